"""Gate 1: what counts as a difference, which identity may label, and what the verdict says."""

from dataclasses import replace

import numpy as np
import pytest
from observations import observation

from moelab import artifacts
from moelab.flywheel import parity, qualification
from moelab.flywheel.engine import LiveEngine
from moelab.flywheel.parity import Parity
from moelab.flywheel.proposals import prefix_digest
from moelab.flywheel.qualification import label_identity, qualify_model, verdict
from moelab.models import TapRecord
from moelab.routes import DECODED

pytestmark = pytest.mark.usefixtures("inside")


# ---------------------------------------------------------------- counting


def replayed(o):
    return TapRecord(o.ids.copy(), o.weights.copy(), o.margin.copy(), None, {})


def added(o, record, tokens=None):
    found = Parity()
    found.add(o, record, o.token_ids if tokens is None else tokens)
    return found


def test_equal_routes_count_no_difference():
    o = observation()
    found = added(o, replayed(o))
    assert found.exact and found.decoded == 4 and found.rows == 8 and found.margins == []
    assert found.figures()["exact_rank_rate"] == found.figures()["set_rate"] == 1.0


def test_another_order_and_another_set_are_told_apart():
    o = observation()
    row = int(np.flatnonzero(o.phase == DECODED)[0])
    swapped = replayed(o)
    swapped.ids[row, 0, :2] = swapped.ids[row, 0, 1::-1].copy()
    found = added(o, swapped)
    assert (found.order_mismatches, found.set_mismatches, found.exact) == (1, 0, False)
    assert found.margins == [pytest.approx(float(o.margin[row, 0]))] and found.weight_error == 0
    other = replayed(o)
    other.ids[row, 1, 2] = next(e for e in range(8) if e not in o.ids[row, 1])
    found = added(o, other)
    assert (found.order_mismatches, found.set_mismatches) == (1, 1)
    assert found.figures()["exact_rank_rate"] == pytest.approx(7 / 8)


def test_prefilled_rows_are_no_evidence():
    o = observation()
    row = int(np.flatnonzero(o.phase != DECODED)[0])
    other = replayed(o)
    other.ids[row] = other.ids[row][:, ::-1]
    assert added(o, other).exact


def test_weights_are_compared_where_the_ids_agree():
    o = observation()
    row = int(np.flatnonzero(o.phase == DECODED)[0])
    other = replayed(o)
    other.weights[row, 0, 1] += 0.25
    assert added(o, other).weight_error == pytest.approx(0.25) and added(o, other).exact
    other.ids[row, 0, :2] = other.ids[row, 0, 1::-1].copy()
    assert added(o, other).weight_error == 0


def test_tokens_prefixes_and_positions():
    o = observation()  # turns at rows 4-7 and 9-10: two accepted prefixes
    tokens = o.token_ids.copy()
    tokens[8] += 1
    found = added(o, replayed(o), tokens)
    assert (found.token_mismatches, found.prefix_mismatches, found.exact) == (1, 1, False)
    tokens = o.token_ids.copy()
    tokens[0] += 1
    assert added(o, replayed(o), tokens).prefix_mismatches == 2
    short = TapRecord(o.ids[:-1], o.weights[:-1], o.margin[:-1], None, {})
    assert added(o, short).position_mismatches == 1 and not added(o, short).exact


def test_prefix_digest_is_of_the_ids():
    ids = np.array([1, 2, 300])
    assert prefix_digest(ids) == prefix_digest(ids.astype(np.uint16)) != prefix_digest(ids[:2])


# ---------------------------------------------------------------- on a model


def test_replay_of_the_capture_is_exact_in_every_chunk(world, captured, records, loaded):
    options = world.replay_options(compared_tokens=10**6)
    found = artifacts.read_json(qualify_model(world.model, options, captured) / "parity.json")
    decoded = sum(e["decoded"] for e in records.replayable())
    assert found["decoded_tokens"] == decoded > 200 and found["rows"] == decoded * loaded.geometry.layers
    assert all(found[name] == 0 for name in qualification.COUNTS) and found["recorded"] is True
    assert found["weight_error"] <= 1e-6 and found["largest_exact_chunk"] == 24
    assert found["chunk_mismatches"] == {"1": 0, "7": 0, "24": 0}
    assert found["diagnostic"]["stored_equal"] is True and found["diagnostic"]["live_difference"] <= 1e-6
    assert found["speeds"].keys() == {"decode", "replay"} and min(map(min, found["speeds"].values())) > 0


def test_under_another_identity_the_same_tokens_are_decoded_again(world, elsewhere, monkeypatch):
    """The recorded capture is no evidence about another runtime: that runtime has to decode itself."""
    from moelab import models

    real = models.runtime_identity
    monkeypatch.setattr(models, "runtime_identity", lambda *a: {**real(*a), "blas": "another"})
    found = artifacts.read_json(qualify_model(world.model, world.replay_options(), elsewhere) / "parity.json")
    assert found["recorded"] is False and found["runtime"]["blas"] == "another"
    assert 20 + 18 <= found["decoded_tokens"] < 60, "compared_tokens, up to the end of a sequence, and every edge"
    assert not any(found[name] for name in qualification.COUNTS)


