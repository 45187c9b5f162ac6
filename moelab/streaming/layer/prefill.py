"""The prefill window: experts of a layer read before a prompt's route through it is known.

A prompt of some length uses nearly every expert of a layer, so they can be read without knowing the route: all
of them (`full_layer_prefill`), or the hottest (`prefill_hot`). The window has two sets of slots: while one
layer is computed, the next one's experts are read. What a layer's window lacks is computed on the exact path.

Which experts are hot is the rule of the eviction policy `HotPin`, with the same options: uses that decay, plus
a bonus for those that a prediction names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..cache.eviction import HotPin
from .options import LayerOptions
from .stack import Filling, Stack, StagedSet

if TYPE_CHECKING:
    from ..memory.forward import Forward
    from ..store.store import ExpertStore

__all__ = ["PrefillWindow", "window_slots"]


class PrefillWindow:
    """The windows of all layers.

    Attributes:
        stacks: one for each size of expert that is windowed.
        hot: the rule that counts uses.
    """

    def __init__(self, forward: Forward, options: LayerOptions):
        self._forward, self._options = forward, options
        store = forward.memory.store
        self._store = store
        self.hot = HotPin(
            hot_per_layer=options.prefill_hot, decay=options.hot_decay,
            update_interval=options.hot_update_interval, pin_bonus=options.pin_bonus,
        )  # fmt: skip
        self.hot.begin(store.layers, store.experts)
        self.stacks = {
            size: Stack(forward.memory, layer, slots) for size, (layer, slots) in window_slots(options, store).items()
        }
        self._filling: dict[int, Filling] = {}
        self._in_service: StagedSet | None = None

    def stack(self, layer: int) -> Stack:
        return self.stacks[self._store.layouts[layer].slot_bytes]

    def used(self, layer: int, experts: np.ndarray) -> None:
        """A turn of the layer used these experts."""
        if self._options.prefill_hot:
            step, layers = max(self._forward.step, 0), self._store.layers
            base = layer * self._store.experts
            self.hot.touch(step * layers + layer, [base + int(expert) for expert in np.unique(experts)])

    def predict(self, layer: int, before: set[int], after: set[int]) -> None:
        base = layer * self._store.experts
        self.hot.unexpect([base + expert for expert in before])
        self.hot.expect([base + expert for expert in after])

    def take(self, layer: int) -> StagedSet | None:
        """The layer's window in a prefill pass, and the start of the next one's. None where it has none.

        Call it after the layer's synchronisation: the window of the layer before has been used by then.
        """
        self._in_service = None
        for other in [other for other in self._filling if other != layer]:  # of a pass that was cut short
            self._filling.pop(other).cancel()
        if layer not in self._filling:
            self._begin(layer)
        filling = self._filling.pop(layer, None)
        if filling is None:
            return None
        waited = self._forward.memory.clock()
        self._in_service = filling.wait()
        filling.stack.counters.wait_s += self._forward.memory.clock() - waited
        if layer + 1 < self._store.layers:
            self._begin(layer + 1)
        return self._in_service

    def reset(self) -> None:
        """Forget windows under way; counts of use survive a request."""
        for filling in self._filling.values():
            filling.cancel()
        self._filling.clear()
        self._in_service = None

    def _begin(self, layer: int) -> None:
        ids = self._wanted(layer)
        if ids:
            keep = () if self._in_service is None else (self._in_service,)
            same = [rows for rows in keep if self.stack(rows.layer) is self.stack(layer)]
            self._filling[layer] = self.stack(layer).fill(layer, ids, keep=same)

    def _wanted(self, layer: int) -> list[int]:
        if whole(self._options, layer):
            return list(range(self._store.experts))
        base = layer * self._store.experts
        return sorted(key - base for key in self.hot.hot[layer])


def whole(options: LayerOptions, layer: int) -> bool:
    """Is this layer read whole in prefill?"""
    return options.full_layer_prefill and (not options.prefill_full_layers or layer < options.prefill_full_layers)


def window_slots(options: LayerOptions, store: ExpertStore) -> dict[int, tuple[int, int]]:
    """By slot size: a layer of that size, and the slots of the two sets."""
    found: dict[int, tuple[int, int]] = {}
    for layer, layout in enumerate(store.layouts):
        slots = 2 * (store.experts if whole(options, layer) else min(options.prefill_hot, store.experts))
        if slots > found.get(layout.slot_bytes, (0, 0))[1]:
            found[layout.slot_bytes] = (layer, slots)
    return found
