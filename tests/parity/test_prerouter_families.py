"""Told the route that the gate would choose, every family of models that can be predicted does what it does alone."""

import mlx.core as mx
import numpy as np
import prerouter_world as world
import pytest

from moelab.errors import UnsupportedModelError
from moelab.models import tiny
from moelab.models.blocks import find_blocks
from moelab.models.gates import REFUSED
from moelab.models.tiny_configs import FAMILIES
from moelab.prerouter import Source, install_prerouter
from moelab.prerouter.hooks import OTHERWISE, BlockParts, attach, detach
from moelab.routes import DECODED

PROMPT, COUNT = list(range(20, 26)), 6
ALONG = [7, 99, 150, 23, 41, 8]
CHANGES = {
    "laguna": {"moe_routed_scaling_factor": 2.5},
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "E", "E"]},  # MoE layers that follow each other
}


class Knowing:
    """A head that knows what its consumer's gate will compute: the logits of one decoded pass after another."""

    def __init__(self, logits, width):
        self.logits, self.width, self.experts = logits, width, logits[0].shape[-1]
        self.calls = 0

    def __call__(self, hidden, current, previous=None):
        told = self.logits[min(self.calls, len(self.logits) - 1)]  # the last call is about a token that never comes
        self.calls += 1
        return told


def listened(streamed):
    """Text on the native routes, and the gates' logits `[1, 1, E]` in each decoded pass, by MoE layer."""
    parts = [BlockParts(block) for block in streamed.loaded.blocks]
    heard = [[] for _ in parts]

    def hook(layer):
        def turn(x, original):
            if streamed.forward.phase == DECODED:
                heard[layer].append(mx.array(np.array(parts[layer].logits(x)).reshape(1, 1, -1)))
            return original(x)

        return turn

    for layer, part in enumerate(parts):
        attach(part.module, hook(layer), patch=False)
    try:
        return world.tokens(streamed, PROMPT, COUNT, along=ALONG), heard
    finally:
        for part in parts:
            detach(part.module)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*REFUSED} - {*OTHERWISE}))
def test_a_foretold_route_is_the_native_one(family, tmp_path):
    world.tiny_model(family, tmp_path, **CHANGES.get(family, {}))
    with world.engine(tmp_path) as streamed:
        want, heard = listened(streamed)
        spec = world.spec_for(streamed)
        wiring = spec.wiring(streamed.loaded.geometry.layer_ids, len(streamed.loaded.model.layers))
        for mode in ("replace", "replace_true_weights"):
            heads = {
                owner: Knowing(heard[consumer], streamed.loaded.geometry.hidden)
                for owner, consumer in zip(wiring.owners, wiring.consumer_index, strict=True)
            }
            own = {"mode": mode, "biased": True}
            with install_prerouter(streamed.loaded, spec, streamed, heads=world.Each(heads), **own) as prerouter:
                got = world.tokens(streamed, PROMPT, COUNT, along=ALONG)
                assert (prerouter.supply.map[:, list(wiring.consumer_index)] == Source.PREDICTION).all()
            if mode == "replace" or normalised(streamed.loaded.family):
                for (_, left), (_, right) in zip(got, want, strict=True):
                    # Experts are added up in rank order instead of the gate's: rounding of four terms a layer.
                    np.testing.assert_allclose(left, right, atol=2e-5, rtol=0)
            else:  # the sum of the weights is another one, so the text is too
                assert any((left != right).any() for (_, left), (_, right) in zip(got, want, strict=True))


def normalised(family):
    return family.normalise or family.weight == "softmax"


@pytest.mark.parametrize("family", sorted(OTHERWISE))
def test_a_family_whose_block_is_no_such_sum_is_refused_with_its_reason(family):
    block = find_blocks(tiny.build(family))[0]
    with pytest.raises(UnsupportedModelError, match="cannot take the place of this gate") as caught:
        BlockParts(block)
    assert caught.value.got == f"{family}: {OTHERWISE[family]}"
