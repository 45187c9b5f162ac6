"""Content-addressed folders: where things are and what they are called by.

Everything that crosses a notebook boundary is a folder whose name is the digest of what went in (input
digests, parameters, versions) and whose manifest lists what came out. A second build with the same inputs
finds the folder and does nothing; an altered folder is refused by name.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .errors import ArtifactError, MissingArtifactError
from .files import (
    canonical_json,
    decode_tensors,
    digest_bytes,
    digest_file,
    digest_json,
    digest_tensors,
    encode_tensors,
    read_json,
    read_tensors,
    write_bytes,
    write_json,
    write_tensors,
)

__all__ = [
    "MANIFEST",
    "Artifact",
    "Manifest",
    "artifacts_dir",
    "build",
    "canonical_json",
    "decode_tensors",
    "digest_bytes",
    "digest_file",
    "digest_json",
    "digest_tensors",
    "encode_tensors",
    "identity",
    "open_artifact",
    "read_json",
    "read_tensors",
    "root",
    "write_bytes",
    "write_json",
    "write_tensors",
]

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
LOCK_TIMEOUT_S = 3600.0
"""How long a build waits for another process that is building the same artefact."""


def root() -> Path:
    """The repository root: `MOELAB_ROOT`, else the nearest folder above that is a checkout.

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
    seal: str = ""
    """Digest of every field above, so that an edited count is noticed too."""

    def sealed(self) -> Manifest:
        fields = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "seal"}
        return msgspec.structs.replace(self, seal=digest_json(fields))


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


def identity(kind: str, inputs: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    """Digest under which an artefact of these inputs and parameters is found."""
    fields = {"schema_version": MANIFEST_VERSION, "kind": kind, "inputs": dict(inputs), "params": dict(params)}
    return digest_json(fields)


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
    Names that begin with a dot are scratch (training state, half-written files): they survive a kill
    too, and are removed before the folder is sealed. A maker of encrypted files returns the digest of
    their plaintext as count `content`, since ciphertext differs from one build to the next.

    Raises:
        ArtifactError: the folder exists but is not what its manifest says; another process has been
            building it for LOCK_TIMEOUT_S; or the file system has no locks.
    """
    key = identity(kind, inputs, params)
    home = artifacts_dir() / kind
    final, staging = home / key[:16], home / f"{key[:16]}.partial"
    if final.exists():
        return open_artifact(final, expected=key)
    home.mkdir(parents=True, exist_ok=True)
    with _lock(home / f".{key[:16]}.lock"):
        if final.exists():  # built by the process we waited for
            return open_artifact(final, expected=key)
        staging.mkdir(exist_ok=True)
        (staging / MANIFEST).unlink(missing_ok=True)  # of a build killed just before its rename
        counts = dict(make(staging))
        if (staging / MANIFEST).exists():
            raise ArtifactError("the maker wrote a file that is ours to write", file=staging / MANIFEST)
        for scratch in list(staging.rglob(".*")):
            shutil.rmtree(scratch) if scratch.is_dir() else scratch.unlink(missing_ok=True)
        files = {name: digest_file(staging / name) for name in _files(staging)}
        content = counts.pop("content") if "content" in counts else digest_json(files)
        manifest = Manifest(MANIFEST_VERSION, kind, key, content, dict(inputs), dict(params), counts, files)
        write_json(staging / MANIFEST, msgspec.structs.asdict(manifest.sealed()))
        os.replace(staging, final)
    return open_artifact(final, expected=key)


def open_artifact(path: str | Path, *, expected: str | None = None) -> Artifact:
    """Open a folder written by `build`, checking every file against its manifest.

    Files with a dot name are no part of an artefact and are not looked at.

    Raises:
        MissingArtifactError: no such folder.
        ArtifactError: a file was altered, added or removed, or the identity is another one.
    """
    path = Path(path)
    if not path.is_dir():
        raise MissingArtifactError("no artefact here", file=path)
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except (FileNotFoundError, msgspec.MsgspecError) as error:
        raise _altered("unreadable manifest", path / MANIFEST, None, str(error), "a manifest") from None
    if manifest.schema_version != MANIFEST_VERSION:
        raise _altered("unknown version", path / MANIFEST, "schema_version", manifest.schema_version, MANIFEST_VERSION)
    if (seal := manifest.sealed().seal) != manifest.seal:
        raise _altered("manifest altered", path / MANIFEST, "seal", seal, manifest.seal)
    key = identity(manifest.kind, manifest.inputs, manifest.params)
    if not key == manifest.digest == (expected or key):
        raise _altered("another identity", path / MANIFEST, "digest", manifest.digest, expected or key)
    present = set(_files(path))
    if present != set(manifest.files):
        odd = sorted(present ^ set(manifest.files))
        raise _altered("file added or removed", path / odd[0], "files", sorted(present), sorted(manifest.files))
    for name, digest in manifest.files.items():
        if (got := digest_file(path / name)) != digest:
            raise _altered("file altered", path / name, "sha256", got, digest)
    return Artifact(path, manifest)


def _altered(problem: str, file: Path, field: str | None, got: Any, expected: Any) -> ArtifactError:
    return ArtifactError(
        problem, file=file, field=field, got=got, expected=expected, fix="delete the folder to build it again"
    )


def _files(folder: Path) -> list[str]:
    """Relative names of the files an artefact consists of: all but its manifest and dot names."""
    names = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [name.as_posix() for name in names if str(name) != MANIFEST and not any(p[0] == "." for p in name.parts)]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the kernel's lock on `path`: released when its holder dies, so a stale one cannot exist.

    What the file *says* (who holds it) is for the reader of a message and is never trusted.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, fallback_to_soft=False)
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logging.getLogger(__name__).warning("waiting for %s, which is building %s", _holder(path), path.stem)
            lock.acquire(timeout=LOCK_TIMEOUT_S)
    except Timeout:
        raise ArtifactError(
            "another process is still building this",
            file=path,
            got=_holder(path),
            expected=f"done within {LOCK_TIMEOUT_S:g} s",
            fix="let it finish, or end it, and run again",
        ) from None
    except OSError as error:
        raise ArtifactError(
            "this file system has no locks",
            file=path,
            got=str(error),
            expected="flock",
            fix="set MOELAB_ARTIFACTS to a folder on a local disk",
        ) from None
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    return path.read_text(errors="replace") or "a process that has not said its name"
