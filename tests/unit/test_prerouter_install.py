"""Installing and taking off: what is checked first, what a hook does to classes, and that nothing is left behind."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import prerouter_world as world
import pytest

from moelab import models
from moelab.errors import (
    ContractError,
    GeometryError,
    IdentityError,
    MissingArtifactError,
    ParameterError,
    UnsupportedModelError,
)
from moelab.models import gates, tiny, tiny_configs
from moelab.models.native import select
from moelab.prerouter import HeadIdentity, PrerouterHead, install_prerouter, uninstall, write_heads
from moelab.prerouter.hooks import OTHERWISE, BlockParts, attach, detach, is_hooked
from moelab.prerouter.modes import true_weights, weigh

PROMPT = [23, 99, 41, 7, 150]
ENGINES = world.Engines()


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    ENGINES.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    own = {"qwen3_5_moe": {}, "bailing_hybrid": {"num_hidden_layers": 4}}
    return {
        family: world.tiny_model(family, tmp_path_factory.mktemp(family), **changes) for family, changes in own.items()
    }


FAMILIES = ("qwen3_5_moe", "bailing_hybrid")
SUMS = sorted({*tiny_configs.FAMILIES} - {*gates.REFUSED} - {*OTHERWISE})


def trace(streamed):
    """Everything that an installation could leave behind: classes, their own names, attributes of every object."""
    network = streamed.loaded.model
    modules = [module for _, module in network.named_modules()]
    classes = {type(module) for module in modules}
    return {
        "classes": [type(module) for module in modules],
        "calls": {cls: cls.__dict__.get("__call__") for cls in classes},
        "names": {cls: sorted(cls.__dict__) for cls in classes},
        "attributes": [sorted(vars(module)) for module in modules],
        "children": [sorted(module) for module in modules],
        "listeners": list(streamed.forward.listeners),
        "observers": list(streamed.memory.observers),
        "engine": sorted(vars(streamed)),
        "predicted": [getattr(switch, "predicted_experts", None) for switch in streamed.switches],
        "staged": [getattr(switch, "staged", None) and switch.staged.ids for switch in streamed.switches],
    }


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("patch", [True, False])
@pytest.mark.parametrize("layer", [None, world.SLOTS])
def test_uninstalled_the_model_is_what_it_was(folders, family, patch, layer):
    streamed = ENGINES(folders[family], layer=layer)
    want, before = world.tokens(streamed, PROMPT, 6), trace(streamed)
    spec = world.spec_for(streamed, patch_call=patch)
    bank = world.heads_for(streamed, spec)
    outputs = []
    for model in (streamed.loaded, streamed.loaded.model):
        install_prerouter(model, spec, streamed, heads=bank, mode="replace")
        outputs.append(world.tokens(streamed, PROMPT, 6))
        assert trace(streamed) != before
        uninstall(model)
        uninstall(model)  # once is enough
        assert trace(streamed) == before
        world.same(world.tokens(streamed, PROMPT, 6), want)
    world.same(*outputs)
    assert [token for token, _ in outputs[0]] != [token for token, _ in want] or any(
        (a != b).any() for (_, a), (_, b) in zip(outputs[0], want, strict=True)
    )


def test_a_patch_and_a_subclass_are_the_same_prerouter(folders):
    streamed = ENGINES(folders["qwen3_5_moe"])
    got = []
    for patch in (True, False):
        spec = world.spec_for(streamed, patch_call=patch)
        with install_prerouter(
            streamed.loaded, spec, streamed, heads=world.heads_for(streamed, spec), mode="replace"
        ) as prerouter:
            got.append(world.tokens(streamed, PROMPT, 6))
            block = prerouter.stager.parts[1].module
            assert type(block).__name__.startswith("Prerouted") != patch
            # The family is still found, and the first layer, which consumes nothing, has no hook.
            assert type(block).__module__ == type(prerouter.stager.parts[0].module).__module__
            assert not is_hooked(prerouter.stager.parts[0].module)
    world.same(*got)


# ---------------------------------------------------------------- hooks


class Adder(nn.Module):
    def __call__(self, x):
        return x + 1


class Child(Adder):
    """Its call is inherited."""


@pytest.mark.parametrize("cls", [Adder, Child])
def test_hooks_are_an_instances_own(cls):
    own = cls.__dict__.get("__call__")
    one, two, plain = cls(), cls(), cls()
    attach(one, lambda x, original: 10 * original(x), patch=True)
    attach(two, lambda x, original: 20 * original(x), patch=True)
    assert (one(1), two(1), plain(1)) == (20, 40, 2)
    patched = cls.__call__
    detach(one)
    assert cls.__call__ is patched and (one(1), two(1)) == (2, 40)  # the class is patched once, for as long as needed
    third = cls()
    attach(third, lambda x, original: 30 * original(x), patch=False)  # made of a patched class
    assert (third(1), two(1)) == (60, 40)
    detach(two)
    assert cls.__dict__.get("__call__") is own and (two(1), third(1)) == (2, 60)
    detach(third)
    assert type(third) is cls and third(1) == 2 and not vars(third).keys() - vars(plain).keys()


def test_a_block_has_one_hook():
    block = Adder()
    with pytest.raises(ContractError, match="has no hook"):
        detach(block)
    attach(block, lambda x, original: x, patch=True)
    for patch in (True, False):
        with pytest.raises(ContractError, match="has a hook"):
            attach(block, lambda x, original: x, patch=patch)
    detach(block)


@pytest.mark.parametrize("family", SUMS)
@pytest.mark.parametrize("tokens", [1, 3])
def test_a_block_on_its_own_route_has_its_own_bits(family, tokens):
    """Given the gate's experts, in the gate's order, and its weights, the sum is the block's."""
    block = models.find_blocks(tiny.build(family, seed=2))[0]
    parts = BlockParts(block)
    x = mx.random.normal((1, tokens, block.matrix["weight"].shape[1]), key=mx.random.key(1))
    want, seen = np.array(parts.module(x)), {}
    inner = block.switch

    class Spy(nn.Module):
        def __call__(self, x, indices):
            seen["ids"] = indices.reshape(1, tokens, -1)  # some blocks flatten what they are given
            return inner(x, indices)

    setattr(block.switch_owner, block.switch_name, Spy())
    parts.module(x)
    weights = weigh(block.family, parts.logits(x), seen["ids"])
    np.testing.assert_array_equal(np.array(parts.output(x, inner(x, seen["ids"]), weights)), want)
    # And in rank order, as predictions come, to rounding: 4 terms added in another order.
    ids = select(block.family, parts.logits(x), parts.bias).ids
    weights = weigh(block.family, parts.logits(x), ids)
    np.testing.assert_allclose(np.array(parts.output(x, inner(x, ids), weights)), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.sort(np.array(ids)), np.sort(np.array(seen["ids"])))


