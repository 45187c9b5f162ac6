"""Held-out threads, judged rankings, and the verdict of Gate 3 on what two notebooks left."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from moelab import artifacts
from moelab.errors import ContractError
from moelab.flywheel.baselines import RANKS, TABLE
from moelab.flywheel.controls import used
from moelab.flywheel.evaluation import LATER, HeldOut, Judged, judge, read_ranks, write_ranks
from moelab.flywheel.value import Evidence, ValueOptions, verdict
from moelab.routes import DECODED

pytestmark = pytest.mark.usefixtures("inside")


# ---------------------------------------------------------------- the held-out threads


@pytest.fixture
def held(dataset):
    return HeldOut.of(dataset, ["validation", "stress"], cache_fraction=0.25)


def test_held_out_rows_are_whole_threads_and_only_their_decoded_rows_count(dataset, held):
    table = dataset.table
    mine = [e["index"] for e in table if e["set"] in ("validation", "stress") and e["mode"] == "forced"]
    assert set(np.unique(dataset.routes.thread[held.rows])) == set(mine)
    assert len(held.rows) == sum(e["tokens"] for e in table if e["index"] in mine), "prompts too: they are history"
    for name in ("validation", "stress"):
        counted = held.counted[name]
        assert counted.any() and (held.routes.phase[counted] == DECODED).all()
        np.testing.assert_array_equal(dataset.rows(name)[held.rows][counted], True)
    assert not (held.counted["validation"] & held.counted["stress"]).any()
    assert held.cache_bytes == int(0.25 * held.routes.experts * held.routes.expert_bytes.sum())
    assert 0 < held.hit_rate < 1 and held.resident.shape[:2] == held.routes.ids.shape[:2]


def test_clusters_are_threads(dataset, held):
    threads = dataset.of_thread("thread")[held.rows]
    for cluster in np.unique(held.cluster):
        assert len(set(threads[held.cluster == cluster])) == 1
    assert len(np.unique(held.cluster)) == len(set(threads))


def test_nothing_to_judge_on_is_refused(dataset):
    with pytest.raises(ContractError, match="no decoded row in the train set") as caught:
        HeldOut.of(dataset, ["train"], cache_fraction=0.25)
    assert caught.value.field == "sets"


# ---------------------------------------------------------------- judging


def oracle(routes, shift=0):
    """A ranking that knows the answer, or the answer of another row."""
    scores = np.roll(used(routes), shift, axis=0).astype(np.float32)
    for start in range(0, routes.tokens, 50):
        rows = slice(start, min(start + 50, routes.tokens))
        yield rows, scores[rows]


def figures(judged, where="validation", group="all"):
    return {r["metric"]: r for r in judged.rows if (r["set"], r["group"]) == (where, group)}


def judged(held, shift=0, layers=None, **options):
    layers = np.ones(held.routes.layers, bool) if layers is None else layers
    return judge(
        "x", "half layer", lambda routes: oracle(routes, shift), held, layers=layers, miss_recall=0.95, **options
    )


def test_a_ranking_that_knows_the_answer_scores_one_and_its_rows_line_up(held):
    found = figures(judged(held))
    K, L = held.routes.top_k, held.routes.layers
    assert found["recall@1x"]["value"] == found["exact set"]["value"] == 1
    assert found["recall@1x"]["n"] == held.counted["validation"].sum() * L * K
    assert found["recall@1x"]["threads"] == 5
    assert found["wasted bytes/token"]["value"] == 0 and found["demand bytes/token"]["value"] > 0
    off = figures(judged(held, shift=1))
    assert off["recall@1x"]["value"] < 0.9 and off["wasted bytes/token"]["value"] > 0


def test_layers_that_a_horizon_cannot_know_are_left_out_of_everything(held):
    later = np.arange(held.routes.layers) > 0
    part, whole = judged(held, shift=1, layers=later), judged(held, shift=1)
    K = held.routes.top_k
    assert figures(part)["recall@1x"]["n"] == held.counted["validation"].sum() * later.sum() * K
    assert not [r for r in part.rows if r["group"] == f"layer {held.routes.layer_ids[0]}"]
    # bytes are sums over layers: a ranking over all of them says what it wastes without the first, too
    for metric in ("wasted bytes/token", "read bytes/token", "demand bytes/token"):
        assert figures(whole, group=LATER)[metric] | {"group": "all"} == figures(part)[metric]
    assert figures(whole)["demand bytes/token"]["value"] > figures(part)["demand bytes/token"]["value"]
    assert figures(part, group=LATER) == {}


def test_sets_domains_and_calibration(held):
    found = judged(held, probabilities=True)
    assert {r["set"] for r in found.rows} == {"validation", "stress"}
    assert {r["group"] for r in found.rows} >= {"domain talk", "domain code", f"layer {held.routes.layer_ids[1]}"}
    assert figures(found)["ece"]["value"] == pytest.approx(0, abs=1e-6), "it says 1 or 0, and is right"
    assert "ece" not in figures(judged(held))


def test_an_empty_set_has_no_figures(held):
    from dataclasses import replace

    empty = replace(held, counted={**held.counted, "stress": np.zeros(len(held.rows), bool)})
    assert {r["set"] for r in judged(empty).rows} == {"validation"}


def test_ranks_survive_the_file(held, tmp_path):
    layers = np.arange(held.routes.layers) > 0
    found = judged(held, shift=1, layers=layers)
    write_ranks(tmp_path / "r.safetensors", [found], held, {"snapshot": "s"})
    arrays, header = read_ranks(tmp_path / "r.safetensors")
    np.testing.assert_array_equal(arrays["ranks x | half layer"], found.ranks)
    np.testing.assert_array_equal(arrays["rows"], held.rows)
    np.testing.assert_array_equal(arrays["counted stress"], held.counted["stress"])
    assert header["layers"] == {"x | half layer": [1, 2]} and header["snapshot"] == "s"


# ---------------------------------------------------------------- Gate 3


@dataclass
class Side:
    """Rankings of one notebook: name → (share of slots it finds, bytes it wastes, layers it counts)."""

    rankings: dict
    rows: int = 200
    threads: int = 8
    first: int = 0


def written(tmp_path, name, side):
    """An artefact as notebooks 40 and 41 leave it, with `side.rows` rows of 3 layers and 4 experts."""
    cluster = np.arange(side.rows) % side.threads
    held = SimpleNamespace(
        counted={"validation": np.arange(side.rows) >= 20},
        cluster=cluster.astype(np.int32),
        rows=np.arange(side.rows) + side.first,
    )
    all_judged, table = [], []
    for ranking, (share, wasted, layers) in side.rankings.items():
        label, horizon = ranking.split(" | ")
        found = np.random.default_rng(3).random((side.rows, 3, 4)) < share
        ranks = np.where(found, 0, 15).astype(np.uint16)
        kept = np.isin(np.arange(3), layers)
        all_judged.append(Judged(label, horizon, kept, ranks, []))
        for group, value in (("all", wasted), *((((LATER, wasted / 2),)) if kept.all() else ())):
            table.append(
                {"ranking": label, "horizon": horizon, "set": "validation", "metric": "wasted bytes/token",
                 "group": group, "value": value, "se": None, "n": 1, "threads": 1}
            )  # fmt: skip

    def make(folder):
        write_ranks(folder / RANKS, all_judged, held, {})
        artifacts.write_json(folder / TABLE, table)
        return {}

    return artifacts.build(name, inputs={"x": str(side)}, params={"runtime": {"blas": "reference"}}, make=make)


LEARNED, OWN = "learned, moe input | 1 layer", "own gate early, moe input | 1 layer"
LATE = [1, 2]


@pytest.fixture
def evidence(world, tmp_path):
    def make(controls, learned, **changes):
        with world.entered(tmp_path):
            one = written(tmp_path, "baselines", Side(controls, **changes))
            return Evidence(one, written(tmp_path, "predictors", Side(learned, **{**changes})))

    return make


def decide(evidence, **changes):
    own = dict(primary_arm="1 layer", smallest_effect=0.01, sigmas=2.0)
    return verdict("m", ValueOptions(**own | changes), evidence)


def test_gate_3_passes_and_names_the_best_control(evidence):
    controls = {
        "random | 1 token": (0.1, 9e3, [0, 1, 2]),
        OWN: (0.6, 1e3, LATE),
    }
    found = decide(evidence(controls, {LEARNED: (0.8, 900.0, LATE)}))
    assert found.status == "pass" and found.figures["control"] == OWN
    assert found.figures["recall_gain"] == pytest.approx(
        found.figures["recall_learned"] - found.figures["recall_control"]
    )
    assert found.n == {"rows": 180 * 2, "threads": 8} and found.standard_errors["recall_gain"] > 0
    assert found.figures["learned_sidecar"] == "refused: no drafter yet"


def test_gate_3_fails_against_a_better_control_or_more_waste(evidence):
    better = decide(evidence({OWN: (0.9, 1e3, LATE)}, {LEARNED: (0.8, 900.0, LATE)}))
    assert better.status == "fail" and "standard errors" in better.reason
    waste = decide(evidence({OWN: (0.6, 1e3, LATE)}, {LEARNED: (0.8, 1001.0, LATE)}))
    assert waste.status == "fail" and "wastes 1001 bytes" in waste.reason
    small = decide(evidence({OWN: (0.6, 1e3, LATE)}, {LEARNED: (0.8, 900.0, LATE)}), smallest_effect=0.5)
    assert small.status == "fail" and "smallest effect" in small.reason


def test_gate_3_is_refused_on_one_thread(evidence):
    one = decide(evidence({OWN: (0.6, 1e3, LATE)}, {LEARNED: (0.8, 900.0, LATE)}, threads=1))
    assert one.status == "refused" and "a second thread" in one.reason


def test_a_control_known_earlier_is_admitted_and_one_known_later_is_not(evidence):
    controls = {
        OWN: (0.5, 1e3, LATE),
        "previous token | 1 token": (0.7, 1e3, [0, 1, 2]),
        "too late | half layer": (0.99, 1.0, [0, 1, 2]),
    }
    found = decide(evidence(controls, {LEARNED: (0.8, 400.0, LATE)}))
    assert found.figures["control"] == "previous token | 1 token"


def test_waste_is_compared_on_the_layers_that_both_were_judged_on(evidence):
    """A control over three layers wastes 1000 bytes, of which 500 in the two that the predictor counts."""
    controls = {"previous token | 1 token": (0.6, 1000.0, [0, 1, 2])}
    found = decide(evidence(controls, {LEARNED: (0.8, 600.0, LATE)}))
    assert found.status == "fail" and found.figures["wasted_bytes_control"] == 500.0
    early = "learned, pre attention | half layer"
    found = decide(evidence({OWN: (0.6, 450.0, LATE)}, {early: (0.8, 800.0, [0, 1, 2])}), primary_arm="half layer")
    assert (found.figures["wasted_bytes_learned"], found.figures["wasted_bytes_control"]) == (400.0, 450.0)


def test_rankings_of_different_rows_are_refused(world, tmp_path):
    with world.entered(tmp_path):
        one = written(tmp_path, "baselines", Side({OWN: (0.6, 1e3, LATE)}))
        for change in ({"first": 1}, {"threads": 7}):
            other = written(tmp_path, "predictors", Side({LEARNED: (0.8, 900.0, LATE)}, **change))
            with pytest.raises(ContractError, match="judged on different rows"):
                Evidence(one, other)
