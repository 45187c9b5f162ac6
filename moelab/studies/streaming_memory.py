"""Does the engine keep within its memory? The resident set of a fresh process, from its first import on.

`memory_budget_bytes` is the whole process, so the whole process is watched: a thread looks every few milliseconds from
before mlx is imported until the answers are done, and the system's own high-water mark is read at the end. What mlx
counts for itself is reported beside: it knows nothing of imports, threads and buffers.

These processes leave torch out of transformers (`models.without_torch`), as one that only runs a model may: with it the
imports alone take some 190 MiB more.

Nothing heavy is imported at the top of this module: `peak_memory` is what a fresh process calls first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from ..models import without_torch

__all__ = ["Watch", "idle_memory", "peak_memory"]


class Watch:
    """Greatest resident set of this process while the block runs, by looking every `every` seconds.

    Attributes:
        peak: bytes.
        looks: how often it looked.
    """

    def __init__(self, every: float = 0.01):
        self.every, self.peak, self.looks = every, 0, 0
        self._process, self._stop = psutil.Process(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="memory-watch", daemon=True)

    def look(self) -> int:
        now = self._process.memory_info().rss
        self.peak, self.looks = max(self.peak, now), self.looks + 1
        return now

    def _follow(self) -> None:
        while not self._stop.wait(self.every):
            self.look()

    def __enter__(self) -> Self:
        self.look()
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self.look()


def idle_memory(*, path: Path, precision: str, cache_bytes: int) -> int:
    """Resident set of this process, bytes, when everything but the slots is loaded. Meant for a process of its own."""
    without_torch()
    from ..streaming import EngineOptions, StreamingEngine

    with StreamingEngine.load(path, EngineOptions(cache_bytes=cache_bytes, precision=precision)) as engine:
        return engine.base_bytes


def peak_memory(
    *,
    path: Path,
    memory_budget_bytes: int,
    reserve_bytes: int,
    precision: str,
    prompts: Sequence[Sequence[int]],
    tokens: int,
) -> dict[str, Any]:
    """Load under a budget, answer each prompt, and say how much memory that took. Meant for a process of its own.

    Returns:
        Bytes: `budget`, `imports` (before loading), `base` (everything but slots loaded), `cache` (what the slots were
        given), `peak` (seen), `high_water` (the system's; None where it keeps none), `allocator` (mlx's peak). And
        `looks`, `tokens`, `misses` and `evictions` of all answers, `shared` (share of the last prompt's experts that
        the first had used), `seconds`, `reader`.
    """
    began = time.perf_counter()
    with Watch() as watch:
        without_torch()
        import mlx.core as mx

        from ..streaming import EngineOptions, StreamingEngine
        from .streaming_answer import Recorder

        imports = watch.look()
        options = EngineOptions(reserve_bytes=reserve_bytes, precision=precision)
        with StreamingEngine.load(path, options, memory_budget_bytes) as engine:
            used = []
            for prompt in prompts:
                recorder = Recorder(engine.forward)
                engine.forward.listeners.append(recorder)
                for _ in engine.stream_tokens(list(prompt), max_tokens=tokens):
                    pass
                engine.forward.listeners.remove(recorder)
                ids, _ = recorder.routes()
                used.append({(layer, int(e)) for layer in range(ids.shape[1]) for e in ids[:, layer].reshape(-1)})
            counted = engine.cache.counters()
            found = {
                "budget": memory_budget_bytes,
                "imports": imports,
                "base": engine.base_bytes,
                "cache": sum(slab.host.nbytes for slab in engine.memory.slabs),
                "reader": engine.store.identity["reader"],
                "misses": counted.misses,
                "evictions": counted.evictions,
            }
    return {
        **found,
        "peak": watch.peak,
        "high_water": _high_water(),
        "allocator": mx.get_peak_memory(),
        "looks": watch.looks,
        "tokens": tokens * len(prompts),
        "shared": len(used[0] & used[-1]) / len(used[-1]),
        "seconds": time.perf_counter() - began,
    }


def _high_water() -> int | None:
    """The system's own greatest resident set of this process since it was started."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
