"""Every family with switch layers: taps change nothing, and what they report is what the model did.

One tiny random model a family (same code as the real one), 96 tokens: as one prefill, and as two chunks
and 32 cached decode steps. Families differ in whether the two agree bit for bit; taps must not care.
"""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from routing_oracle import GROUPED_INF, RULES, route

from moelab.models import NO_RESIDUAL, find_blocks, tiny
from moelab.models.gate_weights import Norm
from moelab.models.taps import tap

TOKENS = np.random.default_rng(5).integers(0, 256, 96)
PIECES = [slice(0, 33), slice(33, 64), *(slice(i, i + 1) for i in range(64, 96))]
# Rows closer to a tie than this are left out when two ways of computing a route are compared: float32
# logits of size 1 carry an error of about 1e-6.
NEAR_TIE = 1e-5
FAMILIES = sorted(RULES)


def prefill(model, tokens=TOKENS):
    logits = model(mx.array(tokens)[None], cache=make_prompt_cache(model))
    mx.eval(logits)
    return logits


def in_pieces(model, pending=lambda: ()):
    cache, parts = make_prompt_cache(model), []
    for piece in PIECES:
        parts.append(model(mx.array(TOKENS[piece])[None], cache=cache))
        mx.eval(parts[-1], *pending())
    return mx.concatenate(parts, axis=1)


def features_of(blocks):
    return ("moe_input",) if blocks[0].defined_in in NO_RESIDUAL else ("moe_input", "pre_attention")


@pytest.fixture(scope="module", params=FAMILIES)
def tapped(request):
    """A tiny model run with and without taps, once for all tests of its family."""
    # Its experts' sum can be normed in a narrower space, where single weights cannot be seen; the tests on
    # ties keep that form.
    plainer = {"routed_expert_hidden_size": None} if request.param == "kimi_k3" else {}
    model = tiny.build(request.param, **plainer)
    blocks = find_blocks(model)
    plain = prefill(model), in_pieces(model)
    modules = [m for b in blocks for m in (b.layer, b.gate, b.switch)]
    classes = [type(m) for m in modules]
    with tap(blocks, features_of(blocks)) as collector:
        once = prefill(model)
        whole = collector.take()
        pieces = in_pieces(model, collector.pending)
        stepped = collector.take()
    assert [type(m) for m in modules] == classes
    return request.param, model, blocks, plain, (once, pieces), (whole, stepped)


def test_taps_change_no_bit_of_the_logits(tapped):
    _, _, _, plain, with_taps, _ = tapped
    for untouched, touched in zip(plain, with_taps, strict=True):
        assert mx.array_equal(untouched, touched).item()


def test_ids_margins_and_order_equal_a_recomputation_from_the_gate_weights(tapped):
    family, _, blocks, _, _, records = tapped
    for record in records:
        assert record.ids.shape == (1, 96, len(blocks), blocks[0].family.top_k) and record.ids.dtype == np.uint16
        for layer, block in enumerate(blocks):
            logits = gate_logits(block, record.features["moe_input"][0, :, layer])
            bias = block.bias()
            for t in range(96):
                ids, margin, between = route(RULES[family], logits[t], bias, block.family.top_k)
                if min(margin, between) > NEAR_TIE:
                    assert set(record.ids[0, t, layer]) == set(ids)
                    gaps = np.diff([selection_score(RULES[family], logits[t], bias, e) for e in ids])
                    if len(ids) == 1 or gaps.max() < -NEAR_TIE:
                        assert record.ids[0, t, layer].tolist() == ids
                    assert record.margin[0, t, layer] == pytest.approx(margin, abs=2e-6)
                    if math.isfinite(between):
                        assert record.group_margin[0, t, layer] == pytest.approx(between, abs=4e-6)


def gate_logits(block, x):
    """The gate's product in float64, from the weights as they are stored."""
    x = x.astype(np.float64)
    if block.defined_in == "gemma4_text":  # its gate norms and scales its own input
        scale = np.array(block.gate.scale, np.float64) * x.shape[-1] ** -0.5
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + block.gate.eps) * scale
    logits = x @ np.array(block.matrix.weight, np.float64).T
    if "bias" in block.matrix:
        logits = logits + np.array(block.matrix.bias, np.float64)
    if block.defined_in == "laguna":
        logits = 30.0 * np.tanh(logits / 30.0)
    return logits


def selection_score(rule, logits, bias, expert):
    from routing_oracle import score

    return score(rule["score"], [float(x) for x in logits])[expert] + (0.0 if bias is None else float(bias[expert]))


def test_pieces_route_as_one_prefill_does(tapped):
    _, _, _, _, _, (whole, stepped) = tapped
    # Latent attention and state-space layers use other formulas for one token: logits move by 1e-6 to
    # 1e-5, so near-ties are left out.
    clear = whole.margin > 1e-4
    if whole.group_margin is not None:
        clear &= whole.group_margin > 1e-4
    assert clear.mean() > 0.95
    same = (np.sort(whole.ids, -1) == np.sort(stepped.ids, -1)).all(-1)
    assert same[clear].all()
    np.testing.assert_allclose(whole.features["moe_input"], stepped.features["moe_input"], atol=1e-3)


