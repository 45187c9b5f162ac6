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

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..errors import ParameterError, RecordError, UnsupportedModelError
from .blocks import Block
from .families import margin, rank
from .gates import NO_RESIDUAL

FEATURES = ("pre_attention", "moe_input")
KINDS = ("ids", "output", *FEATURES)


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
        if "pre_attention" in self.features and (reason := NO_RESIDUAL.get(blocks[0].defined_in)):
            raise UnsupportedModelError(reason, field="pre_attention", got=blocks[0].defined_in)
        self.blocks = blocks
        self.shapes: list[tuple[int, int]] = []
        self.notes: dict[str, list[list[mx.array]]] = {kind: [[] for _ in blocks] for kind in KINDS}
        self.chooses = [False] * len(blocks)
        """Whether a gate does the choosing itself and returns (ids, weights), not logits."""
        self._returned = 0

    def pending(self) -> list[mx.array]:
        """Arrays noted since the last call: evaluate them together with the logits of the step."""
        fresh = [array for kind in self.notes.values() for layer in kind for array in layer[self._returned :]]
        self._returned = len(self.shapes)
        return fresh

    def take(self) -> TapRecord:
        """Everything since the last call, forward passes joined along T, computed in bulk: so rather one
        call a sequence than one a step.

        Raises:
            RecordError: nothing ran, a layer was skipped, or the batch size changed in between.
            UnsupportedModelError: the chosen set contradicts the family's arithmetic.
        """
        steps, batches = len(self.shapes), {batch for batch, _ in self.shapes}
        seen = {len(layer) for kind in ("ids", "output", *self.features) for layer in self.notes[kind]}
        if steps == 0 or seen != {steps}:
            raise RecordError("forward passes seen differ between layers", got=sorted(seen), expected=steps)
        if len(batches) > 1:
            raise RecordError("batch size changed between takes", got=sorted(batches), expected="one")
        mx.eval(self.pending())
        layers = [self._layer(index) for index in range(len(self.blocks))]
        for layer in (layer for kind in self.notes.values() for layer in kind):
            layer.clear()
        self.shapes.clear()
        self._returned = 0

        def stack(name: str) -> np.ndarray | None:
            return None if layers[0][name] is None else np.stack([layer[name] for layer in layers], 2)

        features = {name: stack(name) for name in self.features}
        return TapRecord(stack("ids"), stack("weights"), stack("margin"), stack("group_margin"), features)

    def _layer(self, index: int) -> dict[str, np.ndarray | None]:
        block = self.blocks[index]
        got = {kind: join(layers[index], self.shapes) for kind, layers in self.notes.items() if layers[index]}
        ids, output, chooses = got["ids"], got["output"], self.chooses[index]
        precision = self.notes["output"][index][0].dtype
        if chooses:  # it returned weights; the logits behind them are computed once more
            precision = self.notes["moe_input"][index][0].dtype
            logits = block.logits(got["moe_input"], precision)
        else:
            logits = output
        masked, free, group_margin = block.family.selection(logits, block.bias())
        lead = margin(ids, masked)
        tied = self._tied(block, lead, group_margin, precision)
        order = rank(ids, np.where(tied[..., None], free, masked) if tied.any() else masked)
        ids = np.take_along_axis(ids, order, -1)
        return {
            "ids": ids.astype(np.uint16),
            "weights": np.take_along_axis(output, order, -1)
            if chooses
            else block.family.weights(logits, ids, block.expert_scale()),
            "margin": np.maximum(lead, 0.0).astype(np.float32),
            "group_margin": None if group_margin is None else group_margin.astype(np.float32),
            **{name: got[name] for name in self.features},
        }

    def _tied(self, block: Block, lead: np.ndarray, group: np.ndarray | None, precision: mx.Dtype) -> np.ndarray:
        """Rows `[B,T]` whose set the arithmetic gives only up to a near-tie between groups; others raise."""
        # Repeating a gate's product may round differently by the number of rows. In float32 that is 1e-6
        # at most (1e-4 is generous); half precision has 8 to 11 bits and logits up to about 10.
        slack = 1e-4 if precision == mx.float32 else 0.1
        wrong = lead < -slack
        tied = wrong & (group <= slack) if group is not None else np.zeros_like(wrong)
        if (wrong & ~tied).any():
            raise UnsupportedModelError(
                "the experts a model chose are not those its family's arithmetic gives",
                field=f"layer {block.layer_id}",
                got=f"{int((wrong & ~tied).sum())} of {wrong.size} rows, worst margin {float(lead.min()):.3g}",
                expected="margin >= 0",
            )
        return tied


