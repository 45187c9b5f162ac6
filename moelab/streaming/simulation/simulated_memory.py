"""`ExpertMemory` without threads: the same calls to cache and scheduler, on a clock that is a number.

Reads in flight are a heap of the times at which the device is done with them. `advance` and `wait` go from
one such time to the next; each completion frees a reader, which takes the next ticket at once.

It also keeps the books that the live memory has no use for: which resident was prefetched and not used
yet, what a prefetch displaced, and what arrived after it was asked for.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

from ...errors import ContractError
from ..cache.cache import Cache
from ..schedule.schedule import P0, Scheduler, Ticket
from ..store.device import VirtualDevice

__all__ = ["Books", "SimulatedMemory"]

DEMAND = "demand"


class Books:
    """Counts since the last `take`, and over the whole run (`*_total`). Bytes, but for `evicted`."""

    def __init__(self):
        self.demand = self.prefetch = self.evicted = 0
        self.useful_total = self.late_total = self.wasted_total = 0
        self.issued = float("nan")  # first read for the current visit

    def take(self) -> tuple[int, int, int]:
        counts = self.demand, self.prefetch, self.evicted
        self.demand = self.prefetch = self.evicted = 0
        return counts


class SimulatedMemory:
    """Cache, scheduler and device on one clock.

    Args:
        nbytes: `[L]`, bytes of a read.
        experts: E.
        threads: readers.
        asking_reads: one more read in flight while the asking thread waits, for demand only.
        wake_s: from the device's end of a read until its thread goes on; of several, each read has the next in turn.
        start_s: from a wish until an idle reader begins on it.

    Attributes:
        now: the clock; never goes back.
        observe: told of every visit and its hits (`Prefetcher.observe`).
        books: what was counted.
        timely, late: experts of the current visit that were resident because they had been prefetched; that were
            still being prefetched.
        landed: when the latest miss of a visit became resident.
    """

    def __init__(
        self,
        cache: Cache,
        scheduler: Scheduler,
        device: VirtualDevice,
        *,
        nbytes: Sequence[int],
        experts: int,
        threads: int,
        asking_reads: bool = False,
        wake_s: float | Sequence[float] = 0.0,
        start_s: float = 0.0,
    ):
        wakes = [wake_s] if isinstance(wake_s, (int, float)) else list(wake_s)
        self.wake, self.start_s, self._mean_wake_s = itertools.cycle(wakes), start_s, sum(wakes) / len(wakes)
        self.cache, self.scheduler, self.device = cache, scheduler, device
        self.nbytes, self.experts = [int(n) for n in nbytes], experts
        self.asking_reads, self.most = asking_reads, threads + asking_reads
        self.now, self.books = 0.0, Books()
        self._flying: list[tuple[float, int, Ticket, bool]] = []  # done, order, ticket, by the asking thread
        self._order = 0
        self.observe: Callable[[list[int], list[bool]], None] | None = None
        self._readers = threads
        self._landed: dict[int, float] = {}  # prefetched and not used yet: when it was issued
        self._speculative: dict[int, float] = {}  # prefetches in flight: when issued
        self._owed: set[int] = set()  # of these, demanded meanwhile
        self._waiting: set[int] = set()
        self._started: dict[int, float] = {}  # reads of the current visit: when issued
        self._alone: dict[tuple[int, int], float] = {}
        self.timely = self.late = 0
        self.landed = 0.0

    # ------------------------------------------------------------------ what ExpertMemory offers

    def demand(self, layer: int, keys: list[int], *, phase: int) -> list[bool]:
        """Begin a visit: hits, in the order of the keys."""
        cache, scheduler, now, books = self.cache, self.scheduler, self.now, self.books
        hits = cache.visit(layer, keys, phase=phase)
        self._started.clear()
        self.timely = self.late = 0
        if self.observe is not None:
            self.observe(keys, hits)
        size = self.nbytes[layer]
        for key, hit in zip(keys, hits, strict=True):
            if hit:
                if self._landed and (issued := self._landed.pop(key, None)) is not None:
                    self.timely += 1
                    books.useful_total += size
                    self._started[key] = issued
            else:
                self._waiting.add(key)
                if key in self._speculative:
                    self.late += 1
                    self._owed.add(key)
                    self._started[key] = self._speculative[key]
                ticket = Ticket(
                    key=key, layer=layer, priority=P0, owner=DEMAND, generation=0, deadline=now, nbytes=size
                )
                scheduler.submit(ticket, now)
        scheduler.cancel_stale(cache.now)
        if self._waiting:
            self._pump()
        return hits

    def groups(self, layer: int, keys: list[int]) -> list[list[int]]:
        """The keys in parts that can be resident together, residents first."""
        while self.cache.room(layer) < 1 and self._flying:  # prefetches hold every slot: they will land
            self._complete()
        return self.cache.groups(layer, keys)

    def wait(self) -> float:
        """Go on until every miss of the visit is resident; the time of that."""
        waiting = self._waiting
        while waiting:
            idle = self.asking_reads and not any(mine for *_, mine in self._flying)
            if idle and (ticket := self._start(urgent=True)) is not None:
                self._book(ticket, mine=True)
            if not self._flying:
                raise ContractError(
                    "this visit cannot be resident at once", field="missing", got=len(waiting), expected="a free slot"
                )
            self._complete()
        return self.now

    def release(self, keys: Iterable[int]) -> None:
        self.cache.release(keys)
        self._pump()

    def prefetch(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if self.cache.slot(ticket.key) is None:
                self.scheduler.submit(ticket, self.now)
        self._pump()

    def drain(self) -> float:
        """Go on until nothing is in flight; the time of that."""
        while self._flying:
            self._complete()
        return self.now

    def advance(self, until: float) -> None:
        """Let the clock run to `until`."""
        while self._flying and self._flying[0][0] <= until:
            self._complete()
        self.now = until

    def close(self) -> None:
        """Prefetches that nobody has used by now are wasted."""
        for key in (*self._landed, *(key for key in self._speculative if key not in self._owed)):
            self.books.wasted_total += self.nbytes[key // self.experts]

    def alone(self, layer: int, count: int) -> float:
        """Seconds that `count` reads of a layer take at once, on a device that has nothing else to do."""
        if (layer, count) not in self._alone:
            device, done = self.device.idle_copy(), []
            for read in range(count):
                at = done[read - self.most] if read >= self.most else 0.0
                done.append(device.book(at, self.nbytes[layer])[1] + self._mean_wake_s)
            self._alone[layer, count] = done[-1]
        return self._alone[layer, count]

    @property
    def issued(self) -> float:
        """When the first read for the current visit was issued; nan if it needed none."""
        return min(self._started.values(), default=float("nan"))

    # ------------------------------------------------------------------ readers

    def _pump(self, *, awake: bool = False) -> None:
        while self._readers and (ticket := self._start(urgent=False)) is not None:
            self._readers -= 1
            self._book(ticket, mine=False, late=0.0 if awake else self.start_s)

    def _start(self, *, urgent: bool) -> Ticket | None:
        while (ticket := self.scheduler.next(self.now, urgent_only=urgent)) is not None:
            speculative = ticket.priority != P0
            grant = self.cache.reserve(ticket.key, speculative=speculative)
            if grant is not None:
                for key in grant.evicted:
                    self.books.evicted += speculative
                    if self._landed and self._landed.pop(key, None) is not None:
                        self.books.wasted_total += self.nbytes[key // self.experts]
                return ticket
            self.scheduler.postpone(ticket, self.now)
            if not speculative:
                return None
        return None

    def _book(self, ticket: Ticket, *, mine: bool, late: float = 0.0) -> None:
        _, done = self.device.book(self.now, ticket.nbytes)
        self._order += 1
        heapq.heappush(self._flying, (done + next(self.wake) + late, self._order, ticket, mine))
        if ticket.priority == P0:
            self.books.demand += ticket.nbytes
            self._started[ticket.key] = self.now
        else:
            self.books.prefetch += ticket.nbytes
            self._speculative[ticket.key] = self.now

    def _complete(self) -> None:
        self.now, _, ticket, mine = heapq.heappop(self._flying)
        self._readers += not mine
        key = ticket.key
        self.scheduler.finish(ticket, self.now, ok=True)
        self.cache.settle(key)
        issued = self._speculative.pop(key, None)
        if issued is not None:
            if key in self._owed:
                self._owed.discard(key)
                self.books.useful_total += ticket.nbytes
                self.books.late_total += ticket.nbytes
            else:
                self._landed[key] = issued
        if key in self._waiting:
            self._waiting.discard(key)
            self.landed = self.now
            self.cache.lease([key])
        self._pump(awake=True)
