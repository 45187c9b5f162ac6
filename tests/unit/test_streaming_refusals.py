"""What a reader tries first and gets wrong: every refusal is typed, says what is known, and leaves nothing behind."""

import shutil

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from moelab import models
from moelab.errors import (
    ArtifactError,
    ContractError,
    GeometryError,
    MissingArtifactError,
    ParameterError,
    UnsupportedModelError,
)
from moelab.models import tiny
from moelab.pages import aligned
from moelab.prerouter import install_prerouter
from moelab.routes import DECODED
from moelab.streaming import EngineOptions, LayerOptions, StreamedModel, StreamingEngine, profile, write_pack
from moelab.streaming.memory.fill import Fill

ROOM = EngineOptions(cache_bytes=4 << 20)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "stock"
    tiny.save("qwen3_moe", folder, seed=1)
    return folder


@pytest.fixture
def copy(stock, tmp_path):
    return shutil.copytree(stock, tmp_path / "copy")


@pytest.fixture
def packed(stock, tmp_path):
    write_pack(stock, tmp_path / "pack")
    return tmp_path / "pack"


@pytest.mark.parametrize("make", [EngineOptions, LayerOptions])
def test_an_unknown_option_is_typed_and_the_known_ones_are_listed(make):
    with pytest.raises(ParameterError, match=f"{make.__name__} has no such option.*thread") as caught:
        make(cache_size=3)
    assert caught.value.field == "cache_size" and "top_k" in str(caught.value.expected)


@pytest.mark.parametrize("call", [StreamingEngine.load, StreamedModel.load, install_prerouter, write_pack])
def test_an_unknown_argument_is_refused_before_a_model_is_opened_and_the_known_ones_are_listed(call):
    with pytest.raises(
        ParameterError, match=f"{call.__name__} has no such option; field: cache_size; got: 3"
    ) as caught:
        call("no such model", cache_size=3)
    assert "model" in caught.value.expected and not {"cls", "self"} & set(caught.value.expected)


@pytest.mark.parametrize("make, values, words", [
    (LayerOptions, {"load_threads": 10**9}, "out of range; field: load_threads; got: 1000000000, expected: <= 256"),
    (LayerOptions, {"prefetch_threads": 257}, "field: prefetch_threads; got: 257"),
    (EngineOptions, {"threads": 10**9}, "field: threads; got: 1000000000, expected: <= 256"),
    (EngineOptions, {"policy": "lfu"}, "unknown policy; field: policy; got: 'lfu'.*'layer-lfu'"),
    (EngineOptions, {"reader": "nmap"}, "unknown reader; field: reader; got: 'nmap'.*'mmap'"),
])  # fmt: skip
def test_what_no_engine_could_use_is_refused_before_a_model_is_named(make, values, words):
    with pytest.raises(ParameterError, match=words):
        make(**values)


@pytest.mark.parametrize("load", [StreamingEngine.load, StreamedModel.load])
@pytest.mark.parametrize("values, words", [
    ({"staged": True, "staged_n": 990}, "staged_n; got: 990, expected: <= 16, the experts"),
    ({"hot_per_layer": 17}, "hot_per_layer; got: 17, expected: <= 16, the experts"),
    ({"full_layer_prefill": True, "prefill_full_layers": 4}, "prefill_full_layers; got: 4, expected: <= 3, the layers"),
])  # fmt: skip
def test_layer_options_count_no_more_than_the_model_has(load, values, words, stock):
    with pytest.raises(GeometryError, match=f"more than the model has; field: options.layer.{words}"):
        load(stock, EngineOptions(cache_bytes=64 << 20, layer=LayerOptions(**values)))


def test_an_engine_has_no_mode(stock):
    with StreamingEngine.load(stock, ROOM) as engine:
        with pytest.raises(ParameterError, match="no mode; field: mode; got: 'advise'.*install_prerouter"):
            engine.mode = "advise"
        assert engine.mode is None


@pytest.mark.parametrize("name", ["model.safetensors", "experts-001.bin", "config.json", "tokenizer.json"])
def test_a_pack_that_lacks_a_file_names_it(name, packed):
    (packed / name).unlink()
    with pytest.raises(MissingArtifactError, match=f"file.*{name}"):
        StreamingEngine.load(packed, ROOM)


@pytest.mark.parametrize("values", [{"cache_bytes": 0}, {"cache_bytes": -1}, {"max_inflight_bytes": 0}])
def test_bytes_that_are_none(values):
    with pytest.raises(ParameterError, match=f"out of range; field: {next(iter(values))}.*>= 1"):
        EngineOptions(**values)


def test_a_cache_below_one_token_says_how_small_it_may_be(stock):
    with StreamingEngine.load(stock, ROOM) as engine:
        least = sum(layout.slot_bytes for layout in engine.store.layouts)
        want = engine.generate([1, 2, 3], max_tokens=4)
    with pytest.raises(ContractError, match=f"one token's experts.*below_cycle=True, with {least} bytes or more"):
        StreamingEngine.load(stock, EngineOptions(cache_bytes=least))
    with pytest.raises(ContractError, match=f"'{least - 1} bytes: 0 slots for layers .*>= 1 beside 0 pins"):
        StreamingEngine.load(stock, EngineOptions(cache_bytes=least - 1, below_cycle=True))
    with StreamingEngine.load(stock, EngineOptions(cache_bytes=least, below_cycle=True)) as engine:
        assert engine.generate([1, 2, 3], max_tokens=4) == want


