"""Controls against plain loops, on routes small enough to count by hand."""

from dataclasses import replace

import numpy as np
import pytest

from moelab.errors import ContractError, GeometryError
from moelab.flywheel import controls
from moelab.flywheel.controls import (
    HORIZONS,
    TIE,
    AdjacentLayer,
    DecayedHistory,
    EarlyGate,
    Popularity,
    PreviousToken,
    Random,
    Recency,
    used,
)
from moelab.flywheel.cooccurrence import CombinedCoOccurrence, CoOccurrence
from moelab.routes import DECODED, MISSING, Routes


def routes(seed=0, threads=3, tokens=9, layers=3, top_k=2, experts=7, missing=0.0):
    """Skewed random routes, several threads, some slots absent."""
    rng = np.random.default_rng(seed)
    total = threads * tokens
    noise = rng.gumbel(size=(total, layers, experts)) + 2 * rng.normal(size=(layers, experts))
    ids = np.argsort(-noise, axis=-1)[..., :top_k].astype(np.uint16)
    mask = rng.random(ids.shape) >= missing
    ids[~mask] = MISSING
    return Routes(
        ids=ids,
        mask=None if mask.all() else mask,
        experts=experts,
        layer_ids=tuple(range(layers)),
        phase=np.full(total, DECODED, np.uint8),
        thread=np.repeat(np.arange(threads, dtype=np.int32), tokens),
        position=np.tile(np.arange(tokens, dtype=np.int32), threads),
    ).validate()


def sets(r):
    """The used experts of each row and layer as Python lists, absent slots left out."""
    return [
        [[int(e) for e, ok in zip(ids, p, strict=True) if ok] for ids, p in zip(row, here, strict=True)]
        for row, here in zip(r.ids, r.present(), strict=True)
    ]


def popularity_of(r):
    out = np.zeros((r.layers, r.experts))
    for layer in range(r.layers):
        rows = [row[layer] for row in sets(r) if row[layer]]
        for row in rows:
            for e in row:
                out[layer, e] += 1 / len(rows)
    return out


def expected_scores(control, r, raw, known):
    """What every control makes of its raw share: popularity breaks ties, and stands in where nothing is known."""
    popularity = popularity_of(control.train)
    out = (1 - TIE) * raw + TIE * popularity
    out[~known] = np.broadcast_to(popularity, out.shape)[~known]
    return out


def fitted(control, train):
    control.fit(train)
    control.train = train
    return control


def all_controls(r):
    return [
        Random(seed=1),
        Popularity(),
        PreviousToken(),
        Recency(),
        DecayedHistory(decay=0.8),
        DecayedHistory(decay=1.0),
        DecayedHistory(),
        AdjacentLayer(),
        *(
            CoOccurrence(tokens_back=a, layers_back=b, weighting=w, online=o)
            for a, b in ((1, 0), (0, 1), (1, 1))
            for w in ("conditional", "counts")
            for o in (False, True)
        ),
        CombinedCoOccurrence(),
        EarlyGate(np.random.default_rng(0).random((r.tokens, r.layers, r.experts), np.float32)),
    ]


def test_every_control_has_a_horizon_and_scores_in_range():
    train, r = routes(1), routes(2, missing=0.2)
    for control in all_controls(r):
        scores = control.fit(train).scores(r)
        assert control.horizon in HORIZONS
        assert scores.shape == (27, 3, 7)
        assert scores.dtype == np.float32
        assert scores.min() >= 0, control.name
        assert scores.max() <= 1 + 1e-6, control.name  # sums of K shares in float32
        assert control.predictable(r).shape == (27, 3)


def test_blocks_of_any_size_give_the_same_scores(monkeypatch):
    train, r = routes(1), routes(2, missing=0.2)
    for control in all_controls(r):
        whole = control.fit(train).scores(r)
        monkeypatch.setattr(controls, "_BLOCK_BYTES", 4 * 4 * 21)  # 4 rows, across thread boundaries
        assert [rows.stop for rows, _ in control.iter_scores(r)] == [4, 8, 12, 16, 20, 24, 27]
        assert np.array_equal(control.fit(train).scores(r), whole), control.name
        monkeypatch.undo()


