"""Predictions between the thread that has them and the queue of reads.

To make tickets of what was predicted takes the interpreter some tens of microseconds a layer, and the thread that has
the prediction is the one that computes. So that thread only tells, and a reader makes the tickets while mlx is at work.

A prediction must still meet the state that it was made in. Hence the rule: whoever is about to change what tickets
depend on (a visit, a slot given to a read, a step, a withdrawal) takes in first whatever has been told. So all that
changes is who does the work, and when; and an expert that lands in between is resident instead of on its way. With the
lock of the memory, as everything that reads are decided by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..schedule.prefetch import Prefetcher
from ..schedule.schedule import Ticket

__all__ = ["Wish"]


class Wish(NamedTuple):
    """What was told: whose it is, and the arguments of `Prefetcher.tickets_of`."""

    prefetcher: Prefetcher
    named: Mapping[int, float]
    deadlines: Mapping[int, float]
    now: float
    passes_ahead: int

    def tickets(self) -> list[Ticket]:
        return self.prefetcher.tickets_of(self.named, self.deadlines, self.now, passes_ahead=self.passes_ahead)
