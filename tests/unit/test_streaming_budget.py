"""A budget is bytes at every moment: layers of unequal experts, prompts with other experts, and one thread for mlx."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import quantize_model, save_config

from moelab import models
from moelab.errors import ContractError
from moelab.files import read_json
from moelab.models import tiny
from moelab.streaming import EngineOptions, StreamingEngine, open_store

PROMPTS = (list(range(20, 45)), list(range(200, 225)))


@pytest.fixture
def uneven(tmp_path):
    """Experts of the first MoE layer in 8 bits, of the others in 4."""
    model = tiny.save("qwen3_moe", tmp_path, seed=1, moe_intermediate_size=128, num_hidden_layers=4)

    def bits(path, module):
        if "switch_mlp" not in path or not hasattr(module, "to_quantized"):
            return False
        return {"bits": 8 if ".layers.0." in path else 4, "group_size": 64}

    model, config = quantize_model(model, read_json(tmp_path / "config.json"), 64, 4, quant_predicate=bits)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    save_config(config, tmp_path / "config.json")
    return tmp_path


def tokens(model, prompt, count=15):
    loaded = models.load(model)
    return [int(t) for t, _ in generate_step(mx.array(prompt), loaded.model, max_tokens=count)]


def test_layers_of_unequal_size_share_a_budget_of_bytes(uneven):
    with open_store(uneven) as store:
        sizes = [layout.slot_bytes for layout in store.layouts]
    assert sizes[0] > sizes[1] == sizes[-1]
    cycle = 4 * sum(sizes)
    with pytest.raises(ContractError, match=f"smaller than one token's experts.*got: {cycle - 1}.*{cycle}"):
        StreamingEngine.load(uneven, EngineOptions(cache_bytes=cycle - 1))
    with StreamingEngine.load(uneven, EngineOptions(cache_bytes=int(1.5 * cycle))) as engine:
        for prompt in (*PROMPTS, PROMPTS[0]):  # other experts, then the first ones again
            got = [token for token, _ in engine.stream_tokens(prompt, max_tokens=15)]
            assert got == tokens(uneven, prompt)
            held = sum(sizes[key // engine.store.experts] for key in engine.cache.resident())
            assert held <= engine.cache.occupied_bytes <= engine.cache.high_water_bytes <= int(1.5 * cycle)
        assert sum(slab.host.nbytes for slab in engine.memory.slabs) <= int(1.5 * cycle)


def test_loading_holds_no_stacked_table(uneven):
    """No parameter that is left has a leading axis of experts, but for the slots."""
    with open_store(uneven) as store:
        cycle = 4 * sum(layout.slot_bytes for layout in store.layouts)
    with StreamingEngine.load(uneven, EngineOptions(cache_bytes=2 * cycle)) as engine:
        slots = {id(array) for layer in range(engine.store.layers) for array in engine.memory.arrays(layer).values()}
        stacked = [
            name for name, value in tree_flatten(engine.loaded.model.parameters())
            if "switch_mlp" in name and id(value) not in slots and value.size
        ]  # fmt: skip
        assert stacked == []


def test_only_the_asking_thread_calls_mlx(uneven, monkeypatch):
    seen, real = set(), mx.eval

    def watched(*arrays):
        seen.add(threading.get_ident())
        return real(*arrays)

    monkeypatch.setattr(mx, "eval", watched)
    with open_store(uneven) as store:
        cycle = 4 * sum(layout.slot_bytes for layout in store.layouts)
    with StreamingEngine.load(uneven, EngineOptions(cache_bytes=cycle, threads=4)) as engine:
        reading, read_into = set(), engine.store.read_into

        def noted(layer, expert, out):
            reading.add(threading.get_ident())
            assert isinstance(out, np.ndarray)
            return read_into(layer, expert, out)

        engine.store.read_into = noted
        list(engine.stream_tokens(PROMPTS[0], max_tokens=10))
    assert seen == {threading.get_ident()}
    assert len(reading) > 1  # others did read
