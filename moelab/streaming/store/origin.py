"""What a pack is made from: a checkpoint as mlx-lm understands it, one expert after the other.

mlx-lm loads lazily, so names, shapes and types cost nothing; a tensor is made when its bytes are asked for, and
dropped before the next. Experts that lie in the checkpoint as they are run do not pass through mlx at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from ...errors import ParameterError, UnsupportedModelError
from ...pages import aligned
from .checkpoint import CheckpointSource, ExpertParameters, expert_parameters_of, model_digest
from .layout import ExpertLayout, convert, run_dtype
from .pack import MANIFEST, Quantisation
from .shards import NAMES, dtype_name, host_bytes, read_header
from .store import ExpertStore

__all__ = ["Origin", "give_back"]


class Origin:
    """The checkpoint: layouts of its experts in the pack's precision, and their records one after the other."""

    def __init__(self, model: str | Path, precision: str):
        from mlx.utils import tree_flatten

        from ...models.loading import cast, find
        from .skeleton import skeleton

        self.path, self.precision = find(model), precision
        if (self.path / MANIFEST).is_file():
            raise ParameterError(
                "this is a pack already", file=self.path, field="model", got="pack", expected="checkpoint",
                fix="pack the checkpoint that it was made of",
            )  # fmt: skip
        for file in sorted(self.path.glob("model*.safetensors")):
            read_header(file)
        self.digest = model_digest(self.path)
        frame = skeleton(self.path)
        self.config = frame.config
        self.parameters: list[ExpertParameters] = expert_parameters_of(frame.network, frame.blocks)
        self.experts = self.parameters[0].experts
        self.layouts = [
            ExpertLayout(tuple(layer.spec(name, precision) for name in layer.arrays)) for layer in self.parameters
        ]
        self.quantised = {
            name: Quantisation(bits=module.bits, group_size=module.group_size, mode=module.mode)
            for name, module in frame.network.named_modules()
            if all(hasattr(module, field) for field in ("bits", "group_size", "mode"))
        }
        cast(frame.network, precision)  # lazily, like all of this
        self.absent = {name: array for layer in self.parameters for name, array in layer.arrays.items()}
        self.others = {k: v for k, v in tree_flatten(frame.network.parameters()) if k not in self.absent}
        self.absent = {name: (tuple(a.shape), _mlx_type(dtype_name(a), precision)) for name, a in self.absent.items()}
        try:
            self.store = ExpertStore(CheckpointSource(self.path, precision, fitted=False))
        except UnsupportedModelError:  # mlx-lm makes them from something else: then it must do so here
            self.store = None

    def records(self, layer: int) -> Iterator[np.ndarray]:
        """Records `u8[record_bytes]` of a layer's experts in order; each is valid until the next."""
        layout = self.layouts[layer]
        record = aligned(layout.slot_bytes)
        read = self._read(layer) if self.store is None else lambda expert, out: self.store.read_into(layer, expert, out)
        for expert in range(self.experts):
            read(expert, record)
            _clear_gaps(layout, record)
            yield record

    def _read(self, layer: int) -> Callable[[int, np.ndarray], None]:
        layout, parameters, tensors = self.layouts[layer], self.parameters[layer], []
        for name in list(parameters.arrays):
            tensors.append(host_bytes(parameters.arrays.pop(name)).reshape(self.experts, -1))
            give_back()

        def read(expert: int, out: np.ndarray) -> None:
            for tensor, offset, values in zip(layout.tensors, layout.offsets, tensors, strict=True):
                convert(values[expert], tensor.stored, out[offset : offset + tensor.run_bytes], tensor.run)

        return read

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of every parameter that is no expert's."""
        return {name: (dtype_name(array), tuple(array.shape)) for name, array in self.others.items()}

    @property
    def nbytes(self) -> int:
        experts = sum(self.experts * layout.slot_bytes for layout in self.layouts)
        return experts + sum(array.nbytes for array in self.others.values())

    def close(self) -> None:
        if self.store is not None:
            self.store.close()


def _mlx_type(stored: str, precision: str) -> str:
    return {name: mlx for mlx, name in NAMES.items()}[run_dtype(stored, precision)]


def give_back() -> None:
    """Return what mlx keeps for reuse to the system."""
    import mlx.core as mx

    mx.clear_cache()


def _clear_gaps(layout: ExpertLayout, record: np.ndarray) -> None:
    """Zero what lies between tensors, where a direct read may have left a neighbour's bytes."""
    ends = [offset + tensor.run_bytes for tensor, offset in zip(layout.tensors, layout.offsets, strict=True)]
    for end, start in zip(ends, (*layout.offsets[1:], layout.slot_bytes), strict=True):
        record[end:start] = 0
