"""What a cache counts, and what follows from it.

Two hit rates are quoted as one too often: over the life of a process, and of steady decode. And a miss on an
expert that was never asked for before (cold) no cache of any size could have avoided, only a prefetch. So every
lookup is counted as cold or warm, prefill and decode apart, and `Cache.mark_steady` starts a second sum.

Byte figures are the disk's bytes of an expert record.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["Counters"]


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
    def warm_hit_rate(self) -> float:
        """The same among experts that had been asked for before."""
        warm = self.warm_hits + self.warm_misses
        return self.warm_hits / warm if warm else float("nan")

    @property
    def useful_prefetch_ratio(self) -> float:
        """Predicted physical bytes consumed ÷ predicted physical bytes read (AFN-021); nan if none was read."""
        return self.prefetch_used_bytes / self.prefetch_bytes if self.prefetch_bytes else float("nan")

    def byte_amplification(self, tokens: int) -> float:
        """Physical expert bytes ÷ accepted output tokens (AFN-021); nan without tokens."""
        return self.read_bytes / tokens if tokens else float("nan")

    def to_json(self) -> dict[str, int]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))
