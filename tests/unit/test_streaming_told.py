"""A prediction is told by one thread and made into tickets by another: it meets the state it was made in."""

import copy
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from moelab.errors import ContractError
from moelab.models import tiny
from moelab.routes import DECODED
from moelab.streaming import P0, Cache, Prefetcher, Scheduler, Ticket, open_store, policy, write_pack
from moelab.streaming.memory.memory import ExpertMemory

SLOTS, TOP_K = 12, 4


@pytest.fixture
def store(tmp_path):
    tiny.save("qwen3_moe", tmp_path / "stock", seed=1)
    write_pack(tmp_path / "stock", tmp_path / "pack", precision="float32")
    with open_store(tmp_path / "pack") as opened:
        yield opened


def rooms(store):
    """Cache, scheduler and prefetcher, without anybody who reads."""
    size = store.layouts[0].slot_bytes
    cache = Cache(
        layers=store.layers, experts=store.experts, slot_bytes=[size] * store.layers, budget=SLOTS * size,
        policy=policy("lru"), top_k=TOP_K,
    )  # fmt: skip
    scheduler = Scheduler(max_inflight_bytes=64 * size)
    sizes = [store.nbytes(layer) for layer in range(store.layers)]
    return cache, scheduler, Prefetcher(cache, scheduler, nbytes=sizes, byte_budget=6 * sizes[0], owner="p")


def queued(scheduler):
    return {key: (live.priority, live.deadline, live.visit, live._claims) for key, live in scheduler._live.items()}


def test_told_and_taken_in_is_what_tickets_at_once_would_be(store):
    """No reader runs, so whatever is told waits until a visit, a step or a withdrawal takes it in."""
    cache, scheduler, told = rooms(store)
    memory = ExpertMemory(store, cache, scheduler, threads=0, clock=lambda: 1.0)
    other_cache, other, at_once = rooms(store)
    memory.observers.append(told.observe)
    rng, waited = random.Random(3), 0
    for step in range(60):
        memory.begin_step(told)
        for each in (scheduler, other):  # what is queued is read meanwhile
            while (started := each.next(1.0)) is not None:
                each.finish(started, 1.0, ok=True)
        at_once.begin_step()
        for layer in range(store.layers):
            ids = sorted(rng.sample(range(store.experts), TOP_K))
            memory.demand(layer, ids, phase=DECODED)
            keys = [layer * store.experts + expert for expert in ids]
            hits = other_cache.visit(layer, keys, phase=DECODED)
            at_once.observe(keys, hits)
            for key in (key for key, hit in zip(keys, hits, strict=True) if not hit):
                asked = Ticket(key=key, layer=layer, priority=P0, owner="demand", generation=0, deadline=1.0,
                               nbytes=store.nbytes(layer))  # fmt: skip
                other.submit(asked, 1.0)
            other.cancel_stale(other_cache.now)
            candidates = [(rng.randrange(store.layers), rng.randrange(store.experts), rng.random()) for _ in range(5)]
            due = {target: rng.uniform(0.5, 3.0) for target in range(store.layers)}
            memory.predict(told, candidates, due=due.get)
            for ticket in at_once.tickets(candidates, 1.0, due=due.get):
                other.submit(ticket, 1.0)
            memory.release(keys)
            other_cache.release(keys)
            if rng.random() < 0.2:
                memory.cancel(owner="p", generation=step)
                other.cancel("p", step)
        waited += told.counters.candidates < at_once.counters.candidates
    assert waited > 30  # at most ends of a step the last predictions had no tickets yet
    memory.catch_up()
    assert told.counters.suppressed == at_once.counters.suppressed
    assert (told.counters.issued, told.left) == (at_once.counters.issued, at_once.left)
    assert queued(scheduler) == queued(other) and cache._expected.keys == other_cache._expected.keys
    assert told.counters.fate == at_once.counters.fate
    assert told.counters.issued > 50 and all(told.counters.suppressed[why] for why in ("too_late", "on_its_way"))
    memory.close()


def test_a_wrong_candidate_is_refused_where_it_is_named(store):
    cache, scheduler, told = rooms(store)
    memory = ExpertMemory(store, cache, scheduler, threads=0)
    with pytest.raises(ContractError, match="no such candidate"):
        memory.predict(told, [(0, store.experts, 1.0)])
    memory.catch_up()
    assert told.counters.candidates == memory.prefetch_errors == 0
    memory.close()


