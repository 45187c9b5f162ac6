"""The live memory under many threads, failing reads and closing: nothing leaks, and every slot holds its expert."""

import random
import threading
import time

import numpy as np
import pytest

from moelab.errors import ContractError, StoreError
from moelab.models import tiny
from moelab.routes import DECODED
from moelab.streaming import Cache, Prefetcher, Scheduler, VirtualDevice, open_store, policy, write_pack
from moelab.streaming.memory.memory import ExpertMemory


@pytest.fixture
def pack(tmp_path):
    tiny.save("qwen3_moe", tmp_path / "stock", seed=1)
    write_pack(tmp_path / "stock", tmp_path / "pack", precision="float32")
    return tmp_path / "pack"


def make(store, *, slots, threads=4, top_k=4):
    size = store.layouts[0].slot_bytes
    cache = Cache(
        layers=store.layers, experts=store.experts, slot_bytes=[size] * store.layers, budget=slots * size,
        policy=policy("lru"), top_k=top_k,
    )  # fmt: skip
    return ExpertMemory(store, cache, Scheduler(max_inflight_bytes=6 * size), threads=threads)


def prefetcher(memory, owner):
    sizes = [memory.store.nbytes(layer) for layer in range(memory.store.layers)]
    return Prefetcher(memory.cache, memory.scheduler, nbytes=sizes, byte_budget=1 << 40, owner=owner)


def check_contents(memory):
    """Every resident slot holds precisely its expert."""
    for key in memory.cache.resident():
        layer, expert = divmod(key, memory.store.experts)
        slot = memory.slab(layer).host[memory.cache.slot(key)]
        for name, want in memory.store.read(layer, expert).items():
            np.testing.assert_array_equal(memory.store.layouts[layer].arrays(slot)[name], want)


