"""Budgets, refusals and counters of the cache, by worked examples."""

import pytest

from moelab.errors import ContractError, GeometryError
from moelab.routes import DECODED, PREFILLED
from moelab.streaming.cache.cache import Cache
from moelab.streaming.cache.eviction import POLICIES, policy

L, E, K = 4, 8, 2
SIZES = [80, 40, 40, 40]  # layer 0 at eight bits, the rest at four
CYCLE = K * sum(SIZES)


def make(budget=CYCLE, which="lru", sizes=SIZES, **options):
    return Cache(
        layers=L, experts=E, slot_bytes=sizes, budget=budget, policy=policy(which), top_k=K, **options
    )  # fmt: skip


def run(cache, layer, *experts, phase=DECODED):
    keys = [layer * E + e for e in experts]
    hits = cache.visit(layer, keys, phase=phase)
    for key, hit in zip(keys, hits, strict=True):
        if not hit:
            assert cache.reserve(key, speculative=False) is not None
            cache.settle(key)
    cache.release(keys)
    return hits


def test_a_budget_below_one_token_cycle_is_refused_with_both_figures():
    with pytest.raises(ContractError, match=f"got: {CYCLE - 1}, expected: >= {CYCLE}"):
        make(CYCLE - 1)
    assert make(CYCLE - 1, below_cycle=True).pool_slots == (5, 2)
    with pytest.raises(ContractError, match="too few slots"):
        make(79, below_cycle=True)


def test_pools_get_the_same_token_cycles_whatever_the_sizes():
    for cycles in (1, 2, 3):
        cache = make(cycles * CYCLE)
        assert cache.pool_slots == (3 * K * cycles, K * cycles)  # by size: 40 bytes, then 80
        assert [cache.pool_of(layer) for layer in range(L)] == [1, 0, 0, 0]
    assert make(10**9).pool_slots == (3 * E, E)  # never more slots than experts
    assert make(CYCLE + 79).pool_slots == (3 * K + 1, K)  # what is left makes a slot of the other pool


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_prompts_of_disjoint_experts_stay_within_the_bytes(name):
    cache = make(CYCLE + 200, name)
    for prompt in ((0, 1, 2, 3), (4, 5, 6, 7)) * 2:
        for _ in range(3):
            for layer in range(L):
                for at in (0, 2):
                    run(cache, layer, *prompt[at : at + 2], phase=PREFILLED)
                    assert cache.occupied_bytes <= cache.high_water_bytes <= CYCLE + 200
    assert cache.counters().evictions > 0


def test_pins_stay_and_too_many_are_refused():
    cache = make(CYCLE + 120, pins=[0, E, E + 1])
    for layer, expert in ((0, 0), (1, 0), (1, 1)):
        run(cache, layer, expert)
    for token in range(6):
        for layer in range(L):
            run(cache, layer, 2 + token % 3, 5 + token % 3)
    assert {0, E, E + 1} <= set(cache.resident())
    with pytest.raises(ContractError, match="too few slots.*beside 1 pins"):
        make(CYCLE, pins=[0])
    with pytest.raises(GeometryError, match="no such expert"):
        make(CYCLE, pins=[L * E])


def test_cold_and_warm_steady_and_phases_are_told_apart():
    cache = make(2 * CYCLE, read_bytes=[70, 30, 30, 30])
    run(cache, 0, 0, 1, phase=PREFILLED)
    assert cache.reset_high_water() == 160 and cache.high_water_bytes == 160
    cache.reserve(2, speculative=True)
    cache.settle(2)
    run(cache, 1, 0)
    cache.mark_steady()
    assert run(cache, 0, 0, 2, 3) == [True, True, False]
    c, steady = cache.counters(), cache.steady()
    assert (c.cold_misses, c.cold_hits, c.warm_hits, c.warm_misses) == (4, 1, 1, 0)
    assert (steady.cold_misses, steady.cold_hits, steady.warm_hits) == (1, 1, 1)
    assert (c.cold_miss_bytes, c.demand_bytes, c.prefetch_bytes, c.prefetch_used_bytes) == (240, 240, 70, 70)
    assert (c.hit_rate, steady.hit_rate) == (2 / 6, 2 / 3)
    assert cache.counters(PREFILLED).lookups == 2 and cache.steady(PREFILLED).lookups == 0
    assert (c.byte_amplification(2), c.useful_prefetch_ratio) == (310 / 2, 1.0)


def test_a_new_request_keeps_the_residents_and_nothing_else():
    cache = make(CYCLE)
    for layer in range(L):
        run(cache, layer, 0, 1)
    cache.visit(0, [0, 5], phase=DECODED)
    cache.expect([E], cache.next_visit(1))
    held = cache.room(1)
    before = cache.resident()
    cache.reset_request()
    assert cache.resident() == before and cache.room(1) == held
    for grant in (cache.reserve(6, speculative=True), cache.reserve(E + 6, speculative=True)):
        assert grant.evicted  # neither the lease of 0 nor the prediction of E stands in the way
    with pytest.raises(ContractError, match="not leased"):
        cache.release([0])


def test_a_late_completion_of_a_former_grant_changes_nothing():
    cache = make(CYCLE)
    first = cache.reserve(0, speculative=True)
    cache.abandon(0, first.generation)
    second = cache.reserve(1, speculative=True)
    assert (second.pool, second.slot) == (first.pool, first.slot) and second.generation == first.generation + 1
    assert not cache.settle(0, first.generation) and not cache.settle(1, first.generation)
    assert cache.slot(0) is None and cache.slot(1) is None
    assert cache.settle(1, second.generation) and cache.slot(1) == second.slot
    with pytest.raises(ContractError, match="no read of this expert"):
        cache.settle(1)


def test_a_late_completion_is_not_taken_for_a_later_read_of_the_same_expert():
    """Slots do not tell the two apart: each of them is granted for the first time."""
    cache = Cache(layers=1, experts=4, slot_bytes=[1], budget=3, policy=policy("lru"), top_k=1)
    first = cache.reserve(1, speculative=False)
    cache.abandon(1, first.generation)
    cache.reserve(0, speculative=False)  # takes the slot
    second = cache.reserve(1, speculative=False)
    assert second.slot != first.slot
    assert not cache.settle(1, first.generation) and not cache.abandon(1, first.generation)
    assert cache.settle(1, second.generation)


def test_visits_refuse_what_they_cannot_mean():
    cache = make(CYCLE)
    for layer, keys, phase, why in (
        (0, [0, 0], DECODED, "once"),
        (0, [E], DECODED, "once"),
        (0, [0], 7, "unknown phase"),
        (0, [0, 1, 2], DECODED, "more experts than slots"),
    ):
        with pytest.raises(ContractError, match=why):
            cache.visit(layer, keys, phase=phase)
    assert cache.now == -1 and cache.counters().lookups == 0  # nothing of it was done
