"""Route shards: labels of decode where there was one, replayed ones only where replay is exact, and no token id."""

import json

import numpy as np
import pytest

from moelab import artifacts, models
from moelab.errors import ArtifactError, ContractError, GateRefusedError, MoelabError, OwnershipError
from moelab.flywheel import parity, replay
from moelab.flywheel.batches import BatchShape
from moelab.flywheel.observations import Records
from moelab.flywheel.replay import THREADS, read_routes, replay_model
from moelab.routes import CAPTURED, DECODED, PREFILLED, REPLAYED

pytestmark = pytest.mark.usefixtures("inside")
BOOKKEEPING = 10
"""Bytes of a row beyond labels: position i32, thread i32, phase u8, label_source u8."""


@pytest.fixture
def routes(routed):
    return artifacts.open_artifact(routed)


def shards(folder):
    return {p.name: artifacts.digest_file(p) for p in sorted(folder.glob("shard-*"))}


def test_decoded_rows_keep_their_label_and_prefilled_ones_say_where_theirs_comes_from(records, routes, loaded):
    rows, table = read_routes(routes)
    observed = list(records.open(table, loaded, purpose="replay"))
    assert [e["index"] for e in table] == list(range(len(table))) and len(table) == len(records.replayable())
    for entry, o in zip(table, observed, strict=True):
        mine = rows.select(rows.thread == entry["index"])
        assert mine.tokens == len(o.token_ids)
        np.testing.assert_array_equal(mine.position, o.ordinal)
        np.testing.assert_array_equal(mine.phase, o.phase)
        np.testing.assert_array_equal(mine.label_source, np.where(o.phase == DECODED, CAPTURED, REPLAYED))
        # Gate 1 is exact on this model: both kinds of label are those of the decode
        np.testing.assert_array_equal(mine.ids, o.ids)
        np.testing.assert_allclose(mine.weights, o.weights, rtol=2**-10)  # stored float16
    counts = routes.counts
    assert counts["tokens"] == rows.tokens == counts["decode_labels"] + counts["replay_labels"]
    assert counts["unlabelled"] == 0 and counts["decode_labels"] == int((rows.phase == DECODED).sum())


def test_a_decoded_row_is_labelled_by_its_decode_even_where_replay_differs(records, loaded, monkeypatch):
    from dataclasses import replace

    def wrong(loaded, sequences, shape):
        for index, record in replay_batches(loaded, sequences, shape):
            yield index, replace(record, ids=record.ids[..., ::-1], weights=record.weights * 0 + 1)

    replay_batches = replay.replay_batches
    monkeypatch.setattr(replay, "replay_batches", wrong)
    entry = next(e for e in records.replayable() if e["decoded"])
    (o,) = records.open([entry], loaded, purpose="replay")
    arrays, _ = replay._shard(loaded, [o], 0, BatchShape(100, 24), True)
    decoded = o.phase == DECODED
    np.testing.assert_array_equal(arrays["ids"][decoded], o.ids[decoded])
    np.testing.assert_array_equal(arrays["ids"][~decoded], o.ids[~decoded][..., ::-1])


def test_nothing_of_the_runtime_holdout_is_in_a_shard(records, routes):
    table = artifacts.read_json(routes.file(THREADS))
    assert records.holdout and not records.holdout & {e["payload"] for e in table}
    assert not {e["set"] for e in table} & {"runtime"}


def test_an_index_that_offers_the_holdout_to_replay_is_refused(records, loaded, monkeypatch, elsewhere, world):
    monkeypatch.setattr(Records, "replayable", lambda self: self.index)
    with pytest.raises(OwnershipError, match="the runtime holdout is never replayed"):
        replay_model(world.model, world.replay_options(), elsewhere, True)
    assert not list(elsewhere.parents[1].glob("routes/*/manifest.json"))


def test_shards_hold_no_token_ids_and_few_bytes(records, routes, loaded):
    rows, table = read_routes(routes)
    K, L = rows.top_k, rows.layers
    names = {"ids", "weights", "margin", "position", "thread", "phase", "label_source"}
    stored = 0
    for name in shards(routes.path):
        arrays, header = artifacts.read_tensors(routes.file(name))
        assert set(arrays) == names and set(header) == {
            "schema_version", "record", "experts", "layer_ids", "expert_bytes", "model", "prefixes", "counts",
        }  # fmt: skip
        stored += sum(a.nbytes for a in arrays.values())
    assert stored == rows.tokens * ((4 * K + 2) * L + BOOKKEEPING)
    assert (4 * K + 2) * L <= 8 * K * L
    everything = b"".join((routes.path / name).read_bytes() for name in routes.manifest.files)
    for o in records.open(table, loaded, purpose="replay"):
        if len(o.token_ids) >= 8:
            for kind in (np.uint8, np.uint16, np.int32, np.int64):
                assert o.token_ids[:8].astype(kind).tobytes() not in everything
            assert json.dumps(o.token_ids[:8].tolist())[1:-1].encode() not in everything


def test_replay_again_gives_the_same_bytes(routed, elsewhere, world):
    again = replay_model(world.model, world.replay_options(), elsewhere, True)
    assert again != routed and again.name == routed.name
    assert shards(again) == shards(routed) and len(shards(routed)) > 2