class Table(nn.Module):
    """Stands in for the experts: expert e answers with row e of a table, whatever it is asked."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def __call__(self, x, indices):
        return self.rows[indices]


def test_weights_are_those_the_model_used(tapped):
    """A block's output with table experts, minus the same with the table zero, is Σ weight · row."""
    family, model, blocks, _, _, (record, _) = tapped
    if family in ("gemma4_text", "deepseek_v41", "llama4"):
        return  # their experts take weights or a weighed input: the next test and the one on llama4 see to them
    for layer, block in enumerate(blocks):
        original, rows = block.switch, mx.random.normal((block.experts, tiny.HIDDEN))
        x = mx.array(record.features["moe_input"][:, :, layer])
        try:
            setattr(block.switch_owner, block.switch_name, Table(rows))
            with_rows = block.switch_owner(x)
            setattr(block.switch_owner, block.switch_name, Table(mx.zeros_like(rows)))
            routed = np.array(with_rows - block.switch_owner(x))
        finally:
            setattr(block.switch_owner, block.switch_name, original)
        if family == "Klear":  # it mixes routed and shared experts by two learned shares
            routed = routed / np.array(mx.softmax(block.switch_owner.coefficient(x), axis=-1)[..., :1])
        ids, weights = record.ids[:, :, layer].astype(int), record.weights[:, :, layer]
        expected = (weights[..., None] * np.array(rows)[ids]).sum(-2)
        np.testing.assert_allclose(routed, expected, atol=2e-5)  # a sum of K float32 products of size 1


def test_family_arithmetic_gives_the_recorded_weights(tapped):
    """Numpy and mlx repeat the routing of the logits; for gates that choose themselves this is a second opinion."""
    _, _, blocks, _, _, (record, _) = tapped
    for layer, block in enumerate(blocks):
        logits = gate_logits(block, record.features["moe_input"][0, :, layer]).astype(np.float32)
        if block.defined_in == "laguna":
            logits = 30.0 * np.arctanh(logits / 30.0)  # the family caps them itself
        clear = record.margin[0, :, layer] > NEAR_TIE
        if record.group_margin is not None:
            clear &= record.group_margin[0, :, layer] > NEAR_TIE
        bias, scale = block.bias(), block.expert_scale()
        ids, weights = record.ids[0, :, layer], record.weights[0, :, layer]
        np.testing.assert_allclose(block.family.weights(logits, ids, scale), weights, atol=2e-6)
        picked = block.family.select(logits, bias, scale)
        np.testing.assert_array_equal(np.sort(picked.ids, -1)[clear], np.sort(ids, -1)[clear])
        if block.family.weight == "sparsemixer":
            continue
        lazy = [None if a is None else mx.array(a) for a in (logits, bias, scale)]
        native = block.family.select(*lazy)
        np.testing.assert_array_equal(np.sort(np.array(native.ids), -1)[clear], np.sort(ids, -1)[clear])
        order = np.argsort(np.array(native.ids), -1)
        np.testing.assert_allclose(
            np.take_along_axis(np.array(native.weights), order, -1)[clear],
            np.take_along_axis(picked.weights, np.argsort(picked.ids, -1), -1)[clear],
            atol=2e-6,
        )


def test_the_norm_found_is_the_one_in_front_of_the_block(tapped):
    family, model, blocks, _, _, (record, _) = tapped
    if family == "gemma4_text":
        assert blocks[0].norm is None  # its gate takes the residual stream and norms it itself
        return
    seen = []
    for block in blocks:
        original = type(block.norm)

        class Spy(original):
            def __call__(self, x):
                seen.append((x, super().__call__(x)))
                return seen[-1][1]

        block.norm.__class__ = Spy
    prefill(model)
    for block in blocks:
        block.norm.__class__ = type(block.norm).__mro__[1]
    for layer, (block, (x, y)) in enumerate(zip(blocks, seen, strict=True)):
        np.testing.assert_array_equal(np.array(y), record.features["moe_input"][:, :, layer])
        np.testing.assert_allclose(Norm.of(block.norm, tiny.HIDDEN)(np.array(x)), np.array(y), atol=1e-5)


NEGATIVE = [f for f in FAMILIES if "groups" in RULES[f] and f not in ("deepseek_v2", "mistral4")]