def test_experts_in_a_space_of_their_own_are_refused():
    block = models.find_blocks(tiny.build("nemotron_h", seed=2, moe_latent_size=32))[0]
    with pytest.raises(UnsupportedModelError, match="a space of their own"):
        BlockParts(block)


def test_weights_of_given_experts():
    family = models.find_blocks(tiny.build("glm4_moe", seed=2))[0].family
    logits = mx.array([[[0.5, -1.0, 2.0, 0.0] * 4]])
    ids = mx.array([[[3, 1]]])
    sigmoid = 1 / (1 + np.exp([0.0, 1.0]))
    np.testing.assert_allclose(
        np.array(true_weights(family, logits, ids))[0, 0], 2.5 * sigmoid / sigmoid.sum(), rtol=1e-6
    )
    chosen = select(family, logits)
    np.testing.assert_array_equal(np.array(weigh(family, logits, chosen.ids)), np.array(chosen.weights))


# ---------------------------------------------------------------- what is refused


def test_what_does_not_fit_is_refused_before_anything_is_touched(folders):
    streamed, other = ENGINES(folders["qwen3_5_moe"]), ENGINES(folders["bailing_hybrid"])
    spec, before = world.spec_for(streamed), trace(streamed)
    bank = world.heads_for(streamed, spec)
    heads = {owner: bank.head(owner) for owner in bank.owners}
    E, H = bank.experts, bank.width

    def narrow():
        return PrerouterHead(mx.zeros((4, H - 1 + 2 * E)), mx.zeros((E, 4)), None)

    network = streamed.loaded.model
    for error, match, own in (
        (IdentityError, "whose experts the store holds", {"model": other.loaded}),
        (ParameterError, "need a live engine", {"store": streamed.memory}),
        (ParameterError, "of another type; field: spec; got: 'dict'", {"spec": {}}),
        (GeometryError, "the model routes otherwise", {"spec": world.spec_for(other, start_layer=1)}),
        (GeometryError, "no head predicts it", {"spec": world.spec_for(streamed, owners=(1, 2))}),
        (GeometryError, "not the owners' heads", {"heads": dict(list(heads.items())[1:])}),
        (GeometryError, "head of another model", {"heads": {**heads, 1: narrow()}}),
        (ParameterError, "no such mode", {"mode": "on"}),
        (ParameterError, "not a probability", {"threshold": 1.5}),
        (ParameterError, "not a probability", {"threshold": "much"}),
        (ParameterError, "not a probability", {"threshold": True}),
        (ParameterError, "not calibrated", {"mode": "gated"}),
        (GeometryError, "one pair an owner", {"calibration": {0: (1, 0)}}),
        (ParameterError, "no such issue point", {"issue": "later"}),
        (ParameterError, "no such candidates", {"extra": 13}),
        (GeometryError, "one time a layer", {"compute_s": [1.0]}),
        (ParameterError, "go to the staged slots", {"prefetcher": object()}),
    ):
        given = {"model": network, "spec": spec, "store": streamed, "heads": bank, "mode": "replace", **own}
        with pytest.raises(error, match=match):
            install_prerouter(given.pop("model"), given.pop("spec"), given.pop("store"), **given)
        assert trace(streamed) == before
    with pytest.raises(ParameterError, match="or another mode"):  # by default a route is replaced where that is sure
        install_prerouter(network, spec, streamed, heads=bank)
    with install_prerouter(network, spec, streamed, heads=bank, calibration=dict.fromkeys(bank.owners, (1, 0))) as sure:
        assert (sure.mode, sure.stager.threshold) == ("gated", 0.55)
    with install_prerouter(network, spec, streamed, heads=bank, mode="replace") as prerouter:
        with pytest.raises(ContractError, match="has a prerouter"):
            install_prerouter(network, spec, streamed, heads=bank, mode="replace")
        with pytest.raises(ParameterError, match="not calibrated"):
            prerouter.mode = "gated"
        assert prerouter.mode == "replace"
    assert trace(streamed) == before


