"""Break-even: how much may a predictor waste before prefetch is slower than doing nothing?

A predictor fetches a share r of the misses in time, and w useless experts for each useful one.
`break_even` gives the time with prefetch against the time without over a grid of both, and for each
r the largest w, that is the smallest precision 1/(1+w), that is not a loss.

The model is a fluid one. A visit (one layer of one token) needs d seconds of miss reads and c of
compute, and reads issued `lead` layers ahead run under the compute of those layers. Over each block of
⌊lead⌋ layers (one for lead ≤ 1)

    T_off = Σ (c + d)
    T_on  = Σ (c + h + (1-r)·d) + κ·min(q, a) + max(0, q - a),   q = Σ r·(d + w·d̄),   a = min(1, lead)·Σ c

with h the cost of making a prediction, κ the share of compute lost while reads run beside it, and d̄ the
mean of d: wrong candidates are read in every visit, whether it misses or not. Demand reads go before
queued prefetches and behind none, reads are never cancelled, and the device is one server: what queues in
it is in `profile.miss_table`. Per visit and uniform, with κ = 0, break-even is w = (a - h)/(r·d).
Sources: AFN-019 (byte roofline, break-even of a block), AFN-021 gate 5; Amdahl 1967.

Times are seconds. Shapes: L MoE layers; R recalls, W wastes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ContractError

__all__ = ["NEVER", "BreakEven", "break_even"]

NEVER = 2.0
"""Precision needed where no precision is enough (none exceeds 1)."""


@dataclass(frozen=True, eq=False)
class BreakEven:
    """Time with prefetch against without, over recall and waste.

    Attributes:
        recall: `f64[R]`, share of misses fetched in time.
        waste: `f64[W]`, useless experts read for each useful one.
        speedup: `f64[R,W]`, T_off / T_on; the contour at 1 is break-even.
        waste_at: `f64[R]`, waste at which T_on = T_off; nan where even none is too slow.
        precision_needed: `f64[R]`, 1 / (1 + waste_at); `NEVER` where it is nan.
    """

    recall: np.ndarray
    waste: np.ndarray
    speedup: np.ndarray
    waste_at: np.ndarray
    precision_needed: np.ndarray


def break_even(
    io_s: np.ndarray | float,
    compute_s: np.ndarray | float,
    *,
    lead: float,
    overhead_s: float = 0.0,
    contention: float = 0.0,
    recall: Sequence[float] = tuple(i / 20 for i in range(1, 21)),
    waste: Sequence[float] = tuple(i / 4 for i in range(33)),
) -> BreakEven:
    """The recall × waste contour of the module text.

    Args:
        io_s: d of each visit, `[..., L]`; visits of different size matter, since one without misses hides
            nothing. A scalar is one uniform visit.
        compute_s: c of each visit, broadcastable to `io_s`.
        lead: layers between issue and need: 0.5 for the layer's own pre-attention, 1 for one layer ahead, L
            for a whole token.
        overhead_s: h, of each visit.
        contention: κ, share of compute lost while a prefetch runs beside it, 0 to 1.
        recall, waste: the grid; recall in (0, 1], waste >= 0.

    Raises:
        ContractError: a negative time, no lead, or a grid out of range.
    """
    io_s = np.atleast_1d(np.asarray(io_s, np.float64))
    compute_s = np.broadcast_to(np.asarray(compute_s, np.float64), io_s.shape)
    recall, waste = np.asarray(recall, np.float64), np.asarray(waste, np.float64)
    for field, value, ok, expected in (
        ("io_s", io_s.min(initial=0), io_s.size and (io_s >= 0).all(), "at least one visit, times >= 0"),
        ("compute_s", compute_s.min(initial=0), (compute_s >= 0).all(), "times >= 0"),
        ("io_s + compute_s", 0, io_s.sum() + compute_s.sum() > 0, "a token that takes time"),
        ("lead", lead, lead > 0, "> 0 layers"),
        ("overhead_s", overhead_s, overhead_s >= 0, ">= 0"),
        ("contention", contention, 0 <= contention <= 1, "0 to 1"),
        ("recall", recall, recall.ndim == 1 and ((recall > 0) & (recall <= 1)).all(), "in (0, 1]"),
        ("waste", waste, waste.ndim == 1 and (waste >= 0).all(), ">= 0"),
    ):
        if not ok:
            raise ContractError("no break-even of these", field=field, got=value, expected=expected)
    first = np.arange(0, io_s.shape[-1], max(1, int(lead)))  # blocks of ⌊lead⌋ layers
    blocks = np.stack(
        np.broadcast_arrays(
            np.add.reduceat(io_s, first, axis=-1),
            min(1.0, lead) * np.add.reduceat(compute_s, first, axis=-1),
            np.diff([*first, io_s.shape[-1]]),
        ),
        axis=-1,
    )
    # A layer misses 0..K experts, so that few blocks differ: count the kinds instead of adding them all up.
    kinds, count = np.unique(blocks.reshape(-1, 3), axis=0, return_counts=True)
    reads, hidden, layers = kinds.T
    mean, total, compute = io_s.mean(), float(io_s.sum()), float(compute_s.sum())
    off = compute + total

    def on(r, w):
        queued = r * (reads + w * mean * layers)
        beside = contention * np.minimum(queued, hidden) + np.maximum(0, queued - hidden)
        return compute + overhead_s * io_s.size + (1 - r) * total + float(count @ beside)

    times = np.array([[on(r, w) for w in waste] for r in recall]).reshape(len(recall), len(waste))
    at = np.array([_largest_waste(lambda w, r=r: on(r, w) - off, off) for r in recall])
    needed = np.where(np.isnan(at), NEVER, 1 / (1 + np.nan_to_num(at)))
    return BreakEven(recall, waste, off / times, at, needed)


def _largest_waste(slower, scale: float) -> float:
    """Root of the non-decreasing `slower(w)`; nan if it is positive, or never, from the start."""
    tolerance = 1e-12 * scale  # rounding in sums of many visits
    if slower(0.0) > tolerance:
        return float("nan")
    high = 1.0
    while slower(high) <= tolerance:
        high *= 2
        if high > 1e9:
            return float("nan")  # nothing is read, so nothing is won or lost
    low = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if slower(middle) <= tolerance else (low, middle)
    return low
