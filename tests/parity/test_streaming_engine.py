"""A streamed model generates the tokens of the resident one: every budget, every family, request after request."""

import threading

import mlx.core as mx
import numpy as np
import pytest
import store_cases
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from moelab import models
from moelab.errors import ContractError, ParameterError, StoreError
from moelab.files import read_json
from moelab.models import tiny
from moelab.models.gates import REFUSED
from moelab.models.tiny_configs import FAMILIES
from moelab.routes import DECODED, PREFILLED
from moelab.streaming import EngineOptions, StreamingEngine, VirtualDevice, write_pack
from moelab.streaming.layer import layer

PROMPT = list(range(20, 90))


def resident_tokens(model, prompt, count):
    loaded = models.load(model)
    steps = generate_step(mx.array(prompt), loaded.model, max_tokens=count, prompt_cache=loaded.make_cache())
    return [(int(token), np.array(logprobs)) for token, logprobs in steps]


def streamed_tokens(engine, prompt, count):
    return [(token, np.array(logprobs)) for token, logprobs in engine.stream_tokens(prompt, max_tokens=count)]


def same(got, want):
    assert [token for token, _ in got] == [token for token, _ in want]
    for (_, left), (_, right) in zip(got, want, strict=True):
        np.testing.assert_array_equal(left, right)


def options(model, cycles, **changes):
    """Room for `cycles` times the experts of one token."""
    from moelab.streaming.store.skeleton import skeleton
    from moelab.streaming.store.store import open_store

    frame = skeleton(model)
    with open_store(frame.path) as store:
        one = frame.blocks[0].family.top_k * sum(layout.slot_bytes for layout in store.layouts)
    return EngineOptions(cache_bytes=int(cycles * one), **changes)


@pytest.fixture(scope="module", params=["softmax", "sigmoid"])
def long(request):
    """A reference model, and what it generates when resident."""
    return request.param, resident_tokens(request.param, PROMPT, 500)


@pytest.mark.parametrize("cycles", [1, 2.5, 16])
def test_500_tokens_at_every_budget(long, cycles):
    model, want = long
    with StreamingEngine.load(model, options(model, cycles)) as engine:
        same(streamed_tokens(engine, PROMPT, 500), want)
        counted = engine.cache.counters()
        assert engine.cache.high_water_bytes <= engine.cache.budget
        assert engine.store.reads == counted.demand_reads


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(REFUSED)))
def test_every_family(family, tmp_path):
    tiny.save(family, tmp_path, seed=1)
    want = resident_tokens(tmp_path, PROMPT[:20], 12)
    with StreamingEngine.load(tmp_path, options(tmp_path, 1)) as engine:
        same(streamed_tokens(engine, PROMPT[:20], 12), want)
        same(streamed_tokens(engine, PROMPT[:20], 12), want)


def test_second_request_equals_the_same_request_cold(tmp_path):
    tiny.save("qwen3_moe", tmp_path, seed=1)
    first, second = PROMPT[:20], PROMPT[30:60]
    want = resident_tokens(tmp_path, second, 30)
    with StreamingEngine.load(tmp_path, options(tmp_path, 1.5)) as engine:
        streamed_tokens(engine, first, 30)
        same(streamed_tokens(engine, second, 30), want)
    with StreamingEngine.load(tmp_path, options(tmp_path, 1.5)) as engine:
        abandoned = engine.stream_tokens(first, max_tokens=30)
        next(abandoned), next(abandoned)
        abandoned.close()
        same(streamed_tokens(engine, second, 30), want)


PACKED = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_next", "nemotron_h", "mixtral"]


