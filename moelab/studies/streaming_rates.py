"""How fast does the store read? Held against a raw probe in the same run.

The probe reads the same files, places, lengths and order with as many threads, and does nothing but `preadv` past the
page cache. The two take turns, and each turn has places of its own, so a slow second of a shared disk meets both. What
is left is the store's own work: its books, and copies or conversions where a slot is not filled directly. There a
second probe does these as well, and says what they take.
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

from ..errors import StoreError
from ..pages import PAGE, aligned
from ..streaming import ExpertStore
from ..streaming.store.layout import ExpertLayout, TensorSpec
from ..streaming.store.plan import Read, plan_reads
from ..streaming.store.readers import Bounce
from ..streaming.store.store import Source

__all__ = ["MadeUp", "RawProbe", "throughput"]


class RawProbe:
    """The reads that a store would make of a source, and nothing else.

    Raises:
        StoreError: the system has no reads past the page cache.
    """

    def __init__(self, source: Source):
        if not hasattr(os, "O_DIRECT"):
            raise StoreError("no reads past the page cache", field="O_DIRECT", got=os.name, expected="Linux")
        self._source, self._plans, self._bounce = source, {}, Bounce()
        self._files = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in source.files]

    def plan(self, layer: int, expert: int) -> tuple[Read, ...]:
        """The reads of one expert."""
        if (layer, expert) not in self._plans:
            layout, places = self._source.layouts[layer], self._source.places(layer, expert)
            self._plans[layer, expert] = plan_reads(layout, places, align=PAGE)
        return self._plans[layer, expert]

    def read(self, layer: int, expert: int, out: np.ndarray) -> None:
        """All reads of one expert, each to the beginning of `out`."""
        for read in self.plan(layer, expert):
            self._fetch(read, out[: read.length])

    def fill(self, layer: int, expert: int, slot: np.ndarray) -> None:
        """All reads of one expert, and what does not go straight into `slot` copied or converted to its place."""
        for read in self.plan(layer, expert):
            if read.into is not None:
                self._fetch(read, slot[read.into : read.into + read.length])
            else:
                buffer = self._bounce.take(read.length)
                self._fetch(read, buffer)
                read.place(self._source.layouts[layer], buffer, slot)

    def _fetch(self, read: Read, out: np.ndarray) -> None:
        got = os.preadv(self._files[read.file], [out], read.start)
        if got < read.need:
            raise StoreError("a read ended early", file=self._source.files[read.file], got=got, expected=read.need)

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
        One row a depth: medians of both rates in bytes a second, median and quartiles of the paired ratio, n pairs;
        `direct`, of the bytes asked for the share that goes straight into slots, and where that is not all of them
        `filled`, the median ratio to the probe that copies and converts as well (else None).
    """
    rng, probe, rows = np.random.default_rng(seed), RawProbe(source), []
    asked = [read for layer in range(store.layers) for read in probe.plan(layer, 0)]
    longest = max(layout.slot_bytes for layout in store.layouts) + PAGE
    longest = max(longest, *(read.length for read in asked))
    direct = sum(read.length for read in asked if read.into is not None) / sum(read.length for read in asked)
    arms: dict[str, tuple[Callable, int | None]] = {"raw": (probe.read, longest), "store": (store.read_into, None)}
    if direct < 1:
        arms["filled"] = (probe.fill, None)
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
            filled = [a / b for a, b in zip(rates["store"], rates.get("filled", ()), strict=direct < 1)]
            rows.append(
                {
                    "depth": depth, "raw": statistics.median(rates["raw"]), "store": statistics.median(rates["store"]),
                    "ratio": middle, "low": low, "high": high, "n": repeats, "reads": reads, "nbytes": store.nbytes(0),
                    "direct": direct, "filled": statistics.median(filled) if filled else None,
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


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
