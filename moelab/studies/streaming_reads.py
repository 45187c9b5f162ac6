"""The store by itself: how much more it reads than it was asked for, and what a cache spares it.

* **Amplification** is bytes the device gave ÷ bytes of the experts. Reads past the page cache ask for whole pages; a
  mapping also reads ahead. What the device gave is counted by the system for this process (page cache fills included).
* **Cache**: a model's own recorded decode goes through the real cache and the real store, demand only. Beside the
  bytes of each policy stand those of a global LRU of the same budget, of OPT, and of first uses alone, which no cache
  can spare (the cold bytes).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..disk import device_bytes
from ..flywheel.estimates import clustered_mean, paired_difference
from ..flywheel.foresight import Opt
from ..flywheel.residency import Visits, replay
from ..pages import aligned
from ..routes import DECODED, PREFILLED, Routes
from ..streaming import Cache, ExpertStore, Passes, open_store, policy

__all__ = ["amplification", "cached", "replay_through"]


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