@pytest.mark.parametrize("name", ["prod_k8", "staged_k8"])
def test_a_profile_of_another_k_is_refused_unless_it_is_meant(name, stock):
    with pytest.raises(GeometryError, match=r"top_k.*got: 8, expected: 4.*top_k=None.*change_top_k=True"):
        StreamingEngine.load(stock, EngineOptions(layer=profile(name)))
    for layer, options, k in ((profile(name, top_k=None), {}, 4), (profile(name), {"change_top_k": True}, 8)):
        with StreamingEngine.load(stock, EngineOptions(layer=layer, **options)) as engine:
            assert engine.loaded.geometry.top_k == k


def test_a_live_engines_model_takes_no_other_turn(stock):
    with StreamingEngine.load(stock, ROOM) as engine:
        want = engine.generate([1, 2, 3], max_tokens=4)
        for turn in (engine.loaded.decoding, engine.loaded.replaying, lambda: engine.loaded.holding(0)):
            with pytest.raises(ContractError, match="in use.*a live engine.*StreamedModel.load"), turn():
                pass
        assert engine.generate([1, 2, 3], max_tokens=4) == want


@pytest.mark.parametrize("load", [StreamingEngine.load, StreamedModel.load])
def test_a_cut_shard_is_refused_before_mlx_maps_it(load, copy, monkeypatch):
    [shard] = copy.glob("model*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-4000])
    monkeypatch.setattr(mx, "load", lambda *_, **__: pytest.fail("it was mapped"))
    with pytest.raises(ArtifactError, match="4000 bytes shorter than its header says"):
        load(copy, ROOM)
    shard.write_bytes(b"no")
    with pytest.raises(ArtifactError, match="not a safetensors file"):
        load(copy, ROOM)


@pytest.mark.parametrize("load", [lambda path: StreamingEngine.load(path, ROOM), models.load])
def test_a_missing_tokenizer_is_typed(load, copy):
    for file in copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(MissingArtifactError, match="no tokenizer here.*put the tokenizer's files beside"):
        load(copy)


def test_a_pack_of_a_model_without_tokenizer(copy, tmp_path):
    for file in copy.glob("tokenizer*"):
        file.unlink()
    write_pack(copy, tmp_path / "pack")
    with pytest.raises(MissingArtifactError, match="no tokenizer here"):
        StreamingEngine.load(tmp_path / "pack", ROOM)


def test_a_pack_is_no_resident_model(packed):
    with pytest.raises(UnsupportedModelError, match="this is a pack.*StreamingEngine.load, or pack@8GiB"):
        models.load(packed)


def test_a_refused_fill_leaves_no_lease(packed):
    with StreamingEngine.load(packed, EngineOptions(cache_bytes=4 << 20, policy="lru")) as engine:  # one pool for all
        memory, slots = engine.memory, [aligned(engine.store.layouts[0].slot_bytes) for _ in range(3)]
        demand = memory.demand(0, [3], phase=DECODED)  # so that 3 is resident
        demand.wait()
        memory.release(demand.keys)
        room = memory.cache.room(1)
        first = Fill(memory, 0, [5], slots[:1], urgent=True, together=True)
        with pytest.raises(ContractError, match=r"filled in one place.*got: \[5\]"):
            Fill(memory, 0, [3, 5], slots[1:], urgent=True)
        with pytest.raises(ValueError, match="zip"):
            Fill(memory, 0, [3, 6], slots[1:2], urgent=True)
        first.wait()
        assert memory.cache.room(1) == room  # others' leases would count
        again = Fill(memory, 0, [3, 5], slots[1:], urgent=True)
        again.wait()
        assert again.copied == [3] and again.arrived() == [3, 5]
        np.testing.assert_array_equal(slots[0], slots[2])


@pytest.mark.parametrize("name, why", [
    ("kv_bits", "attention caches stay in the precision"), ("input_embeddings", "token ids"),
    ("draft_model", "no drafting"), ("tempreature", "unknown argument"), ("mode", "a prerouter's.*install_prerouter"),
])  # fmt: skip
def test_arguments_that_streaming_has_not_are_refused_at_the_call(stock, name, why):
    with StreamingEngine.load(stock, ROOM) as engine:
        for ask in (engine.generate, engine.stream_generate, engine.stream_tokens):
            with pytest.raises(ParameterError, match=f"{why}.*field: {name}.*max_kv_size") as caught:
                ask([1, 2], **{name: 4})
            assert "engine" not in caught.value.expected
        assert engine.store.reads == 0


def test_a_cache_of_the_callers_counts_what_it_has_seen(stock):
    """Under a budget its positions count too."""
    options = EngineOptions(reserve_bytes=20 << 20, allocator_cache_bytes=0)
    with StreamingEngine.load(stock, options, memory_budget_bytes=4 << 30) as engine:
        cache = make_prompt_cache(engine.loaded.model)
        fresh = engine.prefill_step(2000, 4)
        list(engine.stream_tokens([n % 250 for n in range(1500)], max_tokens=1, prompt_cache=cache))
        assert cache[0].offset == 1501
        assert engine.prefill_step(2000, 4, seen=1501) < fresh


def test_options_and_prompts_of_another_type(stock):
    with pytest.raises(ParameterError, match="field: options; got: 'dict', expected: EngineOptions"):
        StreamingEngine.load(stock, {"cache_bytes": 4 << 20})
    with StreamingEngine.load(stock, ROOM) as engine:
        for prompt in (None, 5, [None]):
            with pytest.raises(ParameterError, match="no prompt; field: prompt"):
                engine.generate(prompt, max_tokens=1)


def test_a_pack_that_cannot_be_written_names_the_folder(stock, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="no pack can be written here; file: .*file; field: out"):
        write_pack(stock, tmp_path / "file" / "pack")
