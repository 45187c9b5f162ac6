"""Routes of a real model, replayed through a real store and the live memory: the cache against a global LRU."""

from pathlib import Path

import numpy as np
import pytest

from moelab.routes import DECODED, read_trace
from moelab.streaming import Cache, ExpertLayout, ExpertStore, Passes, Scheduler, TensorSpec, policy
from moelab.streaming.cache.eviction import DEFAULT
from moelab.streaming.memory.memory import ExpertMemory

PAGE = 4096


class Pages:
    """One page an expert, holding its key: the geometry of a large model in 25 MB (`store.Source`)."""

    def __init__(self, path: Path, layers: int, experts: int):
        self.layers, self.experts, self.files = layers, experts, [path]
        self.layouts = (ExpertLayout((TensorSpec("weight", (PAGE // 4,), "F32", "F32"),)),) * layers
        np.repeat(np.arange(layers * experts, dtype=np.float32), PAGE // 4).tofile(path)

    def identity(self):
        return {"source": "pages"}

    def places(self, layer, expert):
        return [(0, (layer * self.experts + expert) * PAGE)]

    def checksum(self, layer, expert):
        return None


def replay(store, passes, slots, name):
    """Bytes read by demand alone, over the whole trace."""
    cache = Cache(
        layers=passes.layers, experts=passes.experts, slot_bytes=[PAGE] * passes.layers, budget=slots * PAGE,
        policy=policy(name), top_k=passes.top_k, below_cycle=True,
    )  # fmt: skip
    memory = ExpertMemory(store, cache, Scheduler(max_inflight_bytes=8 * PAGE), threads=1)
    before = store.payload_bytes
    for step in passes.keys:
        for layer, keys in enumerate(step):
            for group in memory.groups(layer, [key % passes.experts for key in keys]):
                demand = memory.demand(layer, group, phase=DECODED)
                demand.wait()
                held = memory.slab(layer).host[demand.slots].view(np.float32)
                assert (held[:, 0] == demand.keys).all() and (held[:, -1] == demand.keys).all()
                memory.release(demand.keys)
    memory.close()
    assert cache.high_water_bytes <= cache.budget
    return store.payload_bytes - before


@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_fewer_bytes_than_a_global_lru_at_three_budgets(name, moelab_data, tmp_path):
    routes = read_trace(moelab_data / "traces" / f"{name}.route.csv.gz")
    passes = Passes.of(routes.ids, experts=routes.experts, thread=routes.thread, phase=routes.phase, mask=routes.mask)
    with ExpertStore(Pages(tmp_path / "experts", passes.layers, passes.experts)) as store:
        for mib in (1000, 2000, 4000):
            slots = int(mib * 2**20 / routes.expert_bytes.mean())
            ours, lru = (replay(store, passes, slots, which) for which in (DEFAULT, "lru"))
            assert ours < lru
