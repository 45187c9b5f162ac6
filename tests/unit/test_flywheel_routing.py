"""The routing study on tiny random models: what its figures must obey whatever the model is."""

import numpy as np
import pytest
import torch
from repository import ROOT

from moelab import models
from moelab.errors import ContractError, ParameterError
from moelab.flywheel.capture import facts
from moelab.flywheel.split import assign
from moelab.models.tiny import save
from moelab.specialists.native import NativeLayer
from moelab.studies.routing import Clock, Corpus, Part, RoutingOptions, _at_most
from moelab.studies.routing_arms import ANCHOR, arms, executed, fit_head
from moelab.studies.routing_study import _utility, study
from moelab.threads import read, render_sequences


def part(seed, windows=6):
    generator = np.random.default_rng(seed)
    return Part(
        [generator.integers(5, 250, n).astype(np.int32) for n in generator.integers(20, 40, windows)],
        np.arange(windows),
        np.arange(windows) // 2,
    )


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe"])
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save(request.param, folder)
    return models.load(folder)


@pytest.fixture(scope="module")
def options():
    return RoutingOptions(utility="error", context=40, train_tokens=256, validation_tokens=256, reliability_tokens=128)


@pytest.fixture(scope="module")
def figures(loaded, options):
    return study(loaded, Corpus(part(0, 8), part(1), {"validation_tokens": 0}), options)


def length(thread, tokenizer):
    return sum(len(part.token_ids) for part in render_sequences(thread, tokenizer))


def rows(figures, name):
    return [row for row in figures["policies"] if row["policy"] == name]


def test_the_layer_as_trained_is_the_origin(figures):
    for row in rows(figures, f"native top-{figures['top_k']}"):
        # the same products summed slot by slot instead of expert by expert
        assert row["error"]["value"] < 1e-9 and abs(row["loss"]["value"]) < 1e-5
        assert row["arity"] == figures["top_k"] and row["anchor_share"] == 0


def test_the_anchor_alone_reads_nothing_and_leaves_all_the_error(figures):
    for row in rows(figures, ANCHOR):
        assert row["bytes"]["value"] == 0 and row["arity"] == 0 and row["anchor_share"] == 1
        assert row["error"]["value"] == pytest.approx(1.0) and row["time"]["0"]["value"] == 1


def test_rows_are_complete_and_a_larger_cache_reads_less(figures, options):
    names = {row["policy"] for row in figures["policies"]}
    assert len(names) == 13 + len(options.dynamic_thresholds)
    for name in names:
        read = [row["bytes"]["value"] for row in rows(figures, name)]
        assert len(read) == len(options.budgets) and read == sorted(read, reverse=True)
        for row in rows(figures, name):
            assert row["bytes"]["owners"] == 3
            assert ("loss" in row) == (row["mixing"] == "unit")
            waits = [row["time"][str(d)]["value"] for d in sorted(options.deadlines)]
            assert waits == sorted(waits, reverse=True)
    assert {row["expert"] for row in figures["picture"] if row["policy"] == ANCHOR} == {-1}


def test_a_learned_head_mixes_at_least_as_well_where_it_was_fitted(loaded):
    fitted = part(0, 8)
    layer = NativeLayer.of(loaded, 0)
    inputs = fitted.inputs(loaded, 0)
    tokens = layer.tokens(torch.from_numpy(inputs.x), inputs.ids)
    scores = tokens.weights * tokens.chosen - 0.01
    every = {
        arm.mixing: arm
        for arm in arms(
            layer.expert_ids, top_k=4, groups=[0] * layer.experts, mixture_threshold=0.0, dynamic_thresholds=[0.0],
            head=fit_head(layer, tokens, scores),
        )
    }  # fmt: skip
    error = {
        name: float((layer.run(tokens, arm.decide(tokens, scores, layer.expert_ids), arm.combination).output[0]
                     - tokens.output).square().mean())
        for name, arm in every.items() if name != "unit"
    }  # fmt: skip
    assert error["learned"] <= min(error.values()) * 1.001, "the head can give equal weights and nearly the others"
    assert fit_head(layer, tokens, -scores.abs() - 1) is None


def test_more_of_the_routers_choice_leaves_less_error(figures):
    errors = [rows(figures, f"native top-{k}")[0]["error"]["value"] for k in (1, 2, figures["top_k"])]
    assert errors[-1] < errors[1] < 1


def test_late_experts(figures, options):
    late = figures["late"]
    modes = {row["mode"] for row in late}
    assert modes == {"exact", "zero", "promote", "anchor"}
    for row in late:
        if row["mode"] == "exact":
            assert row["loss"]["value"] == 0 and row["time"]["value"] >= 1
        else:
            assert row["time"]["value"] == 1 and row["error"]["value"] >= 0
            assert ("loss" in row) == (row["share"] == options.budgets[1])
    for share in options.budgets:  # a later deadline makes fewer experts late
        experts = [r["late_experts"] for r in late if r["share"] == share and r["mode"] == "exact"]
        assert experts == sorted(experts, reverse=True)


