"""The store by itself: how fast it reads, how much more than it was asked for, and what a cache spares it.

* **Throughput** is held against a raw probe in the same run: the same files, places, lengths and order, as many
  threads, nothing but `preadv` past the page cache. The two take turns, and each turn has places of its own, so a slow
  second of a shared disk meets both. What is left is the store's own work: its books, and copies or conversions where
  a slot is not filled directly.
* **Amplification** is bytes the device gave ÷ bytes of the experts. Reads past the page cache ask for whole pages; a
  mapping also reads ahead. What the device gave is counted by the system for this process (page cache fills included).
* **Cache**: a model's own recorded decode goes through the real cache and the real store, demand only. Beside the
  bytes of each policy stand those of a global LRU of the same budget, of OPT, and of first uses alone, which no cache
  can spare (the cold bytes).
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..disk import device_bytes
from ..errors import StoreError
from ..flywheel.estimates import clustered_mean, paired_difference
from ..flywheel.foresight import Opt
from ..flywheel.residency import Visits, replay
from ..pages import PAGE, aligned
from ..routes import DECODED, PREFILLED, Routes
from ..streaming import Cache, ExpertStore, Passes, open_store, policy
from ..streaming.store.layout import ExpertLayout, TensorSpec
from ..streaming.store.plan import plan_reads
from ..streaming.store.store import Source

__all__ = ["MadeUp", "RawProbe", "amplification", "cached", "replay_through", "throughput"]


class RawProbe:
    """The reads that a store would make of a source, and nothing else.

    Raises:
        StoreError: the system has no reads past the page cache.
    """

    def __init__(self, source: Source):
        if not hasattr(os, "O_DIRECT"):
            raise StoreError("no reads past the page cache", field="O_DIRECT", got=os.name, expected="Linux")
        self._source, self._plans = source, {}
        self._files = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in source.files]

    def plan(self, layer: int, expert: int) -> list[tuple[int, int, int, int]]:
        """File, place, bytes that must come and bytes asked for, of each read of one expert."""
        if (layer, expert) not in self._plans:
            reads = plan_reads(self._source.layouts[layer], self._source.places(layer, expert), align=PAGE)
            self._plans[layer, expert] = [(r.file, r.start, r.need, r.length) for r in reads]
        return self._plans[layer, expert]

    def read(self, layer: int, expert: int, out: np.ndarray) -> None:
        for file, start, need, length in self.plan(layer, expert):
            got = os.preadv(self._files[file], [out[:length]], start)
            if got < need:
                raise StoreError("a read ended early", file=self._source.files[file], got=got, expected=need)

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


class MadeUp:
    """A source of experts of one size, random bytes in one new file: what the store does with larger experts than the
    model has. Attributes as `store.Source`."""

    layers = 1

    def __init__(self, file: Path, *, size: int, experts: int, seed: int):
        rng = np.random.default_rng(seed)
        with open(file, "wb") as out:
            for _ in range(experts):
                out.write(rng.bytes(size))
            out.flush()
            os.fsync(out.fileno())
        self.files, self.experts, self._size = [file], experts, size
        self.layouts = (ExpertLayout((TensorSpec("weight", (size // 4,), "F32", "F32"),)),)

    def identity(self) -> dict[str, Any]:
        return {"source": "made up"}

    def places(self, layer: int, expert: int) -> list[tuple[int, int]]:
        return [(0, expert * self._size)]

    def checksum(self, layer: int, expert: int) -> None:
        return None


def throughput(
    store: ExpertStore, source: Source, *, depths: Sequence[int], reads: int, repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Rates of the store and of the raw probe over the same reads, by turns.

    Args:
        source: of the same files as `store`.
        depths: threads reading at once.
        reads: experts read in one turn.

    Returns:
        One row a depth: medians of both rates in bytes a second, median and quartiles of the paired ratio, n pairs.
    """
    rng, probe, rows = np.random.default_rng(seed), RawProbe(source), []
    longest = max(layout.slot_bytes for layout in store.layouts) + PAGE
    longest = max(longest, *(length for *_, length in probe.plan(0, 0)))
    arms: dict[str, tuple[Callable, int | None]] = {"raw": (probe.read, longest), "store": (store.read_into, None)}
    try:
        for depth in depths:
            rates: dict[str, list[float]] = {name: [] for name in arms}
            for turn in range(-1, repeats):  # the first pair warms plans, threads and the device's own queue
                keys = [divmod(int(k), store.experts) for k in rng.integers(0, store.layers * store.experts, reads)]
                payload = sum(store.nbytes(layer) for layer, _ in keys)
                for name in sorted(arms, reverse=bool(turn % 2)):
                    read, size = arms[name]
                    took = _seconds(read, keys, depth, lambda layer, size=size: size or store.layouts[layer].slot_bytes)
                    if turn >= 0:
                        rates[name].append(payload / took)
            ratios = [a / b for a, b in zip(rates["store"], rates["raw"], strict=True)]
            low, middle, high = _quartiles(ratios)
            rows.append(
                {
                    "depth": depth, "raw": statistics.median(rates["raw"]), "store": statistics.median(rates["store"]),
                    "ratio": middle, "low": low, "high": high, "n": repeats, "reads": reads, "nbytes": store.nbytes(0),
                }
            )  # fmt: skip
    finally:
        probe.close()
    return rows


