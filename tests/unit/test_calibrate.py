"""Calibration recovers a known temperature, agrees with logistic regression, and never turns a ranking."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from moelab.errors import GeometryError, RecordError
from moelab.flywheel.calibrate import MIN_SLOPE, calibrate

SLOPES, OFFSETS = np.array([0.2, 1.0, 5.0]), np.array([-0.5, 0.0, 1.0])


def known(tokens: int = 4_000, pairs: int = 8, seed: int = 0):
    """Exactly K of 2K experts a row, yet P(selected) = sigmoid(slope * score + offset) for each of them.

    Experts come in pairs of which exactly one is selected, and the second's score is the one that makes
    its probability the rest: sigmoid(-(a s + b)) = sigmoid(a s' + b) for s' = -s - 2b/a.
    """
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((tokens, 3, pairs)) * 2 / SLOPES[:, None]
    second = -first - (2 * OFFSETS / SLOPES)[:, None]
    chosen = rng.random(first.shape) < 1 / (1 + np.exp(-(SLOPES[:, None] * first + OFFSETS[:, None])))
    scores = np.concatenate([first, second], -1).astype(np.float32)
    return scores, np.where(chosen, np.arange(pairs), np.arange(pairs) + pairs).astype(np.uint16)


def test_known_temperature_is_found():
    scale, bias = calibrate(*known())
    # 32,000 pairs a layer: the standard error of a slope is about its hundredth, of an offset about .02
    np.testing.assert_allclose(scale, SLOPES, rtol=0.04)
    np.testing.assert_allclose(bias, OFFSETS, atol=0.08)
    assert scale.dtype == bias.dtype == np.float32


def test_calibrated_probabilities_need_no_calibration():
    scores, ids = known()
    scale, bias = calibrate(scores, ids)
    again, left = calibrate(scores * scale[:, None] + bias[:, None], ids)
    np.testing.assert_allclose(again, 1, atol=1e-4)  # float32 scores and parameters
    np.testing.assert_allclose(left, 0, atol=1e-4)


@pytest.mark.parametrize("candidates", [None, 6])
def test_equal_to_logistic_regression(candidates):
    scores, ids = known(400)
    scale, bias = calibrate(scores, ids, candidates=candidates)
    for layer in range(3):
        x, y = [], []
        for row, chosen in zip(scores[:, layer], ids[:, layer], strict=True):
            for expert in np.argsort(-row, kind="stable")[:candidates]:
                x.append([row[expert]])
                y.append(expert in chosen)
        oracle = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(np.array(x, np.float64), y)
        # the ridge is a thousandth of one observation in thousands
        np.testing.assert_allclose(scale[layer], oracle.coef_[0, 0], rtol=1e-3)
        np.testing.assert_allclose(bias[layer], oracle.intercept_[0], atol=1e-3)


def test_deterministic_and_free_of_order_in_memory():
    scores, ids = known(200)
    one, other = calibrate(scores, ids), calibrate(np.asfortranarray(scores), ids)
    assert [a.tobytes() for a in one] == [a.tobytes() for a in other]


def test_scores_that_say_nothing_or_the_opposite_keep_their_ranking():
    scores, ids = known(400)
    scores[:, 0] *= -1  # ranks backwards
    scores[:, 1] = 3.0  # says nothing
    scale, bias = calibrate(scores, ids)
    assert (scale > 0).all()
    np.testing.assert_allclose(scale[0] * scores[:, 0].std(), MIN_SLOPE, rtol=1e-3)
    mean = 1 / (1 + np.exp(-(scale * scores.mean((0, 2)) + bias)))
    np.testing.assert_allclose(mean[:2], 0.5, atol=1e-3)  # half of the experts are selected


def test_perfect_scores_give_finite_sure_probabilities():
    ids = np.tile(np.arange(4), (50, 1, 1))
    scores = np.where(np.arange(16) < 4, 1.0, -1.0)[None, None].repeat(50, 0).astype(np.float32)
    scale, bias = calibrate(scores, ids)
    p = 1 / (1 + np.exp(-(scale * scores + bias)))
    assert np.isfinite([scale, bias]).all()
    assert p[..., :4].min() > 0.99 > 0.01 > p[..., 4:].max()
    assert np.isfinite(calibrate(scores, ids, candidates=4)).all()  # every candidate was selected


@pytest.mark.parametrize("shape", [(5, 2, 4), (4, 3, 4), (5, 3, 16), (5, 3, 0)])
def test_ids_of_another_shape_are_refused(shape):
    with pytest.raises(GeometryError, match="ids of another shape; field: ids; got: "):
        calibrate(np.zeros((5, 3, 16), np.float32), np.zeros(shape, np.uint16))


def test_nothing_to_fit_is_refused():
    scores, ids = known(4)
    with pytest.raises(RecordError, match="nothing to calibrate on; field: scores"):
        calibrate(scores[:0], ids[:0])
    scores[0, 0, 0] = np.nan
    with pytest.raises(RecordError, match="nothing to calibrate on; field: scores"):
        calibrate(scores, ids)
