"""Memory that a disk fills past the page cache: page-aligned, and in huge pages where the system has them.

A direct read hands the device a list of the pages that it goes to. In pages of 4 kB that list is long: the kernel pins
and checks each of them, and splits the read where the list is full. In huge pages (2 MB on Linux, "transparent huge
pages") it is one entry or two, so the same disk gives experts of some MB about twice as fast (reports/LOG.md).

Linux gives huge pages to memory that asks for them before it is touched; elsewhere nothing changes but the speed.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

from .errors import ContractError

__all__ = ["HUGE", "PAGE", "address", "aligned", "huge_bytes", "renew", "setting"]

PAGE = 4096
HUGE = 2 << 20
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def address(array: np.ndarray) -> int:
    """Where its bytes begin in memory."""
    return array.__array_interface__["data"][0]


def aligned(nbytes: int, *, huge: bool = False) -> np.ndarray:
    """`u8[nbytes]` of private memory that begins at a page, as direct reads demand; its bytes are anything.

    From 2 MB on, and with `huge` however little it is, it begins at a huge page, as a slot lies in one. It is the
    system's until it is touched.
    """
    if nbytes < HUGE and not huge:
        base, edge = np.empty(nbytes + PAGE, np.uint8), PAGE
    else:
        # Private, so that a forked child never shares it with its parent.
        memory, edge = mmap.mmap(-1, max(nbytes, HUGE) + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), HUGE
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        base = np.frombuffer(memory, np.uint8)
    first = -address(base) % edge
    return base[first : first + nbytes]


def renew(zeros: np.ndarray) -> bool:
    """Ask for memory of zeros to be put into huge pages. Whether the system takes the advice.

    For memory that someone else allocated and cleared. Its pages are given back, and come again at the next touch: as
    zeros, and huge where they can be. Hence only for a private allocation of this process that holds nothing yet.

    Args:
        zeros: `u8[n]`, contiguous, all zero.

    Raises:
        ContractError: it is not contiguous; what lies between would be lost.
    """
    if not zeros.flags.c_contiguous:
        raise ContractError("memory in pieces", field="zeros", got=zeros.strides, expected="contiguous bytes")
    first = address(zeros) + -address(zeros) % PAGE
    size = (address(zeros) + zeros.nbytes - first) // PAGE * PAGE
    if sys.platform != "linux" or size < HUGE:
        return False
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return all(advise(first, size, advice) == 0 for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTNEED))


def setting() -> str | None:
    """Linux's setting: huge pages `always`, at `madvise` (as asked for here) or `never`; None where it has none."""
    with suppress(OSError):
        return SETTING.read_text().split("[")[-1].split("]")[0]
    return None


def huge_bytes() -> int | None:
    """Bytes of this process that lie in huge pages; None where the system does not say."""
    with suppress(OSError):
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages:"))
    return None
