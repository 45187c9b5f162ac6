"""A turn that does not wait for late experts: what is in time is computed, the rest is read for a later turn.

Without staged slots, `on_missing` other than "exact" asks `available`, just when the layer's ids are known, which of
the layer's experts are in time. By default those are the residents of the cache. `specialists.CacheAvailability` over
the engine's cache is such an answer too, and adds reads that arrive before a deadline: an expert that is called
available and is not resident is waited for. Late ones are queued behind every demand, and fill the cache for the next
token, so doing without them saves waiting and no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...errors import GeometryError
from ..schedule.prefetch import Prefetcher
from .staged import StagedCounters

if TYPE_CHECKING:
    from ..memory.forward import Forward

__all__ = ["Available", "LateExperts"]

Available = Callable[[int], np.ndarray]
"""MoE layer → `bool[E]`, which of its experts are in time."""


class LateExperts:
    """What is in time for one layer's turns, and reads for what is not.

    Attributes:
        available: see the module text; replace it to know better.
        counters: of this layer: pairs `used`, and those that were late.
    """

    def __init__(self, forward: Forward, layer: int):
        memory = forward.memory
        self.layer, self.counters, self._memory = layer, StagedCounters(), memory
        self.available: Available = self.resident
        self._reads = Prefetcher(
            memory.cache, memory.scheduler, nbytes=[memory.store.nbytes(n) for n in range(memory.store.layers)],
            byte_budget=1 << 62, owner=f"late in layer {layer}", protect=False,
        )  # fmt: skip

    def resident(self, layer: int) -> np.ndarray:
        first, cache = layer * self._memory.store.experts, self._memory.cache
        return np.array([cache.slot(first + expert) is not None for expert in range(self._memory.store.experts)])

    def in_time(self, ids: np.ndarray) -> np.ndarray:
        """`bool[..., K]`. Raises GeometryError where `available` does not answer for every expert."""
        found, experts = np.asarray(self.available(self.layer)), self._memory.store.experts
        if found.shape != (experts,) or found.dtype != bool:
            raise GeometryError(
                "one answer an expert", field="available", got=(found.shape, str(found.dtype)),
                expected=((experts,), "bool"),
            )  # fmt: skip
        return found[ids]

    def read(self, experts: np.ndarray) -> None:
        """Queue reads of late experts for the layer's next turn, which withdraws what has not begun by then."""
        self._memory.begin_step(self._reads)
        self._memory.predict(self._reads, [(self.layer, int(expert), 1.0) for expert in experts])