def join(arrays: list[mx.array], shapes: list[tuple[int, int]]) -> np.ndarray:
    """Arrays of consecutive forward passes, each `[B,t,X]` or flattened `[B*t,X]`, as one numpy `[B,T,X]`.

    Bytes are joined through the buffer protocol, which is several times cheaper than mlx or numpy
    operations on thousands of one-token arrays. Half precision widens to float32.
    """
    if arrays[0].dtype in (mx.bfloat16, mx.float16):
        arrays = [array.astype(mx.float32) for array in arrays]
    views = [memoryview(array) for array in arrays]
    dtype, width, batch = np.dtype(views[0].format), arrays[0].shape[-1], shapes[0][0]
    if batch == 1 or len(views) == 1:
        data = b"".join([view if view.c_contiguous else view.tobytes() for view in views])
        return np.frombuffer(data, dtype).reshape(batch, -1, width)
    parts = [np.asarray(view).reshape(*shape, width) for view, shape in zip(views, shapes, strict=True)]
    return np.concatenate(parts, axis=1)


@contextmanager
def tap(blocks: list[Block], features: Iterable[str] = ()) -> Iterator[Tap]:
    """Install taps on these blocks, yield the `Tap`, and put every class back at the end."""
    collector, swapped = Tap(blocks, features), []
    try:
        for index, block in enumerate(blocks):
            for module, wrapper in (
                (block.layer, _layer_call(collector, index)),
                (block.gate, _gate_call(collector, index)),
                (block.switch, _switch_call(collector, index)),
            ):
                if wrapper is None:
                    continue
                swapped.append((module, type(module)))
                module.__class__ = _tapped(type(module), wrapper)
        yield collector
    finally:
        for module, original in reversed(swapped):
            module.__class__ = original


def _tapped(original: type, wrapper: Callable) -> type:
    body = {"__call__": wrapper(original.__call__), "__module__": original.__module__}
    return type(original.__name__, (original,), body)


def _layer_call(collector: Tap, index: int) -> Callable | None:
    """None where there is nothing to note: `[B, T]` is read at the first layer, for all."""
    note = collector.notes["pre_attention"][index].append if "pre_attention" in collector.features else None
    shape = collector.shapes.append if index == 0 else None
    if note is None and shape is None:
        return None

    def wrapper(call: Callable) -> Callable:
        def __call__(self, x, *args, **kwargs):
            if shape is not None:
                shape(x.shape[:2])
            if note is not None:
                note(x)
            return call(self, x, *args, **kwargs)

        return __call__

    return wrapper


def _gate_call(collector: Tap, index: int) -> Callable:
    note_input = collector.notes["moe_input"][index].append
    note_output = collector.notes["output"][index].append
    wanted = "moe_input" in collector.features

    def wrapper(call: Callable) -> Callable:
        def __call__(self, x):
            out = call(self, x)
            if chooses := isinstance(out, tuple):
                collector.chooses[index] = True
            if wanted or chooses:
                note_input(x)
            note_output(out[1] if chooses else out)
            return out

        return __call__

    return wrapper


def _switch_call(collector: Tap, index: int) -> Callable:
    note = collector.notes["ids"][index].append

    def wrapper(call: Callable) -> Callable:
        def __call__(self, x, indices, *args, **kwargs):
            note(indices)
            return call(self, x, indices, *args, **kwargs)

        return __call__

    return wrapper
