"""Ranking metrics against loops, hand-worked cases and scikit-learn / torchmetrics."""

import numpy as np
import pytest
import torch
from sklearn.metrics import recall_score, top_k_accuracy_score
from torchmetrics.functional.retrieval import (
    retrieval_precision,
    retrieval_recall,
    retrieval_reciprocal_rank,
)

from moelab.errors import ContractError, GeometryError
from moelab.flywheel import metrics
from moelab.flywheel.metrics import by_group, by_layer, rank_blocks, ranks, recall, summarise, union_growth

T, L, E, K = 40, 3, 12, 3
CLUSTERS = np.repeat(np.arange(4), 10)


def sample(seed=0, ties=False):
    rng = np.random.default_rng(seed)
    scores = rng.random((T, L, E)).astype(np.float32)
    if ties:
        scores = np.round(scores * 3) / 3
    ids = np.argsort(scores + 0.5 * rng.random((T, L, E)), axis=-1)[..., -K:][..., ::-1]
    return scores, ids.astype(np.uint16)


@pytest.mark.parametrize("ties", [False, True])
def test_ranks_are_places_in_the_stable_order(ties):
    scores, ids = sample(ties=ties)
    found = ranks(scores, ids)
    for t in range(T):
        for layer in range(L):
            order = sorted(range(E), key=lambda e: (-scores[t, layer, e], e))
            assert found[t, layer].tolist() == [order.index(int(e)) for e in ids[t, layer]]


def test_ranks_in_blocks_and_with_infinite_scores(monkeypatch):
    scores, ids = sample()
    scores[3, 1, :6] = -np.inf  # dropped groups
    whole = ranks(scores, ids)
    monkeypatch.setattr(metrics, "_BLOCK", 5 * L * E)
    assert np.array_equal(ranks(scores, ids), whole)
    blocks = [(slice(a, a + 7), scores[a : a + 7]) for a in range(0, T, 7)]
    assert np.array_equal(rank_blocks(blocks, ids), whole)
    for wrong in (blocks[:-1], [*blocks, blocks[0]], []):
        with pytest.raises(ContractError, match="every row once"):
            rank_blocks(wrong, ids)


def test_absent_slots_rank_last_and_do_not_count():
    scores, ids = sample()
    mask = np.ones(ids.shape, bool)
    mask[:5, 0, 2] = False
    ids[~mask] = 0xFFFF
    found = ranks(scores, ids, mask=mask)
    assert (found[~mask] == E).all()
    figures = summarise(found, CLUSTERS, mask=mask)
    assert figures["recall@1x"].n == T * L * K - 5
    assert figures["exact set"].n == T * L - 5
    assert figures["recall@4x"].value == 1.0
    with pytest.raises(ContractError, match="an id is no expert"):
        ranks(scores, ids)


def test_bad_arguments_are_refused():
    scores, ids = sample()
    with pytest.raises(GeometryError, match="scores and ids disagree"):
        ranks(scores[:-1], ids)
    with pytest.raises(GeometryError, match="a mask does not fit"):
        ranks(scores, ids, mask=np.ones((T, L), bool))
    scores[2, 1, 0] = np.nan
    with pytest.raises(ContractError, match="not a number"):
        ranks(scores, ids)
    with pytest.raises(GeometryError, match="one group a row"):
        by_group(ranks(sample()[0], ids), CLUSTERS, np.zeros(3), candidates=K)


def test_a_hand_worked_row():
    scores = np.array([[[0.9, 0.1, 0.8, 0.2, 0.7, 0.0, 0.0, 0.0]]])
    figures = summarise(ranks(scores, np.array([[[4, 0]]])), np.zeros(1))
    assert ranks(scores, np.array([[[4, 0]]])).tolist() == [[[2, 0]]]
    assert {name: e.value for name, e in figures.items()} == {
        "recall@1x": 0.5,
        "recall@2x": 1.0,
        "recall@4x": 1.0,
        "precision@1x": 0.5,
        "precision@2x": 0.5,
        "precision@4x": 0.25,
        "exact set": 0.0,
        "exact order": 0.0,
        "reciprocal rank": 1.0,
    }
    figures = summarise(ranks(scores, np.array([[[2, 0]]])), np.zeros(1))
    assert (figures["exact set"].value, figures["exact order"].value) == (1.0, 0.0)
    assert summarise(ranks(scores, np.array([[[0, 2]]])), np.zeros(1))["exact order"].value == 1.0


