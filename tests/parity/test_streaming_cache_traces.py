"""The live cache on real decode traces: fewer bytes than global LRU, and the offline replay's figures."""

import numpy as np
import pytest

from moelab.flywheel.foresight import Opt
from moelab.flywheel.residency import Visits, replay
from moelab.routes import DECODED, PREFILLED, read_trace
from moelab.streaming.cache.cache import Cache
from moelab.streaming.cache.eviction import DEFAULT, POLICIES, policy

MIB = 1 << 20


def trace(moelab_data, name):
    routes = read_trace(moelab_data / "traces" / f"{name}.route.csv.gz")
    visits = Visits.of(routes.ids, routes.experts, routes.thread, prefilled=routes.phase == PREFILLED, mask=routes.mask)
    return routes, visits


def live(visits, phase, sizes, budget, name, top_k):
    """The cache after all visits, prompts in groups."""
    cache = Cache(
        layers=visits.layers, experts=visits.experts, slot_bytes=sizes, budget=budget, policy=policy(name), top_k=top_k
    )  # fmt: skip
    for visit in range(len(visits.offsets) - 1):
        row, layer = visits.first_row[visit // visits.layers], visit % visits.layers
        keys = visits.keys[visits.offsets[visit] : visits.offsets[visit + 1]].tolist()
        for group in cache.groups(layer, keys):
            for key, hit in zip(group, cache.visit(layer, group, phase=int(phase[row])), strict=True):
                if not hit:
                    cache.reserve(key, speculative=False)
                    cache.settle(key)
            cache.release(group)
    assert cache.high_water_bytes <= budget
    return cache


@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_the_default_policy_reads_less_than_global_lru_at_three_budgets(moelab_data, name):
    routes, visits = trace(moelab_data, name)
    decoded = routes.phase == DECODED
    sizes = routes.expert_bytes.tolist()
    for mib in (1000, 2000, 4000):
        run = replay(visits, routes.expert_bytes, budget=mib * MIB)  # over all layers, whatever their sizes
        lru = int(run.read_bytes[decoded].sum())
        opt = int(replay(visits, routes.expert_bytes, budget=mib * MIB, policy=Opt()).read_bytes[decoded].sum())
        mine = live(visits, routes.phase, sizes, mib * MIB, DEFAULT, 6).counters(DECODED).miss_bytes
        # Measured: 0.88, 0.83, 0.90 of LRU's bytes on qwen and 0.81, 0.86, 0.85 on gemma.
        assert opt < mine < 0.92 * lru, (mib, mine / lru)
        pools = live(visits, routes.phase, sizes, mib * MIB, "lru", 6).counters(DECODED).miss_bytes
        assert abs(pools / lru - 1) < 0.01  # two sizes of expert in two pools cost LRU nothing: measured 0.6 % at most


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_decode_hits_equal_the_replay_slot_by_slot(moelab_data, name):
    """Equal sizes, no prompt, and a budget that divides by the layers: then the relation is equality."""
    routes, _ = trace(moelab_data, "gemma")
    rows = np.flatnonzero(routes.phase == DECODED)[:40]
    visits = Visits.of(routes.ids[rows], routes.experts, np.zeros(len(rows)))
    budget = 20 * visits.layers * MIB
    run = replay(visits, np.full(visits.layers, MIB), budget=budget, policy=policy(name))
    cache = live(visits, np.full(len(rows), DECODED), [MIB] * visits.layers, budget, name, 6)
    assert cache.counters().hits == run.hits.sum()
    assert cache.counters().read_bytes == run.read_bytes.sum()
