"""Bounds against hand-worked figures of named systems, and the ceiling against its parts."""

import numpy as np
import pytest

from moelab.disk_profile import declared
from moelab.errors import ContractError, GeometryError
from moelab.flywheel.bounds import ceiling, hit_curve, overlap, roofline, token_bytes
from moelab.flywheel.breakeven import NEVER
from moelab.flywheel.foresight import Opt
from moelab.flywheel.residency import Visits, replay
from moelab.streaming.cache.eviction import LayerLfu, Lru

T, L, E, K = 60, 4, 16, 3
SIZES = np.array([1000, 2000, 1000, 500])
CLUSTERS = np.arange(T) // 15
COUNTED = np.arange(T) % 15 >= 5
READ_S = declared(latency_s=1e-4, bytes_per_s=1e7, sizes=(512, 4096), note="test").miss_table(SIZES, K)


def visits(seed=0):
    rng = np.random.default_rng(seed)
    noise = rng.gumbel(size=(T, L, E)) + 1.5 * rng.normal(size=(L, E))
    ids = np.argsort(-noise, axis=-1)[..., :K]
    return Visits.of(ids, E, CLUSTERS, prefilled=~COUNTED)


def test_token_bytes_and_roofline():
    assert token_bytes(SIZES, K) == 3 * 4500
    assert roofline(500e6, 1e9) == 2.0
    assert roofline(0, 1e9) == float("inf")
    for wrong in ((-1, 1e9), (1, 0)):
        with pytest.raises(ContractError):
            roofline(*wrong)


def test_a_small_share_of_reads_bounds_every_predictor():
    # A published measurement: pread is 6.39 ms of a 73.33 ms token, so perfect prefetch gives 1.095.
    got = overlap(compute_s=73.33e-3 - 6.39e-3, io_s=6.39e-3)
    assert got.io_share == pytest.approx(0.087, abs=5e-4)
    assert got.speedup == got.amdahl == pytest.approx(1.095, abs=5e-4)


def test_overlap_is_never_more_than_twice_as_fast():
    assert overlap(compute_s=1, io_s=1).speedup == 2
    assert overlap(compute_s=1, io_s=9).speedup == pytest.approx(10 / 9)
    assert overlap(compute_s=1, io_s=9).amdahl == pytest.approx(10)
    assert overlap(compute_s=0, io_s=1).amdahl == float("inf")
    for wrong in (dict(compute_s=0, io_s=0), dict(compute_s=-1, io_s=2)):
        with pytest.raises(ContractError, match="takes time"):
            overlap(**wrong)


def test_hit_curves_count_the_stated_tokens_only():
    v = visits()
    budgets = (5_000, 20_000, 60_000)
    for policy in (Lru(), LayerLfu(), Opt()):
        curve = hit_curve(v, SIZES, budgets=budgets, policy=policy, clusters=CLUSTERS, counted=COUNTED)
        assert (curve.policy, curve.budgets) == (policy.name, budgets)
        for i, budget in enumerate(budgets):
            run = replay(v, SIZES, budget=budget, policy=policy)
            assert curve.hits[i].value == pytest.approx(run.hits[COUNTED].mean())
            assert curve.miss_bytes[i].value == pytest.approx(run.read_bytes[COUNTED].mean())
            assert (curve.hits[i].n, curve.miss_bytes[i].n, curve.hits[i].clusters) == (40 * L * K, 40, 4)
        assert np.diff([e.value for e in curve.hits]).min() >= 0


def test_the_ceiling_is_made_of_its_parts():
    v = visits()
    got = ceiling(
        v, SIZES, top_k=K, budget=20_000, compute_s=2e-3, read_s=READ_S, lead=1, clusters=CLUSTERS, counted=COUNTED
    )
    run, best = (replay(v, SIZES, budget=20_000, policy=p) for p in (Lru(), Opt()))
    seconds = np.array([[READ_S[i, m] for i, m in enumerate(row)] for row in run.misses.sum(-1)])[COUNTED]
    assert got.io_s.value == pytest.approx(seconds.sum(1).mean())
    assert got.hits.value == pytest.approx(run.hits[COUNTED].mean())
    assert got.opt_hits.value == pytest.approx(best.hits[COUNTED].mean())
    assert got.opt_miss_bytes.value == pytest.approx(best.read_bytes[COUNTED].mean())
    assert got.overlap == overlap(compute_s=2e-3, io_s=got.io_s.value)
    assert got.opt_overlap.io_s < got.overlap.io_s
    assert got.roofline == pytest.approx(1 / got.io_s.value)
    assert got.cold_roofline == pytest.approx(1 / READ_S[:, K].sum())
    assert got.cold_roofline < got.roofline
    assert got.precision_needed == got.break_even.precision_needed[-1]
    assert 0 < got.precision_needed < 1
    # Uneven visits and one layer of lead: less than the bound with unlimited lead.
    assert 1 < got.break_even.speedup[-1, 0] < got.overlap.speedup
    assert (got.policy, got.budget, got.token_bytes) == ("lru", 20_000, 13_500)


def test_a_cache_that_holds_everything_leaves_nothing_to_win():
    same = Visits.of(np.tile([3, 7, 1], (T, L, 1)), E, CLUSTERS)
    late = np.arange(T) > 0
    got = ceiling(
        same, SIZES, top_k=K, budget=13_500, compute_s=2e-3, read_s=READ_S, lead=1, clusters=CLUSTERS, counted=late
    )
    assert (got.hits.value, got.miss_bytes.value, got.io_s.value) == (1, 0, 0)
    assert (got.overlap.speedup, got.precision_needed, got.roofline) == (1.0, NEVER, float("inf"))


def test_bad_arguments_are_refused():
    v = visits()
    arguments = dict(top_k=K, budget=20_000, compute_s=1e-3, read_s=READ_S, lead=1, clusters=CLUSTERS)
    with pytest.raises(GeometryError, match="read times of another geometry"):
        ceiling(v, SIZES, **arguments | {"read_s": READ_S[:, :-1]})
    with pytest.raises(ContractError, match="no token counts"):
        ceiling(v, SIZES, **arguments, counted=np.zeros(T, bool))