def test_not_fitted_and_other_geometry_are_refused():
    for control in all_controls(routes()):
        with pytest.raises(ContractError, match="fitted first"):
            control.scores(routes())
        control.fit(routes(1))
        with pytest.raises(GeometryError, match="another geometry"):
            control.scores(routes(experts=8))
    for wrong in (
        lambda: CoOccurrence(tokens_back=2),
        lambda: CoOccurrence(),
        lambda: CoOccurrence(layers_back=1, weighting="mean"),
        lambda: CoOccurrence(layers_back=1, prior=0),
        lambda: DecayedHistory(decay=1.5),
        lambda: EarlyGate(np.zeros((1, 1, 1)), horizon="2 layers"),
    ):
        with pytest.raises(ContractError):
            wrong()
    with pytest.raises(GeometryError, match="gate scores of other routes"):
        EarlyGate(np.zeros((4, 3, 7), np.float32)).fit(routes()).scores(routes())


def test_popularity_and_random():
    train, r = routes(1, missing=0.2), routes(2)
    scores = fitted(Popularity(), train).scores(r)
    np.testing.assert_allclose(scores, np.broadcast_to(popularity_of(train), scores.shape), rtol=1e-6)  # float32
    a, b = (Random(seed=s).fit(train).scores(r) for s in (0, 1))
    assert not np.allclose(a, b)


def raw_history(r, share):
    """`share(past)` of the experts used at each earlier token of the same thread, newest first."""
    raw, known = np.zeros((r.tokens, r.layers, r.experts)), np.zeros((r.tokens, r.layers), bool)
    rows = sets(r)
    for t in range(r.tokens):
        past = [s for s in range(t - 1, -1, -1) if r.thread[s] == r.thread[t]]
        known[t] = bool(past)
        for layer in range(r.layers):
            for e in range(r.experts):
                raw[t, layer, e] = share([e in rows[s][layer] for s in past])
    return raw, known


