"""Candidates to tickets, and the fate of each; the books agree with the cache's own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.errors import ContractError
from moelab.routes import DECODED
from moelab.streaming.cache.cache import Cache
from moelab.streaming.cache.eviction import HotPin, policy
from moelab.streaming.schedule.prefetch import Prefetcher
from moelab.streaming.schedule.schedule import P0, P1, P2, Scheduler, Ticket

L, E, K, SIZE = 3, 8, 2, 10


class World:
    """Cache, scheduler and prefetcher with a clock that the test moves; reads take as long as the test says."""

    def __init__(self, slots=12, which="lru", **options):
        self.cache = Cache(
            layers=L, experts=E, slot_bytes=[SIZE] * L, budget=slots * SIZE,
            policy=policy(which) if isinstance(which, str) else which, top_k=K,
        )  # fmt: skip
        self.scheduler = Scheduler(max_inflight_bytes=6 * SIZE)
        self.prefetcher = Prefetcher(
            self.cache, self.scheduler, nbytes=[SIZE] * L, **{"byte_budget": 100 * SIZE} | options
        )  # fmt: skip
        self.flying, self.now = [], 0.0

    def issue(self, *candidates, **options):
        tickets = self.prefetcher.tickets(candidates, self.now, **options)
        for ticket in tickets:
            self.scheduler.submit(ticket, self.now)
        return [(t.layer, t.key % E) for t in tickets]

    def start(self):
        while (ticket := self.scheduler.next(self.now)) is not None:
            if self.cache.reserve(ticket.key, speculative=ticket.priority != P0) is None:
                self.scheduler.postpone(ticket, self.now)
                if ticket.priority == P0:
                    break
            else:
                self.flying.append(ticket)

    def land(self, count=None, ok=True):
        for ticket in self.flying[:count]:
            self.scheduler.finish(ticket, self.now, ok)
            (self.cache.settle if ok else self.cache.abandon)(ticket.key)
        del self.flying[:count]

    def visit(self, layer, *experts):
        keys = [layer * E + e for e in experts]
        hits = self.cache.visit(layer, keys, phase=DECODED)
        self.prefetcher.observe(keys, hits)
        for key, hit in zip(keys, hits, strict=True):
            if not hit:
                self.scheduler.submit(
                    Ticket(
                        key=key, layer=layer, priority=P0, owner="demand", generation=0, deadline=self.now, nbytes=SIZE
                    ),
                    self.now,
                )  # fmt: skip
        self.scheduler.cancel_stale(self.cache.now)
        while not all(self.cache.slot(key) is not None for key in keys):
            self.start()
            self.land()
        self.cache.release(keys)
        return hits

    def fates(self):
        return {fate: n for fate, n in self.prefetcher.close().fate.items() if n}


def test_the_most_confident_get_the_bytes_and_every_refusal_has_a_reason():
    w = World(byte_budget=2 * SIZE, threshold=0.3)
    w.visit(0, 0)
    w.scheduler.submit(Ticket(key=E + 1, layer=1, priority=P0, owner="x", generation=0, deadline=0, nbytes=SIZE), 0)
    due = {0: 9.0, 1: 9.0, 2: 0.0}.get
    got = w.issue(
        (1, 2, 0.4), (1, 3, 0.9), (1, 4, 0.5), (1, 3, 0.1), (1, 5, 0.2), (0, 0, 1.0), (1, 1, 1.0), (2, 0, 1.0), due=due
    )
    assert got == [(1, 3), (1, 4)]
    c = w.prefetcher.counters
    assert c.suppressed == {"confidence": 1, "resident": 1, "on_its_way": 1, "too_late": 1, "budget": 1}
    assert c.candidates == 7 == c.issued + sum(c.suppressed.values())
    assert c.issued_bytes == 2 * SIZE
    assert w.issue((2, 1, 1.0)) == []  # the step's budget is spent
    w.prefetcher.begin_step()
    assert w.issue((2, 1, 1.0)) == [(2, 1)]
    assert w.scheduler.ticket(2 * E + 1).generation == 1


def test_deadlines_are_the_next_visit_and_the_time_given():
    w = World()
    w.visit(1, 0)  # visit 1
    w.issue((1, 3, 1.0), (2, 3, 0.5), due={1: 8.0, 2: 4.0}.get)
    w.issue((0, 3, 0.5), passes_ahead=2)
    tickets = {t.key: (t.visit, t.deadline) for t in map(w.scheduler.ticket, (E + 3, 2 * E + 3, 3))}
    assert tickets == {E + 3: (4, 8.0), 2 * E + 3: (2, 4.0), 3: (3 + 2 * L, float("inf"))}


def test_each_fate():
    w = World()
    w.issue((0, 0, 0.9), (1, 0, 0.8), (1, 1, 0.7))
    w.start()
    w.land(1)
    assert w.visit(0, 0) == [True]  # read in time
    assert w.visit(1, 0, 2) == [False, False]  # 0 is still being read
    w.issue((2, 0, 0.9), (2, 1, 0.5))
    assert w.visit(2, 0) == [False]  # asked for before its read began; 1 is withdrawn, its visit has come
    w.issue((0, 5, 0.9))
    w.start()
    w.land(ok=False)
    c = w.prefetcher.counters
    assert w.fates() == {"useful": 1, "late": 1, "overtaken": 1, "wasted": 1, "withdrawn": 1, "failed": 1}
    assert (c.selected, c.ready, c.ready_by_prefetch) == (4, 1, 1)
    assert (c.timely_recall, c.timely_miss_recall) == (1 / 4, 1 / 4)
    assert c.useful_prefetch_ratio == 2 / 4  # useful and late, of those and the wasted and the failed
    cache = w.cache.counters()
    assert (cache.prefetch_bytes, cache.prefetch_used_bytes, cache.prefetch_late_bytes) == (30, 20, 10)
    assert cache.useful_prefetch_ratio == 2 / 3  # a failed read brought no bytes


def test_none_of_many_in_time_is_a_timely_recall_of_nothing():
    """As measured elsewhere: 725 preloads issued at their layer's turn, none ready, and all of them paid for."""
    w = World(slots=L * E)
    for layer, expert in [(layer, expert) for expert in range(E) for layer in range(L)]:
        w.issue((layer, expert, 1.0))
        w.start()
        assert w.visit(layer, expert) == [False]
    c = w.prefetcher.close()
    assert c.fate["late"] == c.issued == L * E and c.timely_recall == 0.0 == c.timely_miss_recall
    assert c.useful_prefetch_ratio == 1.0  # the bytes were used: only time tells that nothing was won


