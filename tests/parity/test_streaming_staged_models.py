"""Whole models on staged slots and prefill windows generate the resident model's tokens, whatever is staged."""

import dataclasses
import threading

import mlx.core as mx
import numpy as np
import pytest
import store_cases
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from moelab import models
from moelab.errors import ContractError, GeometryError, ParameterError, UnsupportedModelError
from moelab.models import tiny
from moelab.routes import DECODED, PREFILLED
from moelab.streaming import EngineOptions, StreamingEngine, write_pack
from moelab.streaming.cache import eviction
from moelab.streaming.layer.install import shared_expert, slots_beside, with_top_k
from moelab.streaming.layer.options import LayerOptions, profile
from moelab.streaming.layer.paths import StagedSwitch
from moelab.streaming.store.skeleton import skeleton

PROMPT = list(range(20, 60))
STAGED = {"staged": True, "staged_n": 4, "staged_trigger": 4}
SLOT = 1 << 20


def resident_tokens(model, prompt, count, top_k=None):
    loaded = models.load(model)
    if top_k is not None:
        with_top_k(dataclasses.replace(skeleton(model), network=loaded.model, blocks=loaded.blocks), top_k)
    steps = generate_step(mx.array(prompt), loaded.model, max_tokens=count, prompt_cache=loaded.make_cache())
    return [(int(token), np.array(logprobs)) for token, logprobs in steps]


def same(got, want):
    assert [token for token, _ in got] == [token for token, _ in want]
    for (_, left), (_, right) in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.array(left), right)


