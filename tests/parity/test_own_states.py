"""States under predicted routes: many texts at once are what the streaming engine does to one."""

import mlx.core as mx
import numpy as np
import prerouter_world as world
import pytest
from mlx_lm.models.cache import make_prompt_cache

from moelab.errors import ContractError
from moelab.flywheel.own_states import native_ids, own_states, passing
from moelab.models.native import select
from moelab.prerouter import install_prerouter
from moelab.prerouter.hooks import BlockParts
from moelab.routes import DECODED, PREFILLED

PROMPT = 5


class Recorder:
    """Input of the experts and executed ids of every decoded pass of an engine."""

    def __init__(self, streamed):
        self.streamed, self.rows = streamed, []

    def routed(self, *, layer, ids, x, **_):
        if self.streamed.forward.phase == DECODED:
            self.rows.append((layer, np.array(ids).reshape(-1), x))

    def ended(self, *, step):
        self.rows = [(layer, ids, np.array(x).reshape(-1)) for layer, ids, x in self.rows]


def alone(streamed, text):
    """`(hidden [T, L, H], ids [T, L, K])` of one text, token by token through the engine."""
    recorder, cache = Recorder(streamed), make_prompt_cache(streamed.loaded.model)
    streamed.reset()
    streamed.forward.listeners.append(recorder)
    try:
        streamed.run(mx.array([text[:PROMPT]]), cache, PREFILLED)
        for token in text[PROMPT:]:
            streamed.run(mx.array([[token]]), cache, DECODED)
    finally:
        streamed.forward.listeners.remove(recorder)
    layers = len(streamed.switches)
    hidden, ids = (np.stack([row[i] for row in recorder.rows]) for i in (2, 1))
    return hidden.reshape(-1, layers, hidden.shape[-1]), ids.reshape(-1, layers, ids.shape[-1])


@pytest.mark.parametrize("mode", ["replace", "replace_true_weights"])
@pytest.mark.parametrize("model", ["softmax", "sigmoid"])
def test_rows_of_a_batch_are_the_engines_passes(model, mode):
    rng = np.random.default_rng(3)
    texts = [rng.integers(5, 8000, length) for length in (16, 24, 9)]
    with world.engine(model) as streamed:
        spec = world.spec_for(streamed, hidden=48)
        bank = world.heads_for(streamed, spec, hidden=48)
        with install_prerouter(streamed.loaded, spec, streamed, heads=bank, mode=mode):
            want = [alone(streamed, text.tolist()) for text in texts]
    loaded = world.resident(model)
    wiring = spec.wiring(loaded.geometry.layer_ids)
    classes = [type(block.switch) for block in loaded.blocks]
    got = own_states(loaded, bank, wiring, texts, prompt=PROMPT, mode=mode)
    assert [type(block.switch) for block in loaded.blocks] == classes
    for text, states, (hidden, ids) in zip(texts, got, want, strict=True):
        assert states.hidden.shape[0] == len(text) - PROMPT
        np.testing.assert_array_equal(states.executed[:, 1:], ids[:, 1:])  # predicted, in rank order
        # The first layer has its gate, whose order is that of its partition; elsewhere a product of more rows rounds
        # otherwise: 1e-6 of states of about one, grown through eight layers and 19 tokens.
        np.testing.assert_array_equal(np.sort(states.executed[:, 0]), np.sort(ids[:, 0]))
        np.testing.assert_allclose(states.hidden, hidden, atol=2e-4, rtol=0)
    mine = np.concatenate([states.native for states in got])
    assert (mine[:, 1:] != np.concatenate([states.executed for states in got])[:, 1:]).any()


def test_labels_are_what_the_gate_chooses_on_the_state():
    loaded = world.resident("sigmoid")  # its choice has a bias
    hidden = np.random.default_rng(0).normal(size=(7, loaded.geometry.layers, loaded.geometry.hidden))
    hidden = hidden.astype(np.float32)
    got = native_ids(loaded, hidden)
    for layer, block in enumerate(loaded.blocks):
        parts = BlockParts(block)
        chosen = select(loaded.family, parts.logits(mx.array(hidden[:, layer])), parts.bias)
        np.testing.assert_array_equal(got[:, layer], np.array(chosen.ids))


def test_classes_come_back_when_a_pass_fails_and_short_prompts_are_refused():
    loaded = world.resident("softmax")
    before = [type(block.switch) for block in loaded.blocks]
    with pytest.raises(RuntimeError, match="on purpose"), passing(loaded.blocks):
        raise RuntimeError("on purpose")
    assert [type(block.switch) for block in loaded.blocks] == before
    with world.engine("softmax") as streamed:
        spec = world.spec_for(streamed, hidden=48)
        bank = world.heads_for(streamed, spec, hidden=48)
    wiring = spec.wiring(loaded.geometry.layer_ids)
    with pytest.raises(ContractError, match="begin with a prompt"):
        own_states(loaded, bank, wiring, [np.arange(5, 12)], prompt=1)
    with pytest.raises(ContractError, match="nothing is decoded"):
        own_states(loaded, bank, wiring, [np.arange(5, 12)], prompt=7)
