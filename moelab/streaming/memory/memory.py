"""The live expert memory: what the thread that computes may ask of slots and readers.

One thread computes (it alone calls mlx) and asks; a few threads read (`reading`).

A layer's turn is a *visit*: `demand` names its experts. Those resident are leased at once, the others are
queued in front of every prefetch. `Demand.wait` returns when all are there; the asking thread reads too
while it waits, because waking another thread for one small read costs as much as the read. `release` ends
the leases, and is called only when the evaluation that used the slots has returned: until then no slot
of the visit can be filled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ContractError
from ..schedule.schedule import P0, Ticket
from .reading import Readers
from .told import Wish

if TYPE_CHECKING:
    from ..schedule.oracle import Candidate
    from ..schedule.prefetch import PrefetchCounters, Prefetcher

__all__ = ["Demand", "ExpertMemory"]

DEMAND = "demand"
"""Owner of what visits ask for."""


@dataclass
class Demand:
    """Experts of one visit on their way. `slots i32[n]` as asked; valid for `missing` ones after `wait`."""

    memory: ExpertMemory
    layer: int
    keys: list[int]
    hits: list[bool]
    slots: np.ndarray
    waiting: set[int] = field(default_factory=set)

    @property
    def missing(self) -> np.ndarray:
        """`bool[n]`: not resident when asked."""
        return ~np.array(self.hits, bool)

    def wait(self, leave: int = 0) -> float:
        """Return when all experts but `leave` are resident; seconds since the call. Raises what a read raised."""
        return self.memory._wait(self, leave)


class ExpertMemory(Readers):
    """Slots and readers, and who may ask them for what (see the module text).

    Arguments as `Readers`, and attributes; and beside those

    Attributes:
        observers: told of every visit's keys and hits, with the lock held (`Prefetcher.observe`).
    """

    def __init__(self, *rooms: Any, **how: Any):
        self.observers: list[Callable[[list[int], list[bool]], None]] = []
        super().__init__(*rooms, **how)

    def groups(self, layer: int, experts: Sequence[int]) -> list[list[int]]:
        """The experts in parts that can each be resident together, residents first; one part if all can."""
        base = layer * self.store.experts
        with self._change:
            while self.cache.room(layer) < 1 and self._reads:  # speculative reads hold every slot: they will land
                self._change.wait()
            parts = self.cache.groups(layer, [base + expert for expert in experts])
        return [[key - base for key in part] for part in parts]

    def demand(self, layer: int, experts: Sequence[int], *, phase: int) -> Demand:
        """Begin a visit: lease what is resident, queue the rest in front of every prefetch.

        Raises:
            ContractError: the memory is closed, or the visit's experts cannot all be resident at once.
        """
        keys = [layer * self.store.experts + int(expert) for expert in experts]
        with self._change:
            self._check_open()
            self._take_in()
            hits = self.cache.visit(layer, keys, phase=phase)
            for observe in self.observers:
                observe(keys, hits)
            demand = Demand(self, layer, keys, hits, np.full(len(keys), -1, np.int32))
            now = self.clock()
            for place, (key, hit) in enumerate(zip(keys, hits, strict=True)):
                if hit:
                    demand.slots[place] = self.cache.slot(key)
                else:
                    demand.waiting.add(key)
                    self._failed.pop(key, None)
                    asked = Ticket(
                        key=key, layer=layer, priority=P0, owner=DEMAND, generation=0, deadline=now,
                        nbytes=self.store.nbytes(layer), confidence=1.0,
                    )  # fmt: skip
                    self.scheduler.submit(asked, now)
            self.scheduler.cancel_stale(self.cache.now)
            self._work.notify(len(demand.waiting) if len(demand.waiting) > 1 else 0)
        return demand

    def _wait(self, demand: Demand, leave: int) -> float:
        began = self.clock()
        with self._change:
            while len(demand.waiting) > leave:
                self._collect(demand)
                if len(demand.waiting) <= leave:
                    break
                self._check_open()
                if (started := self._start(urgent=True)) is not None:
                    self._read(*started)
                else:
                    self._require_coming(demand)
                    self._change.wait(timeout=1.0)
        return self.clock() - began

    def _require_coming(self, demand: Demand) -> None:
        """Raises ContractError: an expert is waited for that is neither there nor on its way, and never would be."""
        for key in demand.waiting:
            if self.cache.slot(key) is None and self.scheduler.ticket(key) is None and key not in self._failed:
                raise ContractError(
                    "nobody reads this expert any more", field="layer, expert", got=divmod(key, self.store.experts),
                    expected="a read that goes on until its visit is released",
                )  # fmt: skip

    def _collect(self, demand: Demand) -> None:
        """Lease what has landed since the last look. Raises what a read of this demand raised."""
        for key in list(demand.waiting):
            if (error := self._failed.pop(key, None)) is not None:
                raise error
            if (slot := self.cache.slot(key)) is not None:
                self.cache.lease([key])
                demand.slots[demand.keys.index(key)] = slot
                demand.waiting.discard(key)

    def release(self, keys: Iterable[int]) -> None:
        """End the leases of a visit: the evaluation that used its slots has returned."""
        with self._change:
            self.cache.release(keys)
            if self.scheduler.queued_bytes:  # for want of a slot, it may be
                self._change.notify_all()
                self._work.notify_all()

    def begin_step(self, prefetcher: Prefetcher) -> None:
        """`Prefetcher.begin_step`, once all that was predicted in the step before has its tickets."""
        with self._change:
            self._take_in()
            prefetcher.begin_step()

    def predict(
        self,
        prefetcher: Prefetcher,
        candidates: Iterable[Candidate],
        *,
        due: Callable[[int], float] | None = None,
        passes_ahead: int = 0,
    ) -> None:
        """Queue what a prefetcher makes of a predictor's candidates (arguments and errors as `Prefetcher.tickets`).

        The tickets are made by a reader, before anything that they depend on changes (see `told`).
        """
        named = prefetcher.named(candidates)
        deadlines = prefetcher.deadlines(named, due)
        with self._change:
            self._check_open()
            self._told.append(Wish(prefetcher, named, deadlines, self.clock(), passes_ahead))
            self._work.notify()

    def retire(self, prefetcher: Prefetcher) -> PrefetchCounters:
        """A prefetcher is done with: `Prefetcher.close`, once all that was predicted has its tickets."""
        with self._change:
            self._take_in()
            return prefetcher.close()

    def expect(self, layer: int, experts: Iterable[int], *, instead_of: Iterable[int] = ()) -> None:
        """Predictions name these experts for the layer's next turn: protect them from eviction until it is over.

        `instead_of` are those of an earlier prediction for that turn.
        """
        base = layer * self.store.experts
        with self._change:
            self._take_in()
            self.cache.unexpect([base + expert for expert in instead_of])
            self.cache.expect([base + expert for expert in experts], self.cache.next_visit(layer))

    def used(self, layer: int, experts: Iterable[int]) -> None:
        """The layer's turn uses these experts in slots that are not the cache's."""
        base = layer * self.store.experts
        with self._change:
            self._take_in()
            self.cache.used(layer, [base + expert for expert in experts])

    def cancel(self, *, owner: str, generation: int | None = None) -> int:
        """Withdraw what an owner queued, in one generation or all; reads in progress finish and may fill the cache."""
        with self._change:
            self._take_in()
            return self.scheduler.cancel(owner, generation)

    def give_up(self) -> None:
        """A pass ends before its time: nobody waits for what it demanded. Reads in progress finish."""
        self.cancel(owner=DEMAND)

    def reset_request(self) -> None:
        """Forget what belongs to a request, demands that are queued too; residents and reads in progress stay."""
        with self._change:
            self._take_in()
            self.scheduler.cancel(DEMAND)
            self.cache.reset_request()
            self._failed.clear()
