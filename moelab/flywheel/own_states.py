"""States that a model has while predictions are its routes, of many texts at once.

On its own text a replaced model is another model: what layer N reads at token t has been made by the predictions of
every earlier token, and so is what its head will be told. These states can only be had token by token; `Lockstep` takes
many texts a token further in one pass. What passes the switch layers is noted: the input of the experts, and the
experts that were executed. What the native gate would have chosen on that input, the label, is computed afterwards for
all rows at once.

The first tokens of a text are its prompt: prefilled, so routed natively, as when the model is used.

Shapes: T rows (tokens of all texts), L MoE layers, K experts a token, H width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..routes import Routes
from .head_examples import HeadRows, head_rows
from .lesson import Examples

if TYPE_CHECKING:
    import mlx.core as mx

    from ..models import LoadedModel
    from ..models.blocks import Block
    from ..prerouter import HeadBank, Wiring

BATCH = 4096
"""Rows of a gate that are computed at once."""


@dataclass(frozen=True, eq=False)
class States:
    """Row for row with some routes: `hidden f32[T, L, H]` inputs of the experts, `executed u16[T, L, K]` ids, and
    `native u16[T, L, K]`, those of the native gate on these inputs."""

    hidden: np.ndarray
    executed: np.ndarray
    native: np.ndarray

    @classmethod
    def teacher_forced(cls, hidden: np.ndarray, routes: Routes) -> States:
        """Of the native model: executed is what its gate chose."""
        return cls(hidden, routes.ids, routes.ids)

    def rows(self, routes: Routes, wiring: Wiring, targets: np.ndarray) -> tuple[HeadRows, Examples]:
        """What heads learn from at the targets `bool[T]`, see `head_examples`."""
        seen = replace(routes, ids=self.native)
        rows = head_rows(self.hidden, seen, wiring, targets, executed=lambda _: self.executed)
        return rows, rows.examples(seen, wiring)


def own_states(
    loaded: LoadedModel,
    bank: HeadBank,
    wiring: Wiring,
    texts: Sequence[np.ndarray],
    *,
    prompt: int,
    mode: str = "replace",
) -> list[States]:
    """States of each text from its token number `prompt` on, under `mode` (see `prerouter.modes`).

    Texts of one call share a batch: padded behind their ends, where a row goes on by itself and nothing is noted.

    Raises:
        ContractError: a prompt of fewer than two tokens, or a text with nothing behind its prompt.
    """
    import mlx.core as mx

    from ..prerouter.lockstep import OWN, ROWS, Arm, Lockstep

    arms = [Arm(name="native", mode="off"), Arm(name=mode, mode=mode)]
    out: list[States] = []
    for start in range(0, len(texts), ROWS // len(arms)):
        some = texts[start : start + ROWS // len(arms)]
        tokens = np.full((len(some), max(map(len, some))), OWN, np.int32)
        for row, text in enumerate(some):
            tokens[row, : len(text)] = text
        decoded = np.broadcast_to(np.arange(tokens.shape[1]) >= prompt, tokens.shape)
        with passing(loaded.blocks) as passed:
            Lockstep(loaded, bank, wiring, arms).run(tokens, decoded)
        # The first call of a switch layer is the prompt; then one a token, the rows of the second arm behind the first.
        hidden, executed = (
            np.stack([np.stack([np.array(call[i])[len(some) :, 0] for call in layer[1:]]) for layer in passed], axis=2)
            for i in (0, 1)
        )
        for row, text in enumerate(some):
            kept = slice(0, len(text) - prompt)
            own = np.ascontiguousarray(hidden[kept, row])
            out.append(States(own, executed[kept, row].astype(np.uint16), native_ids(loaded, own)))
        mx.clear_cache()
    return out


def native_ids(loaded: LoadedModel, hidden: np.ndarray) -> np.ndarray:
    """`u16[T, L, K]` in rank order: what each layer's gate chooses for `hidden f32[T, L, H]`."""
    out = np.empty((*hidden.shape[:2], loaded.family.top_k), np.uint16)
    for layer, block in enumerate(loaded.blocks):
        for start in range(0, len(hidden), BATCH):
            rows = slice(start, start + BATCH)
            logits = block.logits(hidden[rows, layer])
            out[rows, layer] = loaded.family.select(logits, block.bias(), block.expert_scale()).ids
    return out


def native_weights(loaded: LoadedModel, states: States, layers: Sequence[int]) -> np.ndarray:
    """`f32[T, n, K]` of the native experts of these MoE layers, in their order."""
    return np.stack(
        [
            loaded.family.weights(loaded.blocks[layer].logits(states.hidden[:, layer]), states.native[:, layer])
            for layer in layers
        ],
        axis=1,
    )


@contextmanager
def passing(blocks: Sequence[Block]) -> Iterator[list[list[tuple[mx.array, mx.array]]]]:
    """What passes the switch layers meanwhile: for each, the input and ids of every call."""
    noted, classes = [[] for _ in blocks], []
    try:
        for block, notes in zip(blocks, noted, strict=True):
            switch, cls = block.switch, type(block.switch)
            classes.append((switch, cls))
            switch.__class__ = _noting(cls, notes)
        yield noted
    finally:
        for switch, cls in classes:
            switch.__class__ = cls


def _noting(cls: type, notes: list[tuple[mx.array, mx.array]]) -> type:
    def call(self, x, ids):
        notes.append((x, ids))
        return cls.__call__(self, x, ids)

    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__})
