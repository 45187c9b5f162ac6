"""safetensors files at the level of bytes: where each tensor lies, and writing one without holding it all.

A header is held against the size of its file before anything is read: a shard that is too short, once mapped,
gives zeros on one machine and rubbish on another where its last tensors should be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ArtifactError, MissingArtifactError
from ...files import canonical_json

__all__ = ["NAMES", "SIZES", "Stored", "dtype_name", "encode_header", "host_bytes", "read_header", "some"]

MAX_HEADER = 100 << 20
NAMES = {
    "bool": "BOOL", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "complex64": "C64",
}  # fmt: skip
SIZES = {
    "BOOL": 1, "U8": 1, "U16": 2, "U32": 4, "U64": 8, "I8": 1, "I16": 2, "I32": 4, "I64": 8,
    "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "C64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """One tensor in a safetensors file: `start` is its place in the file."""

    key: str
    file: int
    start: int
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path, file: int = 0) -> dict[str, Stored]:
    """Tensors of a safetensors file by key, after its size was held against its header.

    Raises:
        MissingArtifactError: no such file.
        ArtifactError: not safetensors, or the file is shorter or longer than its header says.
    """
    if not path.is_file():
        raise MissingArtifactError("file not found", file=path, expected="a safetensors file")
    size = path.stat().st_size
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(MAX_HEADER, size - 8):
            raise ArtifactError(
                "not a safetensors file", file=path, field="header", got=f"{size} bytes", expected=f"{8 + length}"
            )
        try:
            entries = json.loads(stream.read(length))
            entries.pop("__metadata__", None)
            tensors = {key: _stored(key, file, 8 + length, entry) for key, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                "not a safetensors file", file=path, field="header", got=str(error), expected="a table of tensors"
            ) from None
    ends = {key: t.start + math.prod(t.shape) * SIZES[t.dtype] for key, t in tensors.items()}
    end = max(ends.values(), default=8 + length)
    if size != end:
        lost = sorted(key for key, at in ends.items() if at > size)
        raise ArtifactError(
            f"the file is {abs(end - size)} bytes {'shorter' if size < end else 'longer'} than its header says",
            file=path,
            field=some(lost) or "size",
            got=f"{size} bytes",
            expected=f"{end} bytes",
            fix="fetch this file again",
        )
    return tensors


def _stored(key: str, file: int, base: int, entry: dict[str, Any]) -> Stored:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if begin < 0 or end - begin != math.prod(shape) * SIZES[entry["dtype"]]:
        raise ValueError(f"{key}: bytes {begin} to {end} for {entry['dtype']} {list(shape)}")
    return Stored(key, file, base + begin, entry["dtype"], shape)


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """First bytes of a safetensors file of these tensors (name → type, shape), which follow in order of name.

    Canonical, so that equal tensors make equal files. Padded to 8 bytes, as the format asks for.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name in sorted(tensors):
        dtype, shape = tensors[name]
        end = at + math.prod(shape) * SIZES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = canonical_json(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def dtype_name(array: Any) -> str:
    """Name of an mlx array's type in safetensors."""
    return NAMES[str(array.dtype).rsplit(".", 1)[-1]]


def host_bytes(array: Any) -> np.ndarray:
    """Bytes `u8[n]` of an mlx array, evaluated; they share its memory where it is contiguous."""
    import mlx.core as mx

    return np.array(mx.view(mx.contiguous(array).reshape(-1), mx.uint8), copy=False)


def some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
