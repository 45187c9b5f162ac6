"""A model whose experts are not there: everything else is loaded, the experts' shapes are known.

A stock checkpoint is loaded lazily by mlx-lm itself, so every renaming and quantisation is its own; the
expert arrays it made are dropped without ever being evaluated. In a pack the experts are not in any
weight file; lazy zeros of the recorded shapes stand in for them while mlx-lm builds and quantises the
model, and are dropped in the same way. Loading stays strict: a name that the model does not know, or
lacks, is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model

from ...errors import GeometryError, UnsupportedModelError
from ...models.blocks import Block, find_blocks
from ...models.loading import find
from .pack import half_written, read_pack
from .shards import read_header
from .slab import TYPES

if TYPE_CHECKING:
    from .store import ExpertStore

__all__ = ["Skeleton", "check_layouts", "drop_experts", "skeleton"]


@dataclass(frozen=True)
class Skeleton:
    """Attributes:
    path: folder of the checkpoint or pack.
    network: the mlx-lm model; every weight is lazy still.
    config: as mlx-lm completed it.
    blocks: its MoE layers.
    packed: it came from a pack.
    """

    path: Path
    network: nn.Module
    config: dict[str, Any]
    blocks: list[Block]
    packed: bool


def skeleton(model: str | Path) -> Skeleton:
    """Load the frame of a model. `model`: a pack folder, or what `models.load` takes.

    Raises:
        MissingArtifactError: nothing to load there.
        ArtifactError: a pack that is half written, altered or of another version; a weight file that is shorter or
            longer than its header says.
        UnsupportedModelError: mlx-lm cannot read this layout (unmatched keys listed), or no MoE layer.
    """
    if Path(model).is_dir() and half_written(Path(model)):
        read_pack(model)  # says what to do about it
    path = Path(model) if (Path(model) / "pack.json").is_file() else find(model)
    packed = (path / "pack.json").is_file()
    for file in sorted(path.glob("model*.safetensors")):  # before mlx-lm maps them
        read_header(file)
    classes = _pack_classes(path) if packed else _get_classes
    try:
        network, config = load_model(path, lazy=True, get_model_classes=classes)
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise UnsupportedModelError(
            "mlx-lm cannot read this checkpoint", file=path, got=str(error), expected="a layout and family it knows"
        ) from error
    return Skeleton(path, network, config, find_blocks(network), packed)


def _pack_classes(path: Path):
    """mlx-lm's classes for a pack, whose weights have the model's own names already and lack the experts."""
    absent = {name: mx.zeros(shape, getattr(mx, dtype)) for name, (shape, dtype) in read_pack(path).absent.items()}

    def classes(config: dict) -> tuple[type, type]:
        model, arguments = _get_classes(config)
        filled = type(model.__name__, (model,), {"sanitize": lambda self, weights: {**weights, **absent}})
        return filled, arguments

    return classes


def check_layouts(frame: Skeleton, store: ExpertStore) -> None:
    """Raise GeometryError unless the store has exactly the expert tensors that the model's layers have."""
    for index, block in enumerate(frame.blocks):
        wanted = {
            name: (tuple(value.shape[1:]), value.dtype) for name, value in tree_flatten(block.switch.parameters())
        }
        have = {tensor.name: (tensor.shape, TYPES.get(tensor.run)) for tensor in store.layouts[index].tensors}
        if have != wanted or store.experts != block.experts:
            raise GeometryError(
                "the store's experts are not the model's", file=frame.path, field=f"layer {block.layer_id}",
                got=(have, store.experts), expected=(wanted, block.experts),
            )  # fmt: skip


def drop_experts(blocks: list[Block]) -> None:
    """Put an empty array in place of every expert tensor, so that nothing can evaluate one by mistake."""
    for block in blocks:
        switch = block.switch
        for name, _ in tree_flatten(switch.parameters()):
            *path, leaf = name.split(".")
            module = switch
            for part in path:
                module = module[part]
            module[leaf] = mx.zeros((0,))
