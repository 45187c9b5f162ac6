"""Pinning the hottest experts of each layer, with a bonus for those that predictions name."""

from __future__ import annotations

import heapq

from ...errors import ContractError
from .ranking import Ranked

__all__ = ["HotPin"]


class HotPin(Ranked):
    """Keep each layer's hottest experts, those that predictions name having a bonus; the rest goes by LRU.

    A use makes an expert's count old·decay + 1. After every `update_interval` passes of a layer, its
    `hot_per_layer` experts with the highest count + `pin_bonus` · (a prediction names it) are hot until the
    next update; experts with a score of 0 never are, and of equals the lowest id is. Hot experts go only when
    nothing else is left. Counts decay on use alone, as in the source project, so an expert that is never
    used again keeps its count: the bonus and others' uses must overtake it.

    Args:
        hot_per_layer: >= 0; 0 makes it plain LRU.
        decay: in [0, 1].
        update_interval: passes of a layer between two updates, >= 1.
        pin_bonus: >= 0, in uses.
    """

    name = "hot-pin"

    def __init__(
        self, *, hot_per_layer: int = 8, decay: float = 0.95, update_interval: int = 8, pin_bonus: float = 1.0
    ):
        if hot_per_layer < 0 or not 0 <= decay <= 1 or update_interval < 1 or pin_bonus < 0:
            raise ContractError(
                "no such hot pins",
                field="hot_per_layer, decay, update_interval, pin_bonus",
                got=(hot_per_layer, decay, update_interval, pin_bonus),
                expected=">= 0, in [0, 1], >= 1, >= 0",
            )
        self.hot_per_layer, self.decay = hot_per_layer, decay
        self.update_interval, self.pin_bonus = update_interval, pin_bonus

    def begin(self, layers, experts):
        super().begin(layers, experts)
        self.layers, self.experts = layers, experts
        self.counts: list[dict[int, float]] = [{} for _ in range(layers)]
        self.expected: list[set[int]] = [set() for _ in range(layers)]
        self.hot: list[set[int]] = [set() for _ in range(layers)]
        self.passes, self.last = [0] * layers, [-1] * layers
        self.stamp = 0

    def touch(self, visit, keys):
        layer = visit % self.layers
        counts = self.counts[layer]
        for key in keys:
            counts[key] = counts.get(key, 0.0) * self.decay + 1
            self._rank(key)
        if self.last[layer] != visit:
            self.last[layer] = visit
            self.passes[layer] += 1
            if self.passes[layer] % self.update_interval == 0:
                self._update(layer)

    def insert(self, key):
        self._rank(key)

    def expect(self, keys):
        for key in keys:
            self.expected[key // self.experts].add(key)

    def unexpect(self, keys):
        for key in keys:
            self.expected[key // self.experts].discard(key)

    def _rank(self, key):
        self.stamp += 1
        self.put(key, (key in self.hot[key // self.experts], self.stamp))

    def _update(self, layer):
        counts, expected = self.counts[layer], self.expected[layer]
        score = {key: counts.get(key, 0.0) + self.pin_bonus * (key in expected) for key in counts.keys() | expected}
        best = heapq.nsmallest(self.hot_per_layer, (key for key in score if score[key] > 0), lambda k: (-score[k], k))
        before, self.hot[layer] = self.hot[layer], set(best)
        for key in before ^ self.hot[layer]:
            if key in self.rank:
                self.put(key, (key in self.hot[layer], self.rank[key][1]))
