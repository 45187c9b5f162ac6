"""What a request takes, by worked examples."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from moelab.errors import ContractError, UnsupportedModelError
from moelab.models import tiny
from moelab.streaming.engine.footprint import Footprint, Growth, room, seen_positions
from moelab.streaming.store.skeleton import skeleton

# Two layers: one cache that grows by 10 bytes a position, one that keeps a window of 8; a token takes 100 bytes and
# 2 for each position it sees; a row of logits 50.
MADE_UP = Footprint(caches=(Growth(30, 10, None), Growth(0, 5, 8)), token=100, score=2, logits=50)


def test_caches():
    assert Growth(30, 10, None).nbytes(20, 4) == 230
    assert Growth(0, 5, 8).nbytes(20, 4) == 60 and Growth(0, 5, 8).nbytes(6, 4) == 30  # and the step beside it
    assert MADE_UP.cache_bytes(20, 4) == 230 + 60 + 230  # the larger one is there twice while it grows


def test_a_pass():
    assert MADE_UP.pass_bytes(4, 20) == 4 * (100 + 2 * 20) + 4 * 50
    assert MADE_UP.pass_bytes(4, 20, rows=4) == 4 * (100 + 2 * 20) + 7 * 50
    assert MADE_UP.need(20, 30, 4) == MADE_UP.cache_bytes(30, 4) + MADE_UP.pass_bytes(4, 20)
    assert MADE_UP.need(1, 1000, 1) == MADE_UP.cache_bytes(1000, 1) + MADE_UP.pass_bytes(1, 1000)
    assert MADE_UP.need(20, 30, 2048) == MADE_UP.need(20, 30, 20)  # a prompt is no longer than itself


def test_a_step_is_halved_until_it_fits():
    for step in (512, 256, 64, 1):
        need = MADE_UP.need(1000, 1010, step)
        assert MADE_UP.step(need, prompt=1000, positions=1010, most=512) == step
    least = MADE_UP.need(1000, 1010, 1)
    with pytest.raises(ContractError, match=f"room for {least - 1} bytes.*expected: {least} bytes for 1010 tokens"):
        MADE_UP.step(least - 1, prompt=1000, positions=1010, most=512)


def test_positions_are_the_longest_caches():
    long, short = KVCache(), RotatingKVCache(max_size=4)
    for cache, tokens in ((long, 9), (short, 3)):
        cache.update_and_fetch(mx.zeros((1, 1, tokens, 2)), mx.zeros((1, 1, tokens, 2)))
    assert seen_positions([CacheList(short, long)]) == 9 and seen_positions([short]) == 3 and seen_positions([]) == 0


def test_a_model_without_heads_is_refused(tmp_path):
    tiny.save("qwen3_moe", tmp_path, seed=1)
    frame = skeleton(tmp_path)
    config = {name: value for name, value in frame.config.items() if name != "num_attention_heads"}
    with pytest.raises(UnsupportedModelError, match="heads of attention are not known"):
        Footprint.of(frame.network, frame.blocks, config)


def test_layers_without_experts_count(tmp_path):
    """A dense layer may be wider than any MoE layer's attention."""
    plain, wide = tmp_path / "plain", tmp_path / "wide"
    tokens = []
    for folder, width in ((plain, 64), (wide, 4096)):
        tiny.save("glm4_moe", folder, seed=1, intermediate_size=width)
        frame = skeleton(folder)
        tokens.append(Footprint.of(frame.network, frame.blocks, frame.config).token)
    assert tokens[1] - tokens[0] == 4 * 3 * 2 * (4096 - 64)  # float32, three copies, gate and up


def test_what_a_budget_leaves():
    assert room(100, 60, 30) == 10
    for budget in (90, 1):
        with pytest.raises(ContractError, match="spent before the first expert.*> 60 .*raise the budget"):
            room(budget, 60, 30)