def test_an_urgent_prediction_raises_a_distant_ticket_without_new_bytes():
    w = World()
    far = Prefetcher(w.cache, w.scheduler, nbytes=[SIZE] * L, byte_budget=SIZE, priority=P2, owner="far")
    w.scheduler.submit(far.tickets([(1, 4, 0.2)], 0.0)[0], 0.0)
    assert w.issue((1, 4, 0.9), due=lambda layer: 3.0) == [(1, 4)]
    live = w.scheduler.ticket(E + 4)
    assert (live.priority, live.deadline, live.confidence, live.owner) == (P1, 3.0, 0.9, "far")
    assert (w.prefetcher.counters.raised, w.prefetcher.counters.issued, w.scheduler.pending) == (1, 0, 1)
    assert w.scheduler.cancel("far", 0) == 1 and w.scheduler.pending == 1  # the near one still wants it


def test_predictions_protect_what_is_resident_until_their_visit_comes():
    def after(confidence, protect):
        w = World(slots=6, threshold=0.5, protect=protect)
        for layer, pair in ((0, (0, 1)), (1, (0, 1)), (2, (0, 1))):
            w.visit(layer, *pair)
        w.issue((1, 0, confidence))  # for visit 4
        w.visit(0, 2, 3)
        w.visit(0, 4, 5)  # a second group: four go, 0, 1 and layer 1's 0, 1, unless one is expected
        return w.cache.slot(E) is not None

    assert after(0.9, True) and not after(0.9, False) and not after(0.4, True)


def test_a_prediction_changes_what_hot_pin_keeps():
    kept = {}
    for bonus in (0.0, 2.0):
        w = World(slots=6, which=HotPin(hot_per_layer=1, update_interval=1, pin_bonus=bonus), protect=True)
        w.visit(0, 0, 1)
        w.visit(1, 0, 1)
        w.issue((0, 1, 1.0))  # for visit 3, in which 1 has a bonus
        w.visit(0, 0, 1)
        kept[bonus] = w.cache._pools.parts[0].policy.hot[0]
    assert kept == {0.0: {0}, 2.0: {1}}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(6, 20), which=st.sampled_from(["lru", "layer-lfu", "hot-pin"]))
def test_every_ticket_has_one_fate_and_the_books_agree(seed, slots, which):
    rng = np.random.default_rng(seed)
    w = World(slots=slots, which=which, byte_budget=4 * SIZE, threshold=0.2)
    for _ in range(15):
        w.prefetcher.begin_step()
        for layer in range(L):
            w.now += float(rng.random())
            wishes = [(int(rng.integers(L)), int(rng.integers(E)), float(rng.random())) for _ in range(3)]
            w.issue(*wishes, due=lambda layer: w.now + 2.0)
            w.start()
            w.land(int(rng.integers(0, 4)))
            w.visit(layer, *rng.permutation(E)[:K].tolist())
    c, cache = w.prefetcher.close(), w.cache.counters()
    assert sum(c.fate.values()) == c.issued
    assert c.candidates == c.issued + c.raised + sum(c.suppressed.values())
    assert c.fate_bytes["useful"] + c.fate_bytes["late"] == cache.prefetch_used_bytes
    assert c.fate_bytes["late"] == cache.prefetch_late_bytes
    assert c.selected == cache.lookups and c.ready == cache.hits
    inflight = sum(t.nbytes for t in w.flying)
    assert c.read_bytes == cache.prefetch_bytes + inflight


def test_impossible_prefetchers_and_candidates_are_refused():
    for bad in ({"threshold": 1.5}, {"byte_budget": -1}, {"priority": P0}):
        with pytest.raises(ContractError, match="no such prefetcher"):
            World(**bad)
    wrong = ((L, 0, 0.5), (0, E, 0.5), (0, 0, 1.5), (-1, 0, 0.5), (0, 0, float("nan")), (0, 0.5, 1.0), (None, 0, 0.5))
    for bad in wrong:
        with pytest.raises(ContractError, match="no such candidate"):
            World().issue(bad)
