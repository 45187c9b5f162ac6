"""The vault: token ids at rest, one key a thread, and a way to forget a thread for good.

Records are age files (X25519) under a key of their thread. Whoever destroys the key has destroyed every
copy of the thread's records, backups included. Key files and not passphrases: a passphrase picks its own
cost, and an attacker's file could name any cost it likes.

A record is opened whole or not at all: age authenticates in chunks, and nothing of a chunk is handed on
before the last one has been checked. It is written aside, flushed and renamed, so a process killed at any
moment leaves finished records and no half one.

Record files are called `<thread uid>.<anything>.age`: the name says which key opens them.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import tempfile
from datetime import date
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

import pyrage
from pyrage.x25519 import Identity, Recipient

from moelab.artifacts import artifacts_dir, read_json, write_json
from moelab.errors import OwnershipError, VaultError

SUFFIX = ".age"
_PARTIAL = ".partial"
_UID = re.compile(r"[A-Za-z0-9_-]+")


def write_encrypted(path: str | Path, data: bytes, recipient: Recipient, *, identity: Identity | None = None) -> None:
    """Encrypt `data` to `path`: written aside, flushed, with `identity` read back and compared, renamed.

    Raises:
        VaultError: what came back is not what was written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PARTIAL)
    aside = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            pyrage.encrypt_io(io.BytesIO(data), file, [recipient])
            file.flush()
            os.fsync(file.fileno())
        if identity is not None:
            back = _Hash()
            _decrypt(aside, back, [identity])
            if back.sha256.digest() != hashlib.sha256(data).digest():
                raise VaultError("read back other bytes than were written", file=path)
        os.replace(aside, path)
        _flush_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def open_encrypted(path: str | Path, *identities: Identity) -> bytes:
    """The plaintext of `path`, all of it or an error. Holds one copy of it in memory and no more.

    Raises:
        VaultError: missing, truncated, altered, or encrypted to none of the identities.
    """
    plain = io.BytesIO()
    try:
        _decrypt(Path(path), plain, list(identities))
    except VaultError:
        # Chunks before the damage were genuine; they are no record all the same.
        plain.seek(0)
        plain.truncate()
        raise
    return plain.getvalue()


def _decrypt(path: Path, into: BinaryIO, identities: list[Identity]) -> None:
    try:
        with open(path, "rb") as file:
            pyrage.decrypt_io(file, into, identities)
    except FileNotFoundError:
        raise VaultError("no such record", file=path, got="nothing", expected="an age file") from None
    except (pyrage.DecryptError, OSError) as error:
        reason = str(error).split("\n")[0]
        raise VaultError(
            "record cannot be opened", file=path, field="bytes", got=reason, expected="a whole record of this key"
        ) from None


class _Hash(io.RawIOBase):
    """A sink that keeps the digest of what it is given."""

    def __init__(self):
        self.sha256 = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        return len(data)


def sweep(folder: str | Path) -> list[Path]:
    """Remove what killed writers left in a folder. Not while another process writes there."""
    left = sorted(Path(folder).rglob(f".*{_PARTIAL}"))
    for path in left:
        path.unlink()
    return left


def record_name(thread: str, sequence: str) -> str:
    """File name of a sequence's record: the thread's uid, and the sequence percent-encoded."""
    return f"{thread}.{quote(sequence, safe='')}{SUFFIX}"


def check_uid(thread: str) -> str:
    """Return a uid that is safe in file names. Raises VaultError."""
    if not _UID.fullmatch(thread):
        raise VaultError("not a thread uid", field="thread", got=thread, expected="letters, digits, - and _")
    return thread


def thread_of(path: str | Path) -> str:
    """uid of the thread whose key opens a record."""
    return Path(path).name.split(".", 1)[0]


