"""The experts of a stock checkpoint, found where they lie, without loading it.

mlx-lm says which expert tensors the model has, with their shapes and types (it loads lazily: nothing is
read). The headers of the shards say which tensors there are and where. A tensor of the model is matched with

1. the key of its own name: that is how mlx-lm saves a model, and what it saves it must load unchanged;
2. a stack `[E, ...]` of another name in the same layer;
3. a fused stack `[E, 2I, ...]`: of each expert first the rows of the gate, then those of the up projection;
4. one key an expert, `experts.N.gate_proj.weight` or `experts.N.w1.weight`.

A match by 2-4 is only a guess from names and shapes. So one expert of the first and of the last MoE layer is
compared, byte for byte, with what mlx-lm itself makes of the checkpoint. It makes whole stacks, so each projection
takes twice its bytes for a moment (`opening_bytes`): known from the headers, and refused first where there is no room
for it. What does not match (transposed, interleaved, to be unpacked first) is refused by
name: `moelab pack` can convert whatever mlx-lm can load.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import ArtifactError, ContractError, UnsupportedModelError
from ...files import digest_file, digest_json, read_json
from .layout import ExpertLayout, TensorSpec, run_dtype
from .plan import fit_slots
from .shards import SIZES, Stored, dtype_name, host_bytes, read_header, some

__all__ = ["CheckpointSource", "ExpertParameters", "expert_parameters", "model_digest"]

ALIASES = {
    "gate_proj": ("gate_proj", "w1"),
    "up_proj": ("up_proj", "w3"),
    "down_proj": ("down_proj", "w2", "output_linear"),
    "fc1": ("fc1", "up_proj"),
    "fc2": ("fc2", "down_proj"),
}
FUSED = ("gate_up_proj", "input_linear")
HALVES = {"gate_proj": 0, "up_proj": 1}


def model_digest(path: Path) -> str:
    """Digest of a checkpoint: configuration and every weight file, as `LoadedModel.digests["model"]`."""
    files = {file.name: digest_file(file) for file in sorted(path.glob("model*.safetensors"))}
    return digest_json({"config": read_json(path / "config.json"), "files": files})


class CheckpointSource:
    """`store.Source` over a checkpoint folder. Attributes as there; `names[layer]` are the model's own tensor names.

    Args:
        room: bytes of memory that opening may take for a moment; None = as many as it needs.
        fitted: slots are laid out for direct reads. False: as those of a pack.

    Raises:
        MissingArtifactError: no such checkpoint.
        ArtifactError: a shard is shorter than its header says, or two shards have a tensor of one name.
        UnsupportedModelError: mlx-lm cannot load it, or its experts do not lie there as they are run.
        ContractError: opening takes more than `room`; nothing was read.
    """

    def __init__(self, model: str | Path, precision: str, *, room: int | None = None, fitted: bool = True):
        from ...models.loading import find

        self.path, self.precision = find(model), precision
        self.files = sorted(self.path.glob("model*.safetensors"))
        stored: dict[str, Stored] = {}
        for number, file in enumerate(self.files):
            tensors = read_header(file, number)
            if twice := sorted(stored.keys() & tensors.keys()):
                raise ArtifactError("two shards hold one tensor", file=file, field=some(twice))
            stored |= tensors
        layers = expert_parameters(self.path)
        self.layers, self.experts = len(layers), layers[0].experts
        self.names = tuple(tuple(layer.arrays) for layer in layers)
        keys = _Keys(stored)
        self._places, layouts, guessed = [], [], set()
        for number, layer in enumerate(layers):
            found = {name: keys.match(name, layer.experts, array) for name, array in layer.arrays.items()}
            if missing := [name for name, places in found.items() if places is None]:
                raise self._unmatched(missing, keys)
            guessed |= {number for name in found if name not in stored}
            self._places.append(list(zip(*found.values(), strict=True)))
            layouts.append(ExpertLayout(tuple(layer.spec(name, precision) for name in layer.arrays)))
        self.layouts = fit_slots(layouts, self.places, self.experts) if fitted else tuple(layouts)
        compared = {number: layers[number] for number in sorted(guessed & {0, self.layers - 1})}
        need = opening_bytes(compared.values())
        if room is not None and need > room:
            raise ContractError(
                "opening this checkpoint in place takes more memory than there is", file=self.path, field="room",
                got=f"{room} bytes", expected=f">= {need} bytes, two stacks of one projection, for a moment",
                fix="raise the memory budget, or moelab pack MODEL OUT once, where there is as much",
            )  # fmt: skip
        for number, parameters in compared.items():
            self._compare(number, parameters)

    def identity(self) -> dict[str, Any]:
        """Reads every shard the first time, for the digest."""
        return {"source": "checkpoint", "model": self._digest, "precision": self.precision}

    @cached_property
    def _digest(self) -> str:
        return model_digest(self.path)

    def places(self, layer: int, expert: int) -> tuple[tuple[int, int], ...]:
        return self._places[layer][expert]

    def checksum(self, layer: int, expert: int) -> None:
        return None

    def _unmatched(self, missing: list[str], keys: _Keys) -> UnsupportedModelError:
        left = keys.around(missing[0])
        return UnsupportedModelError(
            "the experts of this checkpoint do not lie in it as they are run",
            file=self.path,
            field=some(missing),
            got=f"keys of this layer: {some(left)}",
            expected="the same tensor stacked, fused gate first, or one key an expert",
            fix="moelab pack MODEL OUT",
        )

    def _compare(self, layer: int, parameters: ExpertParameters) -> None:
        """One expert as mlx-lm loads it against the bytes found for it."""
        import mlx.core as mx

        expert = self.experts - 1
        for name, tensor, (file, start) in zip(
            self.names[layer], self.layouts[layer].tensors, self.places(layer, expert), strict=True
        ):
            mx.clear_cache()
            array = parameters.arrays.pop(name)  # evaluated whole below, and gone before the next one is
            with open(self.files[file], "rb") as stream:
                stream.seek(start)
                found = stream.read(tensor.stored_bytes)
            if found != host_bytes(array[expert]).tobytes():
                raise UnsupportedModelError(
                    "mlx-lm makes other values of this tensor than lie in the checkpoint",
                    file=self.files[file],
                    field=f"{name}, expert {expert}",
                    got=f"bytes from {start}",
                    expected="equal bytes",
                    fix="moelab pack MODEL OUT",
                )


@dataclass(frozen=True)
class ExpertParameters:
    """Expert tensors of one MoE layer as mlx-lm loads them: full name → lazy mlx array `[E, ...]`."""

    layer_id: int
    experts: int
    switch: str
    arrays: dict[str, Any]

    def spec(self, name: str, precision: str) -> TensorSpec:
        array = self.arrays[name]
        stored = dtype_name(array)
        return TensorSpec(
            name.removeprefix(self.switch + "."), tuple(array.shape[1:]), stored, run_dtype(stored, precision)
        )


def opening_bytes(compared: Iterable[ExpertParameters]) -> int:
    """Most memory that comparing takes: of one stacked tensor the parts that mlx reads, and the stack it makes."""
    return max((2 * array.nbytes for layer in compared for array in layer.arrays.values()), default=0)


def expert_parameters(path: Path) -> list[ExpertParameters]:
    """Expert tensors of every MoE layer of a checkpoint; nothing is read. Raises as `skeleton`."""
    from .skeleton import skeleton

    frame = skeleton(path)
    return expert_parameters_of(frame.network, frame.blocks)


def expert_parameters_of(network: Any, blocks: list[Any]) -> list[ExpertParameters]:
    """The same of a loaded network: all tensors of the stacked projections of each switch layer.

    Raises:
        UnsupportedModelError: such a tensor has no leading axis of experts.
    """
    from mlx.utils import tree_flatten
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    paths = {id(module): name for name, module in network.named_modules()}
    layers = []
    for block in blocks:
        switch, arrays = paths[id(block.switch)], {}
        for name, module in block.switch.children().items():
            if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
                arrays |= {f"{switch}.{name}.{key}": value for key, value in tree_flatten(module.parameters())}
        if odd := [name for name, array in arrays.items() if not array.ndim or array.shape[0] != block.experts]:
            raise UnsupportedModelError("a tensor of the experts is not one for each", field=some(odd))
        layers.append(ExpertParameters(block.layer_id, block.experts, switch, arrays))
    return layers


class _Keys:
    """Keys of a checkpoint, by what comes before the number of the layer and that number."""

    def __init__(self, stored: dict[str, Stored]):
        self.stored = stored
        self.layers: dict[int, list[tuple[str, list[str], Stored]]] = defaultdict(list)
        for key, tensor in stored.items():
            if (split := _split(key)) is not None:
                head, layer, rest = split
                self.layers[layer].append((head, rest, tensor))

    def around(self, name: str) -> list[str]:
        """Keys of the layer of a tensor that the model would not know by this name."""
        split = _split(name)
        return sorted(tensor.key for _, _, tensor in self.layers[split[1]]) if split else []

    def match(self, name: str, experts: int, array: Any) -> list[tuple[int, int]] | None:
        """`(file, start)` of each expert's part of one stacked tensor, or None."""
        dtype = dtype_name(array)
        shape = tuple(array.shape)
        each = math.prod(shape[1:]) * SIZES[dtype]
        own = self.stored.get(name)
        if own is not None:
            return _rows(own, experts, each) if (own.shape, own.dtype) == (shape, dtype) else None
        if (split := _split(name)) is None:
            return None
        head, layer, rest = split
        projection, kind = rest[-2:]
        near = [
            (tail, tensor)
            for other, tail, tensor in self.layers[layer]
            if tensor.dtype == dtype and (other.endswith(head) or head.endswith(other))
        ]
        tails = [[alias, kind] for alias in ALIASES.get(projection, (projection,))]
        stacked = [t for tail, t in near if t.shape == shape and _ends(tail, tails, kind)]
        if len(stacked) == 1:
            return _rows(stacked[0], experts, each)
        half = HALVES.get(projection)
        wide = (experts, 2 * shape[1], *shape[2:]) if half is not None and len(shape) > 1 else None
        fused = [t for tail, t in near if t.shape == wide and _ends(tail, [[f, kind] for f in FUSED], kind)]
        if not stacked and len(fused) == 1:
            return [(file, start + half * each) for file, start in _rows(fused[0], experts, 2 * each)]
        if stacked or fused:
            return None
        singles = defaultdict(list)
        for tail, tensor in near:
            if len(tail) > 2 and tail[-3].isdecimal() and tail[-2:] in tails and tensor.shape == shape[1:]:
                singles[int(tail[-3])].append(tensor)
        if sorted(singles) != list(range(experts)) or any(len(found) > 1 for found in singles.values()):
            return None
        return [(singles[expert][0].file, singles[expert][0].start) for expert in range(experts)]


def _split(key: str) -> tuple[str, int, list[str]] | None:
    """`model.layers.3.mlp.gate.weight` → `("model.layers", 3, ["mlp", "gate", "weight"])`."""
    found = re.match(r"(.*?)\.(\d+)\.(.+)$", key)
    return (found[1], int(found[2]), found[3].split(".")) if found else None


def _ends(tail: list[str], endings: list[list[str]], kind: str) -> bool:
    """A stack may be named by its projection alone, without `.weight`."""
    return tail[-2:] in endings or (kind == "weight" and [tail[-1], kind] in endings)


def _rows(tensor: Stored, experts: int, each: int) -> list[tuple[int, int]]:
    return [(tensor.file, tensor.start + expert * each) for expert in range(experts)]
