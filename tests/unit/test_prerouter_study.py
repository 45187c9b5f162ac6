"""Notebook 81's stage on a small flywheel: agreement and bytes against plain loops, costs of a step by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from moelab import artifacts
from moelab.errors import ParameterError, RecordError
from moelab.flywheel.baselines import BaselineOptions, Upstream
from moelab.flywheel.batches import BatchShape
from moelab.flywheel.evaluation import HeldOut
from moelab.flywheel.head_recipe import HeadRecipe
from moelab.flywheel.head_training import FILES, RANKS, heads_model
from moelab.flywheel.metrics import ranks
from moelab.prerouter.steps import Arm, Steps
from moelab.routes import DECODED
from moelab.studies import prerouter_cost as cost
from moelab.studies import prerouter_study
from moelab.studies.prerouter_agreement import HEADS, SET, _early, _rankings, agreement, lead_layers
from moelab.studies.prerouter_verdict import sentences

RECIPE = HeadRecipe(
    hidden=16, rank=8, epochs=2, shared_epochs=2, batch=128, overfit_tokens=12, overfit_epochs=80, overfit_recall=0.9
)
SHAPE = BatchShape(256, 24)


@pytest.fixture(scope="module")
def before(world, captured, routed, snapped):
    with world.entered():
        return Upstream(*(artifacts.open_artifact(path) for path in (captured, routed, snapped)))


@pytest.fixture(scope="module")
def judged_as(world):
    own = dict(sets=["validation", "temporal", "stress"], batch_tokens=256, chunk=24, cache_fraction=0.25)
    return BaselineOptions(**world.shared(), **own)


@pytest.fixture(scope="module")
def heads(world, before, judged_as):
    with world.entered():
        return artifacts.open_artifact(heads_model(world.model, judged_as, before, judged_as, RECIPE))


def options(world, **changes):
    own = dict(texts=3, context=64, thresholds=[0.1, 0.5], top_ks=[2], part_texts=2, prompt=8, tokens=5)
    own |= dict(check_tokens=3, timed_tokens=4)
    return prerouter_study.PrerouterOptions(**world.shared(), **own | changes)


# ---------------------------------------------------------------- agreement


def test_rankings_are_judged_as_plain_loops_judge_them(inside, loaded, records, dataset, heads):
    held = HeldOut.of(dataset, [SET], cache_fraction=0.25)
    found = agreement(loaded, records, dataset, heads, shape=SHAPE, cache_fraction=0.25, token_s=0.03)
    rankings = {r.name: r for r in _rankings(loaded, records, dataset, held, heads, SHAPE)}
    assert [row["ranking"] for row in found["rows"]] == list(rankings) and set(HEADS.values()) < set(rankings)
    counted, routes = np.flatnonzero(held.counted[SET]), held.routes
    K, E, L = routes.top_k, routes.experts, routes.layers
    resident = np.unpackbits(held.resident, axis=-1, count=E).astype(bool)
    for row in found["rows"]:
        hits = exact = top = read = wasted = missed = covered = 0
        for t in counted:
            for n in range(1, L):
                order = sorted(range(E), key=lambda e: (-rankings[row["ranking"]].scores[t, n, e], e))[:K]
                used = routes.ids[t, n].tolist()
                hits += len(set(order) & set(used))
                exact += set(order) == set(used)
                top += order[0] == used[0]
                absent = [e for e in order if not resident[t, n, e]]
                read += len(absent) * int(routes.expert_bytes[n])
                wasted += len(set(absent) - set(used)) * int(routes.expert_bytes[n])
                lacking = {e for e in used if not resident[t, n, e]}
                missed, covered = missed + len(lacking), covered + len(lacking & set(order))
        places, tokens = len(counted) * (L - 1), len(counted)
        want = {"recall": hits / places / K, "exact": exact / places, "top1": top / places}
        want |= {"read": read / tokens, "wasted": wasted / tokens, "covered": covered / missed}
        assert {name: row[name]["value"] for name in want} == pytest.approx(want), row["ranking"]
        by_layer = [r["recall"]["value"] for r in found["layers"] if r["ranking"] == row["ranking"]]
        assert np.mean(by_layer) == pytest.approx(row["recall"]["value"]) and len(by_layer) == L - 1
        assert row["lead_s"] == pytest.approx(0.03 * row["lead_layers"] / len(loaded.model.layers))


def test_heads_rank_as_they_were_judged_in_training(inside, loaded, records, dataset, heads):
    held = HeldOut.of(dataset, [SET], cache_fraction=0.25)
    stored, _ = artifacts.read_tensors(heads.file(RANKS))
    rows = np.searchsorted(stored["rows"], held.rows)
    counted = held.counted[SET]
    for r in _rankings(loaded, records, dataset, held, heads, SHAPE):
        if r.name in HEADS.values():
            form = r.name.split(", ")[1]
            want = stored[f"ranks prerouter, {form} | 1 token + 1 layer"][rows][counted][:, 1:]
            assert (ranks(r.scores, held.routes.ids)[counted][:, 1:] == want).mean() > 0.999
            assert r.nbytes == heads.file(FILES[form]).stat().st_size


def test_a_gate_applied_a_token_early_is_told_of_the_token_before(inside, loaded, records, dataset, heads):
    held = HeldOut.of(dataset, [SET], cache_fraction=0.25)
    found = {r.name: r.scores for r in _rankings(loaded, records, dataset, held, heads, SHAPE)}
    routes, before = held.routes, held.routes.previous_row()
    later = np.flatnonzero((before >= 0) & (routes.phase == DECODED))
    same = found["own gate, 1 token early"]
    order = np.argsort(-same[later], axis=-1, kind="stable")[..., : routes.top_k]
    assert (np.sort(order, -1) == np.sort(routes.ids[before[later]], -1)).mean() > 0.99  # its route at that token
    one, both = found["own gate, 1 layer early"], found["own gate, 1 token + 1 layer early"]
    np.testing.assert_allclose(both[later, 1:], one[before[later], 1:], rtol=1e-5)
    assert (same[before < 0] == 0).all() and (both[before < 0] == 0).all()


def test_lead_counts_layers_and_an_empty_cache_saves_nothing(inside, dataset):
    assert [lead_layers(h, 8) for h in ("half layer", "1 layer", "1 token", "1 token + 1 layer")] == [0.5, 1, 8, 9]
    held = HeldOut.of(dataset, [SET], cache_fraction=0.25)
    object.__setattr__(held, "resident", np.zeros_like(held.resident))
    kept = np.arange(held.routes.layers) > 0
    perfect = np.zeros((held.routes.tokens, held.routes.layers, held.routes.experts), np.float32)
    np.put_along_axis(perfect, held.routes.ids.astype(np.int64), 1, -1)
    found = _early(perfect, held, kept)
    assert found["covered"].value == 1 and found["wasted"].value == 0
    assert found["read"].value == held.routes.top_k * held.routes.expert_bytes[kept].sum()


# ---------------------------------------------------------------- costs


def observed(phases, owner, thread):
    header = SimpleNamespace(owner=owner, thread=thread)
    phase = np.array([p == "d" for p in phases], np.uint8)
    return SimpleNamespace(token_ids=np.arange(1, len(phases) + 1), phase=phase, header=header)


def test_texts_come_in_rounds_over_owners_and_count_tokens_of_one_answer():
    every = [observed("ppdddpd", "a", "0"), observed("ppdd", "a", "1"), observed("pppddd", "b", "2")]
    every += [observed("pppp", "c", "3"), observed("pddd", "d", "4")]  # nothing decoded, no prompt
    texts = cost.Texts.of(every, most=2, context=6)
    assert texts.tokens.tolist() == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]] and texts.thread.tolist() == [0, 1]
    assert texts.counted.tolist() == [[False, False, True, True, False, False], [False] * 3 + [True, True, False]]
    short = cost.Texts.of(every, most=9, context=9)
    assert len(short) == 3 and short.tokens.shape == (3, 7) and short.tokens[2].tolist() == [1, 2, 3, 4, 0, 0, 0]
    assert short.some(1).thread.tolist() == [0]
    with pytest.raises(RecordError, match="two threads"):
        cost.Texts.of(every[:1], most=3, context=6)


@pytest.fixture
def steps():
    """Three arms on two texts of two counted tokens."""
    tokens, decoded = np.arange(8).reshape(2, 4), np.array([[0, 1, 1, 1]] * 2, bool)
    out = Steps.empty(3, tokens, decoded, 2)
    out.loss[:, :, 1:3] = np.array([1.0, 1.5, 1.2])[:, None, None]
    out.loss[1, :, 2] = 2.0
    out.greedy[:] = 5
    out.greedy[1, 0, 1] = 6
    out.hits[1, :, :, 1], out.replaced[1, :, :, 1] = 1, True
    return out, cost.Texts(tokens, decoded, np.arange(2))


def test_a_row_says_what_an_arm_costs(steps):
    found, texts = steps
    arms = [
        Arm(name=name, mode=mode) for name, mode in (("off", "off"), ("replace", "replace"), (cost.PAST, "replace"))
    ]
    rows = cost.mode_rows(arms, found, texts, [1], 2)
    value = {name: [row[name]["value"] for row in rows] for name in ("loss", "greedy", "replaced", "recall")}
    assert value["loss"] == pytest.approx([0, 0.75, 0.2]) and value["greedy"] == [1, 0.75, 1]
    assert value["replaced"] == [0, 1, 0] and value["recall"] == [0, 0.5, 0]
    assert rows[2]["less_replace"]["value"] == pytest.approx(-0.55)
    assert cost.of_the_past(found, texts)["value"] == pytest.approx(0.55)
    assert rows[1]["loss"]["n"] == 4 and rows[1]["loss"]["threads"] == 2


def test_positions_count_decoded_tokens(steps, monkeypatch):
    found, texts = steps
    monkeypatch.setattr(cost, "BINS", (0, 1, 5))
    arms = [Arm(name=name, mode="off") for name in ("off", "replace", cost.PAST)]
    rows = [r for r in cost.by_position([*arms, Arm(name="replace_true_weights", mode="off")], _four(found), texts)]
    plain = [r for r in rows if r["arm"] == "replace"]
    assert [(r["from"], r["to"], r["loss"]["n"]) for r in plain] == [(0, 0, 2), (1, 1, 2)]
    assert [r["loss"]["value"] for r in plain] == pytest.approx([0.5, 1.0])
    assert [r["past"]["value"] for r in plain] == pytest.approx([0.3, 0.8])


def _four(steps):
    return steps.some([0, 1, 2, 1], 2)


# ---------------------------------------------------------------- the stage


def test_a_run_gives_every_figure_and_a_second_one_finds_it(
    world, inside, before, judged_as, heads, monkeypatch, tmp_path
):
    asked = options(world)
    folder = prerouter_study.modes_model(world.model, asked, before, heads.path, judged_as)
    found = artifacts.read_json(folder / prerouter_study.RESULT)
    assert {"agreement", "modes", "drift", "past", "position", "top_k", "depth", "own", "engine"} < set(found)
    rows = {row["arm"]: row for row in found["modes"]}
    assert rows["off"]["loss"]["value"] == 0 and rows["replace"]["replaced"]["value"] == 1
    assert {row["top_k"] for row in found["top_k"]} == {2, 4}
    own = next(r for r in found["top_k"] if r["top_k"] == 4 and r["arm"] == "off")
    assert own["loss"]["value"] == 0 and own["over_gate"]["value"] == 0
    depth = found["depth"]["rows"]
    assert [r["layer"] for r in depth if r["layers"] == "this layer alone"] == list(
        r["layer"] for r in depth if r["layers"] == "up to this layer"
    )
    engine = {row["arm"]: row for row in found["engine"]}
    assert engine["advise"]["equal_bits"] and engine["off"]["equal_bits"] and not engine["replace"]["equal_bits"]
    assert max(row["largest"] for row in engine.values()) < 1e-3  # rounding: another order of float32 sums
    assert found["own"]["rows"][0]["equal_tokens"]["value"] == 5 and found["own"]["rows"][0]["agrees"]["value"] == 1
    assert sentences({"m": found})
    prerouter_study.report({"m": found}, "tiny", tmp_path / "out.json")
    kept = artifacts.read_json(tmp_path / "out.json")
    assert kept["command"].endswith("prerouter_study tiny OUT.json") and kept["date"].startswith("20")
    assert kept["models"] == {"m": {name: found[name] for name in prerouter_study.REPORTED}}
    monkeypatch.setattr(prerouter_study, "study", None)
    assert prerouter_study.modes_model(world.model, asked, before, heads.path, judged_as) == folder


def test_a_memory_budget_is_refused(world, before, judged_as, heads):
    with pytest.raises(ParameterError, match="resident"):
        prerouter_study.modes_model(f"{world.model}@1GiB", options(world), before, heads.path, judged_as)


def test_the_last_layer_alone_is_all_where_there_is_one(inside, loaded, heads, dataset, records, world):
    texts = prerouter_study._texts(loaded, records, dataset, options(world))
    used = prerouter_study._heads(loaded, heads, "full")
    consumers = used.tier.wiring.consumer_index
    one = cost.by_depth(loaded, used, texts, consumers[:1], 4)
    assert [row["layers"] for row in one["rows"]] == ["up to this layer", "this layer alone"]
    assert one["rows"][0]["loss"] == one["rows"][1]["loss"] and one["together"]["value"] == 0


def test_a_prompt_as_long_as_its_text_is_refused():
    with pytest.raises(ParameterError, match="an answer begins inside its text; field: prompt"):
        prerouter_study.modes(prerouter_study.PrerouterOptions(prompt=96, context=96))
