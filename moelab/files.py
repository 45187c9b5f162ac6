"""The one spelling of a value, the one digest of it, and the one way a file is written and read.

Digests cover canonical plaintext: sorted JSON and contiguous little-endian tensors. Never clocks, never
ciphertext, never paths. `moelab.artifacts` re-exports everything here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ArtifactError, MissingArtifactError

HEADER_KEY = "moelab"
SEALS = ("payload_sha256", "header_sha256")


def canonical_json(value: Any, *, file: Any = None) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, UTF-8.

    Raises:
        ArtifactError: something that JSON would change in silence or cannot carry: a key that is not
            text (1 and "1" would share a digest), NaN, an infinity, a numpy scalar. The field is named.
    """
    _require_json(value, "", file)
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ArtifactError("text that is not Unicode", file=file, got=str(error), expected="UTF-8") from None


def _require_json(value: Any, where: str, file: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ArtifactError("key is not text", file=file, field=where or None, got=key, expected="text")
            _require_json(item, f"{where}.{key}".lstrip("."), file)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_json(item, f"{where}[{index}]", file)
    elif not (value is None or isinstance(value, str | int) or isinstance(value, float) and math.isfinite(value)):
        raise ArtifactError(
            "JSON cannot carry this", file=file, field=where or None, got=value, expected="plain finite JSON values"
        )


def digest_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    return digest_bytes(canonical_json(value))


def digest_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_tensors(tensors: Mapping[str, Any]) -> str:
    """Digest of named arrays: name, dtype, shape and little-endian bytes of each, in name order."""
    state = hashlib.sha256()
    for name, array in _canonical_arrays(tensors).items():
        state.update(canonical_json([name, array.dtype.str, list(array.shape)]))
        state.update(array.data if array.size else b"")
    return state.hexdigest()


def _canonical_arrays(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same arrays in name order, C order and little-endian; nothing is copied that already is.

    `np.asarray` and not `np.ascontiguousarray`, which turns a scalar into an array of one.
    """
    import numpy as np

    arrays = {}
    for name in sorted(tensors):
        array = np.asarray(tensors[name])
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise ArtifactError("no such tensor type", field=name, got=str(array.dtype), expected="bool, int or float")
        arrays[name] = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    return arrays


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write aside, flush to disk, read back, rename: a reader sees the old file, the new one, or none.

    The file aside has a dot name, so what a killed writer leaves is scratch that `build` removes.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if aside.read_bytes() != data:
            raise ArtifactError("the disk returned other bytes than were written", file=path)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    """Readable JSON, one item a line, sorted. Refuses what `canonical_json` refuses."""
    canonical_json(value, file=path)
    write_bytes(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n")


def read_json(path: str | Path) -> Any:
    """Raises MissingArtifactError without the file, ArtifactError when it is not JSON (NaN is not)."""

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(Path(path).read_bytes(), parse_constant=refuse)
    except FileNotFoundError:
        raise MissingArtifactError("file not found", file=path) from None
    except ValueError as error:
        raise ArtifactError("not valid JSON", file=path, got=str(error), expected="JSON") from None


def encode_tensors(tensors: Mapping[str, Any], header: Mapping[str, Any]) -> bytes:
    """safetensors bytes that depend on the content only, decoded again before they are returned.

    The library's numpy writer permutes strided arrays and orders header metadata at random, so arrays
    are made contiguous and the whole header travels as one canonical JSON string, with the digests of
    the tensors and of the header inside.

    Raises:
        ArtifactError: a reserved header key, a header JSON cannot carry, or an array of another type.
    """
    from safetensors.numpy import save

    if taken := sorted(set(SEALS) & set(header)):
        raise ArtifactError("header key is reserved", field=taken[0], got=header[taken[0]], expected="another name")
    arrays = _canonical_arrays(tensors)
    seals = dict(zip(SEALS, (digest_tensors(arrays), digest_json(dict(header))), strict=True))
    data = save(arrays, metadata={HEADER_KEY: canonical_json({**header, **seals}).decode()})
    decode_tensors(data)
    return data


def decode_tensors(data: bytes, *, file: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inverse of `encode_tensors`: `(arrays, header)`.

    Raises:
        ArtifactError: truncated, not safetensors, no moelab header, or tensors or header altered.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays = load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__")
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            "not a complete safetensors file", file=file, got=f"{len(data)} bytes ({error})", expected="safetensors"
        ) from None
    if set(metadata or ()) != {HEADER_KEY}:
        raise ArtifactError(
            "unknown header", file=file, field="__metadata__", got=sorted(metadata or ()), expected=[HEADER_KEY]
        )
    try:
        header = json.loads(metadata[HEADER_KEY])
        seals = [header.pop(name) for name in SEALS]
        found = [digest_tensors(arrays), digest_json(header)]
    except (ArtifactError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            "unreadable header", file=file, field=HEADER_KEY, got=str(error), expected="sealed JSON"
        ) from None
    for name, got, expected in zip(SEALS, found, seals, strict=True):
        if got != expected:
            raise ArtifactError(f"{name.split('_')[0]} altered", file=file, field=name, got=got, expected=expected)
    return arrays, header


def write_tensors(path: str | Path, tensors: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """The only safetensors writer in moelab. Raises as `encode_tensors`; atomic as `write_bytes`."""
    write_bytes(path, encode_tensors(tensors, header))


def read_tensors(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The only safetensors reader for moelab's own files. Raises as `decode_tensors`."""
    try:
        return decode_tensors(Path(path).read_bytes(), file=path)
    except FileNotFoundError:
        raise MissingArtifactError("file not found", file=path) from None