def written(path, streamed, spec, form, **identity):
    """A weight file of random heads; the heads themselves."""
    loaded, rng = streamed.loaded, np.random.default_rng(6)
    own = HeadIdentity(**{
        "model": loaded.model_digest, "top_k": loaded.family.top_k, "experts": loaded.geometry.experts,
        "width": loaded.geometry.hidden, "hidden": 16, "form": form,
        "owners": spec.wiring(loaded.geometry.layer_ids, len(loaded.model.layers)).owners, **identity,
    })  # fmt: skip

    def draw(shape):
        return (rng.normal(size=shape) / 4).astype(np.float16)

    tensors = {owner: {part: draw(shape) for part, shape in own.shapes().items()} for owner in own.owners}
    write_heads(path, own, tensors, draw((16, own.width + 2 * own.experts)) if form == "shared" else None)


@pytest.mark.parametrize("form", ["full", "shared"])
def test_heads_of_a_file(folders, form):
    folder = folders["qwen3_5_moe"]
    streamed = ENGINES(folder)
    spec = world.spec_for(streamed, weights_file=f"{form}.safetensors")
    with pytest.raises(MissingArtifactError, match="no prerouter heads"):
        install_prerouter(streamed.loaded, spec, streamed, mode="replace")
    pairs = ((1.0, -1.0),) * 3
    written(folder / spec.weights_file, streamed, spec, form, confidence=pairs)
    with install_prerouter(streamed.loaded, spec, streamed, mode="gated") as prerouter:
        got = world.tokens(streamed, PROMPT, 4)
        assert list(prerouter.stager.calibration.values()) == list(pairs) and prerouter.supply.fed()
        bank = prerouter.heads
    own = {"mode": "gated", "calibration": dict(zip(bank.owners, pairs, strict=True))}
    with world.Plain(folder, bank, spec, **own) as plain:
        world.same(got, list(plain.tokens(PROMPT, 4)))
    other = folder / "other.safetensors"
    for match, identity in (
        ("heads of another model", {"model": "0" * 64}),
        ("heads of another geometry", {"top_k": 3}),
        ("trained on other experts", {"feature_topk": "teacher"}),
    ):
        written(other, streamed, spec, form, **identity)
        with pytest.raises(ContractError, match=match):
            install_prerouter(streamed.loaded, spec, streamed, weights=other, mode="replace")
    written(other, streamed, spec, form, model="edge0-35b")
    with install_prerouter(
        streamed.loaded, spec, streamed, weights=other, model_names=["edge0-35b"], mode="replace"
    ) as prerouter:
        assert world.tokens(streamed, PROMPT, 1) and prerouter.supply.fed()


