"""Gate 0: how much can reading experts early win at all, and how good must a predictor be?

Everything here can be known before a predictor exists, from routes, the sizes of experts, a memory
budget and a disk:

* **Bytes.** A token demands `Σ_l K·bytes_l`; a cache leaves its misses. No more tokens a second can be
  made than the disk delivers misses (`roofline`). Eviction lowers the bytes, prefetch only hides them.
* **Overlap.** With compute c and reads d a token takes c + d without prefetch and at least max(c, d) with
  a perfect one: never more than twice as fast, and at most 1/(1 - d/(c+d)) (Amdahl). With 9 % of the
  time in reads the best of all predictors gives 1.10×.
* **Break-even.** A real predictor also reads what is not used: `breakeven` says how much it may waste.

Sources: AFN-019 (byte roofline), Amdahl 1967. Times are seconds, sizes bytes.
Shapes: T tokens, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ContractError, GeometryError
from ..streaming.cache.eviction import Lru, Policy
from .breakeven import BreakEven, break_even
from .estimates import Estimate, clustered_mean
from .foresight import Opt
from .residency import Visits, replay

__all__ = [
    "Ceiling",
    "HitCurve",
    "Overlap",
    "ceiling",
    "hit_curve",
    "overlap",
    "roofline",
    "token_bytes",
]


def token_bytes(expert_bytes: np.ndarray, top_k: int) -> int:
    """`Σ_l K·bytes_l`: bytes of experts that one token uses, and the least cache in which LRU hits anything."""
    return int(top_k * np.asarray(expert_bytes, np.int64).sum())


def roofline(miss_bytes: float, bytes_per_s: float) -> float:
    """Tokens a second that the disk allows, whatever is hidden: bandwidth / miss bytes a token; inf without misses."""
    if bytes_per_s <= 0 or miss_bytes < 0:
        raise ContractError("no such disk", got=(miss_bytes, bytes_per_s), expected="bytes >= 0, bandwidth > 0")
    return bytes_per_s / miss_bytes if miss_bytes else float("inf")


@dataclass(frozen=True)
class Overlap:
    """A token's compute and read time, and what hiding one under the other could give.

    Attributes:
        compute_s, io_s: seconds a token of each, when nothing overlaps.
        io_share: io / (compute + io).
        amdahl: 1 / (1 - io_share), the speed-up if reads took no time at all; inf without compute.
        perfect_s: max(compute, io), a token with perfect prefetch.
        speedup: (compute + io) / perfect_s, at most 2.
    """

    compute_s: float
    io_s: float
    io_share: float
    amdahl: float
    perfect_s: float
    speedup: float


def overlap(*, compute_s: float, io_s: float) -> Overlap:
    """Bounds of prefetch for one token. Raises ContractError unless both are >= 0 and one is positive."""
    serial = compute_s + io_s
    if not (compute_s >= 0 and io_s >= 0 and serial > 0):
        raise ContractError("a token takes time", got=(compute_s, io_s), expected=">= 0 and not both 0")
    perfect = max(compute_s, io_s)
    amdahl = serial / compute_s if compute_s else float("inf")
    return Overlap(compute_s, io_s, io_s / serial, amdahl, perfect, serial / perfect)


@dataclass(frozen=True)
class HitCurve:
    """What a policy hits at each byte budget.

    Attributes:
        policy: its name.
        budgets: bytes.
        hits: share of counted lookups that were resident; n counts slots.
        miss_bytes: bytes read a token; n counts tokens.
    """

    policy: str
    budgets: tuple[int, ...]
    hits: tuple[Estimate, ...]
    miss_bytes: tuple[Estimate, ...]


def hit_curve(
    visits: Visits,
    expert_bytes: np.ndarray,
    *,
    budgets: Sequence[int],
    policy: Policy,
    clusters: np.ndarray,
    counted: np.ndarray | None = None,
) -> HitCurve:
    """Replay one policy at each budget.

    Args:
        clusters: `[T]`, thread of each token.
        counted: `bool[T]`, tokens that count (decoded ones); the others still fill the cache. None = all.
    """
    counted = np.ones(len(clusters), bool) if counted is None else np.asarray(counted)
    slots = (visits.lookup >= 0) & counted[:, None, None]
    hits, read = [], []
    for budget in budgets:
        run = replay(visits, expert_bytes, budget=budget, policy=policy)
        hits.append(clustered_mean(run.hits, clusters, weights=slots))
        read.append(clustered_mean(run.read_bytes, clusters, weights=counted))
    return HitCurve(policy.name, tuple(budgets), tuple(hits), tuple(read))


@dataclass(frozen=True)
class Ceiling:
    """Everything Gate 0 asks, for one budget, disk and compute time.

    Attributes:
        token_bytes: bytes of experts that a token uses.
        budget: bytes of cache.
        policy: name of the policy the reads below are for.
        hits, miss_bytes: of that policy.
        opt_hits, opt_miss_bytes: of OPT at the same budget: all that better eviction could give.
        io_s: seconds of miss reads a token.
        overlap: bounds of perfect prefetch on these reads, with unlimited lead.
        opt_overlap: the same on OPT's reads.
        roofline, cold_roofline: tokens/s that the disk allows at these misses, and with no cache at all.
        break_even: the contour at the stated lead.
        precision_needed: at full recall, above 1 if nothing pays; what Gate 0 is given.
    """

    token_bytes: int
    budget: int
    policy: str
    hits: Estimate
    miss_bytes: Estimate
    opt_hits: Estimate
    opt_miss_bytes: Estimate
    io_s: Estimate
    overlap: Overlap
    opt_overlap: Overlap
    roofline: float
    cold_roofline: float
    break_even: BreakEven
    precision_needed: float


def ceiling(
    visits: Visits,
    expert_bytes: np.ndarray,
    *,
    top_k: int,
    budget: int,
    compute_s: float,
    read_s: np.ndarray,
    lead: float,
    clusters: np.ndarray,
    counted: np.ndarray | None = None,
    policy: Policy | None = None,
    overhead_s: float = 0.0,
    contention: float = 0.0,
) -> Ceiling:
    """Bounds of one set-up.

    Args:
        expert_bytes: `i64[L]`.
        budget: bytes of cache.
        compute_s: seconds a token when every expert is resident; spread evenly over the layers.
        read_s: `f64[L,K+1]`, seconds to read 0..K missed experts of a layer (`DiskProfile.miss_table`).
        lead: layers between issue and need.
        clusters: `[T]`, thread of each token.
        counted: `bool[T]`, tokens that count; None = all.
        policy: default LRU.
        overhead_s, contention: of `break_even`, per layer.

    Raises:
        GeometryError: `read_s` is not of this geometry.
        ContractError: nothing counts, or what `replay` and `break_even` refuse.
    """
    policy = Lru() if policy is None else policy
    read_s = np.asarray(read_s, np.float64)
    if read_s.shape != (visits.layers, top_k + 1):
        raise GeometryError(
            "read times of another geometry", field="read_s", got=read_s.shape, expected=(visits.layers, top_k + 1)
        )
    counted = np.ones(len(clusters), bool) if counted is None else np.asarray(counted)
    if not counted.any():
        raise ContractError("no token counts", field="counted", got=0, expected="at least one")
    figures = {}
    for name, chosen in (("", policy), ("opt_", Opt())):
        run = replay(visits, expert_bytes, budget=budget, policy=chosen)
        seconds = read_s[np.arange(visits.layers), run.misses.sum(-1)]
        slots = (visits.lookup >= 0) & counted[:, None, None]
        figures[name + "hits"] = clustered_mean(run.hits, clusters, weights=slots)
        figures[name + "miss_bytes"] = clustered_mean(run.read_bytes, clusters, weights=counted)
        io_s = clustered_mean(seconds.sum(-1), clusters, weights=counted)
        figures[name + "overlap"] = overlap(compute_s=compute_s, io_s=io_s.value)
        if not name:
            visits_s, figures["io_s"] = seconds[counted], io_s
    contour = break_even(visits_s, compute_s / visits.layers, lead=lead, overhead_s=overhead_s, contention=contention)
    taken = figures["io_s"].value
    return Ceiling(
        token_bytes=token_bytes(expert_bytes, top_k),
        budget=budget,
        policy=policy.name,
        roofline=1 / taken if taken else float("inf"),
        cold_roofline=1 / float(read_s[:, -1].sum()),
        break_even=contour,
        precision_needed=float(contour.precision_needed[-1]),
        **figures,
    )