def test_against_torchmetrics():
    scores, ids = sample(1)  # no ties: torch leaves their order open
    figures = summarise(ranks(scores, ids), CLUSTERS)
    flat = torch.from_numpy(scores.reshape(-1, E))
    hot = torch.zeros(T * L, E, dtype=torch.bool).scatter_(
        1, torch.from_numpy(ids.reshape(-1, K).astype(np.int64)), True
    )
    for m in (1, 2, 4):
        expected = np.mean([retrieval_recall(p, t, top_k=m * K) for p, t in zip(flat, hot, strict=True)])
        assert figures[f"recall@{m}x"].value == pytest.approx(expected, abs=1e-6)  # float32 there
        expected = np.mean([retrieval_precision(p, t, top_k=m * K) for p, t in zip(flat, hot, strict=True)])
        assert figures[f"precision@{m}x"].value == pytest.approx(expected, abs=1e-6)
    expected = np.mean([retrieval_reciprocal_rank(p, t) for p, t in zip(flat, hot, strict=True)])
    assert figures["reciprocal rank"].value == pytest.approx(expected, abs=1e-6)


def test_against_scikit_learn():
    scores, ids = sample(2)
    found = ranks(scores, ids)
    hot = np.zeros((T, L, E), int)
    np.put_along_axis(hot, ids.astype(np.int64), 1, axis=-1)
    order = np.argsort(-scores, axis=-1)[..., :K]
    guess = np.zeros_like(hot)
    np.put_along_axis(guess, order, 1, axis=-1)
    expected = recall_score(hot.reshape(-1, E), guess.reshape(-1, E), average="micro")
    assert recall(found, CLUSTERS, candidates=K).value == pytest.approx(expected)
    first = top_k_accuracy_score(ids[:, 0, 0], scores[:, 0], k=4, labels=np.arange(E))
    assert (found[:, 0, 0] < 4).mean() == pytest.approx(first)


def test_by_layer_and_by_group():
    scores, ids = sample(3)
    found = ranks(scores, ids)
    layers = by_layer(found, CLUSTERS, candidates=K)
    assert [e.value for e in layers] == pytest.approx([(found[:, i] < K).mean() for i in range(L)])
    domain = np.array(["code", "prose"])[np.arange(T) // 20]
    groups = by_group(found, CLUSTERS, domain, candidates=K)
    assert list(groups) == ["code", "prose"]
    assert groups["prose"].value == pytest.approx((found[20:] < K).mean())
    assert (groups["prose"].clusters, groups["prose"].n) == (2, 20 * L * K)


def test_miss_recall_is_recall_over_misses():
    scores, ids = sample(4)
    found = ranks(scores, ids)
    misses = np.random.default_rng(0).random(ids.shape) < 0.3
    assert recall(found, CLUSTERS, candidates=K, mask=misses).value == pytest.approx((found[misses] < K).mean())


@pytest.mark.parametrize("block", [1, 2, 3, 10])
def test_union_growth_counts_distinct_experts_in_windows(block, monkeypatch):
    monkeypatch.setattr(metrics, "_BLOCK", 7 * L * K * block)
    _, ids = sample(5)
    mask = np.random.default_rng(0).random(ids.shape) > 0.2
    ids[~mask] = 0xFFFF
    starts = np.arange(T) % 10 == 0
    starts[13] = True  # a gap inside a thread
    sizes, rows = [], []
    for t in range(T - block + 1):
        if not starts[t + 1 : t + block].any():
            rows.append(t)
            sizes.append([len(set(ids[t : t + block, i][mask[t : t + block, i]].tolist())) for i in range(L)])
    got = union_growth(ids, starts, CLUSTERS, block=block, mask=mask)
    assert got.value == pytest.approx(np.mean(sizes))
    assert got.n == len(rows) * L


def test_union_growth_refuses_an_empty_block_and_finds_no_window():
    _, ids = sample()
    with pytest.raises(ContractError, match="a block has tokens"):
        union_growth(ids, np.zeros(T, bool), CLUSTERS, block=0)
    assert union_growth(ids, np.arange(T) % 10 == 0, CLUSTERS, block=11).value is None
