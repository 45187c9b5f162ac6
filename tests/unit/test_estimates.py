"""Clustered means, paired differences and Student's t, against textbook cases and scipy."""

import numpy as np
import pytest
from scipy import stats

from moelab.errors import ContractError, GeometryError
from moelab.flywheel.estimates import (
    Estimate,
    clustered_mean,
    clustered_ratio,
    jackknife,
    paired_difference,
    t_quantile,
)


def test_equal_clusters_give_the_error_of_their_means():
    values = np.array([[1.0, 3.0], [2.0, 2.0], [7.0, 5.0], [6.0, 6.0], [0.0, 2.0], [1.0, 1.0]])
    clusters = np.array([5, 5, 2, 2, 9, 9])
    means = [2.0, 6.0, 1.0]
    got = clustered_mean(values, clusters)
    assert got.value == pytest.approx(3.0)
    assert got.se == pytest.approx(np.std(means, ddof=1) / np.sqrt(3))
    assert (got.n, got.clusters) == (12, 3)


def test_a_plain_row_names_what_its_clusters_are():
    assert Estimate(0.5, None, 3, 1).plain() == {"value": 0.5, "se": None, "n": 3, "threads": 1}
    assert list(Estimate(0.5, 0.1, 3, 2).plain("owners")) == ["value", "se", "n", "owners"]


def test_clusters_of_one_give_the_plain_standard_error():
    values = np.random.default_rng(0).random(200)
    got = clustered_mean(values, np.arange(200))
    assert got.se == pytest.approx(stats.sem(values))


def test_dependent_rows_widen_the_error():
    rng = np.random.default_rng(0)
    values = np.repeat(rng.random(20), 50) + 0.01 * rng.random(1000)
    clusters = np.repeat(np.arange(20), 50)
    assert clustered_mean(values, clusters).se > 5 * clustered_mean(values, np.arange(1000)).se


def test_unequal_clusters_against_the_bootstrap():
    rng = np.random.default_rng(1)
    sizes = rng.integers(5, 60, 80)
    level = rng.random(80)
    clusters = np.repeat(np.arange(80), sizes)
    values = rng.random(sizes.sum()) < level[clusters]
    got = clustered_mean(values, clusters)
    sums = np.bincount(clusters, values)
    draws = rng.integers(0, 80, (4000, 80))
    means = sums[draws].sum(1) / sizes[draws].sum(1)
    assert got.value == pytest.approx(values.mean())
    assert got.se == pytest.approx(means.std(), rel=0.08)  # 4,000 bootstrap draws of 80 clusters


def test_weights_mask_and_nan_where_nothing_counts():
    values = np.array([[1.0, np.nan], [0.0, 1.0], [1.0, 0.0]])
    mask = np.array([[True, False], [True, True], [True, False]])
    got = clustered_mean(values, np.array([0, 0, 1]), weights=mask)
    assert (got.value, got.n, got.clusters) == (0.75, 4, 2)
    weighted = clustered_mean(np.array([[1.0], [0.0]]), np.array([0, 1]), weights=np.array([[3.0], [1.0]]))
    assert weighted.value == 0.75
    by_layer = clustered_mean(np.array([[1.0, 0.0]] * 2), np.array([0, 1]), weights=np.array([1.0, 3.0]))
    assert by_layer.value == 0.25
    assert clustered_mean(values, np.array([0, 1, 2]), weights=np.zeros((3, 2), bool)) == Estimate(None, None, 0, 0)


def test_one_cluster_has_no_error_and_no_interval():
    got = clustered_mean(np.array([1.0, 0.0]), np.array([3, 3]))
    assert got == Estimate(0.5, None, 2, 1)
    with pytest.raises(ContractError, match="at least two clusters"):
        got.interval()


def test_interval_uses_t_with_few_clusters():
    low, high = Estimate(0.5, 0.1, 100, 4).interval()
    assert high - 0.5 == pytest.approx(0.1 * stats.t.ppf(0.975, 3), rel=1e-6)
    assert 0.5 - low == pytest.approx(high - 0.5)
    low, high = Estimate(0.5, 0.1, 100, 4).interval(0.9)
    assert high - 0.5 == pytest.approx(0.1 * stats.t.ppf(0.95, 3), rel=1e-6)


@pytest.mark.parametrize("df", [1, 2, 5, 30, 1000])
@pytest.mark.parametrize("p", [0.001, 0.025, 0.5, 0.8, 0.975, 0.9995])
def test_t_quantile(p, df):
    # Trapezoid rule on 1e5 points: seven digits where the density is smooth, measured against scipy.
    assert t_quantile(p, df) == pytest.approx(stats.t.ppf(p, df), rel=1e-6, abs=1e-9)


def test_t_quantile_refuses_what_has_none():
    for p, df in ((0.0, 3), (1.0, 3), (0.5, 0)):
        with pytest.raises(ContractError, match="no such quantile"):
            t_quantile(p, df)


def test_a_paired_difference_cancels_what_both_share():
    rng = np.random.default_rng(0)
    level = np.repeat(rng.random(30), 20)[:, None]
    a, b = level + 0.02 + 0.001 * rng.random((600, 2)), level + 0.001 * rng.random((600, 2))
    clusters = np.repeat(np.arange(30), 20)
    difference = paired_difference(a, b, clusters)
    assert difference.value == pytest.approx(0.02, abs=1e-3)
    assert difference.se < clustered_mean(a, clusters).se / 100
    boolean = paired_difference(a > 0.5, b > 0.5, clusters)
    assert boolean.value == pytest.approx(np.mean((a > 0.5).astype(float) - (b > 0.5)))
    with pytest.raises(GeometryError, match="equal shapes"):
        paired_difference(a, b[:, :1], clusters)


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).random(50)
    sums = np.stack([values, np.ones(50)], axis=1)
    got = jackknife(lambda s: s[0] / s[1], sums, 50)
    assert got.value == pytest.approx(values.mean())
    assert got.se == pytest.approx(stats.sem(values))
    assert jackknife(lambda s: s[0] / s[1], sums[:1], 1).se is None


def test_ratio_of_sums():
    assert clustered_ratio(np.array([1.0, 3.0, 0.0]), np.array([2.0, 4.0, 0.0]), 6).value == pytest.approx(4 / 6)


def test_bad_arguments_are_refused():
    with pytest.raises(GeometryError, match="one cluster label a row"):
        clustered_mean(np.zeros((3, 2)), np.zeros(2))
    with pytest.raises(ContractError, match="not finite"):
        clustered_mean(np.array([1.0, np.nan]), np.zeros(2))
    with pytest.raises(ContractError, match="negative"):
        clustered_mean(np.ones(2), np.zeros(2), weights=np.array([1.0, -1.0]))
