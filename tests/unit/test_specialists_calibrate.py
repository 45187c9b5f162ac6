"""Calibrated scores: against numpy's least squares, on utilities whose zero is known."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.errors import ContractError, GeometryError, PolicyError
from moelab.specialists.calibrate import by_score, fit_calibration, terms


def made(tokens=400, experts=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(tokens, experts, generator=generator)
    return weights, torch.rand(tokens, experts, generator=generator) < 0.4


def test_least_squares_for_each_specialist():
    weights, chosen = made()
    noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    utility = weights - 0.5 + 0.3 * noise
    found = fit_calibration(utility, weights, chosen, ridge=1e-12)
    for k in range(3):
        x = terms(weights, chosen)[:, k].numpy()
        expected, *_ = np.linalg.lstsq(x, utility[:, k].double().numpy(), rcond=None)
        # the ridge of 1e-12 moves a coefficient by about as much
        assert found.coefficients[k].numpy() == pytest.approx(expected, abs=1e-8)


def test_zero_is_where_the_anchor_is_as_good():
    weights, chosen = made(experts=2)
    truth = torch.stack((weights[:, 0] - 0.25, 2 * (weights[:, 1] ** 2 - 0.16)), 1)
    score = fit_calibration(5 * truth, weights, chosen, unit=5.0, ridge=1e-9)(weights, chosen)
    clear = truth.abs() > 0.02
    assert ((score > 0) == (truth > 0))[clear].all()
    assert score.dtype == torch.float32 and torch.allclose(score, truth, atol=1e-4), "in shares of the unit"


def test_a_strong_ridge_gives_the_fit_of_all_together():
    weights, chosen = made()
    utility = weights - 0.5 + 0.3 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
    found = fit_calibration(utility, weights, chosen, ridge=1e9)
    x, y = terms(weights, chosen).flatten(0, 1).numpy(), utility.flatten().double().numpy()
    expected, *_ = np.linalg.lstsq(x, y, rcond=None)
    assert found.coefficients.numpy() == pytest.approx(np.tile(expected, (3, 1)), abs=1e-6)


def test_a_specialist_that_was_never_chosen_has_finite_scores():
    weights, chosen = made()
    chosen[:, 1] = False
    found = fit_calibration(weights - 0.5, weights, chosen)
    assert torch.isfinite(found.coefficients).all() and found.tokens == 400
    weights[:], chosen[:] = 0, False  # and one whose weight is always zero
    assert torch.isfinite(fit_calibration(weights, weights, chosen).coefficients).all()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.lists(st.integers(-5, 5), max_size=40), st.integers(2, 8))
def test_bins_keep_the_sides_apart_and_rise(values, bins):
    scores = np.array(values, float) / 2
    found = by_score(scores, bins=bins)
    assert found.shape == scores.shape and ((found >= 0) & (found < bins)).all()
    for b in set(found.tolist()):
        assert len({s > 0 for s in scores[found == b]}) == 1
    order = np.argsort(scores, kind="stable")
    assert (np.diff(found[order]) >= 0).all()


def test_bins_are_of_equal_count():
    found = by_score(np.linspace(-1, 3, 400), bins=8)
    assert np.bincount(found).tolist() == [50] * 8


def test_bad_input_is_named():
    weights, chosen = made(4)
    for field, arguments in (
        ("utility", (weights[:, :2], weights, chosen)),
        ("utility", (weights * math.nan, weights, chosen)),
        ("weights", (weights, weights.long(), chosen)),
        ("chosen", (weights, weights, weights)),
    ):
        with pytest.raises(PolicyError) as error:
            fit_calibration(*arguments)
        assert error.value.field == field
    for field, more in (("unit", {"unit": 0.0}), ("ridge", {"ridge": -1.0}), ("utility", {})):
        with pytest.raises(ContractError) as error:
            fit_calibration(*(t[: 4 if more else 0] for t in (weights, weights, chosen)), **more)
        assert error.value.field == field
    with pytest.raises(PolicyError):
        fit_calibration(weights, weights, chosen)(weights[:, :2], chosen[:, :2])
    with pytest.raises(GeometryError):
        by_score(np.zeros(3), bins=1)
