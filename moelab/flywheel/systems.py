"""Published systems that stream experts: how long a token reads against how long it computes, and what they cache.

Two figures carry over from a system to a model whose experts are of another size: the ratio ρ of read time to compute
time of a token, and the share of the experts that a cache holds. A study slows its reads to a named system's ρ, at its
cache share, and says whose it is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class System:
    """A published system: read time ÷ compute time of a token at a cache share, and whose figures they are."""

    name: str
    read_to_compute: float
    cache_fraction: float
    source: str


SYSTEMS = {
    system.name: system
    for system in (
        System("MER, Qwen3-Coder-30B", 231.9 / 60.1, 0.125, "231.9 s of 292 s waiting for experts at 12.5 % residency"),
        System("Edge0, 35B on M4 Pro", 9.8 / 42.86, 0.25, "9.8 ms of 52.66 ms a step loading experts"),
        System("Hebrus, M5 Pro", 6.39 / 66.94, 0.5, "6.39 ms of 73.33 ms a token in pread"),
    )
}