@pytest.mark.parametrize("precision", ["stored", "float32"])
@pytest.mark.parametrize("family", PACKED)
def test_pack(family, precision, tmp_path):
    tiny.save(family, tmp_path / "stock", seed=1)
    want = resident_tokens(tmp_path / "stock", PROMPT[:20], 12)
    write_pack(tmp_path / "stock", tmp_path / "pack", precision=precision)
    with StreamingEngine.load(tmp_path / "pack", options(tmp_path / "pack", 1)) as engine:
        same(streamed_tokens(engine, PROMPT[:20], 12), want)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_in_place_and_packed(bits, tmp_path):
    from mlx_lm.utils import quantize_model, save_config

    stock, packed = tmp_path / "stock", tmp_path / "pack"
    model = tiny.save("qwen3_moe", stock, seed=1, moe_intermediate_size=64)
    model, config = quantize_model(model, read_json(stock / "config.json"), 64, bits)
    mx.save_safetensors(str(stock / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    save_config(config, stock / "config.json")
    want = resident_tokens(stock, PROMPT[:20], 20)
    write_pack(stock, packed)
    for folder in (stock, packed):
        with StreamingEngine.load(folder, options(folder, 1)) as engine:
            same(streamed_tokens(engine, PROMPT[:20], 20), want)


@pytest.mark.parametrize("policy", ["lru", "recent-lfu"])
@pytest.mark.parametrize("reader", ["auto", "buffered", "mmap"])
def test_layers_that_lie_differently_in_place_share_the_cache(reader, policy, tmp_path, monkeypatch):
    model = store_cases.fitted(tmp_path, monkeypatch)
    want = resident_tokens(model, PROMPT, 30)
    with StreamingEngine.load(model, options(model, 1.5, policy=policy, reader=reader)) as engine:
        assert len(engine.memory.slabs) == 1
        for _ in range(2):
            same(streamed_tokens(engine, PROMPT, 30), want)


@pytest.fixture
def small(tmp_path):
    tiny.save("qwen3_moe", tmp_path, seed=1)
    return tmp_path


def test_experts_computed_as_they_land(small, monkeypatch):
    """As large experts are: in several goes. Every row keeps its bits and its place."""
    monkeypatch.setattr(layer, "WORTH_SPLITTING", 0)
    want = resident_tokens(small, PROMPT, 40)
    for cycles in (1, 2):
        device = VirtualDevice(latency_s=1e-3, bytes_per_s=1e9, lanes=1)  # they land one by one
        with StreamingEngine.load(small, options(small, cycles, device=device)) as engine:
            same(streamed_tokens(engine, PROMPT, 40), want)


def test_sampling_draws_what_mlx_lm_draws(small):
    from mlx_lm.generate import generate
    from mlx_lm.sample_utils import make_logits_processors, make_sampler

    loaded = models.load(small)

    def settings():
        mx.random.seed(11)
        return {
            "sampler": make_sampler(temp=0.9, top_p=0.9),
            "logits_processors": make_logits_processors(repetition_penalty=1.3),
            "max_tokens": 40,
        }

    want = generate(loaded.model, loaded.tokenizer, "three plain words", **settings())
    with StreamingEngine.load(small, options(small, 1)) as engine:
        assert engine.generate("three plain words", **settings()) == want


def test_prompt_in_steps_and_of_one_token(small):
    for prompt in ([7], PROMPT):
        want = resident_tokens(small, prompt, 5)
        with StreamingEngine.load(small, options(small, 1)) as engine:
            same(streamed_tokens(engine, prompt, 5), want)
    told = []
    with StreamingEngine.load(small, options(small, 1, prefill_step_size=32)) as engine:
        list(engine.stream_tokens(PROMPT, max_tokens=1, prompt_progress_callback=lambda *n: told.append(n)))
    assert told == [(0, 70), (32, 70), (64, 70), (69, 70), (70, 70)]


def test_turns_with_one_attention_cache(small):
    loaded = models.load(small)
    with StreamingEngine.load(small, options(small, 1)) as engine:
        theirs, ours = loaded.make_cache(), engine.loaded.make_cache()
        for turn in (PROMPT[:12], PROMPT[30:37], PROMPT[50:51]):
            want = [int(t) for t, _ in generate_step(mx.array(turn), loaded.model, max_tokens=6, prompt_cache=theirs)]
            assert [t for t, _ in engine.stream_tokens(turn, max_tokens=6, prompt_cache=ours)] == want
            assert ours[0].offset == theirs[0].offset


def test_loaded_in_one_thread_used_in_another(small):
    want, got = resident_tokens(small, PROMPT, 6), []
    with StreamingEngine.load(small, options(small, 1)) as engine:
        same(streamed_tokens(engine, PROMPT, 6), want)
        thread = threading.Thread(target=lambda: got.extend(streamed_tokens(engine, PROMPT, 6)))
        thread.start()
        thread.join()
        same(got, want)


def test_two_threads_at_once_are_refused_by_name(small):
    with StreamingEngine.load(small, options(small, 1)) as engine:
        engine.forward.begin(DECODED)
        caught = []

        def second():
            try:
                engine.run(mx.array([[1]]), engine.loaded.make_cache(), DECODED)
            except ContractError as error:
                caught.append(str(error))

        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
        engine.forward.abort()
        assert "another thread is in it" in caught[0]


def test_a_request_that_is_refused_takes_nothing_from_the_one_that_runs(small):
    """Asked in the middle of its second pass, by another thread and by its own."""
    want, caught = resident_tokens(small, PROMPT, 6), []

    class Second:
        def routed(self, *, step, layer, **_):
            if (step, layer) == (1, 1):
                for ask in (self.ask, in_another_thread(self.ask)):
                    ask()

        def ended(self, *, step):
            pass

        def ask(self):
            try:
                streamed_tokens(engine, PROMPT[:5], 1)
            except ContractError as error:
                caught.append(str(error))

    def in_another_thread(work):
        def run():
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

        return run

    with StreamingEngine.load(small, options(small, 1)) as engine:
        engine.forward.listeners.append(Second())
        same(streamed_tokens(engine, PROMPT, 6), want)
        assert ["this thread" in text for text in caught] == [True, False] and "a pass is running" in caught[1]
        engine.forward.listeners.clear()
        same(streamed_tokens(engine, PROMPT, 6), want)


def test_a_pass_is_closed_whatever_its_end_raises(small):
    def broken():
        raise RuntimeError("a stack that cannot be released")

    with StreamingEngine.load(small, options(small, 1)) as engine:
        engine.forward.begin(DECODED)
        engine.forward.depart(mx.zeros(1), then=broken)
        with pytest.raises(RuntimeError, match="cannot be released"):
            engine.forward.abort()
        same(streamed_tokens(engine, PROMPT, 3), resident_tokens(small, PROMPT, 3))
        engine.forward.abort()  # nothing is open: nothing happens
        same(streamed_tokens(engine, PROMPT, 3), resident_tokens(small, PROMPT, 3))


def test_a_pass_must_be_opened(small):
    with StreamingEngine.load(small, options(small, 1)) as engine:
        with pytest.raises(ContractError, match="no pass open.*begin"):
            engine.loaded.model(mx.array([[1, 2]]))
        with pytest.raises(ContractError, match="prefill or decode"):
            engine.run(mx.array([[1]]), engine.loaded.make_cache(), 7)


def test_failed_read_is_raised_and_the_next_request_is_right(small, monkeypatch):
    want = resident_tokens(small, PROMPT, 6)
    with StreamingEngine.load(small, options(small, 1)) as engine:
        real, left = engine.store.read_into, [25]

        def read_into(layer, expert, out):
            left[0] -= 1
            if left[0] == 0:
                out[:] = 0x7F
                raise StoreError("the device failed", field="expert", got=expert)
            return real(layer, expert, out)

        monkeypatch.setattr(engine.store, "read_into", read_into)
        with pytest.raises(StoreError, match="the device failed"):
            streamed_tokens(engine, PROMPT, 6)
        assert not engine.scheduler.queued_bytes  # nobody waits for the rest of its experts
        same(streamed_tokens(engine, PROMPT, 6), want)


def test_budgets(small):
    with pytest.raises(ParameterError, match="exactly one"):
        StreamingEngine.load(small)
    with pytest.raises(ParameterError, match="exactly one"):
        StreamingEngine.load(small, options(small, 1), 1 << 30)
    with pytest.raises(ContractError, match="smaller than one token's experts"):
        StreamingEngine.load(small, options(small, 0.9))
    with pytest.raises(ContractError, match="memory_budget_bytes"):
        StreamingEngine.load(small, memory_budget_bytes=1 << 20)


@pytest.mark.parametrize(
    "wrong", [{"cache_bytes": "8GiB"}, {"threads": 2.5}, {"threads": True}, {"device": "x"}, {"reserve_bytes": None},
              {"layer": {}}, {"below_cycle": "no"}, {"prefill_step_size": 1.5}]
)  # fmt: skip
def test_options_of_another_type(wrong):
    with pytest.raises(ParameterError, match=f"another type.*{next(iter(wrong))}"):
        EngineOptions(**wrong)


def test_bad_requests(small):
    with StreamingEngine.load(small, options(small, 1)) as engine:
        with pytest.raises(ParameterError, match="a prompt has tokens"):
            engine.generate([])
        with pytest.raises(ParameterError, match="nothing to generate"):
            engine.generate("x", max_tokens=0)
        with pytest.raises(ParameterError, match="max_token"):
            engine.generate("x", max_token=3)
        for prompt, count, match in (([10**6, 5], 3, "no such token"), ([-5, 5], 3, "no such token"),
                                     ([5], -3, "no such count"), ([5], 2.5, "no such count")):  # fmt: skip
            with pytest.raises(ParameterError, match=match):
                engine.generate(prompt, max_tokens=count)
        engine.close()
        with pytest.raises(ContractError, match="closed"):
            engine.generate("x", max_tokens=3)


def test_timeline_adds_up(small):
    with StreamingEngine.load(small, options(small, 1)) as engine:
        list(engine.stream_tokens(PROMPT, max_tokens=9))
        rows = engine.forward.timeline.arrays()
    layers = engine.store.layers
    assert len(rows["issue"]) == layers * 10  # one prefill pass, nine decoded tokens
    assert rows["phase"].tolist() == [PREFILLED] * layers + [DECODED] * 9 * layers
    assert (rows["layer"].reshape(-1, layers) == np.arange(layers)).all()
    assert (rows["issue"] <= rows["ready"]).all() and (rows["ready"] <= rows["consume"]).all()
    assert (rows["compute"] >= 0).all()
    assert rows["missing"].sum() == engine.cache.counters().demand_reads
    assert rows["read_bytes"].sum() == engine.store.payload_bytes
