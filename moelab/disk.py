"""How fast does this disk give up an expert? Measured.

Streaming an expert is one read of a few hundred KiB to a few MiB at a random place in a large file,
so that is what is measured: `pread` of one size at a time, with `depth` reads in flight, past the page
cache (O_DIRECT on Linux, F_NOCACHE on macOS). A deep queue raises bytes per second and the time of
each single read; a demand miss waits for the latter, a prefetch lives off the former.

Where the file system let nothing past its cache, the profile's method is "buffered"; then `device_share`,
bytes the device delivered per byte read, tells memory from disk.
"""

from __future__ import annotations

import mmap
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from .disk_profile import DEPTHS, SIZES, DiskCell, DiskProfile
from .errors import ContractError, RecordError
from .pages import PAGE, aligned

__all__ = ["device_bytes", "measure"]


def measure(
    folder: str | Path,
    *,
    sizes: Sequence[int] = SIZES,
    depths: Sequence[int] = DEPTHS,
    file_bytes: int = 256 << 20,
    seconds: float = 0.3,
    repeats: int = 5,
    seed: int = 0,
) -> DiskProfile:
    """Measure the disk under `folder` with a temporary file there.

    Args:
        folder: where the experts would lie; the file is removed afterwards, whatever happens.
        sizes: bytes of a read, multiples of 4096.
        depths: reads in flight.
        file_bytes: size of the file, of incompressible bytes; at least four of the largest read.
        seconds: time spent on each size and depth, over all repeats.
        repeats: rates measured for each cell, spread over the whole run so that a slow second shows as spread.
        seed: of the file's bytes and of the places read.

    Raises:
        ContractError: sizes that are no multiple of 4096, a file too small, or non-positive counts.
    """
    sizes, depths = tuple(sorted(sizes)), tuple(sorted(depths))
    if any(s % PAGE or s <= 0 for s in sizes) or min(depths) < 1 or repeats < 1 or seconds <= 0:
        raise ContractError(
            "this cannot be measured",
            field="sizes, depths, repeats, seconds",
            got=(sizes, depths, repeats, seconds),
            expected=f"multiples of {PAGE}, and positive counts",
        )
    if file_bytes < 4 * sizes[-1]:
        raise ContractError("the file is too small", field="file_bytes", got=file_bytes, expected=f">= {4 * sizes[-1]}")
    rng = np.random.default_rng(seed)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".disk-", suffix=".probe") as file:
        for _ in range(0, file_bytes, 4 << 20):
            file.write(rng.bytes(4 << 20))
        file.flush()
        os.fsync(file.fileno())
        fd, method = _open_uncached(file.name)
        try:
            return _measure_open(fd, method, sizes, depths, file_bytes, seconds, repeats, rng)
        finally:
            os.close(fd)


def _open_uncached(path: str) -> tuple[int, str]:
    """Descriptor that reads past the page cache where the system can, and the method that it uses."""
    if hasattr(os, "O_DIRECT"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # some file systems (tmpfs, overlays) refuse it; the profile then says "buffered"
            pass
        else:
            with mmap.mmap(-1, PAGE) as page:
                try:
                    os.preadv(fd, [page], 0)
                except OSError:
                    os.close(fd)
                else:
                    return fd, "o_direct"
    fd = os.open(path, os.O_RDONLY)
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        return fd, "f_nocache"
    return fd, "buffered"


def _measure_open(fd, method, sizes, depths, file_bytes, seconds, repeats, rng) -> DiskProfile:
    times = {(s, d): [] for s in sizes for d in depths}
    rates = {key: [] for key in times}
    before, asked = device_bytes(), 0
    with ThreadPoolExecutor(max(depths)) as pool:
        for _ in range(repeats):
            for size, depth in times:
                if method == "buffered" and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                took, wall = _read_cell(pool, fd, size, depth, file_bytes, seconds / repeats, rng)
                times[size, depth] += took
                rates[size, depth].append(len(took) * size / wall / 1e6)
                asked += len(took) * size
    after = device_bytes()
    cells = []
    for (size, depth), took in times.items():
        (ms, ms_spread), (rate, rate_spread) = _middle([1e3 * t for t in took]), _middle(rates[size, depth])
        cells.append(
            DiskCell(
                size=size,
                depth=depth,
                ms=ms,
                ms_spread=ms_spread,
                mb_per_s=rate,
                mb_per_s_spread=rate_spread,
                n=len(took),
                mb_per_s_range=(min(rates[size, depth]), max(rates[size, depth])),
            )
        )
    share = None if before is None or after is None else (after - before) / asked
    return DiskProfile(method=method, cells=tuple(cells), device_share=share)


def _read_cell(pool, fd, size, depth, file_bytes, seconds, rng) -> tuple[list[float], float]:
    """Times of reads at random places by `depth` threads for `seconds`, at least one each, and the wall time."""
    places = rng.integers(0, (file_bytes - size) // PAGE + 1, 4096) * PAGE
    start = threading.Barrier(depth + 1)
    deadline = [0.0]

    def reader(first):
        took = []
        buffer = aligned(size, huge=True)  # as the slots of a cache are
        buffer[::PAGE] = 0
        start.wait()
        for place in places[first::depth].tolist():
            began = time.perf_counter()
            _read_fully(fd, buffer, place)
            ended = time.perf_counter()
            took.append(ended - began)
            if ended > deadline[0]:
                break
        return took

    readers = [pool.submit(reader, i) for i in range(depth)]
    began = time.perf_counter()
    deadline[0] = began + seconds
    start.wait()
    took = [t for r in readers for t in r.result()]
    return took, time.perf_counter() - began


def _read_fully(fd: int, buffer: np.ndarray, place: int) -> None:
    """A read may be short: go on to the end of the buffer, or say that the file ended."""
    view, done = memoryview(buffer), 0
    try:
        while done < len(view):
            got = os.preadv(fd, [view[done:]], place + done)
            if not got:
                raise RecordError("a read ended early", field="bytes", got=done, expected=len(view))
            done += got
    finally:
        view.release()


def device_bytes() -> int | None:
    """Bytes that this process made a device deliver, page cache fills included; None where the system is silent."""
    try:
        lines = Path("/proc/self/io").read_text().split("\n")
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def _middle(values: list[float]) -> tuple[float, float]:
    """Median and half the distance between the quartiles."""
    if len(values) < 2:
        return values[0], 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, (high - low) / 2
