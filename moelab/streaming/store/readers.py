"""Bytes from files at given places, by three ways that differ in who owns the copy in between.

* `o_direct`: `preadv` past the page cache into page-aligned memory (on macOS `f_nocache`). Nothing of it
  counts as anyone's memory but the caller's, and the disk's own speed is what is seen. Places, lengths and
  addresses are multiples of 4096.
* `buffered`: `preadv` through the page cache. For file systems that refuse the first, and for comparison.
* `mmap`: copies out of a mapping. For comparison only: page faults read ahead what nobody asked for.

A read returns all its bytes or raises: one that the system cuts short is continued, an interrupted one is
repeated, and one that ends early names what it got. Every `preadv` releases the interpreter's lock.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...errors import MissingArtifactError, ParameterError, StoreError
from ...pages import PAGE, aligned

__all__ = ["READERS", "Mapped", "Pread", "open_reader"]

READERS = ("auto", "o_direct", "buffered", "mmap")


def open_reader(kind: str, paths: Sequence[str | Path]) -> Pread | Mapped:
    """A reader over these files. `auto` reads directly where every file allows it, else buffered.

    Raises:
        ParameterError: a kind that is none of `READERS`.
        StoreError: `o_direct` was asked for, and the file system refuses it.
        MissingArtifactError: a file is not there.
    """
    if kind not in READERS:
        raise ParameterError("unknown reader", field="reader", got=kind, expected=READERS)
    for path in paths:
        if not Path(path).is_file():
            raise MissingArtifactError("file not found", file=path)
    if kind == "mmap":
        return Mapped(paths)
    if kind == "buffered":
        return Pread(paths, direct=False)
    try:
        return Pread(paths, direct=True)
    except StoreError:
        if kind == "o_direct":
            raise
        return Pread(paths, direct=False)


class Pread:
    """`preadv` on descriptors that stay open.

    Attributes:
        kind: `o_direct`, `f_nocache` or `buffered`: what is really used.
        align: what places, lengths and addresses must be multiples of.

    Raises:
        StoreError: direct reads are asked for and refused, by the system or by a file.
    """

    def __init__(self, paths: Sequence[str | Path], *, direct: bool):
        self.paths = [Path(path) for path in paths]
        self.kind = ("f_nocache" if sys.platform == "darwin" else "o_direct") if direct else "buffered"
        self.align = PAGE if self.kind == "o_direct" else 1
        self._files: list[int] = []
        try:
            for path in self.paths:
                self._files.append(self._open(path))
        except OSError as error:
            self.close()
            raise StoreError("this file cannot be opened", file=path, field=self.kind, got=str(error)) from error
        except StoreError:
            self.close()
            raise

    def _open(self, path: Path) -> int:
        if self.kind == "buffered":
            return os.open(path, os.O_RDONLY)
        if self.kind == "f_nocache":
            import fcntl

            fd = os.open(path, os.O_RDONLY)
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
            return fd
        if not hasattr(os, "O_DIRECT"):
            raise StoreError("this system has no direct reads", field="reader", got=sys.platform, expected="O_DIRECT")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError as error:
            raise _refused(path, error) from error
        try:  # some file systems open the file and refuse the read
            with mmap.mmap(-1, PAGE) as page:
                os.preadv(fd, [page], 0)
        except OSError as error:
            os.close(fd)
            raise _refused(path, error) from error
        return fd

    def fetch(self, file: int, start: int, need: int, out: np.ndarray) -> int:
        """Read `need` bytes of file number `file` from `start` into `out` (`u8`, writable); bytes asked of the system.

        `out` may be longer than `need` (the rounding of a direct read); its end may lie past the end of
        the file. All three must suit `align`, but for `need`.

        Raises:
            StoreError: the file ended early, or the system reports an error. `out` then holds rubbish.
        """
        fd, rest, done = self._files[file], out, 0
        while done < need:
            try:
                got = os.preadv(fd, [rest], start + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise StoreError(
                    "the system could not read an expert",
                    file=self.paths[file],
                    field=f"bytes {start + done} to {start + need}",
                    got=f"{error.strerror} (errno {error.errno})",
                    expected=f"{need - done} bytes",
                ) from error
            reached = done + got
            if reached >= need:
                break
            restart = reached - reached % self.align  # a direct read goes on at a block only
            if restart <= done:
                raise ended_early(self.paths[file], start, reached, need)
            done, rest = restart, memoryview(out)[restart:]
        return len(out)

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


class Mapped:
    """Copies out of read-only mappings. `kind`, `align` and `fetch` as `Pread`."""

    kind, align = "mmap", 1

    def __init__(self, paths: Sequence[str | Path]):
        self.paths = [Path(path) for path in paths]
        self._files: list[int] = []
        self._maps: list[mmap.mmap] = []
        for path in self.paths:
            self._files.append(os.open(path, os.O_RDONLY))
            self._maps.append(mmap.mmap(self._files[-1], 0, access=mmap.ACCESS_READ))

    def fetch(self, file: int, start: int, need: int, out: np.ndarray) -> int:
        """As `Pread.fetch`. The figure is the pages touched; what the system read ahead is not known here."""
        # A page past the end of the file would end the process, not the read.
        if (size := os.fstat(self._files[file]).st_size) < start + need:
            raise ended_early(self.paths[file], start, max(0, size - start), need)
        out[:need] = np.frombuffer(self._maps[file], np.uint8, need, start)
        return -(-(start + need) // PAGE) * PAGE - start // PAGE * PAGE

    def close(self) -> None:
        while self._maps:
            self._maps.pop().close()
        while self._files:
            os.close(self._files.pop())


def ended_early(path: Path, start: int, got: int, need: int) -> StoreError:
    return StoreError(
        "a read ended early: the file is shorter than it was",
        file=path,
        field=f"bytes {start} to {start + need}",
        got=f"{got} bytes",
        expected=f"{need} bytes",
        fix="restore the file from its source and open it again",
    )


def _refused(path: Path, error: OSError) -> StoreError:
    return StoreError(
        "the file system refuses direct reads",
        file=path,
        field="reader",
        got=error.strerror,
        expected="O_DIRECT",
        fix="reader='auto' (buffered where direct reads are refused) or reader='buffered'",
    )


class Bounce(threading.local):
    """Page-aligned memory of each thread, for reads that cannot go where they belong at once."""

    def __init__(self):
        self._buffer = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        """`u8[nbytes]`, valid until this thread asks again."""
        if len(self._buffer) < nbytes:
            self._buffer = aligned(nbytes, huge=True)
        return self._buffer[:nbytes]
