"""Taps on the two reference models: bits, pieces, features, the early gate, and what is refused."""

import mlx.core as mx
import numpy as np
import pytest

from moelab.errors import GeometryError, ParameterError, RecordError, UnsupportedModelError
from moelab.models import find_blocks, load, tiny
from moelab.models.taps import join, tap

TOKENS = np.random.default_rng(3).integers(5, 8000, 72)


@pytest.fixture(scope="module", params=["softmax", "sigmoid"])
def lm(request):
    return load(request.param)


def run(lm, pieces, pending=lambda: ()):
    cache, parts = lm.make_cache(), []
    for piece in pieces:
        parts.append(lm.model(mx.array(TOKENS[piece])[None], cache=cache))
        mx.eval(parts[-1], *pending())
    return mx.concatenate(parts, axis=1)


WHOLE = [slice(0, 72)]
CHUNKS = [slice(0, 1), slice(1, 30), slice(30, 72)]
STEPS = [slice(0, 40), *(slice(i, i + 1) for i in range(40, 72))]


@pytest.mark.parametrize("pieces", [WHOLE, CHUNKS, STEPS], ids=["prefill", "chunks", "decode"])
def test_logits_with_taps_are_bit_equal_and_pieces_join(lm, pieces):
    plain = run(lm, pieces)
    with lm.tap(("moe_input", "pre_attention")) as collector:
        tapped = run(lm, pieces, collector.pending)
        record = collector.take()
        run(lm, WHOLE)
        whole = collector.take()
    assert mx.array_equal(plain, tapped).item()
    shape = (1, 72, lm.geometry.layers, lm.geometry.top_k)
    assert record.ids.shape == record.weights.shape == shape and record.weights.dtype == np.float32
    assert record.margin.shape == shape[:3] and record.margin.dtype == np.float32
    assert {f.shape for f in record.features.values()} == {(*shape[:3], lm.geometry.hidden)}
    np.testing.assert_array_equal(record.ids, whole.ids)
    # With the reference BLAS these are equal bits; with another one rounding differs by the row count.
    np.testing.assert_allclose(record.weights, whole.weights, atol=1e-5)
    for name, feature in record.features.items():
        np.testing.assert_allclose(feature, whole.features[name], atol=1e-4)


def test_features_are_the_layer_input_and_the_block_input(lm):
    """Recomputed by walking the layers by hand."""
    from mlx_lm.models.base import create_attention_mask

    with lm.tap(("moe_input", "pre_attention")) as collector:
        lm.model(mx.array(TOKENS)[None])
        record = collector.take()
    h = lm.model.model.embed_tokens(mx.array(TOKENS)[None])
    mask = create_attention_mask(h, None)
    for i, layer in enumerate(lm.model.layers):
        np.testing.assert_array_equal(record.features["pre_attention"][:, :, i], np.array(h))
        middle = h + layer.self_attn(layer.input_layernorm(h), mask, None)
        moe_input = layer.post_attention_layernorm(middle)
        np.testing.assert_array_equal(record.features["moe_input"][:, :, i], np.array(moe_input))
        # The gate behind its own norm, given the residual stream, is the gate given the block input.
        from_residual = lm.early_gate_scores(np.array(middle), i, norm=True)
        from_input = lm.early_gate_scores(record.features["moe_input"][:, :, i], i, norm=False)
        np.testing.assert_allclose(from_residual, from_input, atol=1e-5)
        h = middle + layer.mlp(moe_input)


def test_margin_and_order(lm):
    with lm.tap(("moe_input",)) as collector:
        run(lm, WHOLE)
        record = collector.take()
    for layer, gate in enumerate(lm.gate_weights()):
        masked, _, between = lm.family.selection(gate.logits(record.features["moe_input"][0, :, layer]), gate.bias)
        picked = np.take_along_axis(masked, record.ids[0, :, layer].astype(int), -1)
        assert (np.diff(picked, axis=-1) <= 1e-6).all()
        ordered = np.sort(masked, -1)
        k = lm.geometry.top_k
        np.testing.assert_allclose(record.margin[0, :, layer], ordered[:, -k] - ordered[:, -k - 1], atol=1e-5)
        if between is None:
            assert record.group_margin is None
        else:
            np.testing.assert_allclose(record.group_margin[0, :, layer], between, atol=1e-5)


def test_early_gate_on_a_layers_own_input_is_its_route(lm):
    with lm.tap(("moe_input", "pre_attention")) as collector:
        run(lm, WHOLE)
        record = collector.take()
    k = lm.geometry.top_k
    for layer in range(lm.geometry.layers):
        own = lm.early_gate_scores(record.features["moe_input"][:, :, layer], layer, norm=False)
        assert own.shape == (1, 72, lm.geometry.experts) and own.dtype == np.float32
        top = np.argsort(-own, axis=-1, kind="stable")[..., :k]
        clear = record.margin[:, :, layer] > 1e-5
        assert (np.sort(top, -1) == np.sort(record.ids[:, :, layer], -1)).all(-1)[clear].all()
    # One layer early, from the state the next layer starts from: far better than chance (4 of 64).
    early = lm.early_gate_scores(record.features["pre_attention"][:, :, 1], 1, norm=True)
    top = np.argsort(-early, axis=-1)[..., :k]
    recall = (top[..., None] == record.ids[:, :, 1][..., None, :]).any(-1).mean()
    assert recall > 0.4


