"""200 tokens of both reference models on predicted routes, in slots: the bits of a plain resident loop."""

import numpy as np
import prerouter_world as world
import pytest

from moelab.prerouter import Source, install_prerouter

PROMPT = list(range(20, 32))
ALONG = np.random.default_rng(0).integers(5, 8000, 200).tolist()
"""Greedy text of a model with random heads repeats itself, and then slots rest."""


@pytest.mark.parametrize("model", ["softmax", "sigmoid"])
def test_200_tokens_in_slots_with_a_cache_smaller_than_the_set_request_after_request(model):
    with world.engine(model, layer=world.SLOTS, cycles=0.5) as streamed:
        assert streamed.cache.budget < sum(streamed.cache.slot_bytes) * 4
        spec = world.spec_for(streamed, hidden=48)
        bank = world.heads_for(streamed, spec, hidden=48)
        with world.Plain(model, bank, spec) as plain:
            want = list(plain.tokens(PROMPT, 200, ALONG))
            other = list(plain.tokens(PROMPT[::-1], 20))
        with install_prerouter(streamed.loaded, spec, streamed, heads=bank, mode="replace") as prerouter:
            world.same(world.tokens(streamed, PROMPT, 200, along=ALONG), want)
            consumers = list(prerouter.wiring.consumer_index)
            assert prerouter.supply.map.shape == (200, 8) and prerouter.supply.fed()
            assert (prerouter.supply.map[:, consumers] == Source.PREDICTION).all()
            counters = [streamed.switches[layer].staged for layer in consumers]
            assert all((s.counters.used, s.counters.exact, s.counters.dropped) == (800, 0, 0) for s in counters)
            # Slots churn: of 800 experts asked for in a layer, hundreds were not in a slot.
            assert all(s.stack.counters.copied + s.stack.counters.read > 200 for s in counters)
            world.same(world.tokens(streamed, PROMPT[::-1], 20), other)
