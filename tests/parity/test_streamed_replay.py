"""Replay of a streamed model: the records of the resident one to the bit, and each expert read once a group."""

import dataclasses

import mlx.core as mx
import numpy as np
import pytest
from streamed_cases import checkpoint, expert_bytes, streamed

from moelab import models
from moelab.errors import ContractError, StoreError
from moelab.flywheel import batches
from moelab.flywheel.batches import GRAPH_BYTES, BatchShape, groups, kept_bytes, replay
from moelab.streaming import LayerMajor, StreamedModel

FEATURES = ("pre_attention", "moe_input")


def sequences(*lengths):
    return [np.random.default_rng(n).integers(5, 250, length).astype(np.int32) for n, length in enumerate(lengths)]


def same(got, want, features=FEATURES):
    """The same operations in the same order: equal to the bit, features too, not to 1e-6."""
    assert list(got) == list(want), "in the same batch order"
    for index, record in want.items():
        for name in ("ids", "weights", "margin"):
            np.testing.assert_array_equal(getattr(got[index], name), getattr(record, name))
        assert (got[index].group_margin is None) == (record.group_margin is None)
        for name in features:
            np.testing.assert_array_equal(got[index].features[name], record.features[name])


@pytest.mark.parametrize(("name", "budgets"), [("softmax", (2,)), ("sigmoid", (2,)), ("gpt_oss", (1, 2, 3))])
def test_a_shard_equals_resident_replay_and_reads_the_model_once(name, budgets, tmp_path):
    """Slots for two of eight layers; for one, two and three of gpt_oss's, which take turns in two slabs at three."""
    model = checkpoint(name, tmp_path, **({"num_hidden_layers": 4} if name == "gpt_oss" else {}))
    given, shape = sequences(20, 3, 26, 1, 9), BatchShape(48, 16)
    want = dict(replay(models.load(model), given, shape, features=FEATURES))
    for layers in budgets:
        with streamed(model, layers=layers) as loaded:
            same(dict(replay(loaded, given, shape, features=FEATURES)), want)
            assert loaded.bytes_read == expert_bytes(loaded)


def test_a_second_shard_and_a_decode_between_share_the_memory(tmp_path):
    model = checkpoint("qwen3_moe", tmp_path)
    given, shape = sequences(12, 20), BatchShape(64, 16)
    want = dict(replay(models.load(model), given, shape, features=FEATURES))
    with streamed(model, layers=1) as loaded:
        for _ in range(2):
            same(dict(replay(loaded, given, shape, features=FEATURES)), want)
            with loaded.decoding():
                loaded.run(mx.array(given[0])[None], loaded.make_cache(), 0)
        with loaded.decoding(), pytest.raises(ContractError, match="in use.*got: 'decoding'"):
            next(replay(loaded, given, shape))
        assert len(dict(replay(loaded, given, shape))) == 2, "the refusal left nothing behind"


