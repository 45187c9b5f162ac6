"""What fetching the first n candidates earns and costs in bytes, net of a stated cache.

Recall at equal candidates hides the cost of being wrong, and credits experts that were in memory
anyway. Here a candidate that the cache holds is free and earns nothing; one that it does not hold
is read, and is a miss avoided if the token uses it, waste if not. Two predictors are then compared
by the bytes they waste at the same miss recall.

The cache is that of the native routes (`residency.replay`): what prefetched bytes would evict is
the simulator's business, not a property of the ranking.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import ContractError, GeometryError
from .estimates import Estimate, clustered_ratio

__all__ = ["MissWaste", "miss_waste"]

_BLOCK = 1 << 24
"""Elements of a temporary array."""


@dataclass(frozen=True)
class MissWaste:
    """The operating point at a stated miss recall, and the whole curve.

    Attributes:
        miss_recall: the share of missed experts to be fetched ahead.
        candidates: candidates a row that reach it, interpolated between whole numbers.
        wasted_bytes: bytes a token read ahead for experts not used; n counts tokens.
        read_bytes: bytes a token read ahead, useful and wasted.
        demand_bytes: bytes a token that the cache misses without any prediction.
        recall_curve: `f64[E+1]`, miss recall with 0..E candidates; all ones when nothing was missed.
        wasted_curve: `f64[E+1]`, wasted bytes a token with 0..E candidates.
    """

    miss_recall: float
    candidates: float
    wasted_bytes: Estimate
    read_bytes: Estimate
    demand_bytes: Estimate
    recall_curve: np.ndarray
    wasted_curve: np.ndarray


def miss_waste(
    blocks: Iterable[tuple[slice, np.ndarray]],
    ids: np.ndarray,
    resident: np.ndarray,
    expert_bytes: np.ndarray,
    clusters: np.ndarray,
    *,
    miss_recall: float = 0.95,
    mask: np.ndarray | None = None,
    counted: np.ndarray | None = None,
) -> MissWaste:
    """Wasted bytes a token at `miss_recall`.

    n is one number for all rows, raised until the share of missed experts (by count) among the first n
    candidates reaches `miss_recall`; between n and n+1 the figures are interpolated, as if that share of
    rows fetched one more.

    Args:
        blocks: `(rows, scores [n,L,E])` covering every row once, such as `Control.iter_scores`.
        ids: integers `[T,L,K]`, experts used.
        resident: `bool[T,L,E]`, or that packed along E by `np.packbits`: held just before the visit.
        expert_bytes: `i64[L]`.
        clusters: `[T]`.
        mask: `bool[T,L,K]`, True = present; None = all.
        counted: `bool[T]`, the rows that count (decoded ones, say); None = all.

    Raises:
        GeometryError: arrays disagree in shape.
        ContractError: blocks do not cover every row once, or `miss_recall` is not in (0, 1].
    """
    tokens, layers, _ = ids.shape
    if not 0 < miss_recall <= 1:
        raise ContractError("no such recall", field="miss_recall", got=miss_recall, expected="in (0, 1]")
    counted = np.ones(tokens, bool) if counted is None else counted
    for name, array, shape in (
        ("resident", resident, (tokens, layers)),
        ("expert_bytes", expert_bytes, (layers,)),
        ("clusters", clusters, (tokens,)),
        ("counted", counted, (tokens,)),
    ):
        if array.shape[: len(shape)] != shape:
            raise GeometryError("arrays disagree", field=name, got=array.shape, expected=shape)
    used_ids = ids.astype(np.int64) if mask is None else np.where(mask, ids.astype(np.int64), -1)
    labels, group = np.unique(clusters, return_inverse=True)
    sums, covered = None, np.zeros(tokens, np.int64)
    for rows, scores in blocks:
        experts = scores.shape[-1]
        if sums is None:  # [cluster, useful count | useful bytes | read bytes, 0..E candidates]
            sums = np.zeros((len(labels), 3, experts + 1))
        covered[rows] += 1
        at = np.arange(tokens)[rows]
        kept = np.flatnonzero(counted[at])
        step = max(1, _BLOCK // (layers * experts))
        for part in (kept[a : a + step] for a in range(0, len(kept), step)):
            row = at[part]
            order = np.argsort(-scores[part], axis=-1, kind="stable")
            used = np.zeros((len(row), layers, experts + 1), bool)  # the extra place takes the absent slots
            np.put_along_axis(used, used_ids[row], True, axis=-1)
            read = np.take_along_axis(~_unpack(resident[row], experts), order, axis=-1)
            useful = read & np.take_along_axis(used[..., :experts], order, axis=-1)
            for cluster in np.unique(group[row]):
                of = group[row] == cluster
                count = useful[of].sum(0, dtype=np.float64)
                sums[cluster, :, 1:] += (
                    count.sum(0),
                    expert_bytes @ count,
                    expert_bytes @ read[of].sum(0, dtype=np.float64),
                )
    if sums is None or (covered != 1).any():
        raise ContractError(
            "score blocks must cover every row once", field="blocks", got=int((covered != 1).sum()), expected="0 rows"
        )
    return _operating_point(sums.cumsum(-1), np.bincount(group, counted, len(labels)), miss_recall)


def _operating_point(curves: np.ndarray, tokens: np.ndarray, target: float) -> MissWaste:
    """`curves[G, 3, E+1]` cumulative sums and `tokens[G]` of each cluster."""
    useful, useful_bytes, read_bytes = curves.sum(0)
    curve = useful / useful[-1] if useful[-1] else np.ones_like(useful)
    above = int(np.argmax(curve >= target))
    n = above - (curve[above] - target) / (curve[above] - curve[above - 1]) if above else 0.0
    low = min(int(n), len(curve) - 2)

    def a_token(sums):
        at = sums[:, low] + (n - low) * (sums[:, low + 1] - sums[:, low])
        return clustered_ratio(at, tokens, int(tokens.sum()))

    return MissWaste(
        miss_recall=target,
        candidates=float(n),
        wasted_bytes=a_token(curves[:, 2] - curves[:, 1]),
        read_bytes=a_token(curves[:, 2]),
        demand_bytes=clustered_ratio(curves[:, 1, -1], tokens, int(tokens.sum())),
        recall_curve=curve,
        wasted_curve=(read_bytes - useful_bytes) / max(float(tokens.sum()), 1.0),
    )


def _unpack(resident: np.ndarray, experts: int) -> np.ndarray:
    if resident.dtype != bool:
        resident = np.unpackbits(resident, axis=-1, count=experts).astype(bool)
    if resident.shape[-1] != experts:
        raise GeometryError("residency is of other experts", field="resident", got=resident.shape, expected=experts)
    return resident
