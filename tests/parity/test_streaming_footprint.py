"""What a request is said to take is what the allocator gives it at most, on every family."""

import mlx.core as mx
import pytest

from moelab.models import tiny
from moelab.models.gates import REFUSED
from moelab.models.tiny_configs import FAMILIES
from moelab.streaming import EngineOptions, StreamingEngine
from moelab.streaming.engine.footprint import _leaves, seen_positions

# (tokens of a step, steps): a short prompt, one that is all activations, one that is mostly attention scores.
STEPS = [(16, 1), (64, 1), (96, 8)]


@pytest.fixture
def nothing_kept():
    before = mx.set_cache_limit(0)
    yield
    mx.set_cache_limit(before)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(REFUSED)))
def test_caches_and_activations_are_within_what_was_said(family, tmp_path, nothing_kept):
    tiny.save(family, tmp_path, seed=1)
    options = EngineOptions(cache_bytes=4 << 20, allocator_cache_bytes=0)
    with StreamingEngine.load(tmp_path, options) as engine:
        footprint = engine.loaded.footprint
        for tokens, steps in STEPS:
            cache = engine.loaded.make_cache()
            mx.reset_peak_memory()
            before = mx.get_active_memory()
            for n in range(steps):
                engine.prefill((mx.arange(tokens) + n)[None] % 250, cache)
            positions = tokens * steps
            assert seen_positions(cache) in (0, positions)
            held = sum(leaf.nbytes for entry in cache for leaf in _leaves(entry))
            assert held <= footprint.cache_bytes(positions, tokens)
            assert mx.get_peak_memory() - before <= footprint.need(positions, positions, tokens), (tokens, steps)


def test_nothing_is_computed_to_find_out(tmp_path):
    from moelab.streaming.engine import footprint
    from moelab.streaming.store import skeleton

    tiny.save("qwen3_moe", tmp_path, seed=1)
    frame = skeleton.skeleton(tmp_path)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    footprint.Footprint.of(frame.network, frame.blocks, frame.config)
    assert mx.get_peak_memory() - before < 64 << 10  # token ids and frequencies, no weight