@pytest.mark.parametrize("family", NEGATIVE)
def test_dropped_groups_are_masked_as_the_model_masks_them(family):
    """With selection scores below zero, a mask of 0 lets dropped experts win; a mask of -inf does not."""
    model = tiny.build(family)
    blocks = find_blocks(model)
    for block in blocks:
        setattr(block.bias_owner, block.bias_name, -2.0 + 0.1 * mx.random.uniform(shape=(16,)))
    with tap(blocks, ("moe_input",)) as collector:
        prefill(model)
        record = collector.take()
    for layer, block in enumerate(blocks):
        logits = gate_logits(block, record.features["moe_input"][0, :, layer])
        for t in range(96):
            kept, _, _ = route(GROUPED_INF, logits[t], block.bias(), 4)
            chosen = set(record.ids[0, t, layer].tolist())
            if RULES[family]["mask"] == 0.0:
                assert not chosen & set(kept) and record.margin[0, t, layer] == 0
            elif record.group_margin[0, t, layer] > NEAR_TIE and record.margin[0, t, layer] > NEAR_TIE:
                assert chosen == set(kept)


@pytest.mark.parametrize("zeroed", [False, True], ids=["six equal rows", "all rows equal"])
@pytest.mark.parametrize("family", FAMILIES)
def test_among_tied_experts_the_set_is_the_models_own(family, zeroed, monkeypatch):
    """Gates with equal rows: a re-pick by another rule would report another set."""
    model = tiny.build(family)
    blocks = find_blocks(model)
    equal = list(range(16)) if zeroed else [1, 4, 6, 9, 11, 14]
    for block in blocks:
        rows = block.matrix.weight
        rows[mx.array(equal)] = mx.zeros((tiny.HIDDEN,)) if zeroed else 3 * rows[1]
        if block.bias_owner is not None:
            getattr(block.bias_owner, block.bias_name)[mx.array(equal)] = 0.2
        if "bias" in block.matrix:
            block.matrix.bias = mx.zeros_like(block.matrix.bias)
    passed = []
    switch = type(blocks[0].switch)
    call = switch.__call__
    monkeypatch.setattr(switch, "__call__", lambda self, x, ids: passed.append(ids) or call(self, x, ids))
    prefill(model)
    own, passed[:] = [np.array(ids).reshape(96, -1) for ids in passed], []
    with tap(blocks, ("moe_input",)) as collector:
        prefill(model)
        record = collector.take()
    ties = 0
    for layer, block in enumerate(blocks):
        ids = record.ids[0, :, layer]
        np.testing.assert_array_equal(np.sort(ids, -1), np.sort(own[layer], -1))
        inside = np.isin(ids, equal).sum(-1)
        split = (inside > 0) & (inside < len(equal)) & (record.margin[0, :, layer] == 0)
        ties += split.sum()
        for row in ids[np.isin(ids, equal).all(-1)]:
            assert (np.diff(row.astype(int)) > 0).all(), "equal scores are ordered by lowest id"
        if block.family.weight != "sparsemixer" and not (zeroed and block.family.groups > 1):
            logits = mx.array(gate_logits(block, record.features["moe_input"][0, :, layer]).astype(np.float32))
            bias, scale = (None if a is None else mx.array(a) for a in (block.bias(), block.expert_scale()))
            native = np.array(block.family.select(logits, bias, scale).ids)
            assert (np.sort(native, -1) == np.sort(ids, -1)).all(-1).mean() > 0.98
    assert ties >= 8


def test_llama4_weighs_the_input_of_its_expert():
    model = tiny.build("llama4")
    blocks = find_blocks(model)
    seen = []

    class Spy(type(blocks[0].switch)):
        def __call__(self, x, ids):
            seen.append(x)
            return super().__call__(x, ids)

    for block in blocks:
        block.switch.__class__ = Spy
    with tap(blocks, ("moe_input",)) as collector:
        prefill(model)
        record = collector.take()
    for layer, x in enumerate(seen):
        np.testing.assert_allclose(
            np.array(x)[0], record.features["moe_input"][0, :, layer] * record.weights[0, :, layer], atol=1e-6
        )


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "olmoe", "granitemoehybrid", "deepseek_v3"])
def test_a_batch_is_its_sequences(family):
    model = tiny.build(family)
    blocks = find_blocks(model)
    rows = np.random.default_rng(1).integers(0, 256, (3, 40))
    with tap(blocks, ("moe_input", "pre_attention")) as collector:
        cache = make_prompt_cache(model)
        for piece in (slice(0, 38), slice(38, 39), slice(39, 40)):
            mx.eval(model(mx.array(rows[:, piece]), cache=cache), *collector.pending())
        batch = collector.take()
        for b in range(3):
            cache = make_prompt_cache(model)
            for piece in (slice(0, 38), slice(38, 39), slice(39, 40)):
                mx.eval(model(mx.array(rows[b : b + 1, piece]), cache=cache), *collector.pending())
            alone = collector.take()
            np.testing.assert_array_equal(batch.ids[b], alone.ids[0])
            for name in ("moe_input", "pre_attention"):
                np.testing.assert_allclose(batch.features[name][b], alone.features[name][0], atol=1e-5)
