"""What a changed layer does to the loss: run the model on from one MoE layer with another output in its place.

Everything before the layer is the same whatever the layer computes, so it runs once. The input of the layer is
kept, and the model then runs again with the layers before it switched off (they pass their input through), that
layer fed with what was kept, and its MoE block answering with a given output. The modules keep their weights and
get their classes back at the end.

Windows are whole contexts of their own: each starts without history, at position 0, and its last token predicts
nothing. Shapes: B windows, T padded tokens, R real tokens of all windows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import GeometryError
from ..flywheel.batches import batches

if TYPE_CHECKING:
    from ..models import LoadedModel


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """What reached one MoE layer of a model on some windows.

    windows: token ids `i32[T]` each. order: window numbers of each batch.
    states: input of the decoder layer, mlx `[B, T, H]` a batch.
    x: `f32[R, H]` input of the MoE block. ids: `i64[R, K]` experts that the model chose, by rank.
    first: `[windows + 1]`, real tokens of window i are rows first[i]:first[i + 1].
    """

    loaded: Any
    layer: int
    windows: list[np.ndarray]
    order: list[np.ndarray]
    states: list[Any]
    x: np.ndarray
    ids: np.ndarray
    first: np.ndarray

    @property
    def predicts(self) -> np.ndarray:
        """`bool[R]`: tokens with a next token in their window."""
        out = np.ones(self.first[-1], bool)
        out[self.first[1:] - 1] = False
        return out

    def losses(self, output: np.ndarray) -> np.ndarray:
        """Next-token loss `f32[R]` in nats when the MoE block answers `f32[R, H]`; 0 where nothing is predicted.

        Raises:
            GeometryError: not one output a token.
        """
        out = np.zeros(len(output), np.float32)
        with _resumed(self.loaded, self.layer) as run:
            for batch, tokens, given in self._batches(output):
                found = _losses(run(tokens, *given), tokens)
                for row, i in enumerate(batch):
                    out[self.first[i] : self.first[i + 1] - 1] = found[row, : len(self.windows[i]) - 1]
        return out

    def gradients(self, output: np.ndarray) -> np.ndarray:
        """`f32[R, H]`: how the summed loss of its window changes with the block's output at each token."""
        import mlx.core as mx
        import mlx.nn as nn

        out = np.empty_like(output)
        with _resumed(self.loaded, self.layer) as run:
            for batch, tokens, (states, given) in self._batches(output):
                ends = np.array([len(self.windows[i]) for i in batch])[:, None]
                counted = mx.array(np.arange(1, tokens.shape[1]) < ends)

                def total(y, tokens=tokens, states=states, counted=counted):
                    logits = run(tokens, states, y)[:, :-1].astype(mx.float32)
                    return (nn.losses.cross_entropy(logits, mx.array(tokens[:, 1:])) * counted).sum()

                found = np.array(mx.grad(total)(given))
                for row, i in enumerate(batch):
                    out[self.rows(i)] = found[row, : len(self.windows[i])]
        return out

    def _batches(self, output: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, tuple[Any, Any]]]:
        import mlx.core as mx

        if output.shape != self.x.shape:
            raise GeometryError("one output a token", field="output", got=output.shape, expected=self.x.shape)
        for batch, states in zip(self.order, self.states, strict=True):
            padded = mx.array(_padded([output[self.rows(i)] for i in batch])).astype(states.dtype)
            yield batch, _padded([self.windows[i] for i in batch]), (states, padded)

    def rows(self, window: int) -> slice:
        return slice(self.first[window], self.first[window + 1])

    def some(self, kept: np.ndarray) -> tuple[LayerInputs, np.ndarray]:
        """Some of the windows, ascending, with their batches cut down, and which rows their tokens are."""
        rows = np.concatenate([np.arange(self.first[i], self.first[i + 1]) for i in kept])
        order, states = [], []
        for batch, state in zip(self.order, self.states, strict=True):
            inside = np.flatnonzero(np.isin(batch, kept))
            if len(inside):
                order.append(np.searchsorted(kept, batch[inside]))
                states.append(state[inside.tolist()][:, : max(len(self.windows[i]) for i in batch[inside])])
        windows = [self.windows[i] for i in kept]
        first = np.concatenate([[0], np.cumsum([len(w) for w in windows])])
        part = replace(
            self, windows=windows, order=order, states=states, x=self.x[rows], ids=self.ids[rows], first=first
        )
        return part, rows

    def every(self, stride: int) -> tuple[LayerInputs, np.ndarray]:
        """One window in `stride`, spread over the owners that windows are ordered by."""
        return self.some(np.arange(0, len(self.windows), stride))


