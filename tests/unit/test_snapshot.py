"""The snapshot: windows are ranges of rows, sets do not touch, and what was dropped is not what is trained on."""

from dataclasses import replace

import flywheel_world
import numpy as np
import pytest

from moelab import artifacts
from moelab.errors import OwnershipError
from moelab.flywheel import dedup, snapshot
from moelab.flywheel.batches import BatchShape
from moelab.flywheel.capture import capture_model
from moelab.flywheel.dataset import WINDOWS, open_dataset
from moelab.flywheel.examples import ARMS, early_gate, examples, known_layers, regenerate, shifted
from moelab.flywheel.replay import read_routes, replay_model
from moelab.flywheel.snapshot import CHECKS, COVERAGE, DUPLICATES, snapshot_model
from moelab.flywheel.split import SETS
from moelab.routes import DECODED

pytestmark = pytest.mark.usefixtures("inside")
WINDOW = flywheel_world.WINDOW


@pytest.fixture
def windows(snapped):
    return artifacts.read_tensors(snapped / WINDOWS)[0]


@pytest.fixture
def copied(dataset):
    """Index in the table of the thread whose text was imported again, and of its copy."""
    return [
        next(e["index"] for e in dataset.table if e["name"] == name and e["sequence"] == "forced-0")
        for name in flywheel_world.COPIED
    ]


def test_windows_are_ranges_of_rows_of_one_sequence_and_one_tile(dataset, windows):
    routes = dataset.routes
    seen = np.zeros(routes.tokens, int)
    for start, stop, thread in zip(windows["start"], windows["stop"], windows["thread"], strict=True):
        assert start < stop
        rows = slice(start, stop)
        assert (routes.thread[rows] == thread).all()
        position = routes.position[rows]
        assert (np.diff(position) == 1).all() and position[0] // WINDOW == position[-1] // WINDOW
        seen[rows] += 1
    assert seen.max() == 1, "no row is in two windows"
    np.testing.assert_array_equal(seen == 1, dataset.set_of_row >= 0)


def test_each_row_is_in_the_set_of_its_thread(dataset):
    for entry in dataset.table:
        mine = dataset.set_of_row[dataset.routes.thread == entry["index"]]
        assert set(mine.tolist()) <= {-1, SETS.index(entry["set"])}
    assert not dataset.rows("runtime").any(), "never inside"
    for name in ("train", "validation", "temporal", "stress"):
        assert dataset.rows(name).any()
        decoded = dataset.rows(name, decoded=True)
        assert (dataset.routes.phase[decoded] == DECODED).all() and not (decoded & ~dataset.rows(name)).any()


def test_edges_are_in_no_window_and_of_sampled_sequences_only_the_decoded_rows(dataset):
    for entry in dataset.table:
        mine = dataset.routes.thread == entry["index"]
        inside = dataset.set_of_row[mine] >= 0
        if entry["sequence"].startswith("edge"):
            assert not inside.any()
        elif entry["mode"] == "sampled" and entry["name"] == flywheel_world.COPIED[0]:
            assert not inside.any(), "answers to a question that the validation set asks as well"
        elif entry["mode"] == "sampled":
            np.testing.assert_array_equal(inside, dataset.routes.phase[mine] == DECODED)


def test_the_copied_thread_is_found_and_dropped_from_the_less_protected_set(dataset, copied, snapped):
    original, copy = copied
    assert (dataset.table[original]["set"], dataset.table[copy]["set"]) == ("train", "validation")
    assert (dataset.set_of_row[dataset.routes.thread == original] == -1).all(), "every window of it"
    assert (dataset.set_of_row[dataset.routes.thread == copy] >= 0).all(), "the validation set keeps its own"
    found = artifacts.read_json(snapped / DUPLICATES)
    ids = {dataset.table[i]["thread"] for i in copied}
    assert {frozenset((d["thread"], d["other"])) for d in found} == {frozenset(ids)}
    assert {d["dropped"] for d in found if d["thread"] == dataset.table[original]["thread"]} == {True}
    assert {d["dropped"] for d in found if d["thread"] == dataset.table[copy]["thread"]} == {False}


def test_the_allow_list_keeps_the_shared_system_prompt(snapped):
    counts = artifacts.open_artifact(snapped).counts
    assert counts["windows_dropped"] == 2 and counts["near_identical_pairs"] == 1
    assert counts["windows_dropped_without_allow_list"] > 2, "first windows that are all system prompt"