def test_1000_concurrent_requests_with_random_cancels_leak_nothing(pack):
    device = VirtualDevice(latency_s=2e-4, bytes_per_s=4e8)
    with open_store(pack, device=device) as store:
        memory = make(store, slots=20)
        failures = []

        def predict(number):
            rng, mine = random.Random(number), prefetcher(memory, f"owner-{number}")
            try:
                for _ in range(125):
                    mine.begin_step()
                    layer = rng.randrange(store.layers)
                    memory.predict(mine, [(layer, rng.randrange(store.experts), rng.random()) for _ in range(3)])
                    if rng.random() < 0.4:
                        memory.cancel(owner=mine.owner, generation=rng.randint(1, mine.step))
            except BaseException as error:  # a thread's error would be lost
                failures.append(error)

        threads = [threading.Thread(target=predict, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        rng = random.Random(99)
        for turn in range(300):
            layer = turn % store.layers
            demand = memory.demand(layer, rng.sample(range(store.experts), 4), phase=DECODED)
            demand.wait()
            for expert, slot in zip(demand.keys, demand.slots, strict=True):
                held = store.layouts[layer].arrays(memory.slab(layer).host[slot])
                want = store.read(layer, expert % store.experts)
                assert all(np.array_equal(held[name], want[name]) for name in want)
            memory.release(demand.keys)
        for thread in threads:
            thread.join()
        assert not failures
        memory.drain()
        scheduler, cache = memory.scheduler, memory.cache
        assert scheduler.pending == scheduler.inflight_bytes == scheduler.queued_bytes == 0
        assert cache.high_water_bytes <= cache.budget
        assert all(cache.room(layer) == 20 for layer in range(store.layers))  # nothing leased, wanted or in flight
        counted = scheduler.counters
        assert sum(counted.started) == sum(counted.done) + counted.failed and counted.failed == 0
        check_contents(memory)
        memory.close()


def test_a_failed_prefetch_costs_nothing_and_a_failed_demand_is_raised(pack, monkeypatch):
    with open_store(pack) as store:
        memory, real, broken = make(store, slots=12), store.read_into, {7}

        def read_into(layer, expert, out):
            if expert in broken:
                raise StoreError("input/output error", field="expert", got=expert)
            return real(layer, expert, out)

        monkeypatch.setattr(store, "read_into", read_into)
        memory.predict(prefetcher(memory, "p"), [(0, 7, 1.0), (0, 8, 1.0)])
        memory.drain()
        assert memory.prefetch_errors == 1 and "input/output" in str(memory.prefetch_error)
        demand = memory.demand(0, [7, 8, 9], phase=DECODED)
        assert demand.hits == [False, True, False]
        with pytest.raises(StoreError, match="input/output error"):
            demand.wait()
        memory.release(demand.keys)
        memory.drain()
        broken.clear()
        again = memory.demand(0, [7, 8, 9], phase=DECODED)
        again.wait()
        memory.release(again.keys)
        check_contents(memory)
        memory.close()


def test_demand_overtakes_queued_predictions(pack):
    """On a device of one read at a time, a demand waits for the read in progress and for no other."""
    device = VirtualDevice(latency_s=0.02, bytes_per_s=1e12, lanes=1)
    with open_store(pack, device=device) as store:
        memory = make(store, slots=16, threads=1)
        order, real = [], store.read_into

        def read_into(layer, expert, out):
            order.append(expert)
            return real(layer, expert, out)

        store.read_into = read_into
        memory.predict(prefetcher(memory, "p"), [(1, expert, 0.5) for expert in range(8)])
        demand = memory.demand(0, [15], phase=DECODED)
        demand.wait()
        assert order.index(15) <= 1  # the asking thread reads it itself while the reader is busy
        memory.release(demand.keys)
        memory.close()


def test_idle_readers_sleep_through_visits_that_miss_nothing(pack, monkeypatch):
    with open_store(pack) as store:
        memory = make(store, slots=12)
        first = memory.demand(0, [1, 2, 3], phase=DECODED)
        first.wait()
        memory.release(first.keys)
        memory.drain()
        time.sleep(0.05)  # readers that were woken by the visit have gone back to sleep
        looks, real = [], memory.scheduler.next
        monkeypatch.setattr(memory.scheduler, "next", lambda *a, **k: (looks.append(a), real(*a, **k))[1])
        for _ in range(5):
            again = memory.demand(0, [1, 2, 3], phase=DECODED)
            again.wait()
            memory.release(again.keys)
        time.sleep(0.05)
        assert again.hits == [True] * 3 and not looks
        memory.close()


def test_a_prediction_that_found_no_bytes_free_is_read_once_they_are(pack):
    """The asking thread's own read takes the bytes that predictions may have; nobody but it sees the end of that."""
    with open_store(pack) as store:
        memory, size, begun, go = (
            make(store, slots=12, threads=1),
            store.nbytes(0),
            threading.Event(),
            threading.Event(),
        )
        memory.scheduler = Scheduler(max_inflight_bytes=2 * size, p0_reserve_bytes=size)
        real = store.read_into

        def read_into(layer, expert, out):
            if expert == 1:
                begun.set()
                go.wait(10)
            return real(layer, expert, out)

        store.read_into = read_into

        def predict():
            begun.wait(10)
            memory.predict(prefetcher(memory, "p"), [(1, 2, 1.0)])
            time.sleep(0.05)  # the reader looks, and finds nothing that may be begun
            go.set()

        other = threading.Thread(target=predict)
        other.start()
        demand = memory.demand(0, [1], phase=DECODED)
        demand.wait()
        other.join()
        landed = time.monotonic() + 5
        while memory.cache.slot(memory.store.experts + 2) is None and time.monotonic() < landed:
            time.sleep(0.01)
        assert memory.cache.slot(memory.store.experts + 2) is not None
        memory.release(demand.keys)
        memory.close()


def test_closed(pack):
    with open_store(pack) as store:
        memory = make(store, slots=12)
        memory.close()
        memory.close()
        with pytest.raises(ContractError, match="closed"):
            memory.demand(0, [1], phase=DECODED)
        assert not any(thread.name.startswith("expert-reader") for thread in threading.enumerate())
