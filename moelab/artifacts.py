"""Where things are, what they are called by, and the one way they are written and read.

Everything that crosses a notebook boundary is a *content-addressed folder*: its name is the digest of
what went in (input digests, parameters, versions), its manifest lists what came out. A second build
with the same inputs finds the folder and does nothing; an altered folder is refused by name.

Digests cover canonical plaintext: sorted JSON and contiguous little-endian tensors, never clocks,
never ciphertext, never paths.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from .errors import ArtifactError, MissingArtifactError

MANIFEST = "manifest.json"
HEADER_KEY = "moelab"


@cache
def root() -> Path:
    """The repository root: `MOELAB_ROOT`, else the nearest folder above with our notebooks.

    Searched from the working directory first, so that an installed package still finds the checkout
    that a notebook was opened in, then from the package itself.
    """
    if value := os.environ.get("MOELAB_ROOT"):
        return Path(value).resolve()
    for start in (Path.cwd(), Path(__file__).resolve().parent):
        for folder in (start, *start.parents):
            if (folder / "moelab" / "artifacts.py").is_file() and (folder / "pyproject.toml").is_file():
                return folder
    raise MissingArtifactError(
        "no moelab checkout found", file=Path.cwd(), fix="run from the repository, or set MOELAB_ROOT"
    )


def artifacts_dir() -> Path:
    """Where generated artefacts go: `MOELAB_ARTIFACTS`, else `artifacts/` of the checkout."""
    return Path(os.environ.get("MOELAB_ARTIFACTS") or root() / "artifacts")


# ---------------------------------------------------------------- digests


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces; refuses NaN and infinities, which JSON cannot carry."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_json(value: Any) -> str:
    return digest_bytes(canonical_json(value))


def digest_file(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_tensors(tensors: Mapping[str, Any]) -> str:
    """Digest of named arrays: name, dtype, shape and little-endian bytes of each, in name order."""
    import numpy as np

    state = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        state.update(canonical_json([name, array.dtype.str, list(array.shape)]))
        state.update(array.data if array.size else b"")
    return state.hexdigest()


# ---------------------------------------------------------------- files


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write aside, flush to disk, rename: a reader sees the old file, the new one, or none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def write_json(path: str | Path, value: Any) -> None:
    write_bytes(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n")


def read_json(path: str | Path) -> Any:
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise MissingArtifactError("file not found", file=path) from None
    except ValueError as error:
        raise ArtifactError("not valid JSON", file=path, got=str(error), expected="JSON") from None


def encode_tensors(tensors: Mapping[str, Any], header: Mapping[str, Any]) -> bytes:
    """safetensors bytes that depend on the content only.

    The library's numpy writer permutes strided arrays and orders header metadata at random, so arrays
    are made contiguous and the whole header travels as one canonical JSON string, with the digest of
    the tensors inside.
    """
    import numpy as np
    from safetensors.numpy import save

    arrays = {name: np.ascontiguousarray(value) for name, value in sorted(tensors.items())}
    text = canonical_json({**header, "payload_sha256": digest_tensors(arrays)}).decode()
    return save(arrays, metadata={HEADER_KEY: text})


def decode_tensors(data: bytes, *, file: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inverse of `encode_tensors`: `(arrays, header)`.

    Raises:
        ArtifactError: truncated, not safetensors, no moelab header, or payload digest mismatch.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        size = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
        arrays = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ArtifactError(
            "not a complete safetensors file", file=file, got=f"{len(data)} bytes ({error})", expected="safetensors"
        ) from None
    if set(metadata) != {HEADER_KEY}:
        raise ArtifactError(
            "unknown header", file=file, field="__metadata__", got=sorted(metadata), expected=[HEADER_KEY]
        )
    header = json.loads(metadata[HEADER_KEY])
    expected = header.pop("payload_sha256", None)
    if (got := digest_tensors(arrays)) != expected:
        raise ArtifactError("payload altered", file=file, field="payload_sha256", got=got, expected=expected)
    return arrays, header


def write_tensors(path: str | Path, tensors: Mapping[str, Any], header: Mapping[str, Any]) -> None:
    """The only safetensors writer in moelab: encode, read back, compare, then rename into place."""
    data = encode_tensors(tensors, header)
    arrays, back = decode_tensors(data, file=path)
    if digest_tensors(arrays) != digest_tensors(tensors) or back != json.loads(canonical_json(header)):
        raise ArtifactError("what was written is not what was given", file=path)
    write_bytes(path, data)


def read_tensors(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The only safetensors reader for moelab's own files. Raises as `decode_tensors`."""
    try:
        return decode_tensors(Path(path).read_bytes(), file=path)
    except FileNotFoundError:
        raise MissingArtifactError("file not found", file=path) from None


