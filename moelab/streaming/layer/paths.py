"""A streamed layer that has more than the exact path: staged slots in decode, a window in prefill.

Which path a turn takes follows from the pass's phase, which is told, and from what is staged:

    prefill: window, if the layer has one       decode: staged set, if there is one for this pass
             otherwise exact                            otherwise exact, counted as fallback

Without staged slots, `on_missing` other than "exact" has a decode turn go on without experts that are not resident
(`late`).

A turn may mix: the experts in a stack's slots are computed there, the others (`on_missing="exact"`) on the
exact path, and every row has the bits that it has alone. So the two paths give equal outputs.

What a turn costs in synchronisations depends on how it is told its route:

* an mlx array is read back at once (one synchronisation, as on the exact path) where ids that are not
  staged have to be known (`on_missing` "exact" or "raise"). "zero" and "anchor" look slots up on the
  device and know what was missing only at the end of the pass, when it is counted for every layer;
* a numpy array is known already, as a predicted route is: no synchronisation unless an id is missing;
* None, with `staged_replace`: the staged set is the route, in its own order, for every token. Ask `staged.ids`
  first: if it is None, nothing is staged for the pass, and the layer needs the router's ids.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...errors import ContractError, GeometryError, ParameterError
from ...routes import DECODED, PREFILLED
from .late import LateExperts
from .layer import StreamingSwitch, distinct, share
from .options import LayerOptions
from .prefill import PrefillWindow
from .stack import Stack, StagedSet
from .staged import StagedCounters, StagedSlots

if TYPE_CHECKING:
    from ..memory.forward import Forward

__all__ = ["Anchor", "StagedSwitch"]

Anchor = Callable[[mx.array], mx.array]
"""The layer's input `[..., H]` → what stands in for an expert that is missing, `[..., H]`."""