def layer_inputs(loaded: LoadedModel, windows: Sequence[np.ndarray], layer: int, *, tokens: int = 512) -> LayerInputs:
    """Run windows up to MoE layer `layer`; `tokens` are padded tokens of a batch, few enough for their logits to stay
    in the processor's cache."""
    import mlx.core as mx

    from ..models.taps import tap

    lengths = np.array([len(w) for w in windows])
    first = np.concatenate([[0], np.cumsum(lengths)])
    order, states = batches(lengths, tokens), []
    x, ids = np.empty((first[-1], loaded.geometry.hidden), np.float32), None
    for batch in order:
        with tap([loaded.blocks[layer]], ("moe_input", "pre_attention")) as notes:
            loaded.model(mx.array(_padded([windows[i] for i in batch])))
            states.append(notes.notes["pre_attention"][0][0])
            record = notes.take()
        if ids is None:
            ids = np.empty((first[-1], record.ids.shape[-1]), np.int64)
        for row, i in enumerate(batch):
            x[first[i] : first[i + 1]] = record.features["moe_input"][row, : lengths[i], 0]
            ids[first[i] : first[i + 1]] = record.ids[row, : lengths[i], 0]
    return LayerInputs(loaded, layer, list(windows), order, states, x, ids, first)


def cut(sequences: Sequence[np.ndarray], context: int, *, least: int = 16) -> list[tuple[int, np.ndarray]]:
    """Sequences as `(sequence number, window)` of at most `context` tokens; a rest shorter than `least` is left out."""
    return [
        (number, part)
        for number, ids in enumerate(sequences)
        for start in range(0, len(ids), context)
        if len(part := ids[start : start + context]) >= least
    ]


@contextmanager
def _resumed(loaded: LoadedModel, layer: int) -> Iterator[Any]:
    import mlx.core as mx

    block = loaded.blocks[layer]
    given: dict[str, Any] = {}

    def passed(self, x, *args, **kwargs):
        return x

    def fed(call):
        return lambda self, x, *args, **kwargs: call(self, given["states"], *args, **kwargs)

    def answer(self, x, *args, **kwargs):
        return given["output"]

    swaps = [(module, passed) for module in loaded.model.layers[: block.layer_id]]
    swaps += [(block.layer, fed(type(block.layer).__call__)), (_answering(block), answer)]
    before = [(module, type(module)) for module, _ in swaps]

    def run(tokens: np.ndarray, states: Any, output: Any) -> Any:
        given.update(states=states, output=output)
        return loaded.model(mx.array(tokens))

    try:
        for module, call in swaps:
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
        yield run
    finally:
        for module, kind in before:
            module.__class__ = kind


def _losses(logits: Any, tokens: np.ndarray) -> np.ndarray:
    """`f32[B, T-1]` from logits `[B, T, V]`. torch's logsumexp is several times faster than mlx's on a processor."""
    import mlx.core as mx
    import torch

    rows = torch.from_numpy(np.array(logits.astype(mx.float32), copy=False))[:, :-1]
    target = torch.from_numpy(tokens[:, 1:].astype(np.int64))[..., None]
    return (rows.logsumexp(-1) - rows.gather(-1, target)[..., 0]).numpy()


def _answering(block: Any) -> Any:
    """The direct part of the decoder layer that holds the gate: the block whose output joins the residual stream."""
    for child in block.layer.children().values():
        if hasattr(child, "named_modules") and any(module is block.gate for _, module in child.named_modules()):
            return child
    raise GeometryError("the gate is no part of its layer", field=f"layer {block.layer_id}")


def _padded(parts: list[np.ndarray]) -> np.ndarray:
    out = np.zeros((len(parts), max(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for row, part in enumerate(parts):
        out[row, : len(part)] = part
    return out