# ---------------------------------------------------------------- content-addressed folders


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an artefact folder holds. `inputs` and `params` make its name; `files` proves its content."""

    schema_version: int
    kind: str
    digest: str
    """Digest of kind, version, inputs and params: the identity under which it is looked up."""
    content: str
    """Digest of the plaintext content: what a downstream artefact names as its input."""
    inputs: dict[str, Any]
    params: dict[str, Any]
    counts: dict[str, Any]
    files: dict[str, str]


@dataclass(frozen=True)
class Artifact:
    """A verified folder. `content` identifies what is in it; `counts` is what its builder reported."""

    path: Path
    manifest: Manifest

    @property
    def content(self) -> str:
        return self.manifest.content

    @property
    def counts(self) -> dict[str, Any]:
        return self.manifest.counts

    def file(self, name: str) -> Path:
        if name not in self.manifest.files:
            raise MissingArtifactError(
                "not part of this artefact", file=self.path, field=name, expected=sorted(self.manifest.files)
            )
        return self.path / name


MANIFEST_VERSION = 1


def identity(kind: str, inputs: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    """Digest under which an artefact of these inputs and parameters is found."""
    return digest_json({"schema_version": MANIFEST_VERSION, "kind": kind, "inputs": inputs, "params": params})


def build(
    kind: str,
    *,
    inputs: Mapping[str, Any],
    params: Mapping[str, Any],
    make: Callable[[Path], Mapping[str, Any]],
) -> Artifact:
    """Return the artefact of these inputs, building it at most once.

    `make(folder)` fills a staging folder and returns counts. The staging folder survives a killed
    build and is handed to the next one, so a maker that writes finished pieces atomically resumes.
    A maker of encrypted files returns the digest of their plaintext as count `content`, since
    ciphertext differs from one build to the next.

    Raises:
        ArtifactError: the folder exists but its files are not what its manifest says.
    """
    from filelock import FileLock

    key = identity(kind, inputs, params)
    home = artifacts_dir() / kind
    final, staging = home / key[:16], home / f"{key[:16]}.partial"
    home.mkdir(parents=True, exist_ok=True)
    # The kernel releases this lock when its holder dies, so a stale one cannot exist.
    with FileLock(home / f".{key[:16]}.lock"):
        if (final / MANIFEST).is_file():
            return open_artifact(final, expected=key)
        staging.mkdir(exist_ok=True)
        counts = dict(make(staging))
        files = {
            str(path.relative_to(staging)): digest_file(path)
            for path in sorted(staging.rglob("*"))
            if path.is_file() and not path.name.startswith(".")
        }
        content = counts.pop("content", None) or digest_json(files)
        manifest = Manifest(MANIFEST_VERSION, kind, key, content, dict(inputs), dict(params), counts, files)
        write_json(staging / MANIFEST, msgspec.to_builtins(manifest))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(staging, final)
    return Artifact(final, manifest)


def open_artifact(path: str | Path, *, expected: str | None = None) -> Artifact:
    """Open a folder written by `build`, checking every file against its manifest.

    Raises:
        MissingArtifactError: no such folder, or a listed file is gone.
        ArtifactError: a file was altered or added, or the identity is another one.
    """
    path = Path(path)
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise MissingArtifactError("no artefact here", file=path) from None
    except msgspec.MsgspecError as error:
        raise ArtifactError("unreadable manifest", file=path / MANIFEST, got=str(error), expected="Manifest") from None
    if manifest.schema_version != MANIFEST_VERSION:
        raise ArtifactError(
            "unknown version",
            file=path / MANIFEST,
            field="schema_version",
            got=manifest.schema_version,
            expected=MANIFEST_VERSION,
        )
    key = identity(manifest.kind, manifest.inputs, manifest.params)
    if key != manifest.digest or (expected is not None and key != expected):
        raise ArtifactError(
            "another identity", file=path / MANIFEST, field="digest", got=manifest.digest, expected=expected or key
        )
    for name, digest in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise MissingArtifactError("listed file is gone", file=file, expected=digest)
        if (got := digest_file(file)) != digest:
            raise ArtifactError("file altered", file=file, field="sha256", got=got, expected=digest)
    present = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file() and not f.name.startswith(".")}
    if extra := present - set(manifest.files) - {MANIFEST}:
        raise ArtifactError(
            "file that no manifest lists", file=path, got=sorted(extra), expected=sorted(manifest.files)
        )
    return Artifact(path, manifest)