def test_reliability_counts_every_pair_once(figures):
    found = figures["calibration"]
    assert sum(row["n"] for row in found["bins"]) == found["tokens"] * figures["experts"]
    assert found["helps_when_positive"]["n"] + found["helps_when_not"]["n"] == found["tokens"] * figures["experts"]


def test_loss_utility_adds_up_to_what_the_choice_gains(loaded):
    held = part(2)
    last = loaded.geometry.layers - 1
    layer, inputs = NativeLayer.of(loaded, last), held.inputs(loaded, last)
    tokens = layer.tokens(torch.from_numpy(inputs.x), inputs.ids)
    utility = _utility(layer, tokens, inputs, "loss")
    gained = (inputs.losses(tokens.anchor.numpy()) - inputs.losses(tokens.output.numpy())).sum()
    # the trapezoid rule on a path this short; a random model's layer moves the loss little and smoothly
    assert float((utility * tokens.chosen).sum()) == pytest.approx(float(gained), rel=0.05, abs=1e-2)


def test_some_windows_lose_as_they_do_among_all(loaded):
    inputs = part(3).inputs(loaded, 0)
    kept = np.array([0, 2, 5])
    part_of, rows = inputs.some(kept)
    assert rows.tolist() == [r for i in kept for r in range(inputs.first[i], inputs.first[i + 1])]
    output = np.random.default_rng(0).normal(size=inputs.x.shape).astype(np.float32)
    # another batch of the same rows: float32 sums in another order
    assert part_of.losses(output[rows]) == pytest.approx(inputs.losses(output)[rows], abs=2e-4)


def test_arms_decide_as_they_say():
    ids = tuple(map(str, range(4)))
    found = arms(ids, top_k=2, groups=[0, 0, 1, 1], mixture_threshold=0.5, dynamic_thresholds=[0.0])
    assert [arm.name for arm in found][:2] == ["native top-2", "native top-1"] and found[-1].name == ANCHOR
    scores = torch.tensor([[0.9, -0.1, 0.6, 0.4]])
    fake = type("T", (), {"ids": torch.tensor([[2, 1]]), "weights": torch.tensor([[0.1, 0.3, 0.6, 0.0]])})
    ran = {}
    for arm in found:
        experts, mask = executed(arm.decide(fake, scores, ids))
        ran[arm.name] = experts[mask].tolist()
    assert ran["native top-2"] == [2, 1] and ran["native top-1"] == [2] and ran[ANCHOR] == []
    assert ran["anchored top-1"] == [0] and ran["anchor-veto top-2"] == [0, 2]
    assert ran["adaptive top-1/2 > 0.5"] == [0, 2] and ran["dynamic-2 > 0"] == [0, 2]
    assert ran["hierarchical top-2"] == [], "the best package has only one positive specialist"
    assert ran["compatible top-2"] == [2, 3]
    with pytest.raises(ContractError, match="groups"):
        arms(ids, top_k=2, groups=[1, 0, 1, 0], mixture_threshold=0.5, dynamic_thresholds=[0.0])


def test_a_small_study_still_has_every_owner():
    class T:
        def __init__(self, owner):
            self.owner = owner

    sequences = [(0, T("a"), None), (1, T("a"), None), (2, T("b"), None)]
    windows = [(0, np.zeros(10)), (0, np.zeros(10)), (1, np.zeros(10)), (2, np.zeros(10))]
    assert [i for i, _ in _at_most(windows, 20, sequences)] == [0, 2]
    assert [i for i, _ in _at_most(windows, 5, sequences)] == [0], "at least one"
    assert len(_at_most(windows, 100, sequences)) == 4


def test_the_clock_counts_by_name():
    clock = Clock()
    sum(range(10000))
    clock.lap("a")
    clock.lap("b")
    clock.lap("a")
    assert set(clock.seconds) == {"a", "b"} and min(clock.seconds.values()) >= 0


def test_owners_are_held_out_whole(loaded, options):
    threads = sorted(read(ROOT / "artifacts" / "threads"), key=lambda t: t.uid)
    corpus = Corpus.of(loaded, threads, options)
    assert not set(corpus.train.owner) & set(corpus.validation.owner)
    for name, found, most in (
        ("train", corpus.train, options.train_tokens),
        ("validation", corpus.validation, options.validation_tokens),
    ):
        assert corpus.counts[f"{name}_tokens"] == sum(map(len, found.windows)) <= most
        assert corpus.counts[f"{name}_owners"] == len(set(found.owner))
        assert max(map(len, found.windows)) <= options.context
        assert found.by_token(found.owner).shape == (corpus.counts[f"{name}_tokens"],)
    # Who is held out does not depend on how much of them is used, nor is any other set touched.
    sets = assign(
        [facts(t, loaded.tokenizer, length(t, loaded.tokenizer)) for t in threads],
        seed=options.seed,
        validation=options.validation,
    )
    assert {sets[threads[n].uid] for n in corpus.validation.thread} == {"validation"}
    assert {sets[threads[n].uid] for n in corpus.train.thread} == {"train"}


def test_a_layer_that_is_not_there_is_refused(loaded):
    with pytest.raises(ParameterError, match="no such MoE layer; field: layer; got: 8"):
        study(loaded, Corpus(part(0, 8), part(1), {}), RoutingOptions(layer=8))