def test_beyond_the_memory_a_shard_is_split_into_groups_that_each_read_the_model(tmp_path):
    model = checkpoint("gpt_oss", tmp_path)
    given, shape = sequences(12, 9, 14, 11, 8), BatchShape(14, 7)  # every sequence a batch
    want = dict(replay(models.load(model), given, shape, features=FEATURES))
    with streamed(model, layers=1) as probe:
        costs = [kept_bytes(probe.geometry, n, -(-n // 7), FEATURES) for n in (14, 12, 11, 9, 8)]
    room = costs[0] + costs[1]
    with streamed(model, layers=1, reserve_bytes=2 * room) as loaded:
        same(dict(replay(loaded, given, shape, features=FEATURES)), want)
        assert loaded.bytes_read == len(groups(costs, room)) * expert_bytes(loaded) == 3 * expert_bytes(loaded)


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3"])
def test_a_batch_that_is_too_much_goes_through_in_pieces(name, tmp_path):
    model = checkpoint(name, tmp_path)
    given, shape = sequences(40, 33), BatchShape(80, 4)
    want = dict(replay(models.load(model), given, shape, features=FEATURES))
    with streamed(model, layers=1) as loaded:
        carried = 4 * 2 * 256 * 2 * loaded.geometry.hidden * len(loaded.model.layers)
        chunk = kept_bytes(loaded.geometry, 8, 1, FEATURES)
        loaded.options = dataclasses.replace(loaded.options, reserve_bytes=2 * (carried + 4 * chunk))
        same(dict(replay(loaded, given, shape, features=FEATURES)), want)
        assert loaded.bytes_read == 3 * expert_bytes(loaded), "ten chunks, four at a time"
        loaded.options = dataclasses.replace(loaded.options, reserve_bytes=2 * (carried + chunk) - 2)
        words = f"one batch.*got: '{carried + chunk} bytes.*expected: <= {carried + chunk - 1} bytes"
        with pytest.raises(ContractError, match=words):
            next(replay(loaded, given, shape, features=FEATURES))


@pytest.mark.parametrize("features", [(), ("moe_input",), FEATURES])
@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_what_a_group_keeps_between_layers_is_within_its_bound(name, features, tmp_path, monkeypatch):
    model, before, during = checkpoint(name, tmp_path, num_hidden_layers=6), [], []
    building, evaluate, calculate = LayerMajor.building, LayerMajor.evaluate, mx.eval

    def noted(*arrays):
        calculate(*arrays)
        during.append(mx.get_active_memory())

    def begin(self):
        before.append(mx.get_active_memory())
        return building(self)

    def measured(self):
        with monkeypatch.context() as patch:
            patch.setattr(mx, "eval", noted)
            evaluate(self)

    monkeypatch.setattr(LayerMajor, "building", begin)
    monkeypatch.setattr(LayerMajor, "evaluate", measured)
    given, shape = sequences(*[64] * 16), BatchShape(256, 16)
    with streamed(model, layers=3) as loaded:
        list(replay(loaded, given, shape, features=features))
        bound = sum(kept_bytes(loaded.geometry, 256, 4, features) for _ in range(4))
        bound -= 16 * loaded.geometry.layers * GRAPH_BYTES  # graphs are no arrays
    assert len(before) == 1, "one group"
    assert 0.3 * bound < max(during) - before[0] <= bound, "a bound, and no idle one"


def test_groups():
    assert groups([4, 4, 4, 9, 1], 9) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert groups([3, 3, 3], 9) == [slice(0, 3)] and groups([], 9) == []
    assert groups([3, 10, 3], 9) == [slice(0, 1), slice(1, 2), slice(2, 3)], "too much: alone"


def test_too_little_memory_is_refused_and_both_figures_named(tmp_path):
    model = checkpoint("gpt_oss", tmp_path)
    with (
        streamed(model, layers=0.99) as loaded,
        pytest.raises(ContractError, match=r"one layer.*cache_bytes; got: '\d+ bytes', expected: >= \d+ bytes"),
    ):
        next(replay(loaded, sequences(4), BatchShape()))
    with StreamedModel.load(model, memory_budget_bytes=64 << 20) as loaded:
        for turn in (loaded.replaying, loaded.decoding):
            with (
                pytest.raises(ContractError, match="memory_budget_bytes; got: 67108864, expected: > "),
                turn(),
            ):
                pass


def test_a_read_that_fails_ends_the_replay_and_the_next_one_is_right(tmp_path, monkeypatch):
    model = checkpoint("qwen3_moe", tmp_path)
    given, shape = sequences(12, 20), BatchShape(64, 16)
    want = dict(replay(models.load(model), given, shape, features=FEATURES))
    with streamed(model, layers=2) as loaded:

        def broken(layer, expert, out):
            raise StoreError("no such luck", field="expert", got=expert)

        with monkeypatch.context() as patch:
            patch.setattr(loaded.store, "read_into", broken)
            with pytest.raises(StoreError, match="no such luck"):
                list(replay(loaded, given, shape))
        same(dict(replay(loaded, given, shape, features=FEATURES)), want)


def test_the_equality_is_of_the_layer_major_path(tmp_path, monkeypatch):
    """The tests above would not notice a streamed model that were replayed batch by batch: this one does."""
    monkeypatch.setattr(batches, "_batch_by_batch", None)
    with streamed(checkpoint("gpt_oss", tmp_path), layers=1) as loaded:
        assert len(list(replay(loaded, sequences(4, 5), BatchShape()))) == 2
