"""Replay a whole shard layer by layer, reading each layer's experts once.

A model larger than its memory cannot be replayed sequence by sequence: every sequence would read nearly every
expert. Turned around, each layer's experts are read once and all sequences of the shard go through them, so
that the teacher's bytes are the model's size per *shard* and not per token.

No family's forward pass is written again for this. mlx is lazy: the passes of all sequences are built first,
with nothing computed, on slabs whose contents come later. Then, for each layer in order, its experts are read
into its slab and the outputs of its switch layer are evaluated, for all sequences. That computes precisely
what lies between two MoE layers. Two slabs take turns, so the next layer is read while one is computed; a
slab is filled again only when everything that was built on it has been evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import ContractError
from ...models.blocks import Block
from ..layer.layer import share
from ..store.slab import Slab
from ..store.store import ExpertStore

__all__ = ["LayerMajor"]


class LayerMajor:
    """Runs the switch layers of `blocks` layer-major, from a store.

        with layers.building():
            model(batch_1); model(batch_2)          # builds graphs, computes nothing
        layers.evaluate()                           # reads each layer once, computes everything

    Args:
        blocks: MoE blocks of a model whose other weights are loaded.
        store: of the same model's experts.
        budget: bytes of slots at most; two layers' worth are used where they fit, else one.
        threads: reads at a time.

    Raises:
        ContractError: the budget does not hold the experts of one layer.
    """

    def __init__(self, blocks: list[Block], store: ExpertStore, *, budget: int, threads: int = 4):
        self.blocks, self.store = blocks, store
        sizes = {layout.slot_bytes for layout in store.layouts}
        one = store.experts * sum(sizes)
        if budget < one:
            raise ContractError(
                "layer-major replay holds all experts of a layer",
                field="budget",
                got=budget,
                expected=f">= {one} bytes",
            )
        turns = 2 if budget >= 2 * one else 1
        self._slabs = {(size, turn): Slab(size, store.experts) for size in sizes for turn in range(turns)}
        self._turn = [layer % turns for layer in range(store.layers)]
        self._ahead = turns == 2
        self._outputs: list[list[mx.array]] = [[] for _ in blocks]
        self._pool = ThreadPoolExecutor(threads, "layer-reader")

    @contextmanager
    def building(self) -> Iterator[None]:
        """Inside, the model's switch layers build on the slabs, and nothing may be evaluated."""
        switches = [block.switch for block in self.blocks]
        try:
            for layer, (block, switch) in enumerate(zip(self.blocks, switches, strict=True)):
                arrays = self._slab(layer).arrays(self.store.layouts[layer])
                setattr(block.switch_owner, block.switch_name, _Deferred(switch, arrays, self._outputs[layer]))
            yield
        finally:
            for block, switch in zip(self.blocks, switches, strict=True):
                setattr(block.switch_owner, block.switch_name, switch)

    def evaluate(self) -> None:
        """Compute all that was built, layer by layer. Afterwards every array of those passes is available."""
        reading: list[Future[int]] = []
        try:
            reading = self._fill(0)
            for layer, outputs in enumerate(self._outputs):
                for done in reading:
                    done.result()
                if self._ahead and layer + 1 < len(self._outputs):
                    reading = self._fill(layer + 1)
                for output in outputs:
                    mx.eval(output)
                outputs.clear()
                if not self._ahead and layer + 1 < len(self._outputs):
                    reading = self._fill(layer + 1)
        finally:
            wait(reading)  # also after an error: the slab of a read in progress must not be filled again
            for outputs in self._outputs:
                outputs.clear()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _slab(self, layer: int) -> Slab:
        return self._slabs[self.store.layouts[layer].slot_bytes, self._turn[layer]]

    def _fill(self, layer: int) -> list[Future[int]]:
        host = self._slab(layer).host
        return [self._pool.submit(self.store.read_into, layer, expert, host[expert]) for expert in range(len(host))]


class _Deferred(nn.Module):
    """The layer's own switch module on a slab of all its experts; notes what it returns."""

    def __init__(self, inner: nn.Module, arrays: dict[str, mx.array], outputs: list[mx.array]):
        super().__init__()
        self.inner, self._note = inner, outputs.append
        share(inner, arrays)

    def __call__(self, x: mx.array, indices: mx.array, *rest: Any) -> mx.array:
        out = self.inner(x, indices, *rest)
        self._note(out)
        return out
