"""The token table against a dictionary, and that a leaky split is what it says."""

from collections import defaultdict

import numpy as np
import pytest

from moelab import artifacts
from moelab.flywheel import leakage
from moelab.flywheel.controls import used
from moelab.flywheel.leakage import TokenTable, leakage_model

pytestmark = pytest.mark.usefixtures("inside")


class SlowTable:
    """The same predictor with dictionaries, one token at a time."""

    def fit(self, pairs, hot):
        self.rows = [(tuple(map(int, pair)), h.astype(np.float64)) for pair, h in zip(pairs, hot, strict=True)]
        self.one, self.two = defaultdict(list), defaultdict(list)
        for pair, h in self.rows:
            self.one[pair[1]].append(h)
            self.two[pair].append(h)
        return self

    def score(self, pair):
        out = sum(h for _, h in self.rows) / len(self.rows)
        for seen in (self.one.get(int(pair[1]), []), self.two.get(tuple(map(int, pair)), [])):
            n = len(seen)
            if n:
                out = n / (n + 1) * (sum(seen) / n) + 1 / (n + 1) * out
        return out


@pytest.mark.parametrize("seed", range(4))
def test_table_equals_the_slow_one(seed):
    rng = np.random.default_rng(seed)
    pairs = rng.integers(-1, 6, (60, 2)).astype(np.int64)
    hot = (rng.random((60, 2, 5)) < 0.4).astype(np.float32)
    ask = np.concatenate([pairs[:10], rng.integers(-1, 9, (40, 2)), [[5, 10**6]]]).astype(np.int64)
    fast, slow = TokenTable().fit(pairs, hot), SlowTable().fit(pairs, hot)
    expected = np.stack([slow.score(pair) for pair in ask])
    # float32 sums of at most 60 zeros and ones
    np.testing.assert_allclose(fast.scores(ask), expected, atol=1e-5)


def test_pairs_name_the_token_and_the_one_before(dataset, records, loaded):
    tokens = [o.token_ids for o in records.open(dataset.table, loaded, purpose="train")]
    pairs, routes = leakage._pairs(dataset, tokens), dataset.routes
    for row in range(0, routes.tokens, 7):
        ids, at = tokens[routes.thread[row]], int(routes.position[row])
        assert pairs[row].tolist() == [int(ids[at - 1]) if at else -1, int(ids[at])]


def test_windows_are_those_of_the_snapshot(dataset, snapped):
    windows = leakage._windows(artifacts.open_artifact(snapped), ("train", "validation"))
    for name in ("train", "validation"):
        rows = np.concatenate([rows for found, rows in windows if found == name])
        np.testing.assert_array_equal(np.sort(rows), np.flatnonzero(dataset.rows(name)))


def test_a_table_scored_on_what_it_was_fitted_on_is_inflated(dataset, records, loaded):
    """The kind of score that a leak gives: far above that of owners who were held out."""
    tokens = [o.token_ids for o in records.open(dataset.table, loaded, purpose="train")]
    pairs, hot = leakage._pairs(dataset, tokens), used(dataset.routes)
    train, held = dataset.rows("train"), dataset.rows("validation")
    table = TokenTable().fit(pairs[train], hot[train])

    def recall(rows):
        best = np.argsort(-table.scores(pairs[rows]), axis=-1, kind="stable")[..., : dataset.routes.top_k]
        return np.take_along_axis(hot[rows], best, -1).mean()

    assert recall(train) > recall(held) + 0.05


def test_both_splits_are_scored_on_as_many_windows(world, captured, routed, snapped):
    result = artifacts.read_json(
        leakage_model(world.model, world.snapshot_options(), captured, routed, snapped) / leakage.RESULT
    )
    assert set(result) == {"shuffled windows", "owner split"}
    for found in result.values():
        assert 0 < found["value"] < 1 and found["n"] > 0 and found["threads"] > 1
    assert result["owner split"]["threads"] == 5
