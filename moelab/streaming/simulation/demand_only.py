"""`SimulatedMemory` for runs without prediction: the same answers, about twice as fast.

Where nothing is read ahead, the misses of a visit are read in their own order, and no other read is in flight when it
begins; so the scheduler has no say, and the times of all reads follow at once. (They may land in another order: threads
wake at different times.) The cache is asked as ever, in the same order. That the results are those of the event loop
is tested.
"""

from __future__ import annotations

import heapq

from ...errors import ContractError
from .simulated_memory import SimulatedMemory

__all__ = ["DemandOnlyMemory"]


class DemandOnlyMemory(SimulatedMemory):
    """As its base, but `prefetch` may not be called, and the scheduler stays untouched."""

    def demand(self, layer, keys, *, phase):
        cache, device, size = self.cache, self.device, self.nbytes[layer]
        hits = cache.visit(layer, keys, phase=phase)
        missing = [key for key, hit in zip(keys, hits, strict=True) if not hit]
        self._landing = landing = []
        flying: list[float] = []
        for key in missing:
            if cache.reserve(key, speculative=False) is None:
                raise ContractError(
                    "this visit cannot be resident at once", field="missing", got=len(missing), expected="a free slot"
                )
            at, late = (self.now, self.start_s) if len(flying) < self.most else (heapq.heappop(flying), 0.0)
            done = device.book(at, size)[1] + next(self.wake) + late
            heapq.heappush(flying, done)
            landing.append((done, len(landing), key))
        landing.sort()
        self.books.demand += size * len(missing)
        self._asked = self.now
        return hits

    def wait(self):
        keys = [key for *_, key in self._landing]
        for key in keys:
            self.cache.settle(key)
        self.cache.lease(keys)
        self.landed = self._landing[-1][0]
        self.now = max(self.now, self.landed)
        return self.now

    def release(self, keys):
        self.cache.release(keys)

    @property
    def issued(self):
        return self._asked if self._landing else float("nan")

    def prefetch(self, tickets):
        raise ContractError("nothing is read ahead here", field="tickets", got="a prefetch", expected="none")
