"""Cache replay against a slow cache that scans everything, on routes of unequal sizes."""

import time

import numpy as np
import pytest

from moelab.errors import ContractError, GeometryError
from moelab.flywheel.foresight import Lookahead, Opt
from moelab.flywheel.residency import Visits, replay
from moelab.streaming.cache.eviction import ExpectedNextUse, HotPin, LayerLfu, LayerStaleness, Lru, RecentLfu

L, E, K = 3, 8, 2
SIZES = np.array([5, 7, 4])


def routes(seed=0, tokens=60):
    """Skewed routes of two threads, some prompt rows and some absent slots."""
    rng = np.random.default_rng(seed)
    noise = rng.gumbel(size=(tokens, L, E)) + 1.5 * rng.normal(size=(L, E))
    ids = np.argsort(-noise, axis=-1)[..., :K]
    mask = rng.random(ids.shape) > 0.1
    thread = np.arange(tokens) >= tokens // 2
    at = np.arange(tokens) % (tokens // 2)
    prefilled = (at < 6) | (at == tokens // 2 - 1)  # a thread may end in its prompt, and the next begin with one
    return ids, mask, thread.astype(int), prefilled


def slow_visits(ids, mask, thread, prefilled):
    """[(rows, layer, keys in order of last mention)]"""
    passes = []
    for t in range(len(ids)):
        if t and prefilled[t] and prefilled[t - 1] and thread[t] == thread[t - 1]:
            passes[-1].append(t)
        else:
            passes.append([t])
    out = []
    for rows in passes:
        for layer in range(L):
            keys = []
            for t in rows:
                for k in range(K):
                    if mask[t, layer, k]:
                        key = layer * E + int(ids[t, layer, k])
                        if key in keys:
                            keys.remove(key)
                        keys.append(key)
            out.append((rows, layer, keys))
    return out


def slow(policy, visits, budget):
    """Hits of each slot and bytes of each pass, by definition: scan all residents for the worst."""
    held, last, uses, clock, share, used_at, counts, hot = set(), {}, {}, 0, {}, {}, {}, set()
    hits, read, resident = {}, {}, {}

    def next_use(key, v):
        return next((w for w in range(v + 1, len(visits)) if key in visits[w][2]), 10**9)

    def badness(key, v):
        if policy.name == "lru":
            return (-last[key],)
        if policy.name in ("layer-lfu", "recent-lfu"):
            return (-uses[key], -last[key])
        if policy.name == "opt":
            return (next_use(key, v), -key)
        if policy.name == "layer-staleness":
            turns = [w for w in range(used_at[key] + 1, v + 1) if w % L == key // E]
            wait = next(w for w in range(1, L + 1) if (v + w) % L == key // E)
            return (len(turns), wait, -last[key])
        if policy.name == "hot-pin":
            return (key not in hot, -last[key])
        if policy.name.startswith("lookahead"):
            n = next_use(key, v)
            if n > v + policy.tokens * L:
                return (1, -uses[key] if policy.frequent else 0, -last[key])
            return (0, n, -key)
        p = max(share.get(key, 0), 1e-6)
        wait = next(w for w in range(1, L + 1) if (v + w) % L == key // E)
        return (wait + L * (1 - p) / p, -key)

    for v, (rows, layer, keys) in enumerate(visits):
        for t in rows:
            resident[t, layer] = {key for key in held if key // E == layer}
        for key in keys:
            hits[v, key] = key in held
            if key not in held:
                read[rows[0]] = read.get(rows[0], 0) + int(SIZES[layer])
            clock += 1
            held.add(key)
            last[key] = clock
            uses[key] = uses.get(key, 0) + policy.decay ** -(v // L) if policy.partitioned else uses.get(key, 0) + 1
            used_at[key] = v
            if policy.name == "hot-pin":
                counts[key] = counts.get(key, 0) * policy.decay + 1
        if policy.name == "hot-pin" and (v // L + 1) % policy.update_interval == 0:
            ranked = sorted((k for k in counts if k // E == layer), key=lambda k: (-counts[k], k))
            hot = {k for k in hot if k // E != layer} | set(ranked[: policy.hot_per_layer])
        if policy.name == "expected-next-use":
            for e in range(E):
                key = layer * E + e
                share[key] = share.get(key, 0) * policy.decay + (1 - policy.decay) * (key in keys)

        def over(layer=layer):
            if policy.partitioned:
                return sum(SIZES[k // E] for k in held if k // E == layer) > budget / L
            return sum(SIZES[k // E] for k in held) > budget

        while over():
            mine = [k for k in held if not policy.partitioned or k // E == layer]
            others = mine if policy.name == "opt" else [k for k in mine if k not in keys] or mine
            held.remove(max(others, key=lambda k: badness(k, v)))
    return hits, read, resident


POLICIES = [
    Lru(),
    LayerLfu(),
    ExpectedNextUse(decay=0.8),
    RecentLfu(decay=0.5),  # a power of two: counts that tie by hand tie in floats
    LayerStaleness(),
    HotPin(hot_per_layer=2, decay=0.9, update_interval=3),
    HotPin(hot_per_layer=0),
    Lookahead(tokens=1),
    Lookahead(tokens=4),
    Lookahead(tokens=2, fallback="lfu"),
    Opt(),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{vars(p)}")
@pytest.mark.parametrize("budget", [12, 30, 55, 200])
def test_every_policy_against_a_full_scan(policy, budget):
    ids, mask, thread, prefilled = routes(budget)
    visits = slow_visits(ids, mask, thread, prefilled)
    hits, read, resident = slow(policy, visits, budget)
    fast = replay(
        Visits.of(ids, E, thread, prefilled=prefilled, mask=mask), SIZES, budget=budget, policy=policy, record=True
    )
    for v, (rows, layer, _) in enumerate(visits):
        for t in rows:
            for k in range(K):
                expected = bool(mask[t, layer, k]) and hits[v, layer * E + ids[t, layer, k]]
                assert fast.hits[t, layer, k] == expected, (t, layer, k)
            bits = np.unpackbits(fast.resident[t, layer], count=E)
            assert set(np.flatnonzero(bits) + layer * E) == resident[t, layer]
    assert np.array_equal(fast.misses, mask & ~fast.hits)
    assert fast.read_bytes.tolist() == [read.get(t, 0) for t in range(len(ids))]
    again = replay(Visits.of(ids, E, thread, prefilled=prefilled, mask=mask), SIZES, budget=budget, policy=policy)
    assert np.array_equal(again.hits, fast.hits)  # a policy object starts afresh
    assert again.resident is None


def test_lru_hits_nothing_below_one_token_cycle():
    ids = np.tile(np.array([0, 1]), (40, L, 1))  # every token the same experts
    visits = Visits.of(ids, E, np.zeros(40))
    cycle = int(K * SIZES.sum())
    a_visit = int(K * SIZES.max())  # the last experts of a visit return sooner than a whole cycle
    assert replay(visits, SIZES, budget=cycle - a_visit).hits.sum() == 0
    assert replay(visits, SIZES, budget=cycle).hits[1:].all()
    assert replay(visits, SIZES, budget=cycle - a_visit, policy=Opt()).hits[1:].mean() > 0.4


def test_knowing_more_never_hits_less():
    ids, mask, thread, prefilled = routes(7, tokens=200)
    visits = Visits.of(ids, E, thread, prefilled=prefilled, mask=mask)
    size = np.ones(L, int)  # equal sizes: Belady is optimal
    for budget in (5, 8, 12, 18):
        best = replay(visits, size, budget=budget, policy=Opt()).hits.mean()
        for policy in (Lru(), LayerLfu(), LayerStaleness(), HotPin(), ExpectedNextUse(), Lookahead(tokens=2)):
            assert replay(visits, size, budget=budget, policy=policy).hits.mean() <= best


def test_bad_arguments_are_refused():
    ids, mask, thread, prefilled = routes()
    visits = Visits.of(ids, E, thread)
    with pytest.raises(ContractError, match="needs bytes"):
        replay(visits, SIZES, budget=0)
    with pytest.raises(GeometryError, match="one size a layer"):
        replay(visits, SIZES[:2], budget=10)
    for wrong in (
        dict(thread=thread[1:]),
        dict(thread=thread, prefilled=prefilled[1:]),
        dict(thread=thread, mask=mask[1:]),
    ):
        with pytest.raises(GeometryError, match="arrays disagree"):
            Visits.of(ids, E, **wrong)
    for make in (
        lambda: Lookahead(tokens=0),
        lambda: Lookahead(tokens=1, fallback="fifo"),
        lambda: ExpectedNextUse(decay=1.0),
    ):
        with pytest.raises(ContractError):
            make()


def test_lru_replays_a_hundred_thousand_lookups_a_second():
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((400, 24, 64)), axis=-1)[..., :8]
    visits = Visits.of(ids, 64, np.zeros(400))
    start = time.process_time()  # CPU time: the machine may be shared
    replay(visits, np.full(24, 1000), budget=1000 * 24 * 16)
    assert len(visits.keys) / (time.process_time() - start) > 100_000
