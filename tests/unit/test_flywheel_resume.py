"""Running on from a layer gives the model's own loss when the layer answers as it would."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from moelab import models
from moelab.errors import GeometryError
from moelab.models.tiny import save
from moelab.specialists.native import NativeLayer
from moelab.studies.resume import cut, layer_inputs


def own_losses(loaded, window):
    """The slow way: the whole model on one window."""
    logits = np.array(loaded.model(mx.array(window[None])))[0, :-1].astype(np.float64)
    total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    return total - logits[np.arange(len(window) - 1), window[1:]]


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe"])
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save(request.param, folder)
    return models.load(folder)


@pytest.fixture(scope="module")
def windows():
    generator = np.random.default_rng(0)
    return [generator.integers(5, 250, n).astype(np.int32) for n in (12, 30, 30, 7, 21)]


def test_the_models_own_output_gives_the_models_own_loss(loaded, windows):
    for layer in range(loaded.geometry.layers):
        inputs = layer_inputs(loaded, windows, layer, tokens=64)
        assert len(inputs.order) > 1
        tokens = NativeLayer.of(loaded, layer).tokens(torch.from_numpy(inputs.x), inputs.ids)
        found = inputs.losses(tokens.output.numpy())
        for i, window in enumerate(windows):
            # float32 sums in another order, through the layers that follow
            assert found[inputs.rows(i)][:-1] == pytest.approx(own_losses(loaded, window), abs=2e-4)
        assert (found[~inputs.predicts] == 0).all() and inputs.predicts.sum() == sum(map(len, windows)) - len(windows)


def test_another_output_gives_another_loss_in_its_own_window_only(loaded, windows):
    inputs = layer_inputs(loaded, windows, 0)
    output = np.zeros_like(inputs.x)
    before = inputs.losses(output)
    output[inputs.rows(1)] += 3.0
    changed = inputs.losses(output) != before
    assert changed[inputs.rows(1)].any() and not np.delete(changed, np.r_[inputs.rows(1)]).any()


def test_the_model_is_given_back(loaded, windows):
    logits = np.array(loaded.model(mx.array(windows[0][None])))
    kinds = [type(module) for _, module in loaded.model.named_modules()]
    inputs = layer_inputs(loaded, windows[:1], 1)
    inputs.losses(np.zeros_like(inputs.x))
    inputs.states[0] = None
    with pytest.raises(AttributeError):  # and when something breaks on the way
        inputs.losses(np.zeros_like(inputs.x))
    assert [type(module) for _, module in loaded.model.named_modules()] == kinds
    assert np.array_equal(np.array(loaded.model(mx.array(windows[0][None]))), logits)


def test_the_gradient_is_the_slope_of_the_windows_loss(loaded, windows):
    # At the last layer: after an earlier one, a step of any size may flip a later route, where there is no slope.
    inputs = layer_inputs(loaded, windows, loaded.geometry.layers - 1)
    generator = np.random.default_rng(1)
    output, step = (generator.normal(size=inputs.x.shape).astype(np.float32) for _ in range(2))
    slope = (inputs.gradients(output) * step).sum()
    up, down = (inputs.losses(output + sign * 1e-2 * step).astype(np.float64).sum() for sign in (1, -1))
    # a difference quotient: float32 losses of about 5 each, a hundred of them, over a step of 2e-2
    assert slope == pytest.approx((up - down) / 2e-2, abs=5e-3)


def test_wrong_shapes_are_refused(loaded, windows):
    inputs = layer_inputs(loaded, windows[:2], 0)
    with pytest.raises(GeometryError, match="output"):
        inputs.losses(inputs.x[:-1])


def test_cut():
    parts = cut([np.arange(10), np.arange(3), np.arange(21)], 8, least=3)
    assert [(n, p.tolist()) for n, p in parts] == [
        (0, list(range(8))),
        (1, [0, 1, 2]),
        (2, list(range(8))),
        (2, list(range(8, 16))),
        (2, list(range(16, 21))),
    ]
