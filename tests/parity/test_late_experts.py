"""The engine's `on_missing` on whole blocks follows the rule of `policies.degrade`, though neither knows the other."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from moelab import models
from moelab.models import tiny
from moelab.policies import degrade
from moelab.routes import DECODED, PREFILLED
from moelab.specialists.availability import CacheAvailability
from moelab.specialists.native import NativeLayer
from moelab.streaming import EngineOptions, LayerOptions, StreamingEngine

TOKENS = 6


def by_policy(layer, tokens, available, on_missing):
    """`[T, H]` of the degraded route, expert by expert."""
    found = degrade(tokens.ids, tokens.weights.gather(1, tokens.ids), available, mass="keep")
    out = tokens.anchor * (1 + found.lost[:, None] * (on_missing == "anchor"))
    for t in range(len(out)):
        for expert, weight, runs in zip(found.ids[t], found.weights[t], found.mask[t], strict=True):
            if runs:
                out[t] += weight * layer.expert(int(expert), tokens.x[t : t + 1])[0]
    return out, int(found.missing.sum())


@pytest.mark.parametrize("on_missing", ["zero", "anchor"])
@pytest.mark.parametrize("staged", [True, False])
def test_a_block_without_some_experts_is_the_degraded_route(staged, on_missing, tmp_path):
    tiny.save("glm4_moe", tmp_path, seed=1)
    loaded = models.load(tmp_path)
    rng, block = np.random.default_rng(0), loaded.blocks[1]
    x = rng.standard_normal((TOKENS, loaded.geometry.hidden)).astype(np.float32)
    layer, experts = NativeLayer.of(loaded, 1), loaded.geometry.experts
    ids = np.array(block.gate(mx.array(x))[0]).astype(np.int64)
    tokens = layer.tokens(torch.from_numpy(x), ids)
    held = np.unique(ids)[::2]
    own = {"staged": True, "staged_n": experts, "staged_trigger": loaded.blocks[0].family.top_k} if staged else {}
    options = EngineOptions(cache_bytes=1 << 25, layer=LayerOptions(on_missing=on_missing, **own))
    with StreamingEngine.load(tmp_path, options) as engine:
        switch, owner = engine.switches[1], engine.loaded.blocks[1].switch_owner
        if staged:
            switch.staged.stage(held.tolist())
            available = torch.isin(torch.arange(experts), torch.from_numpy(held))
        else:
            engine.forward.begin(PREFILLED)
            engine.forward.end(
                switch(mx.zeros((len(held), 1, x.shape[1])), mx.array(np.repeat(held[:, None], 4, 1))[:, None])
            )
            available = CacheAvailability(engine.cache, experts)(1, tuple(map(str, range(experts))))
        engine.forward.begin(DECODED)
        out = owner(mx.array(x)[:, None])
        engine.forward.end(out)
        counters = switch.staged.counters if staged else switch.late.counters
        want, missing = by_policy(layer, tokens, available, on_missing)
        assert 0 < missing == counters.dropped < ids.size
        # float32 sums in another order
        np.testing.assert_allclose(np.array(out)[:, 0], want.numpy(), rtol=1e-4, atol=1e-5)
