"""Eviction policies one by one: worked examples, and prefetched keys among the used ones."""

import numpy as np
import pytest

from moelab.errors import ContractError
from moelab.streaming.cache.eviction import POLICIES, HotPin, LayerLfu, LayerStaleness, Lru, RecentLfu, policy

L, E = 3, 4


def begun(which):
    which.begin(L, E)
    return which


def drain(which, visit, spared=frozenset()):
    """Every victim in order."""
    out = []
    while (key := which.victim(visit, spared)) is not None:
        out.append(key)
    return out


def test_staleness_counts_passes_of_the_layer_then_takes_the_layer_farthest_ahead():
    p = begun(LayerStaleness())
    for visit, keys in enumerate([[0, 1], [4, 5], [8], [2], [6], [9], [3]]):  # passes of layers 0, 1, 2; then layer 0
        p.touch(visit, keys)
    # At visit 6 layer 0 has used 0, 1 two passes ago; layer 1's 4, 5 and layer 2's 8 are one pass stale, like
    # layer 0's 2; layer 0 was visited last, so comes round last, and layer 1 comes first.
    assert drain(p, 6) == [0, 1, 2, 8, 4, 5, 3, 9, 6]


def test_lru_at_the_cliff_evicts_what_comes_next_and_staleness_does_not():
    uses = [[0], [4], [8]] * 2
    first = {}
    for which in (Lru(), LayerStaleness()):
        which.begin(L, E)
        for visit, keys in enumerate(uses):
            which.touch(visit, keys)
        first[which.name] = which.victim(5, frozenset([8]))
    assert first == {"lru": 0, "layer-staleness": 4}  # visit 6 uses 0, visit 7 uses 4


def test_pin_bonus_changes_which_expert_is_kept():
    kept = {}
    for bonus in (0.0, 1.5):
        p = begun(HotPin(hot_per_layer=1, decay=0.5, update_interval=1, pin_bonus=bonus))
        p.expect([1])
        for visit, keys in enumerate([[0], [], [], [0], [], [], [1]]):
            p.touch(visit, keys)
        # Counts are 0: 1.5, 1: 1.0; a prediction is worth `bonus` uses.
        kept[bonus] = drain(p, 6)[-1]
    assert kept == {0.0: 0, 1.5: 1}


def test_pin_bonus_is_inert_without_hot_experts():
    for bonus in (0.0, 9.0):
        p = begun(HotPin(hot_per_layer=0, update_interval=1, pin_bonus=bonus))
        p.expect([0])
        p.touch(0, [0])
        p.touch(1, [4])
        assert drain(p, 1) == [0, 4]


def test_a_lapsed_prediction_loses_its_bonus_at_the_next_update():
    p = begun(HotPin(hot_per_layer=1, decay=1.0, update_interval=1, pin_bonus=5))
    p.expect([1])
    p.touch(0, [0, 1, 2])
    p.unexpect([1])
    p.touch(3, [0])
    assert drain(p, 3) == [1, 2, 0]


def test_hot_experts_go_when_nothing_else_is_left():
    p = begun(HotPin(hot_per_layer=4, update_interval=1))
    p.touch(0, [0, 1])
    assert drain(p, 0) == [0, 1]


@pytest.mark.parametrize("name", POLICIES)
def test_prefetched_and_removed_keys(name):
    p = begun(policy(name))
    p.touch(0, [0, 1])
    p.insert(2)
    p.insert(3)
    p.remove(1)
    p.remove(1)
    p.remove(11)
    assert sorted(drain(p, 0, frozenset([0]))) == [2, 3]  # spared is never given up
    assert p.victim(0, frozenset([0])) is None
    assert drain(p, 0) == [0]
    p.begin(L, E)
    assert drain(p, 0) == []


@pytest.mark.parametrize("name", POLICIES)
def test_a_visit_in_groups_is_one_visit(name):
    rng = np.random.default_rng(3)
    whole, parts = begun(policy(name)), begun(policy(name))
    for visit in range(60):
        keys = (visit % L * E + rng.permutation(E)[: rng.integers(1, E + 1)]).tolist()
        cut = int(rng.integers(0, len(keys)))
        whole.touch(visit, keys)
        parts.touch(visit, keys[:cut])
        parts.touch(visit, keys[cut:])
        if visit % 7 == 6:
            assert whole.victim(visit, frozenset(keys)) == parts.victim(visit, frozenset(keys))


def test_recent_counts_outlast_their_scale():
    """A long run multiplies the weight of a use beyond any float; only ratios matter."""
    short, long = begun(RecentLfu(decay=0.5)), begun(RecentLfu(decay=0.5))
    for visit in range(0, 2000 * L, L):  # 0.5 ** -2000 is no float
        long.touch(visit, [visit // L % 3])
    assert long.weight < 1e200 and all(np.isfinite(n) for n in long.uses.values())
    for visit in range(0, 50 * L, L):
        short.touch(visit, [(visit // L + 1950) % 3])
    assert drain(long, 2000 * L) == drain(short, 50 * L)


def test_an_old_subject_is_forgotten():
    first = {}
    for which in (LayerLfu(), RecentLfu(decay=0.9)):
        which.begin(L, E)
        for at, key in enumerate([0] * 30 + [1] * 20):
            which.touch(at * L, [key])
        first[which.name] = which.victim(50 * L, frozenset())
    assert first == {"layer-lfu": 1, "recent-lfu": 0}


def test_heaps_do_not_grow_with_the_run():
    for name in ("layer-lfu", "hot-pin"):
        p = begun(policy(name))
        for visit in range(3000):
            p.touch(visit, [visit % L * E])
        assert len(p.heap) < 200


def test_unknown_policies_and_options_are_refused():
    with pytest.raises(ContractError, match="no such eviction policy.*'arc'.*'lru'"):
        policy("arc")
    with pytest.raises(ContractError, match="no such option of this policy; field: lru"):
        policy("lru", decay=0.5)
    for bad in ({"hot_per_layer": -1}, {"decay": 1.5}, {"update_interval": 0}, {"pin_bonus": -1}):
        with pytest.raises(ContractError, match="no such hot pins"):
            policy("hot-pin", **bad)
    with pytest.raises(ContractError, match="no such decay"):
        policy("expected-next-use", decay=1.0)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_victims_taken_in_one_go_are_those_taken_one_by_one(name):
    """Also who goes next, after what was spared has been put back."""
    rng = np.random.default_rng(0)
    together, alone = begun(policy(name)), begun(policy(name))
    for visit in range(200):
        layer = visit % L
        keys = (layer * E + rng.choice(E, 2, replace=False)).tolist()
        for which in (together, alone):
            which.touch(visit, keys)
        count, spared = int(rng.integers(0, 4)), frozenset(keys)
        leaving = together.victims(visit, spared)
        gone = [next(leaving, None) for _ in range(count)]
        leaving.close()
        assert gone == [alone.victim(visit, spared) for _ in range(count)]
    assert drain(together, 200) == drain(alone, 200)
