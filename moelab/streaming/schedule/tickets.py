"""A wish to read an expert, and what becomes of all of them together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["P0", "P1", "P2", "SchedulerCounters", "Ticket"]

P0, P1, P2 = 0, 1, 2
"""Demand, near-term, speculative."""

QUEUED, STARTED, DONE, FAILED, CANCELLED, DROPPED, MERGED = (
    "queued", "started", "done", "failed", "cancelled", "dropped", "merged",
)  # fmt: skip


@dataclass(slots=True, eq=False, kw_only=True)
class Ticket:
    """A wish to read one expert. The scheduler owns it once it is submitted, and changes it.

    Attributes:
        key, layer: which expert.
        priority: P0, P1 or P2; the best of all claims.
        owner, generation: whose wish, to cancel by.
        deadline: seconds when it is needed, of the caller's clock; the earliest of all claims.
        nbytes: bytes of the read.
        confidence: that it will be used, in [0, 1].
        visit: cache visit it is for, None = not for one.
        state: see the module text; "merged" = another ticket of this key carries the claim.
    """

    key: int
    layer: int
    priority: int
    owner: str
    generation: int
    deadline: float
    nbytes: int
    confidence: float = 1.0
    visit: int | None = None
    state: str = "new"
    submitted_at: float = math.nan
    started_at: float = math.nan
    started_as: int = P0
    """Its priority when it started."""
    joined_at: float = math.nan
    """When a demand joined the speculative read in flight."""
    blocked_at: float = math.nan
    """When, as next P0, it first found too many speculative bytes in flight."""
    _claims: dict[tuple[str, int], tuple[int, float, float, int | None]] = field(default_factory=dict)
    _entry: tuple | None = None


@dataclass(slots=True)
class SchedulerCounters:
    """Sums since the start; lists are by priority. Seconds are of the caller's clock."""

    submitted: list[int] = field(default_factory=lambda: [0, 0, 0])
    started: list[int] = field(default_factory=lambda: [0, 0, 0])
    done: list[int] = field(default_factory=lambda: [0, 0, 0])
    wait_s: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """From submission (or rise) to start."""
    longest_wait_s: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    merged: int = 0
    """Submissions of a key that had a live ticket."""
    failed: int = 0
    cancelled: int = 0
    """Queued tickets that lost their last claim."""
    cancelled_in_flight: int = 0
    """Started tickets that did; their bytes were read all the same."""
    expired: int = 0
    """P1 and P2 whose deadline passed in the queue."""
    crowded: int = 0
    """P1 and P2 that found no slot."""
    joined: int = 0
    """Demands for a speculative read in flight."""
    joined_s: float = 0.0
    """What they waited for it."""
    blocked: int = 0
    """P0 that found too many bytes in flight, speculative ones among them."""
    blocked_s: float = 0.0
    """What they waited for that."""
    demand_bytes: int = 0
    useful_bytes: int = 0
    """Speculative bytes that landed by their deadline and still wanted. Whether they are used, the cache counts."""
    late_bytes: int = 0
    """Landed after the deadline, or a demand waited already."""
    wasted_bytes: int = 0
    """Landed when nobody wanted them any more, or failed."""
    high_water_bytes: int = 0
    """Most bytes in flight."""
