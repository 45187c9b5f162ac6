"""Calibration at its edges, by hand; then against torchmetrics away from its known faults."""

import numpy as np
import pytest
import torch
from sklearn.calibration import calibration_curve
from torchmetrics.functional.classification import binary_calibration_error

from moelab.errors import ContractError, GeometryError
from moelab.flywheel.calibration import calibration, conformal_candidates

T, L, E, K = 60, 2, 10, 2


def whole(probabilities):
    return [(slice(0, len(probabilities)), probabilities)]


def rows(confidence, used):
    """One layer, K = 1, candidates = 1: a list of (confidence, was it used) as probabilities and ids."""
    probability = np.zeros((len(confidence), 1, 2))
    probability[:, 0, 0] = confidence
    probability[:, 0, 1] = -0.0
    return probability, np.where(used, 0, 1)[:, None, None]


def ece(confidence, used, bins=10):
    probability, ids = rows(confidence, used)
    return calibration(whole(probability), ids, np.zeros(len(ids)), candidates=1, bins=bins)


def test_one_is_in_the_last_bin_with_its_neighbours():
    got = ece([1.0, 1.0, 0.95, 0.91], [True, True, True, False])
    assert got.count.tolist() == [4]
    assert got.confidence.tolist() == pytest.approx([0.965])
    assert got.ece.value == pytest.approx(abs(0.965 - 0.75))


def test_zero_is_in_the_first_bin_and_counts():
    got = ece([0.0, 0.0, 0.02, 0.0], [True, False, False, False])
    assert got.count.tolist() == [4]
    assert got.ece.value == pytest.approx(0.25 - 0.005)


def test_a_constant_predictor_is_judged():
    got = ece([0.7] * 10, [True] * 4 + [False] * 6)
    assert got.ece.value == pytest.approx(0.3)
    assert (got.confidence.tolist(), got.frequency.tolist(), got.count.tolist()) == ([pytest.approx(0.7)], [0.4], [10])


def test_a_saturated_sigmoid_is_not_lost():
    saturated = 1 / (1 + np.exp(-20.0))  # 0.99999999794
    got = ece([saturated, np.float32(saturated)], [True, False])
    assert got.count.tolist() == [2]
    assert got.ece.value == pytest.approx(0.5, abs=1e-6)


def test_the_place_of_a_bin_is_the_mean_of_its_confidences():
    got = ece([0.501, 0.502, 0.503, 0.304], [True, True, False, False])
    assert got.confidence.tolist() == pytest.approx([0.304, 0.502])
    assert got.frequency.tolist() == pytest.approx([0, 2 / 3])
    assert got.ece.value == pytest.approx(0.304 / 4 + 3 / 4 * abs(2 / 3 - 0.502))


def test_a_confidence_that_is_no_probability_is_refused():
    for bad in (1.0001, -0.1, np.nan):
        with pytest.raises(ContractError, match="no probability"):
            ece([0.5, bad], [True, False])


def sample(seed=0):
    rng = np.random.default_rng(seed)
    probability = rng.random((T, L, E)).astype(np.float32)
    ids = np.argsort(-(probability + rng.gumbel(size=probability.shape) * 0.3), axis=-1)[..., :K]
    return probability, ids


def top(probability, ids, candidates):
    order = np.argsort(-probability, axis=-1, kind="stable")[..., :candidates]
    confidence = np.take_along_axis(probability, order, axis=-1)
    return confidence, (order[..., None] == ids[..., None, :]).any(-1)


def test_against_torchmetrics_and_scikit_learn():
    probability, ids = sample()
    assert probability.max() < 1  # torchmetrics gives 1.0 a bin of its own
    clusters = np.arange(T) // 15
    got = calibration(whole(probability), ids, clusters, bins=10)
    confidence, used = top(probability, ids, 2 * K)
    oracle = binary_calibration_error(
        torch.from_numpy(confidence.ravel().astype(np.float64)), torch.from_numpy(used.ravel().astype(int)), n_bins=10
    )
    assert got.ece.value == pytest.approx(float(oracle), abs=1e-6)  # float32 sums there
    assert (got.ece.n, got.ece.clusters) == (T * L * 2 * K, 4)
    frequency, mean = calibration_curve(used.ravel(), confidence.ravel(), n_bins=10)
    np.testing.assert_allclose(got.confidence, mean, rtol=1e-6)
    np.testing.assert_allclose(got.frequency, frequency, rtol=1e-6)


