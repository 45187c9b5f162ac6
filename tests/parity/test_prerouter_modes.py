"""Cross-token routing through the streaming engine has the bits of a plain resident loop with the same heads."""

import numpy as np
import prerouter_world as world
import pytest

from moelab.prerouter import Source, edge0_8b, edge0_35b, install_prerouter, read_heads, uninstall
from moelab.routes import DECODED
from moelab.streaming import StagedSwitch

PROMPT = list(range(20, 32))
ENGINES = world.Engines()


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    ENGINES.close()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return world.tiny_model("qwen3_5_moe", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def ling(tmp_path_factory):
    return world.tiny_model("bailing_hybrid", tmp_path_factory.mktemp("ling"), num_hidden_layers=4)


@pytest.mark.parametrize("mode", ["replace", "replace_true_weights", "gated"])
@pytest.mark.parametrize("layer", [None, world.SLOTS, {**world.SLOTS, "staged_replace": True}, world.IN_PLACE])
def test_every_mode_with_and_without_slots(qwen, ling, mode, layer):
    for model in (qwen, ling):
        streamed = ENGINES(model, layer=layer)
        spec = world.spec_for(streamed)
        bank = world.heads_for(streamed, spec)
        own, heads = {"mode": mode}, world.each(bank)
        if mode == "gated":
            calibration = {owner: (0.5, -0.5) for owner in bank.owners}
            with install_prerouter(
                streamed.loaded, spec, streamed, heads=heads, calibration=calibration, mode="replace"
            ) as prerouter:
                world.tokens(streamed, PROMPT, 6)
                sure = [prediction.confidence for prediction in prerouter.stager.predictions.values()]
            own |= {"threshold": float(np.median(sure)), "calibration": calibration}
        with install_prerouter(streamed.loaded, spec, streamed, heads=heads, **own) as prerouter:
            got = world.tokens(streamed, PROMPT, 12)
            sources = set(prerouter.supply.map[:, list(prerouter.wiring.consumer_index)].reshape(-1).tolist())
        assert sources == ({Source.PREDICTION, Source.DECLINED} if mode == "gated" else {Source.PREDICTION})
        with world.Plain(model, bank, spec, **own) as plain:
            world.same(got, list(plain.tokens(PROMPT, 12)))
        if layer is not None:
            assert all(switch.staged.counters.dropped == 0 for switch in streamed.switches)


def test_a_gate_that_nothing_passes_is_the_native_model(qwen, ling):
    """Declined predictions only stage: experts that are in a slot are computed there, the others exactly."""
    for model in (qwen, ling):
        streamed = ENGINES(model)
        want = world.tokens(streamed, PROMPT, 12)
        spec = world.spec_for(streamed)
        bank = world.heads_for(streamed, spec)
        own = {"mode": "gated", "threshold": 1.0, "calibration": {owner: (1.0, -5.0) for owner in bank.owners}}
        before = sum(switch.staged.counters.exact for switch in streamed.switches)
        with install_prerouter(streamed.loaded, spec, streamed, heads=bank, **own) as prerouter:
            world.same(world.tokens(streamed, PROMPT, 12), want)
            assert (prerouter.supply.map[:, list(prerouter.wiring.consumer_index)] == Source.DECLINED).all()
            prerouter.set("gated", threshold=0.0)
            with world.Plain(model, bank, spec) as plain:
                world.same(world.tokens(streamed, PROMPT, 6), list(plain.tokens(PROMPT, 6)))
        assert sum(switch.staged.counters.exact for switch in streamed.switches) > before


def test_the_staged_set_is_the_route_and_without_one_the_route_is_exact(qwen, monkeypatch):
    called, call = [], StagedSwitch.__call__

    def noting(self, x, indices=None):
        if self._forward.phase == DECODED:
            called.append((self.layer, indices is None))
        return call(self, x, indices)

    monkeypatch.setattr(StagedSwitch, "__call__", noting)
    streamed = ENGINES(qwen, layer={**world.SLOTS, "staged_replace": True})
    spec = world.spec_for(streamed)
    bank = world.heads_for(streamed, spec)
    with world.Plain(qwen, bank, spec) as plain:
        want = list(plain.tokens(PROMPT, 3))
    with install_prerouter(streamed.loaded, spec, streamed, heads=bank, mode="replace") as prerouter:
        consumers = prerouter.wiring.consumer_index
        world.same(world.tokens(streamed, PROMPT, 3), want)
        assert called == [(layer, layer in consumers) for _ in range(3) for layer in range(4)]
        called.clear()
        ask = prerouter.fill.ask
        prerouter.fill.ask = lambda layer, *told, **more: None if layer == 2 else ask(layer, *told, **more)
        fallback = streamed.switches[2].staged.counters.fallback
        world.same(world.tokens(streamed, PROMPT, 3), want)
        assert called == [(layer, layer in consumers and layer != 2) for _ in range(3) for layer in range(4)]
        assert streamed.switches[2].staged.counters.fallback == fallback + 3


@pytest.mark.parametrize("layer", [None, {}, world.SLOTS, world.IN_PLACE])
def test_advice_changes_no_bit(qwen, ling, layer):
    for model in (qwen, ling):
        streamed = ENGINES(model, layer=layer)
        want = world.tokens(streamed, PROMPT, 8)
        spec = world.spec_for(streamed)
        bank = world.heads_for(streamed, spec)
        waits = layer is not None and layer.get("staged_sync", False)
        for issue in ("step_boundary",) if waits else ("in_forward", "async_boundary", "step_boundary"):
            for extra, protect in ((0, True), (3, False)):
                own = {"mode": "advise", "issue": issue, "extra": extra, "protect": protect}
                own["compute_s"] = [1e-3] * streamed.store.layers
                with install_prerouter(streamed.loaded, spec, streamed, heads=bank, **own) as prerouter:
                    world.same(world.tokens(streamed, PROMPT, 8), want)
                    assert prerouter.supply.fed()
                    if layer is None:
                        counters = prerouter.fill.prefetcher.counters
                        assert counters.candidates == 9 * len(bank) * (4 + extra)  # a set a token, and prefill's


@pytest.mark.parametrize("issue", ["in_forward", "async_boundary", "step_boundary"])
def test_where_reads_are_issued_changes_no_bit_of_a_predicted_route(qwen, issue):
    """Asked one by one, as `in_forward` does, heads give the same bits at every point."""
    streamed = ENGINES(qwen)
    spec = world.spec_for(streamed)
    bank = world.heads_for(streamed, spec)
    with install_prerouter(streamed.loaded, spec, streamed, heads=world.each(bank), issue=issue, mode="replace"):
        got = world.tokens(streamed, PROMPT, 12)
    with world.Plain(qwen, bank, spec) as plain:
        world.same(got, list(plain.tokens(PROMPT, 12)))


def test_the_teachers_experts_as_features(qwen, ling):
    for model in (qwen, ling):
        streamed = ENGINES(model)
        spec = world.spec_for(streamed, feature_topk="teacher")
        bank = world.heads_for(streamed, spec)
        with install_prerouter(streamed.loaded, spec, streamed, heads=bank, mode="replace"):
            got = world.tokens(streamed, PROMPT, 12)
        with world.Plain(model, bank, spec) as plain:
            world.same(got, list(plain.tokens(PROMPT, 12)))


def test_the_correction_bias_is_added_for_heads_that_foretell_the_gate(ling):
    streamed = ENGINES(ling)
    spec = world.spec_for(streamed)
    bank = world.heads_for(streamed, spec)
    got = {}
    for biased in (True, False):
        with install_prerouter(streamed.loaded, spec, streamed, heads=bank, biased=biased, mode="replace"):
            got[biased] = world.tokens(streamed, PROMPT, 12)
        with world.Plain(ling, bank, spec, biased=biased) as plain:
            world.same(got[biased], list(plain.tokens(PROMPT, 12)))
    assert any((a != b).any() for (_, a), (_, b) in zip(got[True], got[False], strict=True))


TIERS = {
    "edge0-35b": (edge0_35b, "qwen3_5_moe", {"num_hidden_layers": 40, "num_experts_per_tok": 8}),
    "edge0-8b": (edge0_8b, "bailing_hybrid",
                 {"num_hidden_layers": 24, "num_experts": 32, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}),
}  # fmt: skip


@pytest.mark.parametrize("name", TIERS)
def test_the_tiers_run_on_their_architectures_at_full_depth(name, tmp_path):
    make, family, own = TIERS[name]
    tier = make()
    k = tier.top_k
    world.tiny_model(family, tmp_path, **own)
    layer = {**world.SLOTS, "staged_n": k, "staged_trigger": k, "top_k": k}
    with world.engine(tmp_path, layer=layer, change_top_k=True) as streamed:  # tier 35b runs four of eight
        assert streamed.loaded.geometry.layer_ids == tier.layer_ids and streamed.loaded.family.top_k == tier.top_k
        bank = world.heads_for(streamed, tier.spec, hidden=tier.spec.hidden)
        with install_prerouter(streamed.loaded, tier.spec, streamed, heads=bank, mode="replace") as prerouter:
            got = world.tokens(streamed, PROMPT, 4)
            fed = [layer for layer, row in enumerate(prerouter.supply.counts) if row[Source.PREDICTION] == 4]
            assert [streamed.loaded.geometry.layer_ids[layer] for layer in fed] == list(tier.wiring.consumers)
            assert len(bank) == {"edge0-35b": 33, "edge0-8b": 16}[name]
        with world.Plain(tmp_path, bank, tier.spec, top_k=k) as plain:
            world.same(got, list(plain.tokens(PROMPT, 4)))
        uninstall(streamed.loaded)


def test_text_through_prerouter_and_streaming():
    """End to end: an embedded model, a prompt in words, off and on and off again."""
    streamed = ENGINES("softmax", cycles=0.5)
    spec = world.spec_for(streamed, hidden=48)
    plain = streamed.generate("The lamp", max_tokens=8)
    with install_prerouter(
        streamed.loaded, spec, streamed, heads=world.heads_for(streamed, spec, hidden=48), mode="replace"
    ) as prerouter:
        predicted = streamed.generate("The lamp", max_tokens=8)
        assert prerouter.supply.fed() and len(prerouter.supply.map) == 8
        prerouter.mode = "off"
        assert streamed.generate("The lamp", max_tokens=8) == plain
        prerouter.mode = "replace"
        assert streamed.generate("The lamp", max_tokens=8) == predicted
    assert predicted and predicted != plain
    assert streamed.generate("The lamp", max_tokens=8) == plain


@pytest.mark.parametrize("model", ["softmax", "sigmoid"])
def test_the_committed_heads_are_found_beside_their_model(model):
    streamed = ENGINES(model, cycles=0.5)
    weights = read_heads(streamed.loaded.path / "prerouter.safetensors").identity
    spec = world.spec_for(streamed, hidden=weights.hidden, weights_file="prerouter.safetensors")
    want = streamed.generate("The lamp", max_tokens=6)
    with install_prerouter(streamed.loaded, spec, streamed, mode="advise") as prerouter:
        assert streamed.generate("The lamp", max_tokens=6) == want
        assert prerouter.supply.fed() and prerouter.stager.calibration is not None
        prerouter.mode = "replace"
        assert streamed.generate("The lamp", max_tokens=6) and prerouter.supply.fed()