def test_an_error_of_a_deadline_is_raised_where_it_is_told(store):
    cache, scheduler, told = rooms(store)
    memory = ExpertMemory(store, cache, scheduler, threads=0)

    def due(layer):
        if layer == 1:
            raise ValueError("no clock")
        return 5.0

    with pytest.raises(ValueError, match="no clock"):
        memory.predict(told, [(0, 3, 1.0), (1, 3, 0.5)], due=due)
    memory.catch_up()
    assert (told.counters.candidates, told.left, memory.prefetch_errors) == (0, told.byte_budget, 0)
    assert not queued(scheduler) and not cache._expected.keys
    memory.close()


def test_an_error_of_a_prediction_is_counted_and_readers_go_on(store, monkeypatch):
    cache, scheduler, told = rooms(store)
    memory = ExpertMemory(store, cache, scheduler, threads=2)
    with monkeypatch.context() as patch:
        patch.setattr(told, "tickets_of", lambda *_, **__: 1 / 0)
        memory.predict(told, [(0, 3, 1.0)])
        memory.catch_up()
    assert memory.prefetch_errors == 1 and "division by zero" in str(memory.prefetch_error)
    memory.predict(told, [(0, 5, 1.0)])
    memory.drain()
    assert cache.slot(5) is not None and memory.prefetch_errors == 1
    memory.close()


def test_what_was_told_protects_before_a_slot_is_taken(store):
    """The thread that waits for a demand evicts for it: not the resident that a prediction has named meanwhile."""
    cache, scheduler, told = rooms(store)
    memory = ExpertMemory(store, cache, scheduler, threads=0)
    for layer in range(store.layers):
        demand = memory.demand(layer, list(range(SLOTS // store.layers)), phase=DECODED)
        demand.wait()
        memory.release(demand.keys)
    demand = memory.demand(0, [store.experts - 1], phase=DECODED)
    oldest = copy.deepcopy(cache).reserve(store.experts - 1, speculative=False).evicted[0]
    memory.predict(told, [(*divmod(oldest, store.experts), 1.0)])
    demand.wait()
    assert cache.slot(oldest) is not None
    memory.close()


def test_what_is_retired_reads_nothing_any_more(store):
    cache, scheduler, told = rooms(store)
    memory = ExpertMemory(store, cache, scheduler, threads=0)
    memory.predict(told, [(0, 3, 1.0)])
    memory.begin_step(told)  # another generation
    memory.predict(told, [(1, 4, 1.0), (1, 5, 1.0)])
    counters = memory.retire(told)
    assert scheduler.pending == 0 and counters.fate["withdrawn"] == 3 and counters.read_bytes == 0
    memory.close()


def test_nobody_waits_for_what_nobody_reads(store):
    """A closed memory is not drained, and an expert whose read was withdrawn is not waited for."""
    cache, scheduler, told = rooms(store)
    memory = ExpertMemory(store, cache, scheduler, threads=0)
    demand = memory.demand(0, [1, 2], phase=DECODED)
    memory.give_up()
    with pytest.raises(ContractError, match=r"nobody reads this expert any more.*\(0, [12]\)"):
        demand.wait()
    memory.predict(told, [(1, 4, 1.0)])
    waiting = []
    with ThreadPoolExecutor(1) as pool:
        drained = pool.submit(memory.drain)
        while not scheduler.pending:
            time.sleep(1e-3)
        memory.close()
        waiting.append(drained.exception(timeout=10))
    assert isinstance(waiting[0], ContractError) and "closed" in str(waiting[0])


def test_a_request_leaves_no_demand_behind(store):
    cache, scheduler, _ = rooms(store)
    memory = ExpertMemory(store, cache, scheduler, threads=0)
    memory.demand(0, [1, 2, 3], phase=DECODED)
    memory.reset_request()
    assert scheduler.pending == 0 and not cache._holds.keys
    memory.close()


def test_a_failing_prediction_takes_no_other_along(store):
    """What was told after it, and what it had asked for before it failed."""
    cache, scheduler, told = rooms(store)
    memory, real = ExpertMemory(store, cache, scheduler, threads=0), scheduler.submit

    def submit(ticket, now):
        if ticket.key == 3:
            raise ValueError("not this one")
        return real(ticket, now)

    scheduler.submit = submit
    memory.predict(told, [(0, 2, 0.9), (0, 3, 0.8)])
    memory.predict(told, [(0, 5, 0.7)])
    memory.catch_up()
    assert memory.prefetch_errors == 1 and set(queued(scheduler)) == {2, 5} and not memory._told
    memory.close()


def test_drain_waits_for_what_was_only_told(store):
    cache, scheduler, told = rooms(store)
    memory = ExpertMemory(store, cache, scheduler, threads=1)
    for expert in range(6):
        memory.predict(told, [(1, expert, 1.0)])
    memory.drain()
    assert all(cache.slot(store.experts + expert) is not None for expert in range(6)) and not memory._told
    memory.close()
