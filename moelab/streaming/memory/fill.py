"""Experts brought to slots that are not the cache's: copied from it where they are resident, read where not.

Staged slots and prefill windows are filled through the same scheduler and the same reader threads as
everything else, so demand goes first and bytes in flight stay bounded. An expert outside of the cache has a
key of its own, above all of the cache's, and no grant: where it goes was said when the fill began.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ContractError
from ..schedule.schedule import P0, P1, Ticket

if TYPE_CHECKING:
    from .memory import ExpertMemory

__all__ = ["Fill", "offer"]


class Fill:
    """Experts of one layer on their way to `outs`, each `u8[slot_bytes]`. Made by the computing thread.

    What is resident has been copied when the constructor returns.

    Args:
        urgent: a layer waits: in front of every prediction. Otherwise near-term, by `deadline` (seconds of the
            memory's clock; what was not begun by then is begun when it is waited for).
        together: ask for all reads at once. False: one after the other, by the thread that waits.

    Attributes:
        copied, read: experts that came from the cache, and that come from the store.

    Raises:
        ContractError: the memory is closed, or one of these is being filled somewhere else.
    """

    _made = 0

    def __init__(
        self,
        memory: ExpertMemory,
        layer: int,
        experts: Sequence[int],
        outs: Sequence[np.ndarray],
        *,
        urgent: bool,
        deadline: float = math.inf,
        together: bool = True,
    ):
        Fill._made += 1
        self.memory, self.layer, self.generation = memory, layer, Fill._made
        self.copied: list[int] = []
        self.read: list[int] = []
        self.pending: dict[int, np.ndarray] = {}  # key outside of the cache -> where it goes
        self._asked: set[int] = set()
        self._errors: list[BaseException] = []
        base, above, copies = layer * memory.store.experts, memory.store.layers * memory.store.experts, []
        with memory._change:
            memory._check_open()
            absent = [expert for expert in experts if memory.cache.slot(base + expert) is None]
            if busy := sorted(expert for expert in absent if base + above + expert in memory.outside):
                raise ContractError(
                    "an expert is filled in one place at a time", field="experts", got=busy, expected=[]
                )
            for expert, out in zip(experts, outs, strict=True):
                if (slot := memory.cache.slot(base + expert)) is not None:
                    copies.append((base + expert, slot, out))
                    self.copied.append(expert)
                else:
                    self.pending[base + above + expert] = out
                    self.read.append(expert)
            memory.cache.lease([key for key, _, _ in copies])
            if together:
                self._ask(list(self.pending), P0 if urgent else P1, deadline)
        for _, slot, out in copies:
            out[:] = memory.slab(layer).host[slot]
        if copies:
            memory.release([key for key, _, _ in copies])

    def _ask(self, keys: Sequence[int], priority: int, deadline: float) -> None:
        """Queue reads; the lock is held."""
        memory, now = self.memory, self.memory.clock()
        for key in keys:
            memory.outside[key] = self
            self._asked.add(key)
            ticket = Ticket(
                key=key, layer=self.layer, priority=priority, owner="fill", generation=self.generation,
                deadline=deadline, nbytes=memory.store.nbytes(self.layer),
            )  # fmt: skip
            memory.scheduler.submit(ticket, now)
        memory._work.notify(len(keys))

    def landed(self, key: int, error: BaseException | None) -> None:
        """A read has ended; called by its thread with the lock."""
        del self.pending[key], self.memory.outside[key]
        if error is not None:
            self._errors.append(error)

    def wait(self) -> float:
        """Return when nothing is pending; seconds since the call. The waiting thread reads too.

        Raises:
            StoreError: the first that a read raised; the other reads have landed by then.
        """
        memory, began = self.memory, self.memory.clock()
        with memory._change:
            while self.pending:
                memory._check_open()
                if not self._asked & self.pending.keys():
                    self._ask([next(iter(self.pending))], P0, math.inf)
                for key in self._asked & self.pending.keys():
                    if memory.scheduler.raise_to_demand(key, memory.clock()) is None:  # its deadline had passed
                        self._ask([key], P0, math.inf)
                if (started := memory._start(urgent=True)) is not None:
                    memory._read(*started)
                else:
                    memory._change.wait(timeout=1.0)
        if self._errors:
            raise self._errors[0]
        return memory.clock() - began

    def cancel(self) -> None:
        """Withdraw what is queued and wait for reads in progress. What has landed stays; `pending` has not."""
        memory = self.memory
        with memory._change:
            memory.scheduler.cancel("fill", self.generation)
            while any(memory.scheduler.ticket(key) is not None for key in self.pending):
                memory._change.wait(timeout=1.0)
            for key in self._asked & self.pending.keys():
                del memory.outside[key]

    def arrived(self) -> list[int]:
        """Experts whose bytes are all there, once waited for or cancelled. None of a fill in which a read failed."""
        if self._errors:
            return list(self.copied)
        missing = {key % self.memory.store.experts for key in self.pending}
        return self.copied + [expert for expert in self.read if expert not in missing]


def offer(memory: ExpertMemory, layer: int, expert: int, source: np.ndarray) -> bool:
    """Let the cache keep a copy of an expert's slot, `u8[slot_bytes]`. False: it has it, or nothing worth less."""
    key = layer * memory.store.experts + expert
    with memory._change:
        memory._check_open()
        if memory.cache.slot(key) is not None or memory.scheduler.ticket(key) is not None:
            return False
        memory._take_in()  # what was told protects experts that this slot could be taken from
        if (grant := memory.cache.reserve(key, speculative=True)) is None:
            return False
        memory.slabs[grant.pool].host[grant.slot] = source
        memory.cache.settle(key, grant.generation)
        return True