def test_replay_resumes_shard_by_shard(routed, elsewhere, world, monkeypatch):
    done, batches = [], []

    def stop(message):
        done.append(message)
        if len(done) == 2:
            raise KeyboardInterrupt

    real = replay.replay_batches
    monkeypatch.setattr(
        replay, "replay_batches", lambda loaded, s, shape: batches.append(len(s)) or real(loaded, s, shape)
    )
    monkeypatch.setattr(models, "report_progress", stop)
    with pytest.raises(KeyboardInterrupt):
        replay_model(world.model, world.replay_options(), elsewhere, True)
    assert batches == [6, 6]
    monkeypatch.setattr(models, "report_progress", done.append)
    built = replay_model(world.model, world.replay_options(), elsewhere, True)
    assert shards(built) == shards(routed)
    assert len(batches) == len(shards(routed)), "the two finished shards were not made again"
    assert artifacts.open_artifact(built).content == artifacts.open_artifact(routed).content
    assert artifacts.open_artifact(built).counts == artifacts.open_artifact(routed).counts


def test_a_damaged_shard_of_a_broken_replay_is_refused(elsewhere, world, monkeypatch):
    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "report_progress", stop)
    with pytest.raises(KeyboardInterrupt):
        replay_model(world.model, world.replay_options(), elsewhere, True)
    (shard,) = elsewhere.parents[1].glob("routes/*.partial/shard-*")
    data = bytearray(shard.read_bytes())
    data[-9] ^= 4
    shard.write_bytes(data)
    with pytest.raises(ArtifactError):
        replay_model(world.model, world.replay_options(), elsewhere, True)


def test_without_an_exact_identity_prefilled_rows_are_left_out_and_counted(elsewhere, world, routes):
    built = artifacts.open_artifact(replay_model(world.model, world.replay_options(), elsewhere, False))
    rows, table = read_routes(built)
    whole, _ = read_routes(routes)
    assert (rows.phase == DECODED).all() and (rows.label_source == CAPTURED).all()
    assert rows.tokens == int((whole.phase == DECODED).sum()) == built.counts["decode_labels"]
    assert built.counts["unlabelled"] == int((whole.phase == PREFILLED).sum()) > 0
    assert built.counts["replay_labels"] == 0 and len(table) == len(artifacts.read_json(routes.file(THREADS)))
    decoded = whole.select(whole.phase == DECODED)
    np.testing.assert_array_equal(rows.ids, decoded.ids)
    np.testing.assert_array_equal(rows.position, decoded.position)
    assert built.manifest.params["exact"] is False


def test_margins_beyond_half_precision_stay_finite(records, loaded):
    from dataclasses import replace

    (o,) = records.open(records.replayable()[:1], loaded, purpose="replay")
    wide = replace(o, margin=np.full_like(o.margin, np.inf), phase=np.ones_like(o.phase))
    arrays, _ = replay._shard(loaded, [wide], 0, BatchShape(100, 24), True)
    assert np.isfinite(arrays["margin"]).all() and arrays["margin"].dtype == np.float16


def test_no_shard_is_no_label(tmp_path, world):
    with world.entered(tmp_path):
        empty = artifacts.build("routes", inputs={}, params={}, make=lambda folder: {})
    with pytest.raises(GateRefusedError, match="no route has a label"):
        read_routes(empty)


def test_an_altered_observation_is_refused(elsewhere, world):
    record = next(elsewhere.glob("*.age"))
    record.write_bytes(record.read_bytes()[:-1])
    with pytest.raises(MoelabError):
        replay_model(world.model, world.replay_options(), elsewhere, True)


# ---------------------------------------------------------------- the bounded diagnostic


def test_features_regenerate_to_the_bit_and_equal_those_of_a_live_decode(records, loaded, tmp_path):
    for o in list(records.open(records.replayable()[:3], loaded, purpose="replay")):
        found = parity.diagnose(loaded, o.token_ids, BatchShape(256, 24), tmp_path)
        assert found["tokens"] == len(o.token_ids) and found["stored_equal"] is True
        # One token or many at a time: the reference BLAS sums alike, softmax and norms may round once more.
        assert found["live_difference"] <= 1e-6
    assert list(tmp_path.iterdir()) == [], "whole activations do not stay"


def test_the_diagnostic_sees_a_difference(loaded, tmp_path, monkeypatch):
    real, seen = parity.replay, []

    def nudged(*arguments, **options):
        for index, record in real(*arguments, **options):
            seen.append(index)
            record.features["moe_input"][0, 0, 0] += 0.5 * len(seen)
            yield index, record

    monkeypatch.setattr(parity, "replay", nudged)
    found = parity.diagnose(loaded, np.arange(10, 30, dtype=np.int32), BatchShape(256, 24), tmp_path)
    assert found["live_difference"] > 0.01 and found["stored_equal"] is False


def test_the_cap_of_the_diagnostic_holds(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "DIAGNOSTIC_CAP", 20)
    assert parity.diagnose(loaded, np.arange(10, 30), BatchShape(256, 24), tmp_path)["tokens"] == 20
    monkeypatch.setattr(type(loaded), "tap", lambda *_: pytest.fail("ran"))
    with pytest.raises(ContractError, match="beyond its cap") as caught:
        parity.diagnose(loaded, np.arange(10, 31), BatchShape(256, 24), tmp_path)
    assert (caught.value.field, caught.value.got, caught.value.expected) == ("tokens", 21, "<= 20")