def test_slots_that_cannot_be_filled_in_a_pass(folders):
    for layer in (world.IN_PLACE, {**world.SLOTS, "staged_sync": True}):
        streamed = ENGINES(folders["qwen3_5_moe"], layer=layer)
        spec = world.spec_for(streamed)
        bank = world.heads_for(streamed, spec)
        for issue in ("in_forward", "async_boundary"):
            with pytest.raises(ParameterError, match="between two passes"):
                install_prerouter(streamed.loaded, spec, streamed, heads=bank, issue=issue, mode="replace")
        with install_prerouter(streamed.loaded, spec, streamed, heads=bank, mode="replace") as prerouter:
            assert prerouter.stager.issue == "step_boundary"


# ---------------------------------------------------------------- bytes


def pinned(folder, bonus, protect):
    """Experts that are pinned in each layer after some tokens."""
    layer = {"hot_per_layer": 2, "hot_update_interval": 1, "hot_decay": 0.5, "pin_bonus": bonus}
    streamed = ENGINES(folder, layer=layer, cycles=2.0 + bonus / 10 + protect / 100)  # a cache of its own
    spec = world.spec_for(streamed)
    bank = world.heads_for(streamed, spec, seed=4)
    want = world.tokens(streamed, PROMPT, 6)
    with install_prerouter(streamed.loaded, spec, streamed, heads=bank, mode="advise", protect=protect) as prerouter:
        world.same(world.tokens(streamed, PROMPT, 6), want)
        parts = [streamed.cache._pools.part[layer].policy for layer in range(streamed.store.layers)]
        hot = [frozenset(policy.hot[layer]) for layer, policy in enumerate(parts)]
        named = [switch.predicted_experts for switch in streamed.switches]
    assert [bool(ids) for ids in named] == [protect and c in prerouter.wiring.consumer_index for c in range(len(named))]
    return hot


def test_predictions_earn_a_bonus_where_experts_are_pinned(folders):
    folder = folders["qwen3_5_moe"]
    plain, without = pinned(folder, 0.0, True), pinned(folder, 5.0, False)
    assert plain == without  # no bonus, or nothing to earn it
    bonus = pinned(folder, 5.0, True)
    assert bonus[0] == plain[0]  # the first layer is predicted by nobody
    assert sum(more != less for more, less in zip(bonus[1:], plain[1:], strict=True)) >= 2  # of three


@pytest.mark.parametrize("slots", [world.SLOTS, world.IN_PLACE])
def test_the_bonus_is_earned_beside_staged_slots(folders, slots):
    """What is pinned in the cache follows predictions also where these go to slots; the output stays the same."""
    hot, outputs = {}, []
    for bonus in (0.0, 5.0):
        layer = {**slots, "hot_per_layer": 2, "hot_update_interval": 1, "hot_decay": 0.5, "pin_bonus": bonus}
        streamed = ENGINES(folders["qwen3_5_moe"], layer=layer, cycles=2.0)
        spec = world.spec_for(streamed)
        with install_prerouter(
            streamed.loaded, spec, streamed, heads=world.heads_for(streamed, spec, seed=4), mode="replace"
        ):
            outputs.append(world.tokens(streamed, PROMPT, 6))
            policy = [streamed.cache._pools.part[layer].policy for layer in range(streamed.store.layers)]
            hot[bonus] = [frozenset(part.hot[layer]) for layer, part in enumerate(policy)]
    world.same(*outputs)
    assert hot[0.0][0] == hot[5.0][0] and hot[0.0] != hot[5.0]


def test_predicted_experts_outlive_others_in_the_cache(folders):
    """Room for two tokens: what a prediction names is there at its turn, whatever else was read in between."""
    streamed = ENGINES(folders["qwen3_5_moe"], layer={}, cycles=2.0)
    spec = world.spec_for(streamed)
    bank = world.heads_for(streamed, spec)
    with install_prerouter(streamed.loaded, spec, streamed, heads=bank, mode="replace") as prerouter:
        world.tokens(streamed, PROMPT, 6)
        assert all(
            streamed.switches[layer].predicted_experts == frozenset(prediction.ids)
            for layer, prediction in prerouter.stager.predictions.items()
        )
        keys = [
            layer * streamed.store.experts + expert
            for layer, prediction in prerouter.stager.predictions.items()
            for expert in prediction.ids
        ]
        streamed.memory.drain()
        assert all(streamed.cache.slot(key) is not None for key in keys)
    assert not any(switch.predicted_experts for switch in streamed.switches)
