"""Which read goes next: demand first, then predictions by deadline, with bounded bytes in flight.

Three priorities. P0 is demand: a layer waits for it. P1 is near-term: a prediction for a layer just ahead. P2 is
speculative: far ahead and discardable. While any P0 is queued no P1 or P2 starts, and part of the bytes
that may be in flight is kept for demand, since a read that has started cannot be taken back.

A ticket lives

    queued --next--> started --finish--> done | failed
       '--cancel--> cancelled   '--postpone--> queued (P0) | dropped
       '--expired-> dropped

There is one live ticket a key. Whoever else submits that key adds a *claim* to it: its priority, deadline and
confidence become the best of all claims, whether it is queued or in flight. `cancel` withdraws an owner's claims; a
ticket without claims is cancelled if it was queued, and if it has started it goes on, holding its bytes and
its slot until `finish`, after which the cache may keep what it brought.

A pure state machine: no thread, no clock, no bytes. The caller brings the time (`now`, seconds of any clock) and
a lock; the simulator brings virtual time. Deadlines are seconds of the same clock (inf = none); a ticket may
also name the visit it is for, and `cancel_stale` withdraws it when that visit has come.
"""

from __future__ import annotations

import heapq
import itertools
import math

from ...errors import ContractError
from .tickets import CANCELLED, DONE, DROPPED, FAILED, MERGED, P0, P1, P2, QUEUED, STARTED, SchedulerCounters, Ticket

__all__ = ["P0", "P1", "P2", "Scheduler", "SchedulerCounters", "Ticket"]


