"""A streamed model generates the tokens of the resident one: every budget, every family, request after request."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from moelab import models
from moelab.models import tiny
from moelab.models.gates import REFUSED
from moelab.models.tiny_configs import FAMILIES
from moelab.streaming import EngineOptions, StreamingEngine

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
    from moelab.streaming.skeleton import skeleton
    from moelab.streaming.store import open_store

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
