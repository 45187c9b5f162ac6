"""Taps: read what a model routes while it runs, without changing one bit of what it computes.

A tap puts a subclass of the module's own class on three modules of each MoE layer (this instance only,
by `__class__`), notes the arrays that pass, and calls the original:

* decoder layer: its input, the residual stream (`pre_attention`);
* gate: its input (`moe_input`), and its output (logits, or the weights the model made of them);
* switch layer: the ids that the model chose. They are recorded, never chosen again.

During a step only references are kept; arrays stay lazy. Everything else (rank order, weights, margins)
happens in bulk in `take()`, on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import ParameterError, RecordError, UnsupportedModelError
from .blocks import Block
from .families import margin, rank

FEATURES = ("pre_attention", "moe_input")


@dataclass(frozen=True)
class TapRecord:
    """What every MoE layer did with every token since the last `take()`.

    `ids u16[B,T,L,K]` in rank order, `weights f32[B,T,L,K]`, `margin f32[B,T,L]`,
    `group_margin f32[B,T,L]` or None, `features` name → `f32[B,T,L,H]`.
    """

    ids: np.ndarray
    weights: np.ndarray
    margin: np.ndarray
    group_margin: np.ndarray | None
    features: dict[str, np.ndarray]


class Tap:
    """Collects references during forward passes; `take()` turns them into a `TapRecord`."""

    def __init__(self, blocks: list[Block], features: Iterable[str]):
        self.features = tuple(features)
        if unknown := set(self.features) - set(FEATURES):
            raise ParameterError("unknown feature", field="features", got=sorted(unknown), expected=FEATURES)
        self.blocks = blocks
        self._clear()

    def _clear(self) -> None:
        layers = range(len(self.blocks))
        self._streams: list[list[mx.array]] = [[] for _ in layers]
        self._inputs: list[list[mx.array]] = [[] for _ in layers]
        self._outputs: list[list[mx.array]] = [[] for _ in layers]
        self._ids: list[list[mx.array]] = [[] for _ in layers]
        self._shapes: list[tuple[int, int]] = []
        self._fresh: list[mx.array] = []

    # ------------------------------------------------------------ during a step

    def _on_layer(self, index: int, args: tuple, kwargs: dict) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        if index == 0:
            self._shapes.append(tuple(x.shape[:2]))
        if "pre_attention" in self.features:
            self._note(self._streams[index], x)

    def _on_gate(self, index: int, x: mx.array, out: Any) -> None:
        self._note(self._inputs[index], x)
        # A gate returns logits, or (ids, weights) when it does the choosing itself.
        self._note(self._outputs[index], out[1] if isinstance(out, tuple) else out)

    def _on_switch(self, index: int, ids: mx.array) -> None:
        self._note(self._ids[index], ids)

    def _note(self, kept: list[mx.array], array: mx.array) -> None:
        kept.append(array)
        self._fresh.append(array)

    def pending(self) -> list[mx.array]:
        """Arrays noted since the last call: evaluate them together with the logits of the step."""
        fresh, self._fresh = self._fresh, []
        return fresh

    # ------------------------------------------------------------ afterwards

    def take(self) -> TapRecord:
        """Everything since the last call, forward passes joined along T.

        Raises:
            RecordError: nothing ran, a layer was skipped, or the batch size changed in between.
            UnsupportedModelError: the chosen set contradicts the family's arithmetic.
        """
        steps = len(self._shapes)
        counts = {len(kind) for kind in (*self._ids, *self._inputs, *self._outputs)}
        if steps == 0 or counts != {steps}:
            raise RecordError("forward passes seen differ between layers", got=sorted(counts), expected=steps)
        if len({batch for batch, _ in self._shapes}) > 1:
            raise RecordError("batch size changed between takes", got=sorted({b for b, _ in self._shapes}), expected=1)
        layers = [self._layer(index) for index in range(len(self.blocks))]
        features = {name: np.stack([layer[name] for layer in layers], 2) for name in self.features}
        self._clear()
        ids, weights, margins, group = ([layer[n] for layer in layers] for n in ("ids", "weights", "margin", "group"))
        return TapRecord(
            np.stack(ids, 2),
            np.stack(weights, 2),
            np.stack(margins, 2),
            None if group[0] is None else np.stack(group, 2),
            features,
        )

    def _join(self, arrays: list[mx.array]) -> mx.array:
        # Some blocks flatten [B, T] into one axis before their gate.
        parts = [a.reshape(*shape, -1) for a, shape in zip(arrays, self._shapes, strict=True)]
        return mx.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]

    def _layer(self, index: int) -> dict[str, np.ndarray | None]:
        block, family = self.blocks[index], self.blocks[index].family
        x, out, chosen = self._join(self._inputs[index]), self._join(self._outputs[index]), self._join(self._ids[index])
        own_weights = out.shape[-1] == family.top_k and out.shape[-1] != block.experts
        logits = block.logits(x) if own_weights else out
        ids, logits = np.array(chosen), np.array(logits.astype(mx.float32))
        bias = None if block.bias() is None else np.array(block.bias().astype(mx.float32))
        masked, free, group_margin = family.selection(logits, bias)
        lead = margin(ids, masked)
        tied = self._check(block, lead, group_margin, x.dtype)
        scores = np.where(tied[..., None], free, masked) if tied.any() else masked
        order = rank(ids, scores)
        if own_weights:
            weights = np.take_along_axis(np.array(out.astype(mx.float32)), order, -1)
        else:
            weights = family.weights(logits, np.take_along_axis(ids, order, -1))
        result = {
            "ids": np.take_along_axis(ids, order, -1).astype(np.uint16),
            "weights": weights,
            "margin": np.maximum(lead, 0.0).astype(np.float32),
            "group": None if group_margin is None else group_margin.astype(np.float32),
        }
        if "moe_input" in self.features:
            result["moe_input"] = np.array(x.astype(mx.float32))
        if "pre_attention" in self.features:
            result["pre_attention"] = np.array(self._join(self._streams[index]).astype(mx.float32))
        return result

    def _check(self, block: Block, lead: np.ndarray, group: np.ndarray | None, dtype: mx.Dtype) -> np.ndarray:
        """Rows whose set the arithmetic does not reproduce; allowed only within rounding of a tie."""
        # The gate's product is repeated in bulk here; another number of rows may round differently:
        # 1e-4 is 100x what was seen in float32, half precision has 8 to 11 bits.
        slack = 1e-4 if dtype == mx.float32 else 0.1
        wrong = lead < -slack
        if group is not None:
            wrong &= group > slack
        if wrong.any():
            raise UnsupportedModelError(
                "the experts a model chose are not those its family's arithmetic gives",
                field=f"layer {block.layer_id}",
                got=f"{int(wrong.sum())} of {wrong.size} rows, worst margin {float(lead.min()):.3g}",
                expected="margin >= 0",
            )
        return lead < -slack


@contextmanager
def tap(blocks: list[Block], features: Iterable[str] = ()):
    """Install taps on these blocks, yield the `Tap`, and put every class back at the end."""
    collector, swapped = Tap(blocks, features), []
    try:
        for index, block in enumerate(blocks):
            _swap(swapped, block.layer, _layer_call(collector, index))
            _swap(swapped, block.gate, _gate_call(collector, index))
            _swap(swapped, block.switch, _switch_call(collector, index))
        yield collector
    finally:
        for module, original in reversed(swapped):
            module.__class__ = original


def _swap(swapped: list, module: nn.Module, make) -> None:
    original = type(module)
    tapped = type(
        original.__name__, (original,), {"__call__": make(original.__call__), "__module__": original.__module__}
    )
    module.__class__ = tapped
    swapped.append((module, original))


def _layer_call(collector: Tap, index: int):
    def make(call):
        def __call__(self, *args, **kwargs):
            collector._on_layer(index, args, kwargs)
            return call(self, *args, **kwargs)

        return __call__

    return make


def _gate_call(collector: Tap, index: int):
    def make(call):
        def __call__(self, x):
            out = call(self, x)
            collector._on_gate(index, x, out)
            return out

        return __call__

    return make


def _switch_call(collector: Tap, index: int):
    def make(call):
        def __call__(self, x, indices, *args, **kwargs):
            collector._on_switch(index, indices)
            return call(self, x, indices, *args, **kwargs)

        return __call__

    return make