def _seconds(read: Callable, keys: list[tuple[int, int]], depth: int, size: Callable[[int], int]) -> float:
    """Time of `depth` threads for all keys, each with memory of its own; threads and memory are there before."""
    ready = threading.Barrier(depth + 1)

    def work(part: list[tuple[int, int]]) -> None:
        # As a slab has them: a slot of it is part of a huge page, however small the slot.
        buffers = {nbytes: aligned(nbytes, huge=True) for nbytes in {size(layer) for layer, _ in part}}
        for buffer in buffers.values():
            buffer[::PAGE] = 0
        ready.wait()
        for layer, expert in part:
            read(layer, expert, buffers[size(layer)])

    with ThreadPoolExecutor(depth) as pool:
        done = [pool.submit(work, keys[at::depth]) for at in range(depth)]
        ready.wait()
        began = time.perf_counter()
        for future in done:
            future.result()
        return time.perf_counter() - began


def amplification(
    place: str, path: Path, files: Sequence[Path], *, reads: int, seed: int, precision: str
) -> list[dict]:
    """Bytes asked of the system and given by the device ÷ bytes of the experts, past the page cache and by mapping.

    Each reader reads the same experts, none twice; the page cache is emptied of the files before.
    """
    rows = []
    for reader in ("auto", "mmap"):
        with open_store(path, reader=reader, precision=precision) as store:
            # An eighth at most: whoever reads everything reads ahead nothing that is useless.
            total = store.layers * store.experts
            keys = np.random.default_rng(seed).permutation(total)[: min(reads, max(total // 8, 1))].tolist()
            slots = {layout.slot_bytes: aligned(layout.slot_bytes) for layout in store.layouts}
            _forget(files)
            before = device_bytes()
            for key in keys:
                layer, expert = divmod(key, store.experts)
                store.read_into(layer, expert, slots[store.layouts[layer].slot_bytes])
            given = None if before is None else device_bytes() - before
            rows.append(
                {
                    "place": place, "reader": store.identity["reader"], "n": len(keys), "payload": store.payload_bytes,
                    "asked": store.physical_bytes / store.payload_bytes,
                    "device": None if given is None else given / store.payload_bytes,
                }
            )  # fmt: skip
    return rows


def _forget(files: Sequence[Path]) -> None:
    """Ask the system to drop the files' pages; clean ones nobody maps go."""
    if hasattr(os, "posix_fadvise"):
        for file in files:
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def cached(store: ExpertStore, routes: Routes, *, budgets: Sequence[float], policies: Sequence[str]) -> dict[str, Any]:
    """Recorded decode through the real cache and store, at shares of all slots; bytes a decoded token.

    Returns:
        `tokens`, `threads`, `demand_bytes` (a token's experts), and `rows`: `policy`, `share`, bytes `value` with `se`
        (clustered by thread) and `n`, `less` and `less_se` (paired difference to a global LRU), `lru`, `opt`, `cold`.
    """
    slots = np.array([layout.slot_bytes for layout in store.layouts], np.int64)
    visits = Visits.of(routes.ids, routes.experts, routes.thread, prefilled=routes.phase == PREFILLED)
    decoded, rows = routes.phase == DECODED, []
    threads, payload = routes.thread[decoded], np.array([store.nbytes(layer) for layer in range(store.layers)])
    for share in budgets:
        budget = max(int(share * routes.experts * slots.sum()), int(routes.top_k * slots.sum()))
        opt = (replay(visits, slots, budget=budget, policy=Opt()).misses[decoded].sum(-1) * payload).sum(-1)
        found = {
            name: replay_through(store, routes, budget=budget, name=name) for name in dict.fromkeys(["lru", *policies])
        }
        lru = found["lru"][0][decoded]
        for name in policies:
            read, cold = found[name][0][decoded], found[name][1]
            mean, less = clustered_mean(read, threads), paired_difference(read, lru, threads)
            rows.append(
                {
                    "policy": name, "share": share, "budget": budget, "value": mean.value, "se": mean.se, "n": mean.n,
                    "less": less.value, "less_se": less.se, "lru": float(lru.mean()), "opt": float(opt.mean()),
                    "cold": cold / int(decoded.sum()),
                }
            )  # fmt: skip
    return {
        "tokens": int(decoded.sum()),
        "threads": len(np.unique(routes.thread)),
        "demand_bytes": int(routes.top_k * payload.sum()),
        "rows": rows,
    }


def replay_through(store: ExpertStore, routes: Routes, *, budget: int, name: str) -> tuple[np.ndarray, int]:
    """Every miss is read, into the slot that the cache grants. Payload bytes `i64[T]` that the store read for each row
    (a prompt pass is booked on its first row), and those of first uses while decoding."""
    passes = Passes.of(routes.ids, experts=routes.experts, thread=routes.thread, phase=routes.phase)
    slot_bytes = [layout.slot_bytes for layout in store.layouts]
    cache = Cache(
        layers=store.layers, experts=store.experts, slot_bytes=slot_bytes, budget=budget, policy=policy(name),
        top_k=routes.top_k, read_bytes=[store.nbytes(layer) for layer in range(store.layers)],
    )  # fmt: skip
    sizes = {cache.pool_of(layer): slot_bytes[layer] for layer in range(store.layers)}
    slabs = [aligned(count * sizes[pool]).reshape(count, sizes[pool]) for pool, count in enumerate(cache.pool_slots)]
    read = np.zeros(len(passes), np.int64)
    for number, visits in enumerate(passes.keys):
        before = store.payload_bytes
        for layer, keys in enumerate(visits):
            for group in cache.groups(layer, keys):
                phase = DECODED if passes.decoded[number] else PREFILLED
                for key, hit in zip(group, cache.visit(layer, group, phase=phase), strict=True):
                    if not hit:
                        grant = cache.reserve(key, speculative=False)
                        store.read_into(layer, key % store.experts, slabs[grant.pool][grant.slot])
                        cache.settle(key, grant.generation)
                cache.release(group)
        read[number] = store.payload_bytes - before
    rows = np.zeros(routes.tokens, np.int64)
    rows[_first_rows(routes)] = read
    return rows, cache.counters(DECODED).cold_miss_bytes


def _first_rows(routes: Routes) -> np.ndarray:
    """First row of every pass, as `Passes.of` cuts them."""
    decoded = routes.phase == DECODED
    opens = np.ones(routes.tokens, bool)
    opens[1:] = decoded[1:] | decoded[:-1] | (np.diff(routes.thread) != 0)
    return np.flatnonzero(opens)


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
