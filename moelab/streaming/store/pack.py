"""A pack: a model on disk in the form in which a streaming runtime wants to read it.

    config.json, tokenizer files   as in the checkpoint
    model.safetensors              every parameter but the experts', under the model's own names
    experts-000.bin ...            one file a MoE layer: E records, each a multiple of 4096 bytes
    pack.json                      this module's `Pack`: shapes, types, checksums, identity; written last

A record holds the tensors of one expert as `layout.ExpertLayout` lays them. Each has a checksum, XXH3 of 64 bits: one
in 2·10^19 accidents escapes it, and at some 15 GB/s a core it costs a tenth of what the read does (CRC-32 4, SHA-256 2
GB/s on the same core), so that it can be compared at every read. It is no protection against intent; the digests of the
model and of `pack.json` are.

Packs are written by `packing.write_pack` and opened by `store.open_store`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from ...errors import ArtifactError, MissingArtifactError
from ...files import digest_file, digest_json, read_json
from .layout import ExpertLayout, TensorSpec, run_dtype
from .shards import read_header

__all__ = ["VERSION", "Pack", "PackSource", "PackedLayer", "PackedTensor", "checksum", "read_pack"]

VERSION = 3
CONFIG, MANIFEST, WEIGHTS = "config.json", "pack.json", "model.safetensors"


def checksum(record: np.ndarray) -> int:
    """XXH3-64 of `u8[n]`. Lets the interpreter go on where there are more than 100 kB."""
    return xxh3_64_intdigest(record)


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class PackedTensor(_Strict):
    name: str
    """In the switch module, such as `gate_proj.weight`."""
    shape: tuple[int, ...]
    """Of one expert."""
    dtype: str
    """As stored, in the names of safetensors."""
    offset: int
    """In the record, bytes."""


class PackedLayer(_Strict):
    layer_id: int
    """Position among all decoder layers."""
    switch: str
    """Full name of the switch module in the model."""
    file: str
    record_bytes: int
    tensors: tuple[PackedTensor, ...]
    checksums: tuple[int, ...]
    """`checksum` of each record, up to the end of its last tensor."""

    def layout(self, precision: str) -> ExpertLayout:
        return ExpertLayout(
            tuple(TensorSpec(t.name, t.shape, t.dtype, run_dtype(t.dtype, precision)) for t in self.tensors)
        )


class Quantisation(_Strict):
    bits: int
    group_size: int
    mode: str


class Pack(_Strict):
    """Contents of `pack.json`."""

    version: int
    moelab: str
    """Version that wrote it."""
    model: str
    """Digest of the checkpoint it was made of."""
    precision: str
    """What floating tensors were cast to; `stored` = left as they were."""
    experts: int
    """E, in every layer."""
    layers: tuple[PackedLayer, ...]
    absent: dict[str, tuple[tuple[int, ...], str]]
    """The experts' parameters by full name: stacked shape `[E, ...]` and mlx type, which no weight file holds."""
    quantised: dict[str, Quantisation]
    """Every quantised module of the model by full name, experts' projections included."""
    weights: str
    """Digest of `model.safetensors`."""
    copied: dict[str, str]
    """Name → digest of configuration, tokenizer and whatever else was taken over as it was."""
    seal: str = ""
    """Digest of all other fields."""

    def sealed(self) -> Pack:
        return msgspec.structs.replace(self, seal=self.digest())

    def digest(self) -> str:
        return digest_json({k: v for k, v in msgspec.to_builtins(self).items() if k != "seal"})