def test_early_gate_ranks_dropped_groups_behind_kept_ones_in_order():
    lm = load("sigmoid")
    rep = np.random.default_rng(0).normal(size=(20, lm.geometry.hidden)).astype(np.float32)
    gate = lm.gate_weights()[2]
    masked, free, _ = lm.family.selection(gate.logits(rep), gate.bias)
    early = lm.early_gate_scores(rep, 2, norm=False)
    dropped = (masked == lm.family.dropped) & (free != masked)
    assert dropped.mean() == 0.5
    for row in range(20):
        assert early[row][dropped[row]].max() < early[row][~dropped[row]].min()
        order = np.argsort(-early[row][dropped[row]])
        assert (np.diff(free[row][dropped[row]][order]) <= 1e-9).all()
        np.testing.assert_allclose(early[row][~dropped[row]], free[row][~dropped[row]], rtol=1e-6)


def test_early_gate_refuses_another_width(lm):
    with pytest.raises(GeometryError, match="rep"):
        lm.early_gate_scores(np.zeros((1, 8), np.float32), 0, norm=False)


def test_classes_come_back_even_after_an_error(lm):
    modules = [m for b in lm.blocks for m in (b.layer, b.gate, b.switch)]
    before = [type(m) for m in modules]
    with pytest.raises(RuntimeError, match="stop"), lm.tap():
        assert [type(m) for m in modules] != before
        assert all(isinstance(m, original) for m, original in zip(modules, before, strict=True))
        raise RuntimeError("stop")
    assert [type(m) for m in modules] == before


def test_taps_nest(lm):
    with lm.tap() as outer:
        with lm.tap() as inner:
            run(lm, WHOLE)
            np.testing.assert_array_equal(inner.take().ids, outer.take().ids)
        run(lm, WHOLE)
        assert outer.take().ids.shape[1] == 72


def test_what_is_recorded_is_what_passed_whatever_the_gate_says():
    """A route put in place of the gate's own is reported as it was, or refused as impossible; never re-picked."""
    model = tiny.build("qwen3_moe")
    blocks = find_blocks(model)
    original = type(blocks[1].switch_owner)

    class Odd(original):
        def __call__(self, x):
            inds = mx.broadcast_to(mx.array([0, 1, 2, 3]), (*x.shape[:-1], 4))
            self.gate(x)
            return self.switch_mlp(x, inds).sum(-2)

    blocks[1].switch_owner.__class__ = Odd
    with tap(blocks) as collector:
        model(mx.array([[1, 2, 3]]))
        with pytest.raises(UnsupportedModelError, match="not those its family's arithmetic gives; field: layer 1"):
            collector.take()


def test_misuse_is_refused(lm):
    with pytest.raises(ParameterError, match="unknown feature"), lm.tap(("attention",)):
        pass
    with lm.tap() as collector:
        with pytest.raises(RecordError, match="forward passes"):
            collector.take()
        lm.model(mx.zeros((1, 3), mx.int32))
        lm.model(mx.zeros((2, 3), mx.int32))
        with pytest.raises(RecordError, match="batch size"):
            collector.take()


def test_a_layer_that_did_not_run_is_an_error_not_a_zero_row(lm):
    with lm.tap() as collector:
        lm.model.layers[0](mx.zeros((1, 3, lm.geometry.hidden)), None, None)
        with pytest.raises(RecordError, match="differ between layers"):
            collector.take()


@pytest.mark.parametrize("family", ["kimi_k3", "deepseek_v41"])
def test_families_without_one_residual_stream_refuse_that_feature(family):
    with (
        pytest.raises(UnsupportedModelError, match="pre_attention"),
        tap(find_blocks(tiny.build(family)), ("pre_attention",)),
    ):
        pass


def test_join_takes_strided_flattened_half_and_batched_arrays():
    rng = np.random.default_rng(0)
    wide = [rng.normal(size=(2, t, 6)).astype(np.float32) for t in (3, 1)]
    strided = [mx.array(a)[..., 2:5] for a in wide]
    np.testing.assert_array_equal(join(strided, [(2, 3), (2, 1)]), np.concatenate([a[..., 2:5] for a in wide], 1))
    flat = [mx.array(a).reshape(-1, 6)[:, -2:] for a in wide]
    np.testing.assert_array_equal(join(flat, [(2, 3), (2, 1)]), np.concatenate([a[..., -2:] for a in wide], 1))
    one = [mx.array(a[:1])[..., 1:4] for a in wide]
    np.testing.assert_array_equal(join(one, [(1, 3), (1, 1)]), np.concatenate([a[:1, :, 1:4] for a in wide], 1))
    half = [mx.array(a[:1]).astype(mx.bfloat16) for a in wide]
    assert join(half, [(1, 3), (1, 1)]).dtype == np.float32