class Vault:
    """The keys of a set of threads, one file each: `<folder>/keys/<thread uid>.key`, readable by its owner only.

    Args:
        folder: by default `artifacts/vault`.
    """

    def __init__(self, folder: str | Path | None = None):
        self.folder = Path(folder) if folder is not None else artifacts_dir() / "vault"
        self.keys = self.folder / "keys"

    def key(self, thread: str, *, create: bool = False) -> Identity:
        """The key of a thread, made on first use if `create`.

        Raises:
            VaultError: no key, a destroyed key, a damaged key file, or one that others can read.
        """
        path = self._key_file(thread)
        if self.tombstone(thread).exists():
            raise VaultError(
                "thread was forgotten",
                file=self.tombstone(thread),
                field="thread",
                got=thread,
                expected="a living thread",
            )
        if not path.exists():
            if not create:
                raise VaultError("no key for this thread", file=path, field="thread", got=thread, expected="a key file")
            self._create(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise VaultError(
                "key can be read by others",
                file=path,
                field="mode",
                got=oct(mode),
                expected="0o600",
                fix=f"chmod 600 {path}",
            )
        try:
            return Identity.from_str(path.read_text("ascii").strip())
        except (pyrage.IdentityError, ValueError):
            # The content is a secret even when it is damaged: it is not quoted.
            raise VaultError(
                "not a key", file=path, field="bytes", got="something else", expected="an age key"
            ) from None

    def write(self, path: str | Path, data: bytes) -> None:
        """Encrypt a record under the key of the thread that its name begins with, making the key if needed."""
        identity = self.key(thread_of(path), create=True)
        write_encrypted(path, data, identity.to_public(), identity=identity)

    def open(self, path: str | Path) -> bytes:
        """Plaintext of a record. Raises VaultError as `key` and `open_encrypted`."""
        return open_encrypted(path, self.key(thread_of(path)))

    def destroy(self, thread: str) -> None:
        """Destroy a thread's key, for good: the thread gets no new one. Again is no error.

        The tombstone comes first, so that a process killed between the two leaves no living key behind it.
        """
        path = self._key_file(thread)
        if not self.tombstone(thread).exists():
            try:
                public = str(self.key(thread).to_public())
            except VaultError:  # no key, or one that nothing can be opened with
                public = None
            write_json(self.tombstone(thread), {"schema_version": 1, "thread": thread, "recipient": public})
        if path.exists():
            # Unlinking alone leaves the old blocks readable on some disks. (On others this does too.)
            with open(path, "r+b") as file:
                file.write(os.urandom(path.stat().st_size))
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
            _flush_folder(self.keys)

    def tombstone(self, thread: str) -> Path:
        """What remains of a forgotten thread: its uid, and the public half of the key it had."""
        return self.folder / "forgotten" / f"{check_uid(thread)}.json"

    def identities(self) -> list[Identity]:
        """Every key that still lives."""
        return [self.key(path.stem) for path in sorted(self.keys.glob("*.key"))]

    def forgotten(self) -> dict[str, str | None]:
        """uid → public key of every forgotten thread."""
        tombs = (read_json(path) for path in sorted((self.folder / "forgotten").glob("*.json")))
        return {tomb["thread"]: tomb["recipient"] for tomb in tombs}

    def _key_file(self, thread: str) -> Path:
        return self.keys / f"{check_uid(thread)}.key"

    def _create(self, path: Path) -> None:
        self.keys.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=self.keys, prefix=f".{path.name}.", suffix=_PARTIAL)  # mode 0600
        try:
            with os.fdopen(handle, "w") as file:
                file.write(f"{Identity.generate()}\n")
                file.flush()
                os.fsync(file.fileno())
            # A link and not a rename: of two processes that make the key at once, one wins and both use it.
            os.link(name, path)
        except FileExistsError:
            pass
        finally:
            os.unlink(name)
        _flush_folder(self.keys)


def check_authorised(header: Any, purpose: str, *, today: date) -> None:
    """Refuse a record that may not be used for `purpose`, or not any more.

    Args:
        header: of an observation or of proposals. `today`: given by the caller, so that a run can be repeated.

    Raises:
        OwnershipError: the owner's grant does not name the purpose, or has ended.
    """
    grant = header.authorisation
    if purpose not in grant.purposes:
        raise OwnershipError(
            "not authorised for this purpose",
            field="authorisation.purposes",
            got=purpose,
            expected=f"one of {', '.join(grant.purposes)} ({grant.basis})",
        )
    if today > date.fromisoformat(grant.retention_until):
        raise OwnershipError(
            "kept longer than allowed",
            field="authorisation.retention_until",
            got=today.isoformat(),
            expected=f"{grant.retention_until} or earlier",
            fix=f"moelab forget {header.thread}",
        )


def _flush_folder(folder: Path) -> None:
    """Make a rename or a removal in a folder survive a power cut, where the system can."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows has no handle of a folder
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
