"""Bytes wasted at a stated miss recall, against counting them one by one."""

import numpy as np
import pytest

from moelab.errors import ContractError, GeometryError
from moelab.flywheel import waste
from moelab.flywheel.estimates import clustered_mean
from moelab.flywheel.waste import miss_waste

T, L, E, K = 30, 3, 8, 2
SIZES = np.array([10, 20, 5])
CLUSTERS = np.arange(T) // 6


def sample(seed=0):
    rng = np.random.default_rng(seed)
    scores = rng.random((T, L, E)).astype(np.float32)
    ids = np.argsort(-(scores + 0.4 * rng.random(scores.shape)), axis=-1)[..., :K]
    resident = rng.random((T, L, E)) < 0.4
    return scores, ids, resident


def blocks(scores, step=7):
    return [(slice(a, a + step), scores[a : a + step]) for a in range(0, T, step)]


def slow(scores, ids, resident, n, counted, mask):
    """Per token: misses in all, misses among the first n, useful bytes, read bytes."""
    out = np.zeros((T, 4))
    for t in np.flatnonzero(counted):
        for layer in range(L):
            used = {int(e) for e, ok in zip(ids[t, layer], mask[t, layer], strict=True) if ok}
            first = sorted(range(E), key=lambda e: (-scores[t, layer, e], e))[:n]
            missed = {e for e in used if not resident[t, layer, e]}
            read = [e for e in first if not resident[t, layer, e]]
            useful = len(missed & set(read))
            out[t] += len(missed), useful, useful * SIZES[layer], len(read) * SIZES[layer]
    return out


def test_curves_and_operating_point_against_counting(monkeypatch):
    monkeypatch.setattr(waste, "_BLOCK", 4 * L * E)
    scores, ids, resident = sample()
    rng = np.random.default_rng(1)
    counted, mask = rng.random(T) < 0.8, rng.random(ids.shape) < 0.9
    got = miss_waste(blocks(scores), ids, resident, SIZES, CLUSTERS, miss_recall=0.7, mask=mask, counted=counted)
    parts = [slow(scores, ids, resident, n, counted, mask) for n in range(E + 1)]
    totals = np.array([p.sum(0) for p in parts])
    np.testing.assert_allclose(got.recall_curve, totals[:, 1] / totals[:, 0])
    np.testing.assert_allclose(got.wasted_curve, (totals[:, 3] - totals[:, 2]) / counted.sum())
    n = int(got.candidates)
    share = got.candidates - n
    assert (1 - share) * got.recall_curve[n] + share * got.recall_curve[n + 1] == pytest.approx(0.7)
    at = (1 - share) * parts[n] + share * parts[n + 1]
    for figure, values in (
        (got.wasted_bytes, at[:, 3] - at[:, 2]),
        (got.read_bytes, at[:, 3]),
        (got.demand_bytes, parts[E][:, 2]),
    ):
        expected = clustered_mean(values, CLUSTERS, weights=counted)
        assert figure.value == pytest.approx(expected.value)
        assert figure.se == pytest.approx(expected.se)
        assert (figure.n, figure.clusters) == (expected.n, expected.clusters)


def test_packed_residency_is_the_same():
    scores, ids, resident = sample()
    a = miss_waste(blocks(scores), ids, resident, SIZES, CLUSTERS)
    b = miss_waste(blocks(scores), ids, np.packbits(resident, axis=-1), SIZES, CLUSTERS)
    assert a.wasted_bytes == b.wasted_bytes
    assert a.candidates == b.candidates


def test_a_perfect_ranking_wastes_nothing_and_a_full_cache_needs_nothing():
    _, ids, resident = sample()
    perfect = np.zeros((T, L, E), np.float32)
    np.put_along_axis(perfect, ids, 1, axis=-1)
    got = miss_waste(blocks(perfect), ids, resident, SIZES, CLUSTERS, miss_recall=1.0)
    assert (got.candidates, got.wasted_bytes.value) == (K, 0)
    assert got.read_bytes.value == got.demand_bytes.value
    full = miss_waste(blocks(perfect), ids, np.ones((T, L, E), bool), SIZES, CLUSTERS)
    assert (full.candidates, full.read_bytes.value, full.demand_bytes.value) == (0, 0, 0)
    assert (full.recall_curve == 1).all()


def test_bad_arguments_are_refused():
    scores, ids, resident = sample()
    for wrong in ([], blocks(scores)[1:], [*blocks(scores), blocks(scores)[0]]):
        with pytest.raises(ContractError, match="every row once"):
            miss_waste(wrong, ids, resident, SIZES, CLUSTERS)
    with pytest.raises(ContractError, match="no such recall"):
        miss_waste(blocks(scores), ids, resident, SIZES, CLUSTERS, miss_recall=0)
    with pytest.raises(GeometryError, match="resident"):
        miss_waste(blocks(scores), ids, resident[:-1], SIZES, CLUSTERS)
    with pytest.raises(GeometryError, match="other experts"):
        miss_waste(blocks(scores), ids, resident[..., :-1], SIZES, CLUSTERS)
    with pytest.raises(GeometryError, match="expert_bytes"):
        miss_waste(blocks(scores), ids, resident, SIZES[:2], CLUSTERS)
