"""How fast does this disk give up an expert? Measured, or declared.

Streaming an expert is one read of a few hundred KiB to a few MiB at a random place in a large file,
so that is what is measured: `pread` of one size at a time, with `depth` reads in flight, past the page
cache (O_DIRECT on Linux, F_NOCACHE on macOS). A deep queue raises bytes per second and the time of
each single read; a demand miss waits for the latter, a prefetch lives off the former. Each cell keeps
median and spread: a shared or virtual disk differs by tens of per cent from one second to the next.

A profile says how it was made (`method`). "buffered" means that the file system let nothing past its
cache; then `device_share`, bytes the device delivered per byte read, tells memory from disk. A
"declared" profile is a statement, not a measurement: the latency and bandwidth of a named real
system, for studies whose own disk means nothing.

Sizes are bytes, times milliseconds, rates MB/s (10^6 bytes).
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

import msgspec
import numpy as np

from .errors import ContractError, RecordError

__all__ = ["DiskCell", "DiskProfile", "declared", "device_bytes", "measure"]

METHODS = ("o_direct", "f_nocache", "buffered", "declared")
SIZES = (256 * 1024, 1 << 20, 4 << 20)
DEPTHS = (1, 4, 16)
_ALIGN = 4096


class DiskCell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Reads of one size at one depth."""

    size: int
    """Bytes of a read."""
    depth: int
    """Reads in flight."""
    ms: float
    """Median time of one read, from issue to bytes."""
    ms_spread: float
    """Half the distance between its quartiles."""
    mb_per_s: float
    """Median rate of all reads together, over repeats."""
    mb_per_s_spread: float
    """Half the distance between its quartiles."""
    n: int
    """Reads measured; 0 = declared."""
    mb_per_s_range: tuple[float, float] | None = None
    """Least and greatest rate of a repeat; None = declared, or of a profile that did not keep them."""


class DiskProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a disk delivers, by size and depth. JSON form: `to_json`, `from_json`.

    Raises:
        RecordError: no cell, two of one size and depth, an unknown method, or a figure that is not positive.
    """

    method: str
    """One of `METHODS`."""
    cells: tuple[DiskCell, ...]
    """Sorted by size, then depth; the same depths for every size."""
    device_share: float | None = None
    """Bytes the device delivered per byte read; near 0 = memory, not disk; None where not known."""
    note: str = ""
    """What was measured, or whose figures were declared."""

    def __post_init__(self):
        keys = [(c.size, c.depth) for c in self.cells]
        sizes, depths = sorted({s for s, _ in keys}), sorted({d for _, d in keys})
        if self.method not in METHODS:
            raise RecordError("not a disk profile", field="method", got=self.method, expected=METHODS)
        if not keys or keys != [(s, d) for s in sizes for d in depths]:
            raise RecordError(
                "not a disk profile", field="cells", got=keys, expected="every size at every depth, sorted"
            )
        for c in self.cells:
            figures = (c.size, c.depth, c.ms, c.mb_per_s)
            if not all(np.isfinite(f) and f > 0 for f in figures) or not (c.ms_spread >= 0 and c.mb_per_s_spread >= 0):
                raise RecordError("not a disk profile", field="cells", got=c, expected="positive figures")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({c.size for c in self.cells}))

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(sorted({c.depth for c in self.cells}))

    def bytes_per_second(self, size: float, depth: float) -> float:
        """Rate of reads of `size` bytes with `depth` in flight.

        Interpolated in log size and log depth between cells and held constant beyond them, which errs low
        for larger reads and high for smaller ones.
        """
        return 1e6 * self._at(size, depth, [c.mb_per_s for c in self.cells])

    def read_seconds(self, size: float, depth: float = 1) -> float:
        """Median time of one read of `size` bytes while `depth` are in flight; below the smallest cell its time."""
        if size > self.sizes[-1]:  # beyond the table a read takes as long as its bytes
            return self.read_seconds(self.sizes[-1], depth) * size / self.sizes[-1]
        return 1e-3 * self._at(size, depth, [c.ms for c in self.cells])

    def batch_seconds(self, size: float, count: float, *, depth: int | None = None) -> float:
        """Time for `count` reads of `size` bytes issued at once: latency of the first, rate of the rest.

        Args:
            depth: reads in flight at most; default the deepest measured.
        """
        if count <= 0:
            return 0.0
        depth = min(count, self.depths[-1] if depth is None else depth)
        one, total = self.read_seconds(size), count * size / self.bytes_per_second(size, depth)
        return max(one, total)

    def miss_table(self, expert_bytes: np.ndarray, top_k: int) -> np.ndarray:
        """`f64[L,K+1]`: seconds to read 0..K experts of each layer at once, from their sizes `[L]`."""
        return np.array([[self.batch_seconds(int(size), n) for n in range(top_k + 1)] for size in expert_bytes])

    def _at(self, size, depth, values):
        if size <= 0 or depth <= 0:
            raise ContractError("a read has bytes", field="size, depth", got=(size, depth), expected="> 0")
        table = np.reshape(values, (len(self.sizes), len(self.depths)))
        by_size = [np.interp(np.log(depth), np.log(self.depths), row) for row in table]
        return float(np.interp(np.log(size), np.log(self.sizes), by_size))

    def to_json(self) -> dict:
        """Plain JSON values, all fields present."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_json(cls, value: object, *, file: object = None) -> DiskProfile:
        """Inverse of `to_json`. Raises RecordError on unknown, absent or mistyped fields."""
        try:
            return msgspec.convert(value, cls, strict=True)
        except msgspec.ValidationError as error:
            raise RecordError("not a disk profile", file=file, got=str(error), expected="DiskProfile") from None


def declared(
    *, latency_s: float, bytes_per_s: float, sizes: Sequence[int] = SIZES, depths: Sequence[int] = DEPTHS, note: str
) -> DiskProfile:
    """Profile of a virtual device: every read waits `latency_s`, and all together share `bytes_per_s`.

    With d reads of s bytes in flight: rate = min(bandwidth, d·s / (latency + s/bandwidth)), and the time of
    one read is d·s / rate (Little's law).

    Args:
        note: whose figures these are.
    """
    cells = []
    for size in sorted(sizes):
        for depth in sorted(depths):
            rate = min(bytes_per_s, depth * size / (latency_s + size / bytes_per_s))
            figures = dict(ms=1e3 * depth * size / rate, ms_spread=0.0, mb_per_s=rate / 1e6, mb_per_s_spread=0.0, n=0)
            cells.append(DiskCell(size=size, depth=depth, **figures))
    return DiskProfile(method="declared", cells=tuple(cells), note=note)


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
    if any(s % _ALIGN or s <= 0 for s in sizes) or min(depths) < 1 or repeats < 1 or seconds <= 0:
        raise ContractError(
            "this cannot be measured",
            field="sizes, depths, repeats, seconds",
            got=(sizes, depths, repeats, seconds),
            expected=f"multiples of {_ALIGN}, and positive counts",
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
            with mmap.mmap(-1, _ALIGN) as page:
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
    places = rng.integers(0, (file_bytes - size) // _ALIGN + 1, 4096) * _ALIGN
    start = threading.Barrier(depth + 1)
    deadline = [0.0]

    def reader(first):
        took = []
        with mmap.mmap(-1, size) as buffer:  # anonymous memory is page-aligned, as O_DIRECT demands
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


def _read_fully(fd: int, buffer: mmap.mmap, place: int) -> None:
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
