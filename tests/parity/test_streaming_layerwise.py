"""Layer-major streamed replay is the resident replay, bit for bit, and reads every expert once."""

import mlx.core as mx
import numpy as np
import pytest
import store_cases
from mlx_lm.models.cache import make_prompt_cache

from moelab import models
from moelab.errors import ContractError, StoreError
from moelab.models import tiny
from moelab.models.loading import cast
from moelab.models.taps import tap
from moelab.streaming import EngineOptions
from moelab.streaming.engine.layerwise import LayerMajor
from moelab.streaming.engine.streamed import StreamedModel
from moelab.streaming.store.skeleton import drop_experts, skeleton
from moelab.streaming.store.store import open_store

FEATURES = ("pre_attention", "moe_input")
CASES = ["softmax", "sigmoid", "qwen3_moe", "deepseek_v3", "gpt_oss", "nemotron_h", "in place"]


@pytest.fixture(params=CASES)
def model(request, tmp_path, monkeypatch):
    if request.param == "in place":
        return store_cases.fitted(tmp_path, monkeypatch)
    if request.param in ("softmax", "sigmoid"):
        return request.param
    tiny.save(request.param, tmp_path, seed=3)
    return tmp_path


def streamed(model):
    frame = skeleton(model)
    cast(frame.network, "float32")
    store = open_store(frame.path)
    drop_experts(frame.blocks)
    mx.eval(frame.network.parameters())
    return frame, store


def passes(network, blocks, batches, *, chunk, evaluate):
    taps = []
    for tokens in batches:
        cache = make_prompt_cache(network)
        with tap(blocks, FEATURES) as recorder:
            for start in range(0, tokens.shape[1], chunk):
                out = network(mx.array(tokens[:, start : start + chunk]), cache=cache)
                if evaluate:
                    mx.eval(out, *recorder.pending())
        taps.append(recorder)
    return taps


@pytest.mark.parametrize("turns", [1, 2])
def test_equals_resident_replay(model, turns):
    resident = models.load(model)
    rng = np.random.default_rng(0)
    batches = [rng.integers(5, 250, shape) for shape in ((3, 40), (1, 1), (2, 70))]
    expected = [t.take() for t in passes(resident.model, resident.blocks, batches, chunk=32, evaluate=True)]
    frame, store = streamed(model)
    with store:
        one = store.experts * sum({layout.slot_bytes for layout in store.layouts})
        layers = LayerMajor(frame.blocks, store, budget=turns * one)
        for _ in range(2):  # a second shard goes through the same slabs
            before = store.payload_bytes
            with layers.building():
                taps = passes(frame.network, frame.blocks, batches, chunk=32, evaluate=False)
            assert store.payload_bytes == before  # building computes nothing
            layers.evaluate()
            assert store.payload_bytes - before == store.experts * sum(map(store.nbytes, range(store.layers)))
            for got, want in zip([t.take() for t in taps], expected, strict=True):
                np.testing.assert_array_equal(got.ids, want.ids)
                np.testing.assert_array_equal(got.weights, want.weights)
                for name in FEATURES:  # the same operations in the same order: equal to the bit, not to 1e-6
                    np.testing.assert_array_equal(got.features[name], want.features[name])
        layers.close()


def test_a_whole_layer_is_held_wherever_it_lies(tmp_path, monkeypatch):
    model = store_cases.fitted(tmp_path, monkeypatch)
    resident = models.load(model)
    x, ids = mx.random.normal((1, 3, 64)), mx.array([[[0, 1, 2, 3], [4, 5, 6, 7], [7, 0, 3, 2]]])
    with StreamedModel.load(model, EngineOptions(cache_bytes=1 << 26)) as streamed:
        for layer in range(4):
            with streamed.holding(layer):
                assert mx.array_equal(streamed.blocks[layer].switch(x, ids), resident.blocks[layer].switch(x, ids))


def test_budget_below_one_layer_is_refused(tmp_path):
    tiny.save("qwen3_moe", tmp_path)
    frame, store = streamed(tmp_path)
    with store, pytest.raises(ContractError, match="all experts of a layer.*budget.*got: 4096"):
        LayerMajor(frame.blocks, store, budget=4096)


def test_failed_read_is_raised_and_leaves_nothing_behind(tmp_path, monkeypatch):
    tiny.save("qwen3_moe", tmp_path)
    frame, store = streamed(tmp_path)
    with store:
        layers = LayerMajor(frame.blocks, store, budget=1 << 30)
        real, broken = store.read_into, [True]

        def read_into(layer, expert, out):
            if broken[0] and (layer, expert) == (1, 5):
                raise StoreError("no such luck", field="expert", got=5)
            return real(layer, expert, out)

        monkeypatch.setattr(store, "read_into", read_into)
        tokens = [np.arange(10, 20)[None]]
        with layers.building():
            passes(frame.network, frame.blocks, tokens, chunk=32, evaluate=False)
        with pytest.raises(StoreError, match="no such luck"):
            layers.evaluate()
        broken[0] = False
        with layers.building():
            (recorder,) = passes(frame.network, frame.blocks, tokens, chunk=32, evaluate=False)
        layers.evaluate()
        resident = models.load(tmp_path)
        (want,) = passes(resident.model, resident.blocks, tokens, chunk=32, evaluate=True)
        np.testing.assert_array_equal(recorder.take().ids, want.take().ids)
        layers.close()
