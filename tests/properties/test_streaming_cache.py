"""The cache under any order of calls: one owner a slot, bytes within the budget, nothing held ever evicted."""

import numpy as np
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moelab.errors import ContractError
from moelab.flywheel.residency import Visits, replay
from moelab.routes import DECODED, PREFILLED
from moelab.streaming.cache.cache import Cache
from moelab.streaming.cache.eviction import POLICIES, policy

L, E, K = 4, 6, 2
SIZES = (5, 8, 5, 8)
CYCLE = K * sum(SIZES)
KEYS = st.integers(0, L * E - 1)


def known(chooser):
    """Keys that a policy takes for resident."""
    if chooser.name == "lru":
        return set(chooser.order)
    if chooser.name == "layer-staleness":
        return set(chooser.used)
    if chooser.name == "expected-next-use":
        return set(np.flatnonzero(chooser.held).tolist())
    return set(chooser.rank)


class CacheMachine(RuleBasedStateMachine):
    """A caller that visits, reads, fails, predicts and forgets in any order, beside a plain record of what it did."""

    @initialize(name=st.sampled_from(sorted(POLICIES)), extra=st.integers(0, 80), pins=st.sets(KEYS, max_size=3))
    def make(self, name, extra, pins):
        try:
            self.cache = Cache(
                layers=L, experts=E, slot_bytes=SIZES, budget=CYCLE + extra, policy=policy(name), top_k=K, pins=pins
            )  # fmt: skip
        except ContractError as error:  # pins that leave no room for a token
            assert error.field == "budget, pins"
            assume(False)
        self.pins, self.where, self.flights, self.old = pins, {}, {}, []
        self.leases, self.wanted, self.expected = {}, set(), {}
        self.lookups = self.hits = self.reads = self.evictions = 0

    def protected(self):
        return set(self.leases) | self.wanted | set(self.flights) | (self.pins & set(self.where))

    @rule(layer=st.integers(0, L - 1), data=st.data(), phase=st.sampled_from([PREFILLED, DECODED]))
    def visit(self, layer, data, phase):
        room = self.cache.room(layer)
        keys = data.draw(
            st.lists(st.integers(layer * E, layer * E + E - 1), unique=True, max_size=max(0, min(room, E)))
        )
        before = self.cache.now
        hits = self.cache.visit(layer, keys, phase=phase)
        assert self.cache.now % L == layer and before <= self.cache.now <= before + L
        if self.cache.now != before:
            self.wanted = {key for key in self.wanted if key // E != layer}
        self.expected = {key: until for key, until in self.expected.items() if until > self.cache.now}
        assert hits == [key in self.where for key in keys]
        for key, hit in zip(keys, hits, strict=True):
            if hit:
                self.leases[key] = self.leases.get(key, 0) + 1
            else:
                self.wanted.add(key)
        self.lookups += len(keys)
        self.hits += sum(hits)

    @rule(key=KEYS, speculative=st.booleans())
    def reserve(self, key, speculative):
        if key in self.where or key in self.flights:
            with pytest.raises(ContractError, match="this expert has a slot"):
                self.cache.reserve(key, speculative=speculative)
            return
        protected = self.protected()
        grant = self.cache.reserve(key, speculative=speculative)
        layer = key // E
        if grant is None:
            full = [k for k in [*self.where, *self.flights] if SIZES[k // E] == SIZES[layer]]
            if not self.cache._pools.parts[0].policy.partitioned:
                assert len(full) == self.cache.pool_slots[self.cache.pool_of(layer)]
                free = [k for k in full if k not in protected and not (speculative and k in self.expected)]
                assert not free
            return
        for victim in grant.evicted:
            assert victim not in protected
            assert not (speculative and victim in self.expected)
            assert SIZES[victim // E] == SIZES[layer]  # it never leaves the pool
            assert self.where.pop(victim) == (grant.pool, grant.slot)
            self.evictions += 1
        assert 0 <= grant.slot < self.cache.pool_slots[grant.pool]
        self.flights[key] = (grant, speculative)

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), ok=st.booleans())
    def land(self, data, ok):
        key = data.draw(st.sampled_from(sorted(self.flights)))
        grant, _ = self.flights.pop(key)
        assert (self.cache.settle if ok else self.cache.abandon)(key, grant.generation)
        self.old.append(grant)
        if ok:
            self.where[key] = (grant.pool, grant.slot)
            self.reads += 1

    @precondition(lambda self: self.old)
    @rule(data=st.data(), ok=st.booleans())
    def a_completion_comes_twice(self, data, ok):
        grant = data.draw(st.sampled_from(self.old))
        assert not (self.cache.settle if ok else self.cache.abandon)(grant.key, grant.generation)

    @rule(key=KEYS)
    def lease_and_release(self, key):
        if key not in self.where:
            with pytest.raises(ContractError, match="only a resident"):
                self.cache.lease([key])
        else:
            self.cache.lease([key])
            self.leases[key] = self.leases.get(key, 0) + 1
            self.wanted.discard(key)

    @rule(key=KEYS)
    def release(self, key):
        if key in self.leases:
            self.cache.release([key])
            self.leases[key] -= 1
            if not self.leases[key]:
                del self.leases[key]
        elif key in self.wanted:
            self.cache.release([key])
            self.wanted.discard(key)
        else:
            with pytest.raises(ContractError, match="not leased"):
                self.cache.release([key])

    @rule(keys=st.sets(KEYS, max_size=4), ahead=st.integers(0, 2 * L))
    def expect(self, keys, ahead):
        until = self.cache.now + ahead
        self.cache.expect(keys, until)
        for key in keys:
            self.expected[key] = max(until, self.expected.get(key, -2))

    @rule(keys=st.sets(KEYS, max_size=4))
    def unexpect(self, keys):
        self.cache.unexpect(keys)
        for key in keys:
            self.expected.pop(key, None)

    @rule()
    def reset(self):
        self.cache.reset_request()
        self.leases, self.wanted, self.expected = {}, set(), {}

    @invariant()
    def every_slot_has_one_owner(self):
        owners = [*self.where.values(), *((g.pool, g.slot) for g, _ in self.flights.values())]
        assert len(set(owners)) == len(owners)
        assert self.cache.resident() == sorted(self.where)
        assert all(self.cache.slot(key) == slot for key, (_, slot) in self.where.items())
        assert all(self.cache.in_flight(key) == grant for key, (grant, _) in self.flights.items())

    @invariant()
    def bytes_hold_at_every_moment(self):
        used = sum(SIZES[key // E] for key in [*self.where, *self.flights])
        assert used == self.cache.occupied_bytes <= self.cache.high_water_bytes <= self.cache.budget
        assert sum(n * SIZES[p] for p, n in enumerate(self.cache.pool_slots)) <= self.cache.budget

    @invariant()
    def counters_add_up(self):
        c = self.cache.counters()
        assert (c.lookups, c.hits, c.evictions) == (self.lookups, self.hits, self.evictions)
        assert c.demand_reads + c.prefetch_reads == self.reads
        assert c.prefetch_used <= c.prefetch_reads and c.prefetch_late <= c.prefetch_used
        unused = len(self.cache._unused)
        assert c.prefetch_reads == c.prefetch_used + c.evictions_unused + unused
        both = self.cache.counters(PREFILLED) + self.cache.counters(DECODED)
        assert both == c

    @invariant()
    def the_policy_knows_the_residents(self):
        parts = self.cache._pools.parts
        told = set().union(*(known(part.policy) for part in parts))
        assert set(self.where) - self.pins <= told
        assert told - set(self.where) <= self.wanted | set(self.flights)

    @invariant()
    def holds_are_what_was_asked_for(self):
        held = set(self.leases) | self.wanted | set(self.flights)
        assert set(self.cache._holds.keys) == held
        assert self.cache._holds.here == [len({k for k in held - self.pins if k // E == layer}) for layer in range(L)]
        assert self.cache._expected.keys == self.expected


CacheMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCache = CacheMachine.TestCase


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("per_layer", [2, 3, 5])
def test_demand_only_hits_are_the_replay(name, per_layer):
    rng = np.random.default_rng(per_layer)
    noise = rng.gumbel(size=(150, L, E)) + rng.normal(size=(L, E))
    ids = np.argsort(-noise, axis=-1)[..., :K]
    thread, prefilled = np.zeros(150), np.arange(150) % 50 < 2
    visits = Visits.of(ids, E, thread, prefilled=prefilled)
    run = replay(visits, np.full(L, 7), budget=L * per_layer * 7, policy=policy(name), record=True)
    cache = Cache(layers=L, experts=E, slot_bytes=[7] * L, budget=L * per_layer * 7, policy=policy(name), top_k=K)
    at = 0
    for visit in range(len(visits.offsets) - 1):
        keys = visits.keys[visits.offsets[visit] : visits.offsets[visit + 1]].tolist()
        row, layer = visits.first_row[visit // L], visit % L
        mine = [key for key in cache.resident() if key // E == layer]
        held = np.flatnonzero(np.unpackbits(run.resident[row, layer], count=E)) + layer * E
        if len(keys) > cache.room(layer):
            break  # a prompt that does not fit: see the next test
        assert mine == held.tolist()
        hits = cache.visit(layer, keys, phase=DECODED)
        for key, hit in zip(keys, hits, strict=True):
            if not hit:
                assert cache.reserve(key, speculative=False) is not None
                cache.settle(key)
        cache.release(keys)
        at = visit
    assert at + 1 == len(visits.offsets) - 1 or per_layer < 4
    if at + 1 == len(visits.offsets) - 1:
        assert cache.counters().miss_bytes == run.read_bytes.sum() == cache.counters().read_bytes


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_prompt_that_does_not_fit_hits_what_the_replay_hits(name):
    """Residents first: a visit in groups finds everything that was there before it."""
    size = 10
    cache = Cache(layers=2, experts=E, slot_bytes=[size] * 2, budget=5 * size, policy=policy(name), top_k=2)
    for layer, keys in ((0, [0, 1]), (1, [6, 7]), (0, [2, 3])):
        for key, hit in zip(keys, cache.visit(layer, keys, phase=DECODED), strict=True):
            if not hit:
                cache.reserve(key, speculative=False)
                cache.settle(key)
        cache.release(keys)
    before = set(cache.resident())
    prompt = [9, 6, 11, 8, 7, 10]
    with pytest.raises(ContractError, match="more experts than slots.*`groups`"):
        cache.visit(1, prompt, phase=PREFILLED)
    found = {}
    for group in cache.groups(1, prompt):
        hits = cache.visit(1, group, phase=PREFILLED)
        found |= dict(zip(group, hits, strict=True))
        for key, hit in zip(group, hits, strict=True):
            if not hit:
                assert cache.reserve(key, speculative=False) is not None
                cache.settle(key)
        assert all(cache.slot(key) is not None for key in group)  # the group is there together
        cache.release(group)
    assert {key for key, hit in found.items() if hit} == before & set(prompt)
    assert sorted(found) == sorted(prompt)
    assert cache.now == 3  # one visit
