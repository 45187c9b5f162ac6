"""Means with honest standard errors: rows within a thread are not independent.

The tokens of one thread share a topic, a language and a history, so a thousand of them say much
less than a thousand threads would. Every mean here is a ratio estimate over clusters (threads, or
owners): with S_c the sum and N_c the weight of cluster c, m = ΣS/ΣN and

    se² = G/(G-1) · Σ_c (S_c - m·N_c)² / (ΣN)²

(linearised ratio estimator: Cochran, Sampling Techniques, 3rd ed., §6.3 and §9A.2). With few
clusters the normal quantile is too small; `interval` uses Student's t with G-1 degrees of freedom.
One cluster has no spread at all: `se` is None, a reproduction and not evidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import ContractError, GeometryError

__all__ = ["Estimate", "clustered_mean", "clustered_ratio", "jackknife", "paired_difference", "t_quantile"]


@dataclass(frozen=True)
class Estimate:
    """A mean, its clustered standard error, and what they rest on.

    Attributes:
        value: the mean; None when nothing was there to average.
        se: standard error clustered by thread; None with fewer than two clusters.
        n: items averaged (slots, rows or tokens, as the metric says).
        clusters: threads that hold at least one of them.
    """

    value: float | None
    se: float | None
    n: int
    clusters: int

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Two-sided interval from Student's t with `clusters - 1` degrees of freedom.

        Raises:
            ContractError: there is no standard error to build it from.
        """
        if self.se is None:
            raise ContractError(
                "an interval needs at least two clusters", field="clusters", got=self.clusters, expected=">= 2"
            )
        half = t_quantile(0.5 + level / 2, self.clusters - 1) * self.se
        return self.value - half, self.value + half

    def plain(self, clusters: str = "threads") -> dict[str, float | int | None]:
        """As a row of JSON: `value`, `se`, `n`, and how many `clusters` there were, under their name."""
        return {"value": self.value, "se": self.se, "n": self.n, clusters: self.clusters}


def clustered_mean(values: np.ndarray, clusters: np.ndarray, *, weights: np.ndarray | None = None) -> Estimate:
    """Mean of `values[T, ...]` with standard error clustered by `clusters[T]`.

    Args:
        values: numbers or booleans; axis 0 is the row that `clusters` labels.
        clusters: integer label of each row (thread or owner).
        weights: broadcastable to `values`; a boolean mask or numbers >= 0. Items of weight 0 do not count
            in `n`, and their values may be NaN.

    Raises:
        GeometryError: one label a row is not what `clusters` has.
        ContractError: a counted value is not finite, or a weight is negative.
    """
    values = np.asarray(values)
    return clustered_ratio(*_cluster_sums(values, clusters, weights))


def paired_difference(
    a: np.ndarray, b: np.ndarray, clusters: np.ndarray, *, weights: np.ndarray | None = None
) -> Estimate:
    """Mean of `a - b` over the same items, clustered: what tells two predictors apart.

    Raises:
        GeometryError: `a` and `b` differ in shape.
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.shape != b.shape:
        raise GeometryError("paired values need equal shapes", field="b", got=b.shape, expected=a.shape)
    return clustered_mean(a.astype(np.float64) - b.astype(np.float64), clusters, weights=weights)


def jackknife(statistic, cluster_sums: np.ndarray, n: int) -> Estimate:
    """A statistic of summed counts, with the delete-one-cluster standard error.

    se² = (G-1)/G · Σ_g (θ_(g) - mean θ_(·))² (Efron and Tibshirani, An Introduction to the Bootstrap,
    §11.5), for figures that are no mean, such as a calibration error.

    Args:
        statistic: function of an array shaped as one row of `cluster_sums`, giving a float.
        cluster_sums: `[G, ...]` additive sums of each cluster.
        n: items behind them.
    """
    total = cluster_sums.sum(0)
    value = float(statistic(total))
    count = len(cluster_sums)
    if count < 2:
        return Estimate(value, None, n, count)
    left_out = np.array([statistic(total - part) for part in cluster_sums])
    se = math.sqrt((count - 1) / count * float(((left_out - left_out.mean()) ** 2).sum()))
    return Estimate(value, se, n, count)


def _cluster_sums(values, clusters, weights):
    clusters = np.asarray(clusters)
    if values.ndim < 1 or clusters.shape != values.shape[:1]:
        raise GeometryError("one cluster label a row", field="clusters", got=clusters.shape, expected=values.shape[:1])
    axes = tuple(range(1, values.ndim))
    if weights is None:
        weights = np.ones((1,) * values.ndim)
    weights = np.broadcast_to(weights, values.shape)
    if weights.dtype != bool and (weights < 0).any():
        raise ContractError("weights cannot be negative", field="weights", got=float(weights.min()), expected=">= 0")
    counted = weights > 0
    if not np.isfinite(values, where=counted, out=np.ones(values.shape, bool)).all():
        raise ContractError("a counted value is not finite", field="values", got="nan or inf", expected="finite")
    product = np.multiply(values, weights, dtype=np.float64, where=counted, out=np.zeros(values.shape))
    labels, index = np.unique(clusters, return_inverse=True)
    sums = np.bincount(index, product.sum(axes), len(labels))
    totals = np.bincount(index, weights.sum(axes, dtype=np.float64), len(labels))
    return sums, totals, int(counted.sum())


def clustered_ratio(sums: np.ndarray, totals: np.ndarray, n: int) -> Estimate:
    """The same estimate from the sum `sums[G]` and the weight `totals[G]` of each cluster."""
    used = totals > 0
    count = int(used.sum())
    if not count:
        return Estimate(None, None, 0, 0)
    sums, totals = sums[used], totals[used]
    mean = sums.sum() / totals.sum()
    if count < 2:
        return Estimate(float(mean), None, n, count)
    residual = sums - mean * totals
    se = math.sqrt(count / (count - 1) * float(residual @ residual)) / totals.sum()
    return Estimate(float(mean), float(se), n, count)


def t_quantile(probability: float, df: int) -> float:
    """Quantile of Student's t by numerical integration.

    With x = √df·tan θ the density is proportional to cos(θ)^(df-1) on (-π/2, π/2), smooth and bounded, so
    that a trapezoid rule on a fixed grid gives about seven digits without a statistics library.

    Raises:
        ContractError: `probability` is not inside (0, 1) or `df` is below 1.
    """
    if not 0 < probability < 1 or df < 1:
        raise ContractError("no such quantile", got=(probability, df), expected="0 < probability < 1 and df >= 1")
    theta = np.linspace(-math.pi / 2, math.pi / 2, 100_001)
    density = np.cos(theta).clip(0) ** (df - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(math.sqrt(df) * math.tan(np.interp(probability, mass / mass[-1], theta)))
