"""A switch layer whose experts are read on demand, in place of mlx-lm's resident one.

The arithmetic is not written again: the layer's own mlx-lm module (`inner`) runs, with a slab's strided
views for weights and slot numbers for indices. Families differ in activation, biases and projections; all
of that stays theirs, and on the CPU every output row has the bits of the resident layer.

There is one synchronisation a layer, at the router's ids. By then the previous MoE layer's output has been
evaluated too (it is asked for in the same call), so its slots are free again. While misses are read, the
resident experts are computed; then the rest, and the native order of the K outputs is restored, so that
the weighted sum that follows adds in the same order as ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

if TYPE_CHECKING:
    from ..memory.forward import Forward
    from ..memory.memory import Demand

__all__ = ["StreamingSwitch"]

WORTH_SPLITTING = 4 << 20
"""Missing bytes from which their experts are computed in two goes; a go costs ~0.1 ms, a disk reads this in 1-4 ms."""


class StreamingSwitch(nn.Module):
    """`(x [..., H], indices [..., K]) -> [..., K, H]`, as the module it replaces.

    Args:
        inner: that module; views of the slab take the place of its parameters.
        layer: MoE layer, 0..L-1.
        forward: the engine's passes.
    """

    def __init__(self, inner: nn.Module, layer: int, forward: Forward):
        super().__init__()
        self.inner, self.layer, self._forward = inner, layer, forward
        share(inner, forward.memory.arrays(layer))

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        out = self.exact(x, self._forward.arrive(self.layer, x, indices))
        self._forward.depart(out)
        return out

    def reset(self) -> None:
        """A new request begins; this layer keeps nothing of the old one."""

    def exact(self, x: mx.array, ids: np.ndarray) -> mx.array:
        """Outputs `[..., K, H]`, lazy, for `ids [..., K]` known on the host, within a turn of the layer."""
        experts, position = distinct(ids)
        groups = self._forward.groups(self.layer, experts)
        if len(groups) == 1:
            return self._at_once(x, experts, position)
        return self._in_groups(x, groups, experts, position)

    def _at_once(self, x: mx.array, experts: np.ndarray, position: np.ndarray) -> mx.array:
        """All experts of the visit have a slot."""
        demand = self._forward.demand(self.layer, experts)
        if not demand.waiting:
            self._forward.wait(demand)
            out = self.inner(x, mx.array(demand.slots[position]))
            mx.async_eval(out)  # while it is computed, predictions are queued and the next layer is put together
            self._forward.announce(self.layer)
            return out
        self._forward.announce(self.layer)
        one_token = position.size == position.shape[-1]
        if not one_token or self._small(demand) and len(demand.waiting) == len(experts):
            self._forward.wait(demand)
            return self.inner(x, mx.array(demand.slots[position]))
        # One token whose experts are there at different times: compute what is there while the rest is read.
        # Lists, not arrays: for K numbers numpy's set functions take longer than all the rest.
        row, parts, order = position.reshape(-1).tolist(), [], []
        while len(order) < len(row):
            slots = demand.slots.tolist()
            ready = [at for at, expert in enumerate(row) if slots[expert] >= 0 and at not in order]
            if ready:
                here = np.array([slots[row[at]] for at in ready], np.int32).reshape(*position.shape[:-1], -1)
                parts.append(self.inner(x, mx.array(here)))
                order += ready
            if demand.waiting:
                mx.async_eval(*parts[-1:])
                half = 0 if self._small(demand) else len(demand.waiting) // 2
                self._forward.wait(demand, leave=half)
        return mx.concatenate(parts, axis=-2)[..., mx.array(np.argsort(order)), :]

    def _small(self, demand: Demand) -> bool:
        """Reading what is missing takes about as long as handing over a part of it."""
        return len(demand.waiting) * self._forward.memory.store.nbytes(self.layer) < WORTH_SPLITTING

    def _in_groups(self, x: mx.array, groups: list[np.ndarray], experts: np.ndarray, position: np.ndarray) -> mx.array:
        """More experts than slots: each group is evaluated before the next takes its slots."""
        tokens = mx.array(np.arange(position.size) // position.shape[-1])
        rows, flat = x.reshape(-1, x.shape[-1]), position.reshape(-1)
        parts, order = [], []
        for number, group in enumerate(groups):
            demand = self._forward.demand(self.layer, experts[group])
            if number == 0:
                self._forward.announce(self.layer)
            self._forward.wait(demand)
            slots = np.full(len(experts), -1, np.int32)
            slots[group] = demand.slots
            pairs = np.flatnonzero(slots[flat] >= 0)
            part = self.inner(rows[tokens[mx.array(pairs)]], mx.array(slots[flat[pairs]][:, None]))[:, 0]
            self._forward.done(part)
            parts.append(part)
            order.append(pairs)
        back = mx.array(np.argsort(np.concatenate(order)))
        return mx.concatenate(parts)[back].reshape(*position.shape, -1)


def distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Experts `[n]` of a visit, each once, ascending, and where each of `ids [..., K]` stands in them, `[..., K]`."""
    if ids.size == ids.shape[-1]:  # one token: distinct already, and sorting K numbers beats `unique`
        row = ids.reshape(-1).tolist()
        order = sorted(row)
        return np.array(order), np.array([order.index(expert) for expert in row]).reshape(ids.shape)
    experts, position = np.unique(ids, return_inverse=True)
    return experts, position.reshape(ids.shape)


def share(inner: nn.Module, arrays: dict[str, mx.array]) -> None:
    """Make arrays the parameters of a switch module; names are the module's own, dotted."""
    for name, array in arrays.items():
        *path, leaf = name.split(".")
        module = inner
        for part in path:
            module = module[part]
        module[leaf] = array