@pytest.mark.parametrize(
    ("control", "share"),
    [
        (PreviousToken(), lambda past: 1.0 if past[:1] == [True] else 0.5 if past[1:2] == [True] else 0.0),
        (Recency(), lambda past: 1 / (1 + past.index(True)) if True in past else 0.0),
        (DecayedHistory(decay=0.8), lambda past: sum(0.2 * 0.8**i for i, hit in enumerate(past) if hit)),
        (DecayedHistory(decay=1.0), lambda past: sum(past) / max(1, len(past))),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_histories_against_a_loop(control, share):
    r = routes(3, missing=0.1)
    fitted(control, routes(4))
    np.testing.assert_allclose(  # float32 recurrences over nine tokens
        control.scores(r), expected_scores(control, r, *raw_history(r, share)), atol=1e-6
    )


def test_a_decay_is_chosen_on_the_training_routes():
    bursty = routes(5, threads=2, tokens=40)
    ids = bursty.ids.copy()
    ids[:] = ids[(np.arange(80) // 8) * 8]  # the same experts for eight tokens, then others
    assert DecayedHistory().fit(replace(bursty, ids=ids)).decay_ == 0.5
    assert DecayedHistory().fit(routes(5, threads=2, tokens=40)).decay_ > 0.8


def test_adjacent_layer():
    r = routes(3, missing=0.1)
    control = fitted(AdjacentLayer(), routes(4))
    raw, known = np.zeros((r.tokens, r.layers, r.experts)), np.zeros((r.tokens, r.layers), bool)
    for t, row in enumerate(sets(r)):
        for layer in range(1, r.layers):
            raw[t, layer, row[layer - 1]] = 1
            known[t, layer] = bool(row[layer - 1])
    np.testing.assert_allclose(control.scores(r), expected_scores(control, r, raw, known), atol=1e-6)


def source_of(r, t, layer, tokens_back, layers_back):
    s = t - tokens_back
    adjacent = s >= 0 and r.thread[s] == r.thread[t] and r.position[s] == r.position[t] - tokens_back
    return sets(r)[s][layer - layers_back] if adjacent and layer >= layers_back else []


class Table:
    """Co-occurrence by dictionaries."""

    def __init__(self):
        self.pairs, self.seen, self.rows, self.uses = {}, {}, {}, {}

    def count(self, r, t, back):
        for layer in range(r.layers):
            source, target = source_of(r, t, layer, *back), sets(r)[t][layer]
            self.rows[layer] = self.rows.get(layer, 0) + 1
            for e in target:
                self.uses[layer, e] = self.uses.get((layer, e), 0) + 1
            for j in source:
                self.seen[layer, j] = self.seen.get((layer, j), 0) + 1
                for e in target:
                    self.pairs[layer, j, e] = self.pairs.get((layer, j, e), 0) + 1

    def score(self, r, t, layer, e, back, weighting):
        source = source_of(r, t, layer, *back)
        below = {j: self.rows[layer] if weighting == "counts" else self.seen.get((layer, j), 0) + 1 for j in source}
        return sum(self.pairs.get((layer, j, e), 0) / below[j] for j in source) / max(1, len(source))


@pytest.mark.parametrize("online", [False, True])
@pytest.mark.parametrize("weighting", ["conditional", "counts"])
@pytest.mark.parametrize("back", [(1, 0), (0, 1), (1, 1)])
def test_cooccurrence_against_dictionaries(back, weighting, online):
    train, r = routes(1), routes(2, missing=0.2 if not online else 0.0)
    control = CoOccurrence(tokens_back=back[0], layers_back=back[1], weighting=weighting, online=online).fit(train)
    table, expected = Table(), np.empty((r.tokens, r.layers, r.experts))
    for t in range(train.tokens):
        table.count(train, t, back)
    for t in range(r.tokens):
        if online and t % 9 == 0:  # a new thread: back to what was fitted
            table = Table()
            for s in range(train.tokens):
                table.count(train, s, back)
        for layer in range(r.layers):
            for e in range(r.experts):
                popular = table.uses.get((layer, e), 0) / table.rows[layer]
                share = table.score(r, t, layer, e, back, weighting)
                known = bool(source_of(r, t, layer, *back))
                expected[t, layer, e] = (1 - TIE) * share + TIE * popular if known else popular
        counted = t - (back == (1, 1))  # of the token before, only the layers so far are known in time
        if online and counted >= t - t % 9:
            table.count(r, counted, back)
    np.testing.assert_allclose(control.scores(r), expected, atol=1e-6)  # float32 sums of K shares


def test_a_gap_in_positions_is_not_bridged():
    r = routes(2).select(np.arange(27) % 2 == 0)
    assert not CoOccurrence(tokens_back=1).predictable(r).any()
    assert DecayedHistory(decay=0.9).predictable(r).sum() > 0


def test_the_combination_is_fitted_on_held_out_threads_and_finds_the_better_table():
    # Layer 1 and 2 copy layer 0 shifted by one: the adjacent table is perfect, the previous token says nothing.
    rng = np.random.default_rng(0)
    r = routes(6, threads=8, tokens=40)
    first = np.argsort(rng.random((320, 7)), axis=-1)[:, :2]
    ids = np.stack([first, (first + 1) % 7, (first + 3) % 7], axis=1).astype(np.uint16)
    r = replace(r, ids=ids)
    control = CombinedCoOccurrence().fit(r)
    assert (control.weight_[1:] > 0).all()
    top = np.argsort(-control.scores(r), axis=-1, kind="stable")[..., :2]
    assert np.array_equal(np.sort(top[:, 1:]), np.sort(ids[:, 1:]))
    # Layer 0 has no layer before it: the previous token decides alone, and the first token has popularity.
    token = CoOccurrence(tokens_back=1).fit(r).scores(r)
    np.testing.assert_allclose(control.scores(r)[1:40, 0], token[1:40, 0], atol=2 * TIE)
    assert control.predictable(r)[0].tolist() == [False, True, True]


def test_the_early_gate_ranks_by_the_scores_it_was_given():
    r = routes(2)
    given = np.random.default_rng(0).random((27, 3, 7), np.float32)
    known = np.ones((27, 3), bool)
    known[:, 0] = False
    control = EarlyGate(given, known=known).fit(routes(1))
    scores = control.scores(r)
    assert np.array_equal(scores[:, 1:], given[:, 1:])
    assert np.array_equal(scores[:, 0], np.broadcast_to(control.popularity_[0], (27, 7)))
    assert np.array_equal(given, np.random.default_rng(0).random((27, 3, 7), np.float32))  # not written to


def test_used_leaves_absent_slots_out():
    r = routes(2, missing=0.3)
    assert used(r).sum() == r.present().sum()


def test_the_shape_of_a_large_model():
    r = routes(7, threads=2, tokens=6, layers=48, top_k=10, experts=512)
    for control in all_controls(r):
        for rows, block in control.fit(r).iter_scores(r):
            assert block.shape == (rows.stop - rows.start, 48, 512)
            assert block.nbytes <= 1 << 24  # what is made at once does not grow with the trace