def test_dropped_windows_are_absent_from_the_arrays_that_training_reads(dataset, records, loaded):
    """A dropped row is no training example: proved on what the trainer opens, by its digests."""
    features = regenerate(loaded, dataset, records, ("pre_attention",), BatchShape(256, 24))
    arm = ARMS["half layer"]
    gate = early_gate(loaded, features["pre_attention"], arm)
    train = dataset.rows("train")
    given = examples(dataset, features, gate, arm, train)
    assert len(given) == train.sum() > 0
    rows = {row.tobytes() for row in given.features}
    # rows whose prefix no other thread has: beyond the first letters, and beyond the shared system prompt
    alone = dataset.routes.position >= 48
    gone = features["pre_attention"][(dataset.of_thread("name") == flywheel_world.COPIED[0]) & alone]
    assert len(gone) and not any(row.tobytes() in rows for row in gone), "the dropped thread"
    for name in ("validation", "temporal", "stress"):
        held = dataset.rows(name) & alone
        assert not any(row.tobytes() in rows for row in features["pre_attention"][held]), name
    # dropping one window more changes the digest of what is trained on
    smaller = replace(dataset, set_of_row=dataset.set_of_row.copy())
    smaller.set_of_row[np.flatnonzero(train)[:WINDOW]] = -1
    fewer = examples(smaller, features, gate, arm, smaller.rows("train"))
    assert len(fewer) == len(given) - WINDOW and fewer.digest() != given.digest()
    assert examples(dataset, features, gate, arm, dataset.rows("train")).digest() == given.digest()


def test_features_line_up_with_the_rows(dataset, records, loaded):
    """Row by row against each sequence run alone."""
    import mlx.core as mx

    features = regenerate(loaded, dataset, records, ("moe_input",), BatchShape(256, 24))["moe_input"]
    again = regenerate(loaded, dataset, records, ("moe_input",), BatchShape(256, 24))["moe_input"]
    np.testing.assert_array_equal(features, again)
    for entry, o in list(zip(dataset.table, records.open(dataset.table, loaded, purpose="train"), strict=True))[::4]:
        with loaded.tap(("moe_input",)) as tap:
            mx.eval(loaded.model(mx.array(o.token_ids)[None]), *tap.pending())
            alone = tap.take().features["moe_input"][0]
        mine = dataset.routes.thread == entry["index"]
        np.testing.assert_allclose(features[mine], alone[dataset.routes.position[mine]], atol=1e-5)


def test_what_an_arm_is_told():
    feature = np.arange(2 * 3 * 1, dtype=np.float32).reshape(2, 3, 1) + 1
    assert shifted(feature, 0) is feature
    assert shifted(feature, 1)[..., 0].tolist() == [[0, 1, 2], [0, 4, 5]]
    assert known_layers(ARMS["1 layer"], 3).tolist() == [False, True, True]
    assert known_layers(ARMS["half layer"], 3).all()


def test_checks_and_coverage(snapped, dataset):
    assert set(artifacts.read_json(snapped / CHECKS).values()) == {0}
    counts = artifacts.open_artifact(snapped).counts
    table = artifacts.read_json(snapped / COVERAGE)
    for kind in ("language", "domain", "length", "tool calls", "reasoning"):
        mine = [row for row in table if row["kind"] == kind]
        for name in SETS:
            assert sum(r["threads"] for r in mine if r["set"] == name) == counts[f"{name}_threads"]
    assert {(r["value"], r["set"]) for r in table if r["kind"] == "language"} >= {("de", "stress"), ("en", "train")}
    assert {r["set"] for r in table if r["kind"] == "domain" and r["value"] == "code"} == {"stress"}
    assert sum(counts[f"{name}_tokens"] for name in SETS) == (dataset.set_of_row >= 0).sum()


def test_each_check_counts_what_it_names(records, routed, loaded, dataset, monkeypatch):
    """Every violation of Gate 2, made by hand."""
    index, rows = records.index, artifacts.open_artifact(routed)
    entries = [e for e in index if e["sequence"] == "forced-0"]
    observed = dict(zip((e["file"] for e in entries), records.open(entries, loaded, purpose="evaluate"), strict=True))
    sets = {e["thread"]: e["set"] for e in entries}

    def checks(**changes):
        given = dict(table=dataset.table, observed=observed, sets=sets, remaining=0, index=index) | changes
        monkeypatch.setattr(type(records), "index", given.pop("index"))
        return snapshot._checks(records, rows, *given.values())

    assert set(checks().values()) == {0}
    validating = next(e for e in entries if e["set"] == "validation")
    stolen = [{**e, "owner": validating["owner"]} if e["set"] == "train" else e for e in index]
    assert checks(index=stolen)["owners_in_two_sets"] == 1
    twice = [*index, {**validating, "set": "train"}]
    assert checks(index=twice)["threads_in_two_sets"] == 1
    assert checks(remaining=3)["near_identical_left"] == 3
    held = next(e for e in entries if e["set"] == "runtime")
    assert checks(table=[*dataset.table, held])["runtime_records_replayed"] == 1
    assert checks(sets={**sets, held["thread"]: "train"})["records_not_authorised"] == 1
    name, o = next(iter(observed.items()))
    for field, counted in (("model", "identities_beyond_one"), ("runtime", "runtimes_beyond_one")):
        other = replace(o, header=type(o.header)(**{**{f: getattr(o.header, f) for f in o.header.__struct_fields__},
                                                    field: {"a": 1} if field == "runtime" else "f" * 64}))  # fmt: skip
        assert checks(observed={**observed, name: other})[counted] == 1


