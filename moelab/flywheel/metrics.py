"""How good a ranking of experts is: recall, precision, order, and the bytes it saves and wastes.

One array is enough for most of it. `ranks[t,l,k]` is the place, from 0, of the k-th expert really
used in the predicted order of all E experts (ties by lowest index, as everywhere). Recall with n
candidates is the share of ranks below n, an exact set is a row with all ranks below K, an exact
order a row whose ranks are 0..K-1 in place; no metric looks at scores again. Scores of real models
do not fit in memory ([T,L,E] float32 at 50k tokens, 48 layers, 512 experts is 4.9 GB), so ranks are
made block by block (`rank_blocks`) from anything that yields `(rows, scores)`.

Recall of routes is not what a predictor earns: an expert that the cache holds costs nothing. Pass a
miss mask (from `residency.replay`) to `recall` for miss recall; bytes are in `waste`.

Shapes: T tokens, L MoE layers, K experts a token, E experts. A mask is True where a slot is present.
Every figure is an `Estimate`: value, standard error clustered by thread, n.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..errors import ContractError, GeometryError
from .estimates import Estimate, clustered_mean

__all__ = ["by_group", "by_layer", "rank_blocks", "ranks", "recall", "summarise", "union_growth"]

MULTIPLES = (1, 2, 4)
"""Candidate budgets at which every ranking is reported, in multiples of K."""
_BLOCK = 1 << 25
"""Elements of a temporary array; keeps peak memory near 100 MB whatever T is."""


def ranks(scores: np.ndarray, ids: np.ndarray, *, mask: np.ndarray | None = None) -> np.ndarray:
    """Place of each used expert in the predicted order, `i32[T,L,K]`; E where the slot is absent.

    The rank of e is the number of experts with a higher score, plus those of equal score and lower index.

    Args:
        scores: `[T,L,E]`, higher = more likely.
        ids: integers `[T,L,K]`.
        mask: `bool[T,L,K]`, True = present.

    Raises:
        GeometryError: shapes disagree.
        ContractError: a score is NaN, or a present id is no expert.
    """
    if scores.ndim != 3 or ids.ndim != 3 or scores.shape[:2] != ids.shape[:2]:
        raise GeometryError("scores and ids disagree", field="scores", got=scores.shape, expected=(*ids.shape[:2], "E"))
    tokens, layers, experts = scores.shape
    present = _present(ids, mask)
    if (present & (ids >= experts)).any():
        raise ContractError("an id is no expert", field="ids", got=int(ids[present].max()), expected=f"< {experts}")
    out = np.full(ids.shape, experts, np.int32)
    step = max(1, _BLOCK // max(1, layers * experts))
    index = np.arange(experts)
    for a in range(0, tokens, step):
        block = scores[a : a + step]
        if np.isnan(block).any():
            raise ContractError("a score is not a number", field="scores", got="nan", expected="finite or infinite")
        for k in range(ids.shape[2]):
            expert = np.where(present[a : a + step, :, k], ids[a : a + step, :, k], 0).astype(np.int64)[..., None]
            own = np.take_along_axis(block, expert, axis=-1)
            ahead = (block > own) | ((block == own) & (index < expert))
            out[a : a + step, :, k] = np.count_nonzero(ahead, axis=-1)
    out[~present] = experts
    return out


def rank_blocks(
    blocks: Iterable[tuple[slice, np.ndarray]], ids: np.ndarray, *, mask: np.ndarray | None = None
) -> np.ndarray:
    """`ranks` of scores that arrive as `(rows, scores of those rows)`, such as `Control.iter_scores`.

    Raises:
        ContractError: the blocks do not cover every row once.
    """
    out = np.empty(ids.shape, np.int32)
    covered = np.zeros(len(ids), np.int64)
    for rows, scores in blocks:
        out[rows] = ranks(scores, ids[rows], mask=None if mask is None else mask[rows])
        covered[rows] += 1
    if (covered != 1).any():
        raise ContractError(
            "score blocks must cover every row once", field="blocks", got=int((covered != 1).sum()), expected="0 rows"
        )
    return out


def recall(ranks: np.ndarray, clusters: np.ndarray, *, candidates: int, mask: np.ndarray | None = None) -> Estimate:
    """Share of used experts among the first `candidates` predicted; n counts slots.

    `mask` may also be a miss mask: then it is miss recall.
    """
    return clustered_mean(ranks < candidates, clusters, weights=_present(ranks, mask))


def summarise(ranks: np.ndarray, clusters: np.ndarray, *, mask: np.ndarray | None = None) -> dict[str, Estimate]:
    """Every ranking metric of `ranks[T,L,K]`.

    Keys:
        `recall@1x`, `@2x`, `@4x`: used experts among the first 1, 2, 4 times K candidates (n: slots).
        `precision@1x` …: candidates that were used, of that many (n: rows).
        `exact set`: rows whose K experts are the first K candidates; `exact order`: in the model's order.
        `reciprocal rank`: 1 / place of the first candidate that was used.
    Rows with an absent slot count in recall, with the slots they have, and in nothing else.
    """
    present = _present(ranks, mask)
    k = ranks.shape[-1]
    whole = present.all(-1)
    place = np.arange(k)
    figures = {f"recall@{m}x": recall(ranks, clusters, candidates=m * k, mask=present) for m in MULTIPLES}
    for m in MULTIPLES:
        share = np.count_nonzero(ranks < m * k, axis=-1) / (m * k)
        figures[f"precision@{m}x"] = clustered_mean(share, clusters, weights=whole)
    figures["exact set"] = clustered_mean((ranks < k).all(-1), clusters, weights=whole)
    figures["exact order"] = clustered_mean((ranks == place).all(-1), clusters, weights=whole)
    figures["reciprocal rank"] = clustered_mean(1 / (1 + ranks.min(-1)), clusters, weights=whole)
    return figures


def by_layer(
    ranks: np.ndarray, clusters: np.ndarray, *, candidates: int, mask: np.ndarray | None = None
) -> list[Estimate]:
    """Recall of each layer, in layer order."""
    present = _present(ranks, mask)
    return [
        recall(ranks[:, [layer]], clusters, candidates=candidates, mask=present[:, [layer]])
        for layer in range(ranks.shape[1])
    ]


def by_group(
    ranks: np.ndarray,
    clusters: np.ndarray,
    groups: np.ndarray,
    *,
    candidates: int,
    mask: np.ndarray | None = None,
) -> dict[object, Estimate]:
    """Recall of each value of `groups[T]` (domain, language, phase), sorted by value."""
    groups, present = np.asarray(groups), _present(ranks, mask)
    if groups.shape != ranks.shape[:1]:
        raise GeometryError("one group a row", field="groups", got=groups.shape, expected=ranks.shape[:1])
    return {
        name.item(): recall(ranks[rows], np.asarray(clusters)[rows], candidates=candidates, mask=present[rows])
        for name in np.unique(groups)
        for rows in [groups == name]
    }


def union_growth(
    ids: np.ndarray,
    starts: np.ndarray,
    clusters: np.ndarray,
    *,
    block: int,
    mask: np.ndarray | None = None,
) -> Estimate:
    """U_B: distinct experts of a layer in `block` consecutive tokens, averaged over windows and layers.

    A block of B tokens verified at once reads each expert once, so verification breaks even against one token
    at a time when U_B < K·τ(B), τ = tokens accepted per block (source: AFN-019 and AFN-021). n counts windows × layers.

    Args:
        ids: integers `[T,L,K]`.
        starts: `bool[T]`, True where a row does not follow the one before (`previous_row() < 0`): no window
            crosses it.
        clusters: `[T]`.
        block: B.

    Raises:
        ContractError: `block` is below 1.
    """
    if block < 1:
        raise ContractError("a block has tokens", field="block", got=block, expected=">= 1")
    tokens, layers, k = ids.shape
    values = np.where(_present(ids, mask), ids.astype(np.int64), -1)
    run = np.cumsum(starts)
    first = np.arange(max(0, tokens - block + 1))
    first = first[run[first] == run[first + block - 1]]
    distinct = np.empty((len(first), layers), np.int64)
    step = max(1, _BLOCK // max(1, layers * block * k))
    for a in range(0, len(first), step):
        rows = first[a : a + step, None] + np.arange(block)
        window = np.sort(np.moveaxis(values[rows], 1, 2).reshape(len(rows), layers, block * k), axis=-1)
        fresh = window[..., 1:] != window[..., :-1]  # absent slots, -1, sort first and are no change
        distinct[a : a + step] = fresh.sum(-1) + (window[..., 0] >= 0)
    return clustered_mean(distinct, np.asarray(clusters)[first])


def _present(array: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    if mask is None:
        return np.ones(array.shape, bool)
    if mask.shape != array.shape or mask.dtype != bool:
        raise GeometryError("a mask does not fit", field="mask", got=(mask.dtype, mask.shape), expected=array.shape)
    return mask