def test_a_decode_made_again_is_the_recorded_one(records, loaded):
    entry = next(e for e in records.replayable() if e["decoded"] and e["sequence"] == "forced-0")
    (o,) = records.open([entry], loaded, purpose="replay")
    with LiveEngine(loaded) as engine:
        again = parity.decode_again(engine, o, chunk=8)
    for name in ("token_ids", "phase", "ids", "weights", "margin"):
        np.testing.assert_array_equal(getattr(again, name), getattr(o, name))


def test_the_largest_exact_chunk_stops_at_the_first_that_is_not(monkeypatch):
    wrong = {1: 0, 7: 0, 32: 3, 96: 0}
    monkeypatch.setattr(parity, "compare", lambda _, __, shape: Parity(order_mismatches=wrong[shape.chunk]))
    assert parity.largest_exact_chunk(None, [], [96, 1, 32, 7], 10) == (7, wrong)
    assert parity.largest_exact_chunk(None, [], [32, 96], 10)[0] is None


def test_capture_cost_has_pairs_and_quartiles(loaded):
    found = parity.capture_cost(loaded, np.arange(10, 26), steps=6, repeats=3)
    assert found["n"] == 3 and found["on_ms"] > 0 and found["off_ms"] > 0
    assert found["overhead_quartiles"][0] <= found["overhead"] <= found["overhead_quartiles"][1]


# ---------------------------------------------------------------- who may label


def figures(speed=100.0, **changes):
    plain = dict.fromkeys(qualification.COUNTS, 0) | {
        "decoded_tokens": 50, "rows": 400, "weight_error": 1e-7,
        "largest_exact_chunk": 24, "chunk_mismatches": {"1": 0},
        "diagnostic": {"stored_equal": True, "live_difference": 0.0, "tokens": 9},
        "speeds": {"replay": [speed, speed * 2, 1.0], "decode": [10.0]}, "runtime": {"blas": "x"},
        "inputs": {"observations": "o"},
        "recorded": False,
    }  # fmt: skip
    return plain | changes


ABSENT = {"absent": "OpenBLAS is not installed"}


def test_the_fastest_exact_identity_labels(world):
    options = world.replay_options()
    slow, fast = figures(100.0, recorded=True), figures(900.0)
    assert label_identity({"reference": slow, "openblas": fast}, options) == "openblas"
    assert label_identity({"openblas": slow, "reference": fast}, options) == "reference"
    assert label_identity({"reference": slow, "openblas": ABSENT}, options) == "reference"
    assert label_identity({"reference": slow, "auto": figures(900.0, chunk_mismatches={"1": 4})}, options) == "auto"


@pytest.mark.parametrize(
    "changes",
    [*({name: 1} for name in qualification.COUNTS), {"weight_error": 1.1e-5}, {"decoded_tokens": 19}],
    ids=lambda c: next(iter(c)),
)
def test_an_identity_that_is_not_exact_never_labels(world, changes):
    options = world.replay_options()
    wrong = figures(900.0, **changes)
    assert label_identity({"reference": figures(), "openblas": wrong}, options) == "reference"
    assert label_identity({"reference": wrong, "openblas": ABSENT}, options) is None


def test_verdicts(world):
    options = world.replay_options()
    good = verdict("m", {"reference": figures(recorded=True), "openblas": figures(900.0)}, options)
    assert good.status == "pass" and good.figures["identity"] == "openblas"
    assert good.measured["replay_tokens_per_second"] == 900.0 and good.measured["decode_tokens_per_second"] == 10.0
    mixed = verdict("m", {"openblas": figures(900.0, order_mismatches=3), "reference": figures(recorded=True)}, options)
    assert mixed.status == "pass" and mixed.figures["identity"] == "reference"
    assert mixed.measured["openblas rank mismatches"] == 3
    bad = {"openblas": figures(order_mismatches=9), "reference": figures(recorded=True, order_mismatches=2)}
    none = verdict("m", bad, options)
    assert none.status == "fail" and none.figures["identity"] == "none", "judged on the identity of the capture"
    assert none.figures["order_mismatches"] == 2
    few = verdict("m", {"reference": figures(decoded_tokens=19)}, options)
    assert few.status == "refused" and "19 decoded tokens compared, 20 needed" in few.reason


def test_without_any_identity_the_gate_is_refused(world):
    found = verdict("m", {"openblas": ABSENT}, world.replay_options())
    assert found.status == "refused" and found.measured == {"openblas": ABSENT["absent"]}


def test_until():
    items = [replace(observation(seed=i)) for i in range(5)]  # four decoded tokens each
    assert qualification._until(items, 9) == items[:3] and qualification._until(items, 8) == items[:2]
    assert qualification._until(items, 99) == items