def test_standard_error_leaves_one_thread_out_at_a_time():
    probability, ids = sample()
    clusters = np.arange(T) // 15
    full = calibration(whole(probability), ids, clusters)
    parts = []
    for out in range(4):
        keep = clusters != out
        parts.append(calibration(whole(probability[keep]), ids[keep], clusters[keep]).ece.value)
    assert full.ece.se == pytest.approx(np.sqrt(3 / 4 * ((np.array(parts) - np.mean(parts)) ** 2).sum()))


def test_blocks_masks_and_counted_rows():
    probability, ids = sample()
    clusters = np.arange(T) // 15
    blocks = [(slice(a, a + 7), probability[a : a + 7]) for a in range(0, T, 7)]
    assert calibration(blocks, ids, clusters).ece == calibration(whole(probability), ids, clusters).ece
    counted = np.arange(T) % 3 > 0
    kept = calibration(whole(probability[counted]), ids[counted], clusters[counted]).ece
    assert calibration(blocks, ids, clusters, counted=counted).ece == kept
    assert calibration(blocks, ids, clusters, counted=clusters != 3).ece.clusters == 3
    mask = np.ones(ids.shape, bool)
    mask[:, 1, 0] = False
    masked = calibration(blocks, ids, clusters, mask=mask).ece
    assert masked == calibration(whole(probability[:, :1]), ids[:, :1], clusters).ece
    with pytest.raises(ContractError, match="no candidate"):
        calibration(blocks, ids, clusters, counted=np.zeros(T, bool))
    with pytest.raises(GeometryError, match="too many candidates"):
        calibration(blocks, ids, clusters, candidates=E + 1)


def test_conformal_candidates_by_hand():
    ranks = np.arange(40).reshape(40, 1, 1)
    clusters = np.arange(40) % 2  # even ranks 0, 2, …, 38 calibrate
    got = conformal_candidates(ranks, clusters, coverage=0.9)
    assert got.calibration_n == 20
    assert got.candidates == 36 + 1  # ceil(21 × 0.9) = 19th smallest
    assert got.coverage.value == pytest.approx(18 / 20)  # odd ranks below 37
    assert conformal_candidates(ranks, clusters, coverage=0.99).candidates is None  # 20 items cannot promise it


def test_conformal_coverage_is_kept_on_average():
    rng = np.random.default_rng(0)
    reached = []
    for _ in range(200):
        ranks = rng.geometric(0.2, size=(40, 1, 2))
        reached.append(conformal_candidates(ranks, np.arange(40), coverage=0.9).coverage.value)
    # 200 means of 40 items with share .9: standard error .0034; discreteness of the ranks only adds coverage.
    assert np.mean(reached) >= 0.9 - 3 * 0.0034


def test_conformal_whole_set_and_masks():
    ranks = np.stack([np.arange(40), np.zeros(40, int)], axis=-1)[:, None]
    clusters = np.arange(40) % 2
    assert conformal_candidates(ranks, clusters, coverage=0.9, whole_set=True).candidates == 37
    mask = np.ones(ranks.shape, bool)
    mask[30:, :, 1] = False
    got = conformal_candidates(ranks, clusters, coverage=0.9, whole_set=True, mask=mask)
    assert (got.calibration_n, got.candidates) == (15, 28 + 1)
    assert conformal_candidates(ranks, clusters, coverage=0.9, mask=mask).calibration_n == 35
    with pytest.raises(ContractError, match="two threads"):
        conformal_candidates(ranks, np.zeros(40))
    with pytest.raises(ContractError, match="inside"):
        conformal_candidates(ranks, clusters, coverage=1.0)
