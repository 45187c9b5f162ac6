"""The live expert memory: cache, scheduler, slabs and reader threads put together.

One thread computes (it alone calls mlx) and asks; a few threads read, and touch bytes only. What may be
read or evicted is decided by `Cache` and `Scheduler`, which are plain state machines; this module gives
them a lock, a clock and threads, and nothing else.

A layer's turn is a *visit*: `demand` names its experts. Those resident are leased at once, the others are
queued in front of every prefetch. `Demand.wait` returns when all are there; the asking thread reads too
while it waits, because waking another thread for one small read costs as much as the read. `release` ends
the leases, and is called only when the evaluation that used the slots has returned: until then no slot
of the visit can be filled again.

A read that fails is raised to whoever waits for it. A prefetch that fails is counted, kept in
`prefetch_error`, and costs nothing else: the demand for that expert reads again, and raises itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ContractError
from ..cache.cache import Cache, Grant
from ..schedule.schedule import P0, Scheduler, Ticket
from ..store.slab import Slab
from ..store.store import ExpertStore

if TYPE_CHECKING:
    from ..schedule.oracle import Candidate
    from ..schedule.prefetch import Prefetcher
    from .fill import Fill

__all__ = ["Demand", "ExpertMemory"]


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


class ExpertMemory:
    """Slots, the threads that fill them, and the rules of who may (see the module text).

    Args:
        store: where experts are read from.
        cache: what is resident; its pools become the slabs.
        scheduler: what is read next.
        threads: readers beside the asking thread.
        clock: seconds, monotonic.

    Attributes:
        slabs: one a pool of the cache.
        prefetch_error: the last error of a speculative read, None if there was none.
        prefetch_errors: how many there were.
        drained_s: seconds that `drain` has waited.
        observers: told of every visit's keys and hits, with the lock held (`Prefetcher.observe`).
        ended: told of every read's ticket and when it was over, with the lock held.
    """

    def __init__(
        self,
        store: ExpertStore,
        cache: Cache,
        scheduler: Scheduler,
        *,
        threads: int = 4,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.store, self.cache, self.scheduler, self.clock = store, cache, scheduler, clock
        pools = {cache.pool_of(layer): store.layouts[layer] for layer in range(store.layers)}
        self.slabs = [Slab(pools[pool], cache.pool_slots[pool]) for pool in range(len(pools))]
        self.prefetch_error: BaseException | None = None
        self.prefetch_errors, self.drained_s = 0, 0.0
        self.observers: list[Callable[[list[int], list[bool]], None]] = []
        self.ended: list[Callable[[Ticket, float], None]] = []
        # One lock, and idle readers wait for `_work`: woken for nothing they take a core from the thread that computes.
        lock = threading.Lock()
        self._change, self._work = threading.Condition(lock), threading.Condition(lock)
        self._reads = 0  # in progress
        self._failed: dict[int, BaseException] = {}
        self.outside: dict[int, Fill] = {}  # key outside of the cache -> who is told when its read ends
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"expert-reader-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def slab(self, layer: int) -> Slab:
        return self.slabs[self.cache.pool_of(layer)]

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
                        key=key, layer=layer, priority=P0, owner="demand", generation=0, deadline=now,
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
                    self._change.wait(timeout=1.0)
        return self.clock() - began

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

    def predict(
        self,
        prefetcher: Prefetcher,
        candidates: Iterable[Candidate],
        *,
        due: Callable[[int], float] | None = None,
        passes_ahead: int = 0,
    ) -> None:
        """Queue what a prefetcher makes of a predictor's candidates (arguments as `Prefetcher.tickets`)."""
        with self._change:
            self._check_open()
            now = self.clock()
            tickets = prefetcher.tickets(candidates, now, due=due, passes_ahead=passes_ahead)
            for ticket in tickets:
                self.scheduler.submit(ticket, now)
            self._work.notify(len(tickets))

    def expect(self, layer: int, experts: Iterable[int], *, instead_of: Iterable[int] = ()) -> None:
        """Predictions name these experts for the layer's next turn: protect them from eviction until it is over.

        `instead_of` are those of an earlier prediction for that turn.
        """
        base = layer * self.store.experts
        with self._change:
            self.cache.unexpect([base + expert for expert in instead_of])
            self.cache.expect([base + expert for expert in experts], self.cache.next_visit(layer))

    def used(self, layer: int, experts: Iterable[int]) -> None:
        """The layer's turn uses these experts in slots that are not the cache's."""
        base = layer * self.store.experts
        with self._change:
            self.cache.used(layer, [base + expert for expert in experts])

    def cancel(self, *, owner: str, generation: int) -> int:
        """Withdraw what an owner queued; reads in progress finish and may fill the cache."""
        with self._change:
            return self.scheduler.cancel(owner, generation)

    def reset_request(self) -> None:
        """Forget what belongs to a request; residents and reads in progress stay."""
        with self._change:
            self.cache.reset_request()
            self._failed.clear()

    def drain(self) -> None:
        """Return when nothing is queued or in progress."""
        began = self.clock()
        with self._change:
            while self.scheduler.pending:
                self._change.wait(timeout=0.1)
        self.drained_s += self.clock() - began

    def close(self) -> None:
        """Stop the readers; reads in progress are waited for. Safe to call twice."""
        with self._change:
            self._closed = True
            self._change.notify_all()
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        with self._change:
            while not self._closed:
                if (started := self._start(urgent=False)) is not None:
                    self._read(*started)
                else:
                    self._work.wait()

    def _start(self, *, urgent: bool) -> tuple[Ticket, Grant | None] | None:
        """The next read and its slot (None: outside of the cache); None if there is no read, or no slot for it."""
        while (ticket := self.scheduler.next(self.clock(), urgent_only=urgent)) is not None:
            if ticket.key in self.outside:
                return ticket, None
            grant = self.cache.reserve(ticket.key, speculative=ticket.priority != P0)
            if grant is not None:
                return ticket, grant
            self.scheduler.postpone(ticket, self.clock())
            if ticket.priority == P0:
                return None
        return None

    def _read(self, ticket: Ticket, grant: Grant | None) -> None:
        """Read into the granted slot. Called with the lock, which is let go during the read."""
        fill, error = self.outside.get(ticket.key), None
        out = self.slabs[grant.pool].host[grant.slot] if grant is not None else fill.pending[ticket.key]
        self._reads += 1
        self._change.release()
        try:
            self.store.read_into(ticket.layer, ticket.key % self.store.experts, out)
        except BaseException as raised:  # typed by the store; handed to whoever waits for this expert
            error = raised
        finally:
            self._change.acquire()
            self._reads -= 1
        now = self.clock()
        self.scheduler.finish(ticket, now, ok=error is None)
        for tell in self.ended:
            tell(ticket, now)
        if grant is None:
            fill.landed(ticket.key, error)
        elif error is None:
            self.cache.settle(ticket.key, grant.generation)
        else:
            self.cache.abandon(ticket.key, grant.generation)
            if ticket.priority == P0:
                self._failed[ticket.key] = error
            else:
                self.prefetch_errors, self.prefetch_error = self.prefetch_errors + 1, error
        self._change.notify_all()
        if self.scheduler.queued_bytes:  # for want of bytes in flight, it may be, or of this slot
            self._work.notify()
        if error is not None and not isinstance(error, Exception):  # the reading thread was interrupted
            raise error

    def _check_open(self) -> None:
        if self._closed:
            raise ContractError("this expert memory is closed", field="memory", got="closed", expected="open")
