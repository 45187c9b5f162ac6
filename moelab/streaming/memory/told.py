"""Predictions between the thread that has them and the queue of reads.

To make tickets of what was predicted takes the interpreter some tens of microseconds a layer, and the thread that has
the prediction is the one that computes. So that thread only tells, and a reader makes the tickets while mlx is at work.

A prediction must still meet the state that it was made in. Hence the rule: whoever is about to change what tickets
depend on (a visit, a step, a withdrawal) takes in first whatever has been told. So all that changes is who does the
work, and when. With the lock of the memory, as everything that reads are decided by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ..schedule.prefetch import Prefetcher
from ..schedule.schedule import Scheduler

__all__ = ["Told", "Wish"]


class Wish(NamedTuple):
    """Arguments of `Prefetcher.tickets_of`, and whose it is."""

    prefetcher: Prefetcher
    named: Mapping[int, float]
    now: float
    due: Callable[[int], float] | None
    passes_ahead: int


class Told(deque[Wish]):
    """What has been told and not been taken in, first told first."""

    def take_in(self, scheduler: Scheduler) -> int:
        """Submit the tickets of all that has been told; how many there were."""
        count = 0
        while self:
            wish = self.popleft()
            tickets = wish.prefetcher.tickets_of(wish.named, wish.now, due=wish.due, passes_ahead=wish.passes_ahead)
            for ticket in tickets:
                scheduler.submit(ticket, wish.now)
            count += len(tickets)
        return count
