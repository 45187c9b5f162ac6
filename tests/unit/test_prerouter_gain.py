"""What a prerouter buys: arms that change nothing but time, figures that are what they are called, honest claims."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import prerouter_world as world
import pytest

from moelab.errors import ContractError, RecordError
from moelab.prerouter import HeadIdentity, Prediction, write_heads
from moelab.prerouter.modes import DEFAULT_THRESHOLD
from moelab.streaming import EngineOptions, StreamingEngine
from moelab.streaming.schedule.prefetch import ISSUE
from moelab.studies import prerouter_gain as gain_study
from moelab.studies import prerouter_report
from moelab.studies import prerouter_rounds as rounds_study
from moelab.studies.prerouter_arms import ARMS, Turn, feed, install, recorded
from moelab.studies.prerouter_claims import claims, pairs_of
from moelab.studies.prerouter_depth import Answer, Bench, gains, side_by_side, uses
from moelab.studies.prerouter_gain import GainPlan, gain, texts_of
from moelab.studies.prerouter_rounds import EVERYTHING, rows_of

PROMPT, TEXT = 4, 6  # prompt and text of a piece
PLAN = GainPlan(
    cycles=(0.5,), ratios=(0.5,), systems=("MER, Qwen3-Coder-30B",), texts=2, prompt=PROMPT, tokens=3, simulated=4,
    simulated_tokens=TEXT, simulated_cycles=(0.5,), layers=(6,), threshold=0.3, thresholds=(0.0, 0.5),
)  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3_moe", "glm4_moe"])
def model(request, tmp_path_factory):
    """A tiny model, random heads of it in a file, and texts."""
    folder = world.tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    rng, weights = np.random.default_rng(0), folder / "prerouter.safetensors"
    with StreamingEngine.load(folder, EngineOptions(cache_bytes=EVERYTHING)) as engine:
        loaded, shape = engine.loaded, engine.loaded.geometry
        own = HeadIdentity(
            model=loaded.model_digest, top_k=shape.top_k, experts=shape.experts, width=shape.hidden, hidden=16,
            owners=tuple(shape.layer_ids[:-1]), confidence=tuple((1.0, 0.0) for _ in shape.layer_ids[:-1]),
        )  # fmt: skip
        tensors = {o: {part: rng.normal(size=s).astype(np.float16) / 4 for part, s in own.shapes().items()}
                   for o in own.owners}  # fmt: skip
        write_heads(weights, own, tensors)
        texts = rng.integers(5, 200, (4, PROMPT + TEXT)).tolist()
        answers = recorded(engine, weights, texts, prompt=PROMPT)
    return SimpleNamespace(folder=folder, weights=weights, texts=texts, answers=answers, experts=shape.experts)


def full(model):
    return StreamingEngine.load(model.folder, EngineOptions(cache_bytes=EVERYTHING))


# ---------------------------------------------------------------- arms


def test_an_answer_is_the_models_own(model):
    with full(model) as engine:
        for answer in model.answers:
            assert feed(engine, answer.prompt, answer.text).said == answer.said
            along = world.tokens(engine, answer.prompt + answer.text[:1], TEXT, along=[*answer.text[1:], 0])
            assert [int(np.argmax(logprobs)) for _, logprobs in along] == answer.said
    layers = answer.ids.shape[1]
    assert answer.ids.shape[0] == PROMPT + TEXT == len(answer.phase)
    # A head a layer but the last, asked after the prompt and after each token; K candidates and K more.
    assert sorted(answer.told) == [(step, owner) for step in range(TEXT + 1) for owner in range(layers - 1)]
    assert all(len(c) == 2 * answer.ids.shape[-1] and {layer for layer, *_ in c} == {owner + 1}
               for (_, owner), c in answer.told.items())  # fmt: skip


def test_perfect_predictions_are_the_routes_to_come(model):
    """With room for every expert and a boundary that waits, only layers without a head ever miss."""
    answer = model.answers[0]
    with full(model) as engine:
        prerouter, between = install(engine, model.weights, "perfect", "step_boundary", threshold=0.5)
        with prerouter:
            between.begins(answer)
            assert feed(engine, answer.prompt, answer.text).said == answer.said
        rows = engine.forward.timeline.arrays()
        missing = rows["missing"].reshape(-1, engine.store.layers)
        assert missing[0].sum() > 0  # the prompt was not foretold
        assert (missing[1:, 1:] == 0).all()
        prefetch = prerouter.fill.prefetcher.counters
        assert prefetch.fate["wasted"] == 0 and prefetch.fate["useful"] > 0


def test_gated_takes_what_is_sure_for_certain(model):
    """A route to be is read and kept whole; other predictions are read by the probability of each expert."""
    with full(model) as engine:
        prerouter, between = install(engine, model.weights, "gated", "in_forward", threshold=0.5)
        with prerouter:
            assert (prerouter.mode, prerouter.stager.threshold) == ("gated", DEFAULT_THRESHOLD)
            asked, fill = [], between.fill
            between.fill = SimpleNamespace(
                begin=fill.begin, drain=fill.drain, ask=lambda layer, prediction, **when: asked.append(prediction)
            )
            feed(engine, model.texts[0][:PROMPT], model.texts[0][PROMPT:])
            base = Prediction((1, 2), (), [0.9, 0.8], [1.0, 2 * DEFAULT_THRESHOLD - 1.0], None, None)
            asked.clear()
            between.ask(1, base, now=0.0, after=0)
            between.ask(1, replace(base, probabilities=[1.0, 2 * DEFAULT_THRESHOLD - 1.01]), now=0.0, after=0)
            assert [p.probabilities is None for p in asked] == [True, False]
            assert asked[0].ids == asked[1].ids == (1, 2)
            between.fill = fill


def test_the_study_runs_whole(model):
    found = gain(model.folder, model.weights, model.texts, PLAN)
    cells = 1 + 2  # caches and ratios, the named system, this machine: all of half a token cycle
    assert [r["arm"] for r in found["rows"]] == [*ARMS] * cells
    assert [r["ratio"] for r in found["rows"][:: len(ARMS)]].count(None) == 1
    for row in found["rows"]:
        assert row["n"] == PLAN.texts and row["seconds_least"] <= row["seconds"] <= row["seconds_greatest"]
        assert row["bound"] >= 0 and (row["bytes_ratio"] is None or row["bytes_ratio"] >= 0)
        if row["arm"] == "off":
            assert row["speedup"] == row["bytes_ratio"] == 1 and row["share"] is None
    assert {(r["layers"], r["cycles"]) for r in found["depth"]} == {(found["sizes"]["layers"], 0.5), (6, 0.5)}
    assert {r["threshold"] for r in found["sweep"]} == {None, 0.0, 0.5} and found["sweep"][0]["who"] == "off"
    assert [r["n"] for r in found["heads"]] == [PLAN.texts] * 2
    assert all({*c} == {"claim", "measured", "asked", "n", "spread", "holds"} for c in found["claims"])


def test_an_arm_that_says_something_else_is_an_error(model):
    wrong = replace(model.answers[0], said=[token + 1 for token in model.answers[0].said])
    with full(model) as engine:
        for rerouted in ("replace, in_forward", "gated, in_forward"):
            rounds_study._turn(rerouted, (engine, None), wrong)
        with pytest.raises(ContractError, match="changed the answer"):
            rounds_study._turn("heads, in_forward", (engine, None), wrong)


def test_texts_are_first_pieces_then_second_ones():
    observed = [SimpleNamespace(token_ids=np.arange(n) + 100 * n) for n in (9, 25, 10)]
    plan = GainPlan(texts=2, prompt=4, tokens=4, simulated=3, simulated_tokens=6)
    assert [text[0] for text in texts_of(observed, plan)] == [2500, 1000, 2510]
    assert {len(text) for text in texts_of(observed, plan)} == {plan.length} == {10}
    with pytest.raises(RecordError, match="too few texts"):
        texts_of(observed[:2], plan)


def test_a_depth_that_texts_do_not_give_is_an_error(model):
    bench, sizes = Bench(model.answers, model.experts), {"experts": model.experts, "layers": 3, "top_k": 2}
    for layers in (3, 10, 15):  # its own, no multiple, more than four texts give
        with pytest.raises(ContractError, match="no such depth"):
            gain_study.simulated(bench, replace(PLAN, layers=(layers,)), sizes)


# ---------------------------------------------------------------- figures


def turn(seconds, exposed, nbytes, missing=(0, 0), waited=(0.0, 0.0)):
    return Turn([], seconds, exposed, nbytes, np.array(missing), np.array(waited), np.zeros((2, 1)))


def test_shares_are_of_what_the_bound_leaves():
    """Compute 1, reads of `off` 2 and 0 seconds: a bound of 1.5; from 2 to 1.75 is half of the possible."""
    turns = {name: [turn(1.75, 0.5, 300)] * 2 for name in ("full", *ARMS)}
    turns["full"] = [turn(1.0, 0.0, 0)] * 2
    turns["off"] = [turn(2.0, 1.0, 200, missing=(4, 0), waited=(1.5, 0.0)), turn(2.5, 1.0, 200, (4, 0), (1.5, 0.0))]
    rows = {row["arm"]: row for row in rows_of(turns, 100, 200.0)}
    heads = rows["heads, in_forward"]
    assert rows["off"]["bound"] == 1.5 and rows["off"]["io"] == 1.0
    assert (heads["share_least"], heads["share_greatest"]) == (0.5, 0.75) and heads["share"] == 0.625
    assert (heads["speedup_least"], heads["bytes_ratio"]) == (2 / 1.75, 1.5)
    # On a disk that nobody declared, reads are what `off` waited: 1.5 and 0.
    assert rows_of(turns, 100, None)[0]["bound"] == 1.25
    # Nothing to win: no share at all, rather than a division by next to nothing.
    turns["off"] = [turn(1.0, 0.0, 0)] * 2
    assert {row["share"] for row in rows_of(turns, 100, 200.0)} == {None}


def synthetic(*, layers=4, experts=12, K=2, tokens=30, recall=0.5, seed=0):
    """Routes that wander, and heads that are right as often as told."""
    rng = np.random.default_rng(seed)
    ids = np.stack([[rng.choice(experts, K, replace=False) for _ in range(layers)] for _ in range(2 + tokens)])
    told = {}
    for step in range(tokens + 1):
        for owner in range(layers - 1):
            truth = ids[2 + step, owner + 1] if step < tokens else rng.choice(experts, K, replace=False)
            others = rng.permutation(np.setdiff1d(np.arange(experts), truth))
            said = [int(e) if rng.random() < recall else int(o) for e, o in zip(truth, others, strict=False)]
            told[step, owner] = [(owner + 1, e, 0.6 if e in truth else 0.4) for e in said]
    return Answer([0, 1], list(range(tokens)), [0] * tokens, ids, told)


@pytest.mark.parametrize("who", ["heads", "perfect"])
@pytest.mark.parametrize("layers", [8, 48])
def test_in_the_forward_reads_overlap_at_equal_bytes(who, layers):
    """In virtual time. With room for every expert nothing is evicted before its use, so both read the same; at the
    synchronous boundary none of it is hidden, in the forward nearly all that is foretold."""
    bench = Bench([synthetic(layers=layers, experts=64, tokens=40)], 64)
    cycles = 64 / 2
    off, rate = bench.off(cycles, "lru", 1.0)
    runs = {issue: bench.run(cycles, "lru", rate, who=who, issue=issue) for issue in ISSUE}
    near, far = runs["in_forward"], runs["step_boundary"]
    assert math.isclose(near.bytes_per_token, far.bytes_per_token, rel_tol=0.02)  # wrong ones that came too late
    if who == "perfect":
        assert near.bytes_per_token == far.bytes_per_token == off.bytes_per_token
    assert near.exposed_s < (0.3 if who == "perfect" else 0.8) * far.exposed_s
    assert near.exposed_s <= runs["async_boundary"].exposed_s
    assert far.seconds > off.seconds * 0.99  # waiting earlier is still waiting


def test_gains_name_every_cell(model):
    bench = Bench(model.answers, model.experts)
    rows = gains(bench, [(1.5, 1.0)], policy_name="lru", thresholds=[0.0, 0.9])
    assert [(r["who"], r["issue"], r["threshold"]) for r in rows] == (
        [("off", None, None)] + [("heads", i, t) for i in ISSUE for t in (0.0, 0.9)]
        + [("perfect", i, None) for i in ISSUE]
    )  # fmt: skip
    off, most = rows[0], next(r for r in rows if r["who"] == "heads" and r["threshold"] == 0.9)
    assert off["speedup"] == 1 and off["share"] is None and off["useful"] is None
    assert most["nbytes"] <= next(r for r in rows if r["threshold"] == 0.0)["nbytes"]
    # The device was slowed until the reads of `off` take a token's compute.
    assert math.isclose(off["bound"], 1.0, rel_tol=0.5) and off["seconds"] > 1.3


def test_protection_alone_reads_nothing_ahead():
    bench = Bench([synthetic(recall=1.0)], 12)
    rows = {(r["policy"], r["use"]): r for r in uses(bench, 1.5, 1.0, threshold=0.5)}
    assert len(rows) == 4 * 4
    for policy in ("recent-lfu", "lru", "hot-pin, no bonus", "hot-pin, bonus 2"):
        assert rows[policy, "protect"]["useful"] is None
        assert rows[policy, "protect"]["nbytes"] < rows[policy, "nothing"]["nbytes"]  # perfect: it keeps what comes
        assert rows[policy, "read and protect"]["nbytes"] <= rows[policy, "read"]["nbytes"]
    # The bonus pins other experts, where predictions protect; where they do not it cannot.
    assert rows["hot-pin, bonus 2", "protect"] | {"policy": 0} != rows["hot-pin, no bonus", "protect"] | {"policy": 0}
    assert rows["hot-pin, bonus 2", "read"] | {"policy": 0} == rows["hot-pin, no bonus", "read"] | {"policy": 0}


def test_side_by_side_keeps_routes_and_hits():
    answers = [synthetic(seed=seed) for seed in range(3)]
    deep, layers, experts = side_by_side(answers, 12), 4, 12
    assert deep.ids.shape == (32, 12, 2)
    # Every layer but the last has a head, and its candidates are the next layer's.
    assert sorted(deep.told) == sorted((s, o) for s in range(31) for o in range(11) if o % layers != 3 or s < 30)
    assert all(layer == owner + 1 for (_, owner), c in deep.told.items() for layer, *_ in c)

    def right(step, owner):
        return [e in deep.ids[2 + step, owner + 1] for _, e, _ in deep.told[step, owner]]

    for number in range(3):
        for step in range(30):
            np.testing.assert_array_equal(deep.ids[:, number * layers : (number + 1) * layers], answers[number].ids)
            if number:  # made up: the hits, confidences and count of the layer behind
                at = number * layers
                assert right(step, at - 1) == right(step, at)
                made, model = deep.told[step, at - 1], deep.told[step, at]
                assert [p for *_, p in made] == [p for *_, p in model]
                assert len({e for _, e, _ in made}) == len(made) and max(e for _, e, _ in made) < experts
    assert side_by_side(answers, 12).told == deep.told  # seeded
    with pytest.raises(ContractError, match="different lengths"):
        side_by_side([synthetic(), synthetic(tokens=29)], 12)


# ---------------------------------------------------------------- claims


def measured(arm, exposed, nbytes, seconds=1.0, ratio=1.0):
    return {
        "arm": arm, "cycles": 3.0, "ratio": ratio, "whose": "", "compute": 1.0, "n": len(exposed), "seconds": seconds,
        "exposed_each": exposed, "nbytes_each": nbytes, "speedup": 1 / seconds, "speedup_least": 1 / seconds,
        "speedup_greatest": 1 / seconds,
    }  # fmt: skip


def figures(near, far, bytes_near=100.0, ratio=1.0):
    rows, depth = [], []
    for who in ("heads", "perfect"):
        rows.append(measured(f"{who}, in_forward", near, [bytes_near] * len(near), 0.8, ratio))
        rows += [measured(f"{who}, {b}_boundary", far, [100.0] * len(far), 1.0, ratio) for b in ("async", "step")]
        if who == "heads":
            rows.append(measured("gated, in_forward", near, [90.0] * len(near), 0.7, ratio))
        for issue, exposed in zip(ISSUE, (0.2, 0.3, 0.6), strict=True):
            depth.append({"who": who, "issue": issue, "layers": 8, "cycles": 3.0, "ratio": 1.0, "tokens": 9,
                          "exposed": exposed, "nbytes": 10.0, "seconds": 1 + exposed})  # fmt: skip
    return {"rows": rows, "depth": depth}


def row(found, words):
    return next(row for row in claims(found) if words in row["claim"])


def verdict(found, words):
    return row(found, words)["holds"]


def test_more_than_the_spread_at_equal_bytes():
    words = "heads: in_forward waits less than step_boundary by more than the spread"
    assert verdict(figures([0.1, 0.2, 0.3], [0.6, 0.7, 0.9]), words) is True  # .5, .5, .6: spread .1
    assert verdict(figures([0.1, 0.2, 0.3], [0.2, 0.4, 0.9]), words) is False  # .1, .2, .6: spread .5
    assert verdict(figures([0.9, 0.9, 0.9], [0.2, 0.4, 0.4]), words) is False
    assert verdict(figures([0.1, 0.2, 0.3], [0.6, 0.7, 0.9], bytes_near=110.0), words) is None  # other bytes
    found = figures([0.1, 0.2, 0.3], [0.6, 0.7, 0.9])
    other = figures([0.1, 0.2, 0.3], [0.2, 0.4, 0.9], ratio=2.0)
    assert verdict(figures([0.1], [0.6]), words) is None  # one text has no spread
    mixed = {"rows": found["rows"] + other["rows"], "depth": found["depth"]}
    assert verdict(mixed, words) is False and "1 of 2 cells of equal bytes" in row(mixed, words)["spread"]
    assert "worst at cache 3, reads 2" in row(mixed, words)["spread"]
    assert verdict(found, "heads: in_forward waits less than step_boundary at equal bytes, 8 layers") is True
    assert verdict(found, "heads: speed-up of in_forward over async_boundary, 8 layers") is True
    assert row(found, "heads, step_boundary: faster than off")["measured"] == 0
    assert "loses at cache 3, reads 1 (x 1.00)" in row(found, "heads, step_boundary: faster than off")["spread"]
    assert verdict(found, "heads, in_forward: faster than off") is True
    assert verdict(found, "gated, in_forward: faster than off") is True
    found["rows"][0]["ratio"] = None  # a disk that is not slowed proves nothing about overlap
    assert pairs_of(found["rows"], "heads", "step_boundary") == []


def test_the_quiet_grid_is_wider():
    few, many = gain_study.GainPlan(), gain_study.QUIET
    assert set(few.ratios) < set(many.ratios) and few.texts < many.texts and set(few.systems) < set(many.systems)


def test_the_report_is_read_as_it_was_written(monkeypatch, tmp_path, capsys):
    claim = {"claim": "this", "measured": 1.0, "asked": 0.5, "n": 2, "spread": "", "holds": True}
    asked = []

    def run_workers(fn, jobs, **options):
        asked.extend((fn, job["model"], job["plan"]) for job in jobs)
        return [{"claims": [claim]}]

    monkeypatch.setattr(prerouter_report, "REPORT", tmp_path / "report.json")
    monkeypatch.setattr(
        prerouter_report, "capture", lambda options: dict.fromkeys(options.models, SimpleNamespace(path=0))
    )
    monkeypatch.setattr(prerouter_report.models, "run_workers", run_workers)
    prerouter_report.main(["tiny"])
    assert prerouter_report.committed() is None and "this" in capsys.readouterr().out
    prerouter_report.main(["reference"])
    report = prerouter_report.committed()
    assert report["command"] == prerouter_report.COMMAND and report["models"]["sigmoid"] == {"claims": [claim]}
    assert asked[-1] == (gain_study.committed_model, "sigmoid", gain_study.QUIET)
