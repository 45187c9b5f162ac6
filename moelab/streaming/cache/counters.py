"""What a cache counts, and what follows from it.

Two hit rates are quoted as one too often: over the life of a process, and of steady decode. And a miss on an
expert that was never asked for before (cold) no cache of any size could have avoided, only a prefetch. So every
lookup is counted as cold or warm, prefill and decode apart, and `Cache.mark_steady` starts a second sum.

Byte figures are the disk's bytes of an expert record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from operator import and_

__all__ = ["Counters", "Tally"]


@dataclass(slots=True)
class Counters:
    """Sums since a start. `a - b` is what happened in between, `a + b` both together."""

    cold_hits: int = 0
    """First lookups of an expert that a prefetch (or a warm-up) had made resident."""
    cold_misses: int = 0
    """First lookups that found nothing."""
    warm_hits: int = 0
    warm_misses: int = 0
    cold_miss_bytes: int = 0
    warm_miss_bytes: int = 0
    """Bytes of experts that were not resident when asked for."""
    demand_reads: int = 0
    demand_bytes: int = 0
    """Reads granted on demand that landed."""
    prefetch_reads: int = 0
    prefetch_bytes: int = 0
    """Reads granted speculatively that landed."""
    prefetch_used: int = 0
    prefetch_used_bytes: int = 0
    """Of those, used before they were evicted: ready in time, or late."""
    prefetch_late: int = 0
    prefetch_late_bytes: int = 0
    """Of those used, still being read when the demand came."""
    failed_reads: int = 0
    evictions: int = 0
    evictions_unused: int = 0
    """Evictions of prefetched experts that were never used."""

    def visited(self, hits: Sequence[bool], seen: Sequence[bool], nbytes: int) -> None:
        """Experts of `nbytes` each asked for: which were resident, and which had been asked for before."""
        hit, warm, warm_hits = sum(hits), sum(seen), sum(map(and_, hits, seen))
        self.warm_hits += warm_hits
        self.cold_hits += hit - warm_hits
        self.warm_misses += warm - warm_hits
        self.cold_misses += (cold_misses := len(hits) - hit - warm + warm_hits)
        self.warm_miss_bytes += (warm - warm_hits) * nbytes
        self.cold_miss_bytes += cold_misses * nbytes

    def landed(self, *, speculative: bool, asked: bool, nbytes: int) -> None:
        """One expert read; `asked`: a visit had named it by then."""
        if not speculative:
            self.demand_reads += 1
            self.demand_bytes += nbytes
            return
        self.prefetch_reads += 1
        self.prefetch_bytes += nbytes
        if asked:
            self.used(nbytes)
            self.prefetch_late += 1
            self.prefetch_late_bytes += nbytes

    def used(self, nbytes: int) -> None:
        """A prefetched expert is used for the first time."""
        self.prefetch_used += 1
        self.prefetch_used_bytes += nbytes

    @property
    def hits(self) -> int:
        return self.cold_hits + self.warm_hits

    @property
    def misses(self) -> int:
        return self.cold_misses + self.warm_misses

    @property
    def lookups(self) -> int:
        return self.hits + self.misses

    @property
    def miss_bytes(self) -> int:
        return self.cold_miss_bytes + self.warm_miss_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes read, on demand and ahead of it."""
        return self.demand_bytes + self.prefetch_bytes

    @property
    def hit_rate(self) -> float:
        """Hits ÷ lookups; nan without lookups."""
        return self.hits / self.lookups if self.lookups else float("nan")

    @property
    def useful_prefetch_ratio(self) -> float:
        """Predicted physical bytes consumed ÷ predicted physical bytes read; nan if none was read."""
        return self.prefetch_used_bytes / self.prefetch_bytes if self.prefetch_bytes else float("nan")

    def byte_amplification(self, tokens: int) -> float:
        """Physical expert bytes ÷ accepted output tokens; nan without tokens."""
        return self.read_bytes / tokens if tokens else float("nan")

    def to_json(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))


class Tally:
    """Counters of each phase, in all and since a mark. `of[phase]` is counted into."""

    def __init__(self, phases: Iterable[int]):
        self.of = {phase: Counters() for phase in phases}
        self._marked = {phase: Counters() for phase in self.of}

    def mark(self) -> None:
        self._marked = {phase: count + Counters() for phase, count in self.of.items()}

    def total(self, phase: int | None, *, since_mark: bool = False) -> Counters:
        """A copy, of one phase or all."""
        chosen = self.of if phase is None else (phase,)
        return sum((self.of[p] - (self._marked[p] if since_mark else Counters()) for p in chosen), Counters())