class Scheduler:
    """The queue of reads (see the module text).

    Args:
        max_inflight_bytes: bytes of started tickets at most.
        p0_reserve_bytes: of those, bytes that P1 and P2 together leave to P0 (unless nothing else is in flight);
            default half.

    Attributes:
        inflight_bytes, queued_bytes: sums over live tickets.
        counters: `SchedulerCounters`.

    Raises:
        ContractError: bytes that are not positive.
    """

    def __init__(self, *, max_inflight_bytes: int, p0_reserve_bytes: int | None = None):
        reserve = max_inflight_bytes // 2 if p0_reserve_bytes is None else p0_reserve_bytes
        if max_inflight_bytes <= 0 or not 0 <= reserve <= max_inflight_bytes:
            raise ContractError(
                "no such scheduler", field="max_inflight_bytes, p0_reserve_bytes", got=(max_inflight_bytes, reserve),
                expected="> 0, and a part of it",
            )  # fmt: skip
        self.max_inflight_bytes, self.p0_reserve_bytes = max_inflight_bytes, reserve
        self.inflight_bytes = self.queued_bytes = 0
        self.counters = SchedulerCounters()
        self._speculative_bytes = 0  # in flight
        self._live: dict[int, Ticket] = {}
        self._of: dict[tuple[str, int], set[int]] = {}  # owner, generation -> keys it claims
        self._visits: list[tuple[int, int, tuple[str, int]]] = []  # heap of (visit, key, claimant)
        self._queues: list[list[tuple]] = [[], [], []]  # heaps of (order..., number, key)
        self._number = itertools.count()

    @property
    def pending(self) -> int:
        """Tickets queued or started."""
        return len(self._live)

    def ticket(self, key: int) -> Ticket | None:
        """The live ticket of a key."""
        return self._live.get(key)

    # ------------------------------------------------------------------ wishes

    def submit(self, ticket: Ticket, now: float) -> Ticket:
        """Queue a ticket, or merge it into the live ticket of its key. Returns the live one.

        Raises:
            ContractError: submitted before, impossible figures, or more bytes than may ever be in flight.
        """
        if ticket.state != "new":
            raise ContractError("a ticket is submitted once", field="state", got=ticket.state, expected="new")
        figures = (ticket.priority, ticket.nbytes, ticket.deadline, ticket.confidence)
        if (
            ticket.priority not in (P0, P1, P2)
            or not 0 < ticket.nbytes <= self.max_inflight_bytes
            or math.isnan(ticket.deadline)
            or not 0 <= ticket.confidence <= 1
        ):
            raise ContractError(
                "no such read", field="priority, nbytes, deadline, confidence", got=figures,
                expected=f"P0-P2, 1 to {self.max_inflight_bytes} bytes, seconds, [0, 1]",
            )  # fmt: skip
        self.counters.submitted[ticket.priority] += 1
        live = self._live.get(ticket.key)
        if live is None:
            live = self._live[ticket.key] = ticket
            ticket.state, ticket.submitted_at = QUEUED, now
            self.queued_bytes += ticket.nbytes
        else:
            ticket.state = MERGED
            self.counters.merged += 1
        self._claim(live, (ticket.owner, ticket.generation), ticket)
        self._reconsider(live, now)
        return live

    def raise_to_demand(self, key: int, now: float) -> Ticket | None:
        """A layer waits for this key: its ticket, queued or in flight, becomes P0. None if there is none."""
        live = self._live.get(key)
        if live is not None and (live.priority != P0 or not live._claims):
            for claimant, (_, _, confidence, visit) in live._claims.items():
                live._claims[claimant] = (P0, now, confidence, visit)
            if not live._claims:  # withdrawn in flight, and wanted after all
                live._claims[live.owner, live.generation] = (P0, now, 1.0, None)
                self._of.setdefault((live.owner, live.generation), set()).add(key)
            self._reconsider(live, now)
        return live

    def cancel(self, owner: str, generation: int | None = None) -> int:
        """Withdraw all claims of an owner, or of one generation. Returns how many; a second call finds none."""
        claimants = [one for one in self._of if one[0] == owner] if generation is None else [(owner, generation)]
        return sum(self._withdraw(key, one) for one in claimants for key in list(self._of.get(one, ())))

    def cancel_stale(self, visit: int) -> int:
        """Withdraw the P1 and P2 claims for visits up to `visit`, whose routes are known. Returns how many."""
        count = 0
        while self._visits and self._visits[0][0] <= visit:
            of, key, claimant = heapq.heappop(self._visits)
            live = self._live.get(key)
            claim = None if live is None else live._claims.get(claimant)
            if claim is not None and claim[0] != P0 and claim[3] == of:
                count += self._withdraw(key, claimant)
        return count

    def _claim(self, live: Ticket, claimant: tuple[str, int], ticket: Ticket) -> None:
        claim = (ticket.priority, ticket.deadline, ticket.confidence, ticket.visit)
        if (old := live._claims.get(claimant)) is not None:
            visits = [visit for visit in (old[3], claim[3]) if visit is not None]
            claim = (min(old[0], claim[0]), min(old[1], claim[1]), max(old[2], claim[2]), max(visits, default=None))
        live._claims[claimant] = claim
        self._of.setdefault(claimant, set()).add(live.key)
        if claim[3] is not None:
            heapq.heappush(self._visits, (claim[3], live.key, claimant))

    def _withdraw(self, key: int, claimant: tuple[str, int]) -> bool:
        live = self._live[key]
        del live._claims[claimant]
        self._disown(key, claimant)
        if live._claims:
            live.owner, live.generation = next(iter(live._claims))
            self._reconsider(live, live.submitted_at)
        elif live.state == QUEUED:
            self._forget(live, CANCELLED)
            self.counters.cancelled += 1
        else:
            self.counters.cancelled_in_flight += 1
        return True

    def _disown(self, key: int, claimant: tuple[str, int]) -> None:
        keys = self._of[claimant]
        keys.discard(key)
        if not keys:
            del self._of[claimant]

    def _forget(self, live: Ticket, state: str) -> None:
        """The ticket leaves the queue or the device for good."""
        if live.state == QUEUED:
            self.queued_bytes -= live.nbytes
        live.state, live._entry = state, None
        del self._live[live.key]
        for claimant in live._claims:
            self._disown(live.key, claimant)

    def _reconsider(self, live: Ticket, now: float) -> None:
        """Priority, deadline and confidence of its claims; its place in the queue."""
        claims, before = live._claims.values(), live.priority
        if len(claims) == 1:  # almost always
            ((live.priority, live.deadline, live.confidence, live.visit),) = claims
        else:
            priorities, deadlines, confidences, visits = zip(*claims, strict=True)
            live.priority, live.deadline, live.confidence = min(priorities), min(deadlines), max(confidences)
            live.visit = max((visit for visit in visits if visit is not None), default=None)
        if live.state == STARTED:
            if live.started_as != P0 and live.priority == P0 and math.isnan(live.joined_at):
                live.joined_at = now
                self.counters.joined += 1
            return
        if live.priority != before:
            live.submitted_at = now  # waits are counted from the rise
        order = {P0: (), P1: (live.deadline,), P2: (live.deadline, -live.confidence)}[live.priority]
        if live._entry is None or live.priority != before or live._entry[: len(order)] != order:
            self._enqueue(live, (*order, next(self._number), live.key))

    def _enqueue(self, live: Ticket, entry: tuple) -> None:
        live._entry = entry
        queue = self._queues[live.priority]
        heapq.heappush(queue, entry)
        if len(queue) > 64 + 4 * len(self._live):  # entries of tickets that moved or left
            queue[:] = [entry for entry in queue if self._entered(entry) is not None]
            heapq.heapify(queue)

    def _entered(self, entry: tuple) -> Ticket | None:
        live = self._live.get(entry[-1])
        return live if live is not None and live._entry is entry else None

    # ------------------------------------------------------------------ reads

    def next(self, now: float, *, urgent_only: bool = False) -> Ticket | None:
        """Start the next read; None when there is none, or no bytes for it. `urgent_only`: P0 or nothing."""
        if (urgent := self._head(P0)) is not None:
            if self.inflight_bytes + urgent.nbytes <= self.max_inflight_bytes:
                return self._start(urgent, now)
            if self._speculative_bytes and math.isnan(urgent.blocked_at):
                urgent.blocked_at = now
            return None
        for priority in () if urgent_only else (P1, P2):
            while (live := self._head(priority)) is not None and live.deadline < now:
                self._forget(live, DROPPED)
                self.counters.expired += 1
            if live is not None:
                room = self.max_inflight_bytes - self.p0_reserve_bytes - self.inflight_bytes
                return self._start(live, now) if live.nbytes <= room or not self.inflight_bytes else None
        return None

    def _head(self, priority: int) -> Ticket | None:
        queue = self._queues[priority]
        while queue and self._entered(queue[0]) is None:
            heapq.heappop(queue)
        return self._live[queue[0][-1]] if queue else None

    def _start(self, live: Ticket, now: float) -> Ticket:
        heapq.heappop(self._queues[live.priority])
        counters, waited = self.counters, now - live.submitted_at
        live.state, live.started_at, live.started_as = STARTED, now, live.priority
        self.queued_bytes -= live.nbytes
        self.inflight_bytes += live.nbytes
        self._speculative_bytes += live.nbytes * (live.started_as != P0)
        counters.started[live.priority] += 1
        counters.wait_s[live.priority] += waited
        counters.longest_wait_s[live.priority] = max(counters.longest_wait_s[live.priority], waited)
        counters.high_water_bytes = max(counters.high_water_bytes, self.inflight_bytes)
        if not math.isnan(live.blocked_at):
            counters.blocked += 1
            counters.blocked_s += now - live.blocked_at
        return live

    def postpone(self, ticket: Ticket, now: float) -> None:
        """A started ticket got no slot and read nothing: P0 goes back to where it was, P1 and P2 are dropped."""
        self._landed(ticket)
        self.counters.started[ticket.started_as] -= 1
        if ticket.priority == P0:
            ticket.state, ticket.submitted_at = QUEUED, now  # what it waited so far is counted
            self.queued_bytes += ticket.nbytes
            self._enqueue(ticket, ticket._entry if ticket.started_as == P0 else (next(self._number), ticket.key))
        else:
            self._forget(ticket, DROPPED)
            self.counters.crowded += 1

    def finish(self, ticket: Ticket, now: float, ok: bool) -> None:
        """The read has ended. Raises ContractError unless it had started and had not ended."""
        self._landed(ticket)
        counters = self.counters
        if ok:
            counters.done[ticket.priority] += 1
        else:
            counters.failed += 1
        if not math.isnan(ticket.joined_at):
            counters.joined_s += now - ticket.joined_at
        if ticket.started_as == P0:
            counters.demand_bytes += ticket.nbytes
        elif not ok or not ticket._claims:
            counters.wasted_bytes += ticket.nbytes
        elif now > ticket.deadline or not math.isnan(ticket.joined_at):
            counters.late_bytes += ticket.nbytes
        else:
            counters.useful_bytes += ticket.nbytes
        self._forget(ticket, DONE if ok else FAILED)

    def _landed(self, ticket: Ticket) -> None:
        if ticket.state != STARTED or self._live.get(ticket.key) is not ticket:
            raise ContractError("this read is not in progress", field="state", got=ticket.state, expected=STARTED)
        self.inflight_bytes -= ticket.nbytes
        self._speculative_bytes -= ticket.nbytes * (ticket.started_as != P0)
