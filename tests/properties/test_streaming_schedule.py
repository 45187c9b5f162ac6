"""The scheduler under any order of calls with a clock of its own, and 1,000 requests from threads with cancels."""

import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moelab.errors import ContractError
from moelab.streaming.cache.cache import Cache
from moelab.streaming.cache.eviction import policy
from moelab.streaming.schedule.schedule import P0, P1, P2, Scheduler, Ticket

LIMIT = 100
OWNERS = st.sampled_from([("a", 0), ("a", 1), ("b", 0)])


class SchedulerMachine(RuleBasedStateMachine):
    """Claims by key beside the scheduler: what is queued, what is in flight, and who wants it."""

    @initialize(reserve=st.integers(0, LIMIT))
    def make(self, reserve):
        self.s = Scheduler(max_inflight_bytes=LIMIT, p0_reserve_bytes=reserve)
        self.now = 0.0
        self.claims, self.size, self.started, self.ended = {}, {}, {}, 0
        self.fifo = []  # keys in the order in which they became P0
        self.outcomes = {"finished": 0, "cancelled": 0, "dropped": 0}
        self.created = 0

    def queued(self):
        return [key for key in self.size if key not in self.started]

    def best(self, key, at):
        return (min if at < 2 else max)(claim[at] for claim in self.claims[key].values())

    def gone(self, key, how):
        self.claims.pop(key)
        self.size.pop(key)
        self.started.pop(key, None)
        if key in self.fifo:
            self.fifo.remove(key)
        self.outcomes[how] += 1

    def note_priority(self, key):
        urgent = bool(self.claims[key]) and self.best(key, 0) == P0 and key not in self.started
        if urgent and key not in self.fifo:
            self.fifo.append(key)
        elif not urgent and key in self.fifo:
            self.fifo.remove(key)

    @rule(ahead=st.floats(0, 5))
    def time_passes(self, ahead):
        self.now += ahead

    @rule(
        key=st.integers(0, 7), priority=st.sampled_from([P0, P1, P2]), claimant=OWNERS, slack=st.floats(0, 9),
        confidence=st.floats(0, 1), visit=st.none() | st.integers(0, 9),
    )  # fmt: skip
    def submit(self, key, priority, claimant, slack, confidence, visit):
        nbytes = 10 + 8 * key
        ticket = Ticket(
            key=key, layer=0, priority=priority, owner=claimant[0], generation=claimant[1],
            deadline=self.now + slack, nbytes=nbytes, confidence=confidence, visit=visit,
        )  # fmt: skip
        live = self.s.submit(ticket, self.now)
        assert (live is ticket) == (key not in self.size)
        self.created += live is ticket
        self.size[key] = nbytes
        claim = (priority, self.now + slack, confidence, visit)
        old = self.claims.setdefault(key, {}).get(claimant)
        if old is not None:
            visits = [v for v in (old[3], visit) if v is not None]
            claim = (min(old[0], claim[0]), min(old[1], claim[1]), max(old[2], claim[2]), max(visits, default=None))
        self.claims[key][claimant] = claim
        self.note_priority(key)
        assert (live.priority, live.deadline, live.confidence) == tuple(self.best(key, at) for at in range(3))

    @rule(key=st.integers(0, 7))
    def raise_to_demand(self, key):
        live = self.s.raise_to_demand(key, self.now)
        assert (live is None) == (key not in self.size)
        if live is not None:
            assert live.priority == P0
            if not self.claims[key]:
                self.claims[key] = {(live.owner, live.generation): (P0, self.now, 1.0, None)}
            elif self.best(key, 0) != P0:
                self.claims[key] = {who: (P0, self.now, c[2], c[3]) for who, c in self.claims[key].items()}
            self.note_priority(key)

    def withdraw(self, key, claimant):
        del self.claims[key][claimant]
        if not self.claims[key] and key not in self.started:
            self.gone(key, "cancelled")
        else:
            self.note_priority(key)

    @rule(claimant=OWNERS)
    def cancel(self, claimant):
        mine = [key for key, claims in self.claims.items() if claimant in claims]
        assert self.s.cancel(*claimant) == len(mine)
        assert self.s.cancel(*claimant) == 0  # released once
        for key in mine:
            self.withdraw(key, claimant)

    @rule(claimant=OWNERS)
    def cancel_all_generations(self, claimant):
        owner = claimant[0]
        mine = [(key, who) for key, claims in self.claims.items() for who in claims if who[0] == owner]
        assert self.s.cancel(owner) == len(mine)
        assert self.s.cancel(owner) == 0
        for key, who in mine:
            self.withdraw(key, who)

    @rule(visit=st.integers(0, 9))
    def cancel_stale(self, visit):
        mine = [
            (key, who)
            for key, claims in self.claims.items()
            for who, (priority, _, _, of) in claims.items()
            if priority != P0 and of is not None and of <= visit
        ]
        assert self.s.cancel_stale(visit) == len(mine)
        for key, who in mine:
            self.withdraw(key, who)

    @rule(urgent=st.booleans())
    def next(self, urgent):
        inflight = sum(self.size[key] for key in self.started)
        room = LIMIT - inflight
        ticket = self.s.next(self.now, urgent_only=urgent)
        if self.fifo:  # P0 never waits behind queued P1 or P2
            first = self.fifo[0]
            assert (ticket is None) == (self.size[first] > room)
            assert ticket is None or ticket.key == first
        elif urgent:
            assert ticket is None
        else:
            for priority in (P1, P2):
                late = [k for k in self.queued() if self.best(k, 0) == priority and self.best(k, 1) < self.now]
                for key in late:
                    self.gone(key, "dropped")
                rest = [k for k in self.queued() if self.best(k, 0) == priority]
                if rest:
                    break
            if rest:
                fits = ticket is not None
                rank = {k: (self.best(k, 1), -self.best(k, 2) * (priority == P2)) for k in rest}
                best = min(rank.values())
                if fits:
                    assert rank[ticket.key] == best
                    nbytes = self.size[ticket.key]
                    assert nbytes <= room - self.s.p0_reserve_bytes or not inflight
                else:
                    least = min(self.size[k] for k in rest if rank[k] == best)
                    most = max(self.size[k] for k in rest if rank[k] == best)
                    assert inflight and (most > room - self.s.p0_reserve_bytes or least > room)
            else:
                assert ticket is None
        if ticket is not None:
            assert ticket.state == "started"
            self.started[ticket.key] = ticket
            self.note_priority(ticket.key)

    @precondition(lambda self: self.started)
    @rule(data=st.data(), ok=st.booleans())
    def finish(self, data, ok):
        key = data.draw(st.sampled_from(sorted(self.started)))
        ticket = self.started[key]
        self.s.finish(ticket, self.now, ok)
        assert ticket.state == ("done" if ok else "failed")
        with pytest.raises(ContractError, match="not in progress"):
            self.s.finish(ticket, self.now, ok)
        self.gone(key, "finished")

    @rule()
    def start_and_find_no_slot(self):
        if (ticket := self.s.next(self.now, urgent_only=True)) is None:
            return
        key = ticket.key
        assert self.fifo[0] == key
        self.s.postpone(ticket, self.now)
        assert ticket.state == "queued"
        again = self.s.next(self.now, urgent_only=True)  # where it was: first
        assert again is ticket
        self.started[key] = ticket
        self.note_priority(key)

    @invariant()
    def sums_are_of_live_tickets(self):
        inflight = sum(self.size[key] for key in self.started)
        assert self.s.inflight_bytes == inflight <= self.s.counters.high_water_bytes <= LIMIT
        assert self.s.queued_bytes == sum(self.size[key] for key in self.queued())
        assert self.s.pending == len(self.size)
        assert self.s._speculative_bytes == sum(t.nbytes for t in self.started.values() if t.started_as != P0)

    @invariant()
    def every_ticket_has_one_fate(self):
        c = self.s.counters
        assert self.outcomes["cancelled"] == c.cancelled
        assert self.outcomes["dropped"] == c.expired + c.crowded
        assert self.outcomes["finished"] == sum(c.done) + c.failed
        assert self.created == self.s.pending + sum(self.outcomes.values())
        assert {who for claims in self.claims.values() for who in claims} == set(self.s._of)

    def teardown(self):
        if not hasattr(self, "s"):
            return
        self.now = math.inf
        for owner in (("a", 0), ("a", 1), ("b", 0)):
            self.s.cancel(*owner)
        for ticket in list(self.started.values()):
            self.s.finish(ticket, 1e9, True)
        assert (self.s.pending, self.s.inflight_bytes, self.s.queued_bytes, self.s._of) == (0, 0, 0, {})


SchedulerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase

L, E, SLOT = 4, 16, 64


def test_a_thousand_requests_with_cancels_leak_nothing():
    """Threads ask, cancel and read at random; every slot always holds what the cache says it holds."""
    cache = Cache(layers=L, experts=E, slot_bytes=[SLOT] * L, budget=20 * SLOT, policy=policy("lru"), top_k=2)
    scheduler = Scheduler(max_inflight_bytes=6 * SLOT)
    slab = np.full((20, SLOT), 255, np.uint8)
    change, closed, wrong, landed = threading.Condition(), threading.Event(), [], []

    def serve(seed):
        rng = random.Random(seed)
        while True:
            with change:
                ticket = grant = None
                while ticket is None:
                    if closed.is_set():
                        return
                    if (ticket := scheduler.next(len(landed))) is None:
                        change.wait(0.01)
                grant = cache.reserve(ticket.key, speculative=ticket.priority != P0)
                if grant is None:
                    scheduler.postpone(ticket, len(landed))
                    change.wait(0.001)
                    continue
            ok = rng.random() > 0.1
            for part in range(0, SLOT, 16):  # the read, torn into pieces
                slab[grant.slot, part : part + 16] = ticket.key
                if rng.random() < 0.2:
                    closed.wait(1e-4)
            with change:
                scheduler.finish(ticket, len(landed), ok)
                landed.append(ticket.key)
                if not ok:
                    assert cache.abandon(ticket.key, grant.generation)
                else:
                    assert cache.settle(ticket.key, grant.generation)
                    if not (slab[grant.slot] == ticket.key).all():
                        wrong.append(ticket.key)
                change.notify_all()

    def ask(number):
        rng = random.Random(number)
        key, owner = rng.randrange(L * E), f"request-{number % 50}"
        priority = rng.choice([P0, P1, P2])
        with change:
            if cache.slot(key) is None:
                scheduler.submit(
                    Ticket(
                        key=key, layer=key // E, priority=priority, owner=owner, generation=number,
                        deadline=len(landed) + rng.randrange(50), nbytes=SLOT, visit=number % 7,
                    ),
                    len(landed),
                )  # fmt: skip
                change.notify()
        if rng.random() < 0.4:
            closed.wait(rng.random() * 1e-3)
            with change:
                scheduler.cancel(owner, number)
                assert scheduler.cancel(owner, number) == 0
        elif rng.random() < 0.1:
            with change:
                scheduler.cancel_stale(number % 7)
        with change:  # what is resident is whole, at any moment
            for held in cache.resident():
                if not (slab[cache.slot(held)] == held).all():
                    wrong.append(held)

    readers = [threading.Thread(target=serve, args=(seed,)) for seed in range(6)]
    for reader in readers:
        reader.start()
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(1000)))
    with change:
        assert change.wait_for(lambda: not scheduler.pending, timeout=60)
        closed.set()
        change.notify_all()
    for reader in readers:
        reader.join()
    assert not wrong
    c = scheduler.counters
    assert c.cancelled + c.cancelled_in_flight > 20 and c.failed > 5 and sum(c.done) > 100  # it did happen
    assert (scheduler.inflight_bytes, scheduler.queued_bytes, scheduler._of) == (0, 0, {})
    assert len(scheduler._live) == 0 and not cache._flight
    assert c.high_water_bytes <= 6 * SLOT
    assert cache.occupied_bytes == len(cache.resident()) * SLOT <= cache.budget
    assert cache.counters().demand_reads + cache.counters().prefetch_reads == sum(c.done)
    spent = c.demand_bytes + c.useful_bytes + c.late_bytes + c.wasted_bytes
    assert spent == SLOT * len(landed)