def read_pack(folder: str | Path) -> Pack:
    """Manifest of a pack, with the sizes of its files held against it.

    Raises:
        MissingArtifactError: the manifest or a file is not there.
        ArtifactError: half written, altered, of an unknown version, with an unknown field, or a file is
            shorter or longer than the manifest says.
    """
    folder = Path(folder)
    if half_written(folder):
        raise ArtifactError(
            "a half-written pack", file=folder, fix="run the same `moelab pack` again: it goes on where it stopped"
        )
    value = read_json(folder / MANIFEST)
    version = value.get("version") if isinstance(value, dict) else None
    if version != VERSION:
        raise ArtifactError(
            "unknown version of a pack", file=folder / MANIFEST, field="version", got=version, expected=VERSION,
            fix="pack the model again with this version of moelab",
        )  # fmt: skip
    try:
        pack = msgspec.convert(value, Pack, strict=True)
    except msgspec.ValidationError as error:
        raise ArtifactError("not a pack", file=folder / MANIFEST, got=str(error), expected="Pack") from None
    if pack.seal != pack.digest():
        raise ArtifactError(
            "the manifest was altered", file=folder / MANIFEST, field="seal", got=pack.digest(), expected=pack.seal
        )
    here = {file.name: digest_file(file) for file in sorted(folder.iterdir()) if is_copied(file.name)}
    for name in sorted(here.keys() | pack.copied.keys()):
        if name not in here:
            raise MissingArtifactError("a file of the pack is missing", file=folder / name, fix="pack the model again")
        if here[name] != pack.copied.get(name):
            raise ArtifactError(
                "altered", file=folder / name, got=here[name],
                expected=pack.copied.get(name, "no such file"), fix="pack the model again",
            )  # fmt: skip
    for layer in pack.layers:
        layout = layer.layout("stored")
        got = (layer.record_bytes, len(layer.checksums), tuple(tensor.offset for tensor in layer.tensors))
        expected = (layout.record_bytes, pack.experts, layout.record_offsets)
        if got != expected:
            raise ArtifactError(
                "records are laid out otherwise", file=folder / MANIFEST, field=layer.file, got=got, expected=expected
            )
        require_size(folder / layer.file, pack.experts * layer.record_bytes)
    read_header(folder / WEIGHTS)
    return pack


def is_copied(name: str) -> bool:
    """Neither manifest nor weights: a file that a pack has from its checkpoint."""
    return name not in (MANIFEST, WEIGHTS) and not name.endswith(".bin")


def half_written(folder: Path) -> bool:
    """Whether this is where `packing` works before it gives a pack its name."""
    return folder.name.endswith(".partial") or folder.absolute().parent.name.endswith(".partial")


def require_size(path: Path, nbytes: int) -> None:
    if not path.is_file():
        raise MissingArtifactError("a file of the pack is missing", file=path, fix="pack the model again")
    if (size := path.stat().st_size) != nbytes:
        raise ArtifactError(
            "a file of expert records is not complete", file=path, field="size", got=f"{size} bytes",
            expected=f"{nbytes} bytes", fix="pack the model again",
        )  # fmt: skip


class PackSource:
    """`store.Source` over a pack folder. Raises as `read_pack`."""

    def __init__(self, folder: str | Path, precision: str):
        self.path, self.precision, self.pack = Path(folder), precision, read_pack(folder)
        self.layers, self.experts = len(self.pack.layers), self.pack.experts
        self.layouts = tuple(layer.layout(precision) for layer in self.pack.layers)
        self.files = [self.path / layer.file for layer in self.pack.layers]

    def identity(self) -> dict[str, Any]:
        """`packed` is the precision that the pack was written in."""
        return {
            "source": "pack", "model": self.pack.model, "precision": self.precision, "packed": self.pack.precision,
        }  # fmt: skip

    def places(self, layer: int, expert: int) -> list[tuple[int, int]]:
        start = expert * self.layouts[layer].record_bytes
        return [(layer, start + offset) for offset in self.layouts[layer].record_offsets]

    def checksum(self, layer: int, expert: int) -> int:
        return self.pack.layers[layer].checksums[expert]

    def verify_weights(self) -> None:
        """Raises ArtifactError when the parameters that are no experts' were altered."""
        if (got := digest_file(self.path / WEIGHTS)) != self.pack.weights:
            raise ArtifactError("altered", file=self.path / WEIGHTS, got=got, expected=self.pack.weights)