class Stager:
    """Stages, between passes, what a layer used in the last one and some more: a predictor of middling quality."""

    def __init__(self, engine, seed=0):
        self.engine, self.rng, self.last = engine, np.random.default_rng(seed), {}
        engine.forward.listeners.append(self)

    def routed(self, *, step, layer, ids, x, now):
        self.last[layer] = np.unique(ids.reshape(-1, ids.shape[-1])[-1])

    def ended(self, *, step):
        """Staging is left to `tokens`, between passes."""

    def tokens(self, prompt, count):
        for token, logprobs in self.engine.stream_tokens(prompt, max_tokens=count):
            yield token, np.array(logprobs)
            for layer, ids in self.last.items():
                switch = self.engine.switches[layer]
                wanted = np.unique([*ids[: len(ids) // 2], *self.rng.permutation(self.engine.store.experts)[:3]])
                switch.predicted_experts = wanted[:2]
                if switch.staged:
                    switch.staged.stage(wanted, weights=self.rng.random(len(wanted)))


def engine(model, cycles=2.0, **layer):
    options = LayerOptions(**layer)
    frame = skeleton(model)
    from moelab.streaming.store.store import open_store

    with open_store(frame.path) as store:
        one = frame.blocks[0].family.top_k * sum(layout.slot_bytes for layout in store.layouts)
        size = int(cycles * one) + slots_beside(options, store)
    return StreamingEngine.load(model, EngineOptions(cache_bytes=size, layer=options))


LAYERS = {
    "beside": STAGED,
    "in place": {**STAGED, "incr_stack": True, "incr_writeback": True, "warm_willneed": True},
    "by threads": {**STAGED, "staged_sync": False},
    "windows": {"full_layer_prefill": True, "prefill_full_layers": 1, "prefill_hot": 4},
    "pins": {**STAGED, "hot_per_layer": 2, "prefill_hot": 2, "hot_update_interval": 1},
}


@pytest.mark.parametrize("family, name", [
    *(("gpt_oss", name) for name in LAYERS),
    ("qwen3_moe", "pins"), ("glm4_moe", "by threads"), ("nemotron_h", "beside"), ("qwen3_next", "in place"),
])  # fmt: skip
def test_a_model_on_staged_slots_generates_the_resident_models_tokens(family, name, tmp_path):
    tiny.save(family, tmp_path, seed=1)
    want = resident_tokens(tmp_path, PROMPT, 12)
    with engine(tmp_path, **LAYERS[name]) as streamed:
        stager = Stager(streamed)
        for _ in range(2):  # and request after request
            same(list(stager.tokens(PROMPT, 12)), want)
        assert all(isinstance(switch, StagedSwitch) for switch in streamed.switches)
        assert len(streamed.switches) == len(streamed.loaded.blocks)
        if LAYERS[name].get("staged"):
            counters = [switch.staged.counters for switch in streamed.switches]
            assert all(c.used > 0 and c.exact > 0 and c.dropped == 0 for c in counters)
            assert all(c.fallback == 2 for c in counters)  # the first token of each request


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_layers_that_lie_differently_in_place_share_stacks_and_windows(name, tmp_path, monkeypatch):
    model = store_cases.fitted(tmp_path, monkeypatch)
    want = resident_tokens(model, PROMPT, 20)
    with engine(model, **LAYERS[name]) as streamed:
        stager = Stager(streamed)
        for _ in range(2):
            same(list(stager.tokens(PROMPT, 20)), want)


@pytest.mark.parametrize("family, own", [
    ("softmax", {}), ("sigmoid", {"incr_stack": True, "incr_writeback": True, "warm_willneed": True}),
])  # fmt: skip
def test_200_steps_of_a_trained_model_with_a_cache_smaller_than_the_set(family, own):
    want = resident_tokens(family, PROMPT, 200)
    frame = skeleton(family)
    layer = LayerOptions(**STAGED, cache_slots=2 * len(frame.blocks), **own)
    options = EngineOptions(layer=layer, below_cycle=True, reader="buffered")  # what is read matters here, not how
    with StreamingEngine.load(frame.path, options) as streamed:
        assert streamed.cache.budget < sum(streamed.cache.slot_bytes) * frame.blocks[0].family.top_k
        stager = Stager(streamed)
        same(list(stager.tokens(PROMPT, 200)), want)
        same(list(stager.tokens(PROMPT, 20)), want[:20])
        counters = [switch.staged.counters for switch in streamed.switches]
        assert all(c.used and c.exact and not c.dropped and c.used + c.exact == 218 * 4 for c in counters)


# ---------------------------------------------------------------- the layouts that experts are found in

SMALL = {"hidden_size": 64, "moe_intermediate_size": 128, "num_experts": 8, "num_hidden_layers": 1}


def separate(folder):
    store_cases.save("qwen3_moe", folder, **SMALL)


def separate_4_bit(folder):
    mode = {"group_size": 64, "bits": 4, "mode": "affine"}
    store_cases.save("qwen3_moe", folder, quantise=mode, only="switch_mlp", **SMALL)


def fused(folder):
    own = {"hidden_size": 64, "intermediate_size": 128, "num_local_experts": 8, "num_hidden_layers": 1}
    tensors = store_cases.save("granitemoe", folder, **own)
    store_cases.write(folder, store_cases.fused(tensors, "switch_mlp", "input_linear.weight", "output_linear.weight"))


def dense(switch, x, ids):
    """`down(silu(gate(x)) * up(x))` in float64 over dequantised weights, `[..., K, H]`."""

    def weight(layer):
        if "scales" not in layer:
            return np.array(layer["weight"], np.float64)
        return np.array(
            mx.dequantize(layer["weight"], layer["scales"], layer["biases"], layer.group_size, layer.bits), np.float64
        )

    up, gate, down = (weight(switch[name]) for name in ("up_proj", "gate_proj", "down_proj"))
    x = np.array(x, np.float64)
    out = np.zeros((*ids.shape, down.shape[1]))
    for place in np.ndindex(ids.shape):
        expert, row = ids[place], x[place[:-1]]
        g, u = gate[expert] @ row, up[expert] @ row
        out[place] = down[expert] @ (g / (1 + np.exp(-g)) * u)
    return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", [separate, separate_4_bit, fused])
def test_every_path_from_disk_against_a_dequantised_reference(layout, packed, tmp_path):
    layout(tmp_path / "model")
    network, _ = load_model(tmp_path / "model")
    folder = tmp_path / ("pack" if packed else "model")
    if packed:
        write_pack(tmp_path / "model", folder)
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((1, 2, 64)).astype(np.float32))
    ids = np.stack([rng.permutation(8)[:4] for _ in range(2)])[None].astype(np.uint32)
    resident = models.find_blocks(network)[0].switch
    want, bits = dense(resident, x, ids), np.array(resident(x, mx.array(ids)))
    assert want.shape == (1, 2, 4, 64)

    def call(streamed, phase, indices, stage=None):
        (switch,) = streamed.switches
        if stage is not None:
            switch.staged.stage(stage)
        streamed.forward.begin(phase)
        out = switch(x, indices)
        streamed.forward.end(out)
        return np.array(out)

    with engine(folder, staged=True, full_layer_prefill=True) as streamed:
        exact = call(streamed, DECODED, mx.array(ids))  # nothing is staged
        counters = streamed.switches[0].staged.counters
        assert (counters.fallback, counters.used) == (1, 0)
        assert np.linalg.norm(exact - want) / np.linalg.norm(want) < 1e-2  # kernel floor of 4 bits is about 0.0024
        np.testing.assert_array_equal(exact, bits)
        np.testing.assert_array_equal(call(streamed, DECODED, mx.array(ids), stage=np.unique(ids)), exact)
        assert (counters.fallback, counters.used) == (1, ids.size)
        np.testing.assert_array_equal(call(streamed, PREFILLED, mx.array(ids)), exact)
    with engine(folder, **STAGED, staged_replace=True) as streamed:
        route = np.broadcast_to(np.array([0, 2, 5, 7], np.uint32), (1, 2, 4))
        exact = call(streamed, DECODED, mx.array(route))
        np.testing.assert_array_equal(call(streamed, DECODED, None, stage=[0, 2, 5, 7]), exact)


# ---------------------------------------------------------------- options made effective


@pytest.mark.parametrize("name, top_k", [("staged_k4", 4), ("prod_k8", 8), ("staged_k8", 8)])
def test_shipped_profiles_run_and_are_exact(name, top_k, tmp_path):
    tiny.save("qwen3_moe", tmp_path, seed=1)
    want = resident_tokens(tmp_path, PROMPT, 8, top_k=top_k)
    with StreamingEngine.load(tmp_path, EngineOptions(layer=profile(name), change_top_k=top_k != 4)) as streamed:
        assert streamed.cache.pool_slots == (min(64, 16 * len(streamed.switches)),)
        assert streamed.loaded.geometry.top_k == top_k and streamed.options.threads == 8
        same(list(Stager(streamed).tokens(PROMPT, 8)), want)


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss", "mixtral", "deepseek_v3", "bailing_hybrid"])
def test_k_can_be_changed(family, tmp_path):
    tiny.save(family, tmp_path, seed=1)
    seen = set()

    class Ear:
        def routed(self, *, step, layer, ids, x, now):
            seen.add(ids.shape[-1])

        def ended(self, *, step):
            pass

    with StreamingEngine.load(
        tmp_path, EngineOptions(cache_bytes=64 * SLOT, layer=LayerOptions(top_k=3), change_top_k=True)
    ) as streamed:
        streamed.forward.listeners.append(Ear())
        list(streamed.stream_tokens(PROMPT, max_tokens=3))
    assert seen == {3}


def test_the_budget_holds_the_slots_beside_the_cache(tmp_path):
    tiny.save("qwen3_moe", tmp_path, seed=1)
    layer = LayerOptions(**STAGED, full_layer_prefill=True)
    with StreamingEngine.load(tmp_path, EngineOptions(cache_bytes=8 * SLOT, layer=layer)) as streamed:
        stacks = [switch.staged.stack for switch in streamed.switches]
        stacks += [stack for stack in streamed.switches[0]._window.stacks.values()]
        beside = sum(stack.nbytes for stack in stacks)
        assert beside == slots_beside(layer, streamed.store)
        assert streamed.cache.budget == 8 * SLOT - beside
    with pytest.raises(ContractError, match="leave nothing for the cache"):
        StreamingEngine.load(tmp_path, EngineOptions(cache_bytes=beside, layer=layer))
    with pytest.raises(ParameterError, match="one budget"):
        StreamingEngine.load(tmp_path)


def test_pins_need_the_policy_that_pins():
    assert EngineOptions(layer=LayerOptions(hot_per_layer=1)).policy == "hot-pin"
    assert EngineOptions().policy == eviction.DEFAULT
    with pytest.raises(ParameterError, match="only one policy pins"):
        EngineOptions(policy="lru", layer=LayerOptions(hot_per_layer=1))


def test_the_shared_expert_stands_in(tmp_path):
    tiny.save("glm4_moe", tmp_path / "shared", seed=1)
    layer = {**STAGED, "on_missing": "anchor"}
    with engine(tmp_path / "shared", **layer) as streamed:
        switch, block = streamed.switches[0], streamed.loaded.blocks[0]
        x = mx.random.normal((1, 1, 64), key=mx.random.key(0))
        ids = mx.array([[[3, 1, 2, 0]]])
        switch.staged.stage([1, 2])
        streamed.forward.begin(DECODED)
        out = switch(x, ids)
        streamed.forward.end(out)
        want = np.array(block.switch_owner.shared_experts(x))[0, 0]
        np.testing.assert_array_equal(np.array(out)[0, 0, [0, 3]], [want, want])
        assert switch.staged.counters.anchored == 2
        list(Stager(streamed).tokens(PROMPT, 6))
        assert all(s.staged.counters.anchored > 0 for s in streamed.switches)
    tiny.save("qwen3_moe", tmp_path / "none", seed=1)
    before = threading.active_count()
    with pytest.raises(UnsupportedModelError, match="no shared expert"):
        engine(tmp_path / "none", **layer)
    assert threading.active_count() == before  # no reader is left behind


def test_the_shared_expert_has_its_gate(tmp_path):
    model = tiny.build("qwen2_moe", seed=1)
    block = models.find_blocks(model)[0]
    x = mx.random.normal((1, 1, 64), key=mx.random.key(0))
    owner = block.switch_owner
    want = mx.sigmoid(owner.shared_expert_gate(x)) * owner.shared_expert(x)
    np.testing.assert_array_equal(np.array(shared_expert(block)(x)), np.array(want))


def test_another_k_than_the_models_is_refused_by_a_layer(tmp_path):
    tiny.save("qwen3_moe", tmp_path, seed=1)
    with engine(tmp_path, top_k=4) as streamed:
        streamed.forward.begin(DECODED)
        with pytest.raises(GeometryError, match="not a route"):
            streamed.switches[0](mx.zeros((1, 1, 64)), mx.array([[[0, 1]]]))
        streamed.forward.abort()
