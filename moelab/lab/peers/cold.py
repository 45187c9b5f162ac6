"""What came from the device, what is still in memory, and how to begin with nothing in it.

A flag that asks for uncached reads proves nothing, and neither does a call that drops caches: pages that are mapped
or dirty stay. Two things prove a cold start, and both are recorded: before the run, the share of a file's pages
that the page cache holds (mincore); after it, the bytes that the block device delivered to this process
(`read_bytes` of /proc/self/io), which cannot be fewer than the weights that it used.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path


def peak_rss() -> int | None:
    """Largest resident set of this program. Not `ru_maxrss`, which a child inherits from whoever started it."""
    kib = _field("/proc/self/status", "VmHWM")
    return None if kib is None else kib << 10


def drop(files: Iterable[Path], *, everything: bool = False) -> None:
    """Empty the page cache of these files by advice; `everything`: of the whole machine, where the system lets us."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if everything:
        with contextlib.suppress(OSError):  # where it is not allowed, what stays is seen by `cached_share`
            Path("/proc/sys/vm/drop_caches").write_text("3")


def cached_share(files: Iterable[Path]) -> float | None:
    """Share of the files' pages that are in the page cache, 0 to 1; None where the system does not tell."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "mincore") or os.uname().sysname != "Linux":
        return None
    held = pages = 0
    for path in files:
        if not (size := path.stat().st_size):
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as view:
            count = -(-size // mmap.PAGESIZE)
            flags = (ctypes.c_ubyte * count)()
            start = ctypes.c_char.from_buffer(view)
            wrong = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), flags)
            del start  # else the view could not be closed
            if wrong:
                return None
            held, pages = held + sum(flag & 1 for flag in bytes(flags)), pages + count
    return held / pages if pages else None


def _field(file: str, name: str) -> int | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