class StagedSwitch(StreamingSwitch):
    """`(x [..., H], indices [..., K] or None) -> [..., K, H]` (see the module text).

    Args:
        options: of the layer.
        window: the model's prefill windows; None without.
        anchor: for `on_missing="anchor"`: an id's weight goes to what this returns.

    Attributes:
        staged: the layer's staged slots, None without `options.staged`.
        late: what is late in a layer without them; None if that is waited for (`on_missing="exact"`).

    Raises:
        ParameterError: `on_missing="anchor"` without an anchor.
    """

    def __init__(
        self,
        inner: nn.Module,
        layer: int,
        forward: Forward,
        options: LayerOptions,
        *,
        window: PrefillWindow | None = None,
        anchor: Anchor | None = None,
    ):
        super().__init__(inner, layer, forward)
        if options.on_missing == "anchor" and anchor is None:
            raise ParameterError(
                "no expert stands in", field="on_missing", got="anchor", expected="a layer with a shared expert"
            )
        self.options, self.staged = options, StagedSlots(forward, layer, options) if options.staged else None
        waits = options.staged or options.on_missing == "exact"
        self.late = None if waits else LateExperts(forward, layer)
        self._window, self._anchor = window, anchor
        self._predicted: frozenset[int] = frozenset()

    def __call__(self, x: mx.array, indices: mx.array | np.ndarray | None = None) -> mx.array:
        self._forward.enter()
        self._check(x, indices)
        staged = self.staged if self._forward.phase == DECODED else None
        # Ids that have to be read back are read back before anything is waited for.
        on_device = isinstance(indices, mx.array) and self.options.on_missing in ("exact", "raise")
        arrives = indices is not None and (staged is None or on_device)
        ids = self._forward.arrive(self.layer, x, mx.array(indices)) if arrives else None
        began = self._forward.memory.clock()
        rows = self._window_rows(indices) if staged is None else staged.serving()
        if arrives:
            now = self._forward.memory.clock()
            self._forward.timeline.waited(now - began, now)
        if rows is not None and staged is not None:
            return self._on_staged(x, indices, ids, rows)
        if rows is not None:
            return self._split(x, ids, rows, self._window.stack(self.layer))
        if indices is None:
            raise ContractError(
                "nothing is staged that could be the route", field="indices", got=None,
                expected="the router's ids", fix="ask staged.ids before the call, and call with ids if it is None",
            )  # fmt: skip
        if staged is not None:
            staged.counters.fallback += 1
        if ids is None:
            ids = self._forward.arrive(self.layer, x, mx.array(indices))
        without = self.late is not None and self._forward.phase == DECODED
        return self._depart(self._in_time(x, ids) if without else self.exact(x, ids), ids)

    def _check(self, x: mx.array, indices: mx.array | np.ndarray | None) -> None:
        top_k, experts = self.options.top_k, self._forward.memory.store.experts
        if indices is not None and (indices.shape[:-1] != x.shape[:-1] or top_k not in (None, indices.shape[-1])):
            raise GeometryError(
                "not a route of these tokens", field="indices", got=indices.shape,
                expected=(*x.shape[:-1], top_k or "K"),
            )  # fmt: skip
        if isinstance(indices, np.ndarray) and not ((indices >= 0) & (indices < experts)).all():
            raise GeometryError(
                "no such expert", field="indices", got=np.unique(indices).tolist(), expected=f"0 to {experts - 1}"
            )

    def _window_rows(self, indices: mx.array | np.ndarray | None) -> StagedSet | None:
        """The layer's window, in a prefill pass that knows its ids."""
        wanted = self._window is not None and self._forward.phase == PREFILLED and indices is not None
        return self._window.take(self.layer) if wanted else None

    # ------------------------------------------------------------------ predictions

    @property
    def predicted_experts(self) -> frozenset[int]:
        """Experts that a prediction names for the layer's next turn. Assign them, or call `predict`."""
        return self._predicted

    def predict(self, experts: Collection[int]) -> None:
        """Name the experts of the layer's next turn, in place of those named before.

        Those that are resident are protected from eviction until that turn is over, and all get `pin_bonus`
        where hot experts are chosen: pins of the cache (`hot_per_layer`), and `prefill_hot`.

        Raises:
            GeometryError: no such expert.
        """
        named, count = frozenset(int(expert) for expert in experts), self._forward.memory.store.experts
        if any(not 0 <= expert < count for expert in named):
            raise GeometryError("no such expert", field="predicted_experts", got=sorted(named), expected=f"< {count}")
        self._forward.memory.expect(self.layer, named, instead_of=self._predicted)
        if self._window is not None:
            self._window.predict(self.layer, self._predicted, named)
        self._predicted = named

    def __setattr__(self, name: str, value: object) -> None:
        if name == "predicted_experts":  # an mlx module would take a list for a child, and pass the property by
            self.predict(value)
        else:
            super().__setattr__(name, value)

    def reset(self) -> None:
        """A new request begins: nothing is staged or predicted."""
        if self.staged is not None:
            self.staged.reset()
        if self._window is not None:
            self._window.reset()
        self.predict(())

    # ------------------------------------------------------------------ paths

    def exact(self, x: mx.array, ids: np.ndarray) -> mx.array:
        share(self.inner, self._forward.memory.arrays(self.layer))
        return super().exact(x, ids)

    def _on_staged(
        self, x: mx.array, indices: mx.array | np.ndarray | None, ids: np.ndarray | None, rows: StagedSet
    ) -> mx.array:
        """`ids` are `indices` on the host, where the device has given them."""
        if indices is None:
            if not self.options.staged_replace:
                raise ParameterError(
                    "without indices the staged set is the route", field="staged_replace", got=False, expected=True
                )
            indices = np.broadcast_to(np.array(rows.ids), (*x.shape[:-1], len(rows.ids)))
        if ids is None and isinstance(indices, mx.array):
            return self._by_table(x, indices, rows)
        ids = indices if ids is None else ids
        if (missing := rows.table[ids] < 0).any():
            self._refuse(ids, missing, "experts are not staged", rows.ids)
            if self.options.on_missing != "exact":
                return self._by_table(x, mx.array(ids), rows)
            if ids is indices:
                ids = self._forward.arrive(self.layer, x, mx.array(indices))
        self._count(ids, rows)
        self.staged.served = True
        return self._split(x, ids, rows, self.staged.stack)

    def _split(self, x: mx.array, ids: np.ndarray, rows: StagedSet, stack: Stack) -> mx.array:
        """Experts of the set in its slots, the others exactly."""
        slots = rows.table[ids]
        inside = np.flatnonzero(slots >= 0)
        self._forward.served(self.layer, np.unique(ids.reshape(-1)[inside]))
        if inside.size == ids.size:
            self._forward.announce(self.layer, ids, x)
            out = self._run(stack, rows, x, mx.array(slots))
        elif not inside.size:
            out = self.exact(x, ids)
        else:
            outside = np.flatnonzero(slots < 0)
            tokens, flat = np.arange(ids.size) // ids.shape[-1], x.reshape(-1, x.shape[-1])
            here = self._run(stack, rows, flat[mx.array(tokens[inside])], mx.array(slots.reshape(-1)[inside, None]))
            mx.async_eval(here)  # computed while the others are read
            there = self.exact(flat[mx.array(tokens[outside])], ids.reshape(-1)[outside, None])
            back = mx.array(np.argsort(np.concatenate([inside, outside])))
            out = mx.concatenate([here[:, 0], there[:, 0]])[back].reshape(*ids.shape, -1)
        return self._depart(out, ids, stack)

    def _by_table(self, x: mx.array, indices: mx.array, rows: StagedSet) -> mx.array:
        """Slots looked up on the device; what is not staged gives nothing, or what the anchor gives."""
        slots = rows.device[indices]
        out = self._stand_in(x, self._run(self.staged.stack, rows, x, mx.maximum(slots, 0)), slots < 0)
        self.staged.served = True
        self._forward.depart(out, then=self.staged.stack.release)
        self._forward.tally(indices, lambda ids: self._known(ids, x, rows))
        return out

    def _refuse(self, ids: np.ndarray, missing: np.ndarray, problem: str, have: Collection[int]) -> None:
        if self.options.on_missing == "raise" and missing.any():
            raise ContractError(
                problem, field=f"layer {self.layer}", got=np.unique(ids[missing]).tolist(),
                expected=sorted({int(expert) for expert in have}),
            )  # fmt: skip

    def _stand_in(self, x: mx.array, out: mx.array, missing: mx.array) -> mx.array:
        """`out [..., K, H]` with nothing, or what the anchor gives, where `missing [..., K]`."""
        stand_in = mx.zeros((), out.dtype) if self.options.on_missing == "zero" else self._anchor(x)[..., None, :]
        if stand_in.ndim and stand_in.shape[-1] != out.shape[-1]:
            raise GeometryError(
                "the anchor has another width than the experts", field="anchor", got=stand_in.shape[-1],
                expected=out.shape[-1],
            )  # fmt: skip
        return mx.where(missing[..., None], stand_in, out)

    def _in_time(self, x: mx.array, ids: np.ndarray) -> mx.array:
        """Experts that are in time exactly; for the others what `on_missing` says, and a read for a later turn."""
        missing = ~self.late.in_time(ids)
        self._tell(self.late.counters, ids.size, int(missing.sum()))
        if not missing.any():
            return self.exact(x, ids)
        self._refuse(ids, missing, "experts are late", ids[~missing])
        experts, position = distinct(ids)
        late = np.isin(experts, ids[missing])
        demand = self._forward.demand(self.layer, experts[~late])
        self._forward.announce(self.layer)
        self.late.read(experts[late])
        self._forward.wait(demand)
        slots = np.zeros(len(experts), np.int32)
        slots[~late] = demand.slots
        share(self.inner, self._forward.memory.arrays(self.layer))
        return self._stand_in(x, self.inner(x, mx.array(slots[position])), mx.array(missing))

    def _known(self, ids: np.ndarray, x: mx.array, rows: StagedSet) -> None:
        """At the end of the pass: what a turn without a synchronisation did."""
        self._count(ids, rows)
        self._forward.served(self.layer, np.unique(ids[rows.table[ids] >= 0]))
        if self._window is not None:
            self._window.used(self.layer, ids)
        self._forward.announce(self.layer, ids, x)

    def _run(self, stack: Stack, rows: StagedSet, x: mx.array, slots: mx.array) -> mx.array:
        stack.hold(rows)
        share(self.inner, stack.arrays(self.layer))
        return self.inner(x, slots)

    def _count(self, ids: np.ndarray, rows: StagedSet) -> None:
        self._tell(self.staged.counters, ids.size, int((rows.table[ids] < 0).sum()))

    def _tell(self, counters: StagedCounters, pairs: int, missing: int) -> None:
        counters.used += pairs - missing
        counters.exact += missing * (self.options.on_missing == "exact")
        counters.zeroed += missing * (self.options.on_missing == "zero")
        counters.anchored += missing * (self.options.on_missing == "anchor")

    def _depart(self, out: mx.array, ids: np.ndarray, stack: Stack | None = None) -> mx.array:
        if self._window is not None:
            self._window.used(self.layer, ids)
        self._forward.depart(out, then=None if stack is None else stack.release)
        return out