def test_the_verdict_of_gate_2(snapped, world):
    made = artifacts.open_artifact(snapped)
    good = snapshot.verdict("m", made, world.snapshot_options())
    assert good.status == "pass" and good.figures["windows_dropped"] == 2
    assert good.n["validation_owners"] == 2 and good.inputs["snapshot"] == made.content
    few = snapshot.verdict("m", made, world.snapshot_options(smallest_validation_owners=3))
    assert few.status == "refused" and "validation_owners: 2 of 3" in few.reason


def test_windows_of_several_sequences_of_a_thread_are_told_apart():
    """A template that rewrites history makes two sequences; a window dropped of the second is not the first's."""
    from types import SimpleNamespace

    from moelab.routes import Routes

    T = 40
    routes = Routes(
        ids=np.tile(np.arange(2, dtype=np.uint16), (2 * T, 1, 1)),
        experts=4,
        layer_ids=(0,),
        phase=np.zeros(2 * T, np.uint8),
        thread=np.repeat(np.arange(2, dtype=np.int32), T),
        position=np.tile(np.arange(T, dtype=np.int32), 2),
    )
    table = [
        {"file": f"f{i}", "index": i, "thread": "t", "set": "train", "mode": "forced", "sequence": f"forced-{i}"}
        for i in range(2)
    ]
    observed = {f"f{i}": SimpleNamespace(token_ids=np.arange(T) + 100 * i) for i in range(2)}
    codec = SimpleNamespace(decode=lambda ids: " ".join(map(str, ids)))
    texts, first = snapshot._texts(table, observed, codec, 16)
    assert len(texts["t"]) == 6 and first == {"f0": 0, "f1": 3}
    assert texts["t"][4].split()[0] == "116"
    assert texts["t"][2].split() == [str(i) for i in range(T - 2 * dedup.SHINGLE, T)], (
        "a short tail, with what precedes"
    )
    made = snapshot._windows(table, routes, first, 16, {("t", 4)})
    spans = list(zip(made["start"].tolist(), made["stop"].tolist(), strict=True))
    assert spans == [(0, 16), (16, 32), (32, 40), (40, 56), (72, 80)]


def test_a_short_last_window_of_a_copy_is_found():
    """Its own few tokens make no shingle; it is read with the tokens before it."""
    from types import SimpleNamespace

    rng = np.random.default_rng(0)
    ids = rng.integers(97, 123, 35)
    entries = [{"file": f, "thread": f, "mode": "forced"} for f in ("a", "b")]
    observed = {f: SimpleNamespace(token_ids=ids) for f in ("a", "b")}
    codec = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))
    texts, _ = snapshot._texts(entries, observed, codec, 32)
    found = dedup.near_identical(texts, encode=lambda text: [ord(c) for c in text])
    assert {(m.thread, m.window) for m in found} == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}


def test_routes_of_another_snapshot_are_refused(snapped, elsewhere, world):
    other = artifacts.open_artifact(replay_model(world.model, world.replay_options(), elsewhere, False))
    with pytest.raises(OwnershipError, match="routes of another snapshot") as caught:
        open_dataset(artifacts.open_artifact(snapped), other)
    assert caught.value.field == "content" and caught.value.got == other.content


def test_routes_of_another_capture_fail_gate_2(elsewhere, world, routed):
    """Other parameters, other records: the rows are counted as another capture's."""
    captured = capture_model(world.model, world.capture_options(sampled=1))
    made = artifacts.open_artifact(snapshot_model(world.model, world.snapshot_options(), captured, routed))
    verdict = snapshot.verdict("m", made, world.snapshot_options())
    assert verdict.status == "fail" and "rows_of_another_capture: 1" in verdict.reason


def test_without_exact_labels_only_decoded_rows_are_in_windows(elsewhere, world):
    rows = replay_model(world.model, world.replay_options(), elsewhere, False)
    made = snapshot_model(world.model, world.snapshot_options(), elsewhere, rows)
    dataset = open_dataset(artifacts.open_artifact(made), artifacts.open_artifact(rows))
    assert dataset.exact is False and (dataset.routes.phase == DECODED).all()
    assert dataset.rows("train").sum() == sum(
        e["decoded"] for e in dataset.table if e["mode"] == "sampled" and e["name"] != flywheel_world.COPIED[0]
    )
    assert read_routes(artifacts.open_artifact(rows))[0].tokens == dataset.routes.tokens
