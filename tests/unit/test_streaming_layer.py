"""The lazy hazard: an output built on slots that are filled again before it is evaluated."""

import mlx.core as mx
import numpy as np
import pytest

from moelab import models
from moelab.models import tiny
from moelab.routes import DECODED
from moelab.streaming import EngineOptions, StreamingEngine
from moelab.streaming.memory.forward import Forward
from moelab.streaming.memory.memory import ExpertMemory


@pytest.fixture
def engine(tmp_path):
    tiny.save("qwen3_moe", tmp_path, seed=1)
    frame = models.load(tmp_path)
    slots = frame.geometry.layers * frame.geometry.top_k
    budget = slots * 4096 * -(-frame.geometry.expert_bytes // 4096)
    with StreamingEngine.load(tmp_path, EngineOptions(cache_bytes=budget, policy="lru")) as engine:
        engine.resident = frame
        yield engine


def churn(engine):
    """Outputs of every layer for experts 0-3, then for 4-7, which take their slots; evaluated only at the end."""
    x = mx.array(np.random.default_rng(0).normal(size=(1, 1, engine.loaded.geometry.hidden)).astype(np.float32))
    engine.forward.begin(DECODED)
    built = []
    for experts in ([0, 1, 2, 3], [4, 5, 6, 7]):
        ids = mx.array([[experts]])
        for layer, block in enumerate(engine.loaded.blocks):
            built.append((block.switch(x, ids), engine.resident.blocks[layer].switch(x, ids)))
    delayed = [np.array(streamed) for streamed, _ in built]
    engine.forward.end()
    return [np.array_equal(got, np.array(want)) for got, (_, want) in zip(delayed, built, strict=True)]


def test_delayed_evaluation_gets_the_bytes_it_was_built_on(engine):
    assert all(churn(engine))


def test_it_would_not_if_slots_were_released_before_the_evaluation(engine, monkeypatch):
    monkeypatch.setattr(Forward, "depart", lambda self, output: None)  # nobody evaluates it in time
    assert not all(churn(engine))


def test_listeners_hear_while_experts_are_computed_and_before_any_waiting(engine, monkeypatch):
    said = []

    class Ear:
        def routed(self, *, step, layer, ids, x, now):
            said.append(f"told {ids.tolist()}")

        def ended(self, *, step):
            pass

    real, wait = mx.async_eval, ExpertMemory._wait
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (said.append("begun"), real(*arrays))[1])
    monkeypatch.setattr(
        ExpertMemory, "_wait", lambda self, demand, leave: (said.append("waits"), wait(self, demand, leave))[1]
    )
    engine.forward.listeners.append(Ear())
    x, ids = mx.zeros((1, 1, engine.loaded.geometry.hidden)), mx.array([[[3, 1, 2, 0]]])
    for _ in range(2):
        engine.forward.begin(DECODED)
        engine.loaded.blocks[0].switch(x, ids)
        engine.forward.end()
        said.append("end")
    missing, resident = ["told [[[3, 1, 2, 0]]]", "waits", "end"], ["waits", "begun", "told [[[3, 1, 2, 0]]]", "end"]
    assert said == missing + resident
