"""A layer's experts as specialists: the model's own output comes back, and corrections mean what they say."""

import numpy as np
import pytest
import torch

from moelab import models
from moelab.errors import UnsupportedModelError
from moelab.models.tiny import save
from moelab.policies import CapacityResult, TopKDecision
from moelab.specialists.native import NativeLayer, all_weights


def tiny(family, folder):
    save(family, folder)
    return models.load(folder)


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe"])
def layer(request, tmp_path_factory):
    return NativeLayer.of(tiny(request.param, tmp_path_factory.mktemp(request.param)), 1)


@pytest.fixture(scope="module")
def tokens(layer):
    x = torch.randn(40, layer.hidden, generator=torch.Generator().manual_seed(1))
    ids = layer.block.family.select(layer.block.logits(x.numpy()), layer.block.bias()).ids
    return layer.tokens(x, ids)


def native(layer, tokens):
    """The router's own choice as decided routes."""
    scores = tokens.weights.gather(1, tokens.ids)
    decision = TopKDecision(tokens.ids[None] + 1, scores[None], layer.expert_ids)
    return CapacityResult(decision, decision)


def test_output_is_the_models_own(layer, tokens):
    import mlx.core as mx

    own = np.array(layer.block.switch_owner(mx.array(tokens.x.numpy())[None])[0])
    # float32, a few hundred products in another order
    assert tokens.output.numpy() == pytest.approx(own, rel=1e-4, abs=1e-5 * float(np.abs(own).max()))


def test_weights_of_the_chosen_are_the_models(layer, tokens):
    logits = layer.block.logits(tokens.x.numpy())
    expected = layer.block.family.weights(logits, tokens.ids.numpy())
    # one division in float64 more, rounded to float32 once
    assert tokens.weights.gather(1, tokens.ids).numpy() == pytest.approx(expected, rel=1e-6)
    assert (tokens.weights >= 0).all() and (tokens.chosen.sum(1) == tokens.ids.shape[1]).all()


def test_always_on_anchor_with_all_corrections_is_the_layer(layer, tokens):
    for each in (layer, layer.with_dense_anchor(tokens)) if layer.shared is None else (layer,):
        here = each.tokens(tokens.x, tokens.ids.numpy())
        found = each.run(here, native(each, here)).output[0]
        assert torch.allclose(found, here.output, rtol=1e-4, atol=1e-5 * float(here.output.abs().max()))


def test_no_specialist_leaves_the_anchor(layer, tokens):
    decision = TopKDecision(torch.zeros(1, 40, 2, dtype=torch.int64), torch.zeros(1, 40, 2), layer.expert_ids)
    assert torch.equal(layer.run(tokens, CapacityResult(decision, decision)).output[0], tokens.anchor)


def test_complete_outputs_stand_beside_each_other(layer, tokens):
    experts = torch.stack((tokens.ids[:, 0], tokens.ids[:, 1]), 1)
    found = layer.complete_outputs(tokens, experts)
    for t in (0, 7, 39):
        for slot in (0, 1):
            one = tokens.rows(slice(t, t + 1))
            k = int(experts[t, slot])
            expected = one.anchor + layer.correction(k, one.x, one.weights, one.anchor)
            # one row at a time: the product may round differently
            assert torch.allclose(found[t, slot], expected[0], rtol=1e-4, atol=1e-5 * float(found.abs().max()))


def test_utility_is_the_error_taken_away(layer, tokens):
    utility = layer.error_utility(tokens)
    before = tokens.residual.square().sum(-1)
    for k in (0, layer.experts - 1):
        d = layer.correction(k, tokens.x, tokens.weights, tokens.anchor)
        expected = before - (tokens.output - tokens.anchor - d).square().sum(-1)
        # a difference of squares loses some digits that the product form keeps
        assert torch.allclose(utility[:, k], expected, rtol=1e-3, atol=1e-4 * float(before.max()))


def test_a_dense_anchor_leaves_less_error(layer, tokens):
    if layer.shared is not None:
        assert layer.anchor_kind == "shared"
        return
    fitted = layer.with_dense_anchor(tokens)
    assert (layer.anchor_kind, fitted.anchor_kind) == ("zero", "dense")
    here = fitted.tokens(tokens.x, tokens.ids.numpy())
    assert here.residual.square().sum() < tokens.residual.square().sum()


def test_other_layers_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError):
        NativeLayer.of(tiny("gpt_oss", tmp_path), 0)
    with pytest.raises(UnsupportedModelError, match="order of choice"):
        all_weights(type("F", (), {"weight": "sparsemixer"}), np.zeros((1, 4)), np.zeros((1, 2), int))
