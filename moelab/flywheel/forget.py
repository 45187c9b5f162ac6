"""Forgetting a thread: its key, its records and every row derived from them, with proof.

Destroying the key already makes every copy of the records unreadable. What was *derived* in the clear
(route shards, snapshots, checkpoints) has no key, so it is found and removed: an artefact is derived from
the thread if it mentions it, or if its manifest names as input an artefact that is.

A folder that merely holds the thread's encrypted records beside those of others is amended: the records
and the mentions go, the rest stays, under a new content digest, so that nothing built from the old content
is taken for up to date. Everything else is removed whole: a row cannot be cut out of a digest, and the
next run builds the artefact again without the thread.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moelab.artifacts import MANIFEST, Manifest, canonical_json, digest_file, digest_json, read_json, write_json
from moelab.errors import VaultError

from .vault import SUFFIX, Vault, check_uid, open_encrypted

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Proof:
    """What was done to forget a thread, and what was tried afterwards.

    Attributes:
        key: public half of the key that was destroyed; None if there was none.
        records: encrypted records that were there, each with its sha256.
        attempts: for each of them, how opening it failed after the key was destroyed, with every key left.
        amended: folders that keep the records of other threads. `removed`: artefacts removed whole.
        mentions: files that still name the thread.
    """

    thread: str
    key: str | None
    records: dict[str, str]
    attempts: dict[str, str]
    amended: tuple[str, ...]
    removed: tuple[str, ...]
    mentions: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing of the thread is left: no record opens, and no file names it."""
        return set(self.attempts) == set(self.records) and not self.mentions


def derived(root: str | Path, thread: str) -> list[Path]:
    """Artefact folders under root that hold rows of a thread or were built from one that does.

    Reads manifests, so it answers for artefacts that `artifacts.build` made and for nothing else.
    """
    manifests = {path.parent: read_json(path) for path in sorted(Path(root).rglob(MANIFEST))}
    found = {folder for folder in manifests if any(folder.rglob(f"{thread}.*")) or any(_naming(folder, thread))}
    while True:
        names = {manifests[folder].get(name) for folder in found for name in ("content", "digest")}
        more = {
            folder
            for folder in set(manifests) - found
            if any(name and name in str(manifests[folder].get("inputs")) for name in names)
        }
        if not more:
            return sorted(found)
        found |= more


def forget(vault: Vault, thread: str, *, root: str | Path, also: Iterable[str | Path] = ()) -> Proof:
    """Destroy a thread's key, its records and everything derived from it, under `root`.

    A second call finishes what a killed one began, and otherwise finds nothing to do.

    Args:
        root: usually `artifacts_dir()`; the vault may lie in it.
        also: files and folders of its rows that have no manifest (an export, a report). Removed whole.

    Raises:
        VaultError: a record could still be opened. The key is destroyed and nothing else was touched.
    """
    root, thread = Path(root), check_uid(thread)
    records = sorted(root.rglob(f"{thread}.*{SUFFIX}"))
    digests = {_name(path, root): digest_file(path) for path in records}
    folders = derived(root, thread)
    vault.destroy(thread)
    attempts = {_name(path, root): _failure(vault, path) for path in records}

    amended, removed = [], []
    for folder in folders:
        if any(folder.rglob(f"{thread}.*")) and _amend(folder, thread):
            amended.append(_name(folder, root))
        else:
            shutil.rmtree(folder)
            removed.append(_name(folder, root))
    for path in records:  # those in no artefact: of a capture that was interrupted
        path.unlink(missing_ok=True)
    for folder in sorted(root.rglob("*.partial")):
        # A half-built artefact has no manifest that says whose rows it holds; only records are their own.
        if folder.is_dir() and not any(folder.rglob(f"*{SUFFIX}")):
            shutil.rmtree(folder)
            removed.append(_name(folder, root))
    for path in map(Path, also):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        removed.append(_name(path, root))

    mentions = [path for path in _naming(root, thread) if not path.is_relative_to(vault.folder)]
    return Proof(
        thread=thread,
        key=vault.forgotten()[thread],
        records=digests,
        attempts=attempts,
        amended=tuple(amended),
        removed=tuple(removed),
        mentions=tuple(_name(path, root) for path in mentions),
    )


def _failure(vault: Vault, path: Path) -> str:
    """How opening a record fails now, with every key there is."""
    try:
        open_encrypted(path, *vault.identities())
    except VaultError as error:
        return str(error.got)
    raise VaultError("record still opens", file=path, field="key", got="its plaintext", expected="no key that fits")


def _amend(folder: Path, thread: str) -> bool:
    """Take a thread out of a folder of records; False if its very identity names the thread."""
    manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    if thread in canonical_json([manifest.inputs, manifest.params]).decode():
        return False
    gone = sorted(folder.rglob(f"{thread}.*"))
    files = {name: digest for name, digest in manifest.files.items() if folder / name not in gone}
    for path in gone:
        path.unlink()
    for path in _naming(folder, thread):
        if path.suffix != ".json":
            return False
        if path.name != MANIFEST:
            write_json(path, _without(read_json(path), lambda text: thread in text))
            files[path.relative_to(folder).as_posix()] = digest_file(path)
    counts = _without(manifest.counts, lambda text: thread in text)
    # How many were forgotten is no secret, and tells a count that no longer fits from a damaged one.
    counts["forgotten"] = counts.get("forgotten", 0) + 1
    content = digest_json({"content": manifest.content, "files": sorted(files)})
    amended = msgspec.structs.replace(manifest, files=files, counts=counts, content=content).sealed()
    write_json(folder / MANIFEST, msgspec.structs.asdict(amended))
    return True


def _without(value: Any, names: Callable[[str], bool]) -> Any:
    """JSON without what names a thread: list items that do, outside lists of their own; else the entry."""

    def named(item: Any) -> bool:
        if isinstance(item, dict):
            return any(names(key) or named(inner) for key, inner in item.items() if not isinstance(inner, list))
        return isinstance(item, str) and names(item)

    if isinstance(value, list):
        return [_without(item, names) for item in value if not named(item)]
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not names(key)}
        kept = {key: item for key, item in kept.items() if not (isinstance(item, str) and names(item))}
        return {key: _without(item, names) for key, item in kept.items()}
    return value


def _naming(folder: Path, thread: str) -> Iterable[Path]:
    """Files under folder whose name or bytes hold the uid, read in pieces."""
    needle = thread.encode()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        if thread in path.name or _holds(path, needle):
            yield path


def _holds(path: Path, needle: bytes) -> bool:
    tail = b""
    with open(path, "rb") as file:
        while piece := file.read(_CHUNK):
            window = tail + piece
            if needle in window:
                return True
            tail = window[1 - len(needle) :]
    return False


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
