"""Are the probabilities of a predictor true, and how many candidates does a promise need?

`calibration` bins the confidences of each row's first 2K candidates (over all experts nearly every
item is a certain negative, and any predictor looks perfect) and compares the mean confidence of a
bin with the share of its experts that were used. The edges are where calibration errors go wrong:
1.0 belongs to the last bin, 0.0 to the first, a bin's place is the mean of its confidences and
never its centre, and a constant predictor is judged like any other.

`conformal_candidates` answers the operational question: how many candidates hold a used expert with
95 % probability? It is split conformal prediction (Vovk et al.; Angelopoulos and Bates 2021): with n
calibration items take the ⌈(n+1)·coverage⌉-th smallest rank. Threads, not tokens, are exchangeable,
so the split is by thread and the coverage reached on the other threads stands beside the number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import ContractError, GeometryError
from .estimates import Estimate, clustered_mean, jackknife

__all__ = ["Calibration", "Conformal", "calibration", "conformal_candidates"]


@dataclass(frozen=True)
class Calibration:
    """Expected calibration error and the reliability plot behind it.

    Attributes:
        ece: Σ_b n_b/n · |mean confidence - share used|, with a delete-one-thread jackknife standard error.
        confidence: mean confidence of each non-empty bin, increasing.
        frequency: share of used experts in each of these bins.
        count: candidates in each of these bins.
    """

    ece: Estimate
    confidence: np.ndarray
    frequency: np.ndarray
    count: np.ndarray


def calibration(
    blocks: Iterable[tuple[slice, np.ndarray]],
    ids: np.ndarray,
    clusters: np.ndarray,
    *,
    candidates: int | None = None,
    bins: int = 15,
    mask: np.ndarray | None = None,
    counted: np.ndarray | None = None,
) -> Calibration:
    """Calibration of the first `candidates` (default 2K) of each row, in `bins` bins of equal width.

    Args:
        blocks: `(rows, probabilities [n,L,E])`.
        ids: integers `[T,L,K]`, experts used.
        clusters: `[T]`.
        mask: `bool[T,L,K]`; a row and layer with an absent slot is left out, its labels being unknown.
        counted: `bool[T]`, the rows that count; None = all.

    Raises:
        ContractError: a confidence outside [0, 1], or nothing to count.
        GeometryError: more candidates than experts.
    """
    tokens, layers, k = ids.shape
    candidates = 2 * k if candidates is None else candidates
    whole = np.ones((tokens, layers), bool) if mask is None else mask.all(-1)
    if counted is not None:
        whole = whole & counted[:, None]
    labels, group = np.unique(clusters, return_inverse=True)
    sums = np.zeros((3, len(labels) * bins))  # count, confidence, used
    for rows, block in blocks:
        if block.shape[-1] < candidates:
            raise GeometryError("too many candidates", field="candidates", got=candidates, expected=block.shape[-1])
        at = np.arange(tokens)[rows]
        token, layer = np.nonzero(whole[at])
        probability = block[token, layer]
        if not ((probability >= 0) & (probability <= 1)).all():
            bad = probability[~((probability >= 0) & (probability <= 1))]
            raise ContractError("a confidence is no probability", field="blocks", got=float(bad[0]), expected="[0, 1]")
        top = np.argsort(-probability, axis=-1, kind="stable")[:, :candidates]
        confidence = np.take_along_axis(probability, top, axis=-1).astype(np.float64)
        used = (top[:, :, None] == ids[at[token], layer].astype(np.int64)[:, None, :]).any(-1)
        place = np.minimum((confidence * bins).astype(np.int64), bins - 1) + bins * group[at[token], None]
        for i, weight in enumerate((None, confidence.ravel(), used.ravel())):
            sums[i] += np.bincount(place.ravel(), weight, sums.shape[1])
    sums = np.moveaxis(sums.reshape(3, len(labels), bins), 0, 1)
    sums = sums[sums[:, 0].sum(-1) > 0]
    count, confidence, used = sums.sum(0) if len(sums) else np.zeros((3, bins))
    if not count.sum():
        raise ContractError("no candidate to calibrate", field="ids", got=0, expected="at least one whole row")

    def error(parts):
        return np.abs(parts[1] - parts[2]).sum() / parts[0].sum()

    filled = count > 0
    return Calibration(
        ece=jackknife(error, sums, int(count.sum())),
        confidence=confidence[filled] / count[filled],
        frequency=used[filled] / count[filled],
        count=count[filled].astype(np.int64),
    )


@dataclass(frozen=True)
class Conformal:
    """Candidates a row that hold what is used with the promised probability.

    Attributes:
        candidates: the number found on the calibration threads; None when they are too few for the promise.
        coverage: share covered by it on the other threads; None without `candidates`.
        promised: the probability asked for.
        calibration_n: items it was found on.
    """

    candidates: int | None
    coverage: Estimate | None
    promised: float
    calibration_n: int


def conformal_candidates(
    ranks: np.ndarray,
    clusters: np.ndarray,
    *,
    coverage: float = 0.95,
    whole_set: bool = False,
    mask: np.ndarray | None = None,
) -> Conformal:
    """Split-conformal number of candidates, found on every other thread and tried on the rest.

    Args:
        ranks: `i32[T,L,K]` from `metrics.ranks`.
        clusters: `[T]`; threads 0, 2, 4, … in label order calibrate, the others test.
        coverage: promised probability, inside (0, 1).
        whole_set: cover all K experts of a row together instead of each one by itself.
        mask: `bool[T,L,K]`; with `whole_set`, rows with an absent slot are left out.

    Raises:
        ContractError: fewer than two threads, or no such probability.
    """
    labels, group = np.unique(clusters, return_inverse=True)
    if len(labels) < 2 or not 0 < coverage < 1:
        raise ContractError(
            "a split needs two threads and a probability inside (0, 1)",
            field="clusters, coverage",
            got=(len(labels), coverage),
            expected=">= 2 threads",
        )
    present = np.ones(ranks.shape, bool) if mask is None else mask
    if whole_set:
        ranks, present = ranks.max(-1), present.all(-1)
    fits = group % 2 == 0
    found = np.sort(ranks[fits][present[fits]])
    place = math.ceil((found.size + 1) * coverage)
    if place > found.size:
        return Conformal(None, None, coverage, int(found.size))
    candidates = int(found[place - 1]) + 1
    reached = clustered_mean(ranks[~fits] < candidates, np.asarray(clusters)[~fits], weights=present[~fits])
    return Conformal(candidates, reached, coverage, int(found.size))
