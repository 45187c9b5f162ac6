"""What a disk delivers, by size of a read and reads in flight: measured (`disk.measure`) or declared.

Each cell keeps median and spread: a shared or virtual disk differs by tens of per cent from one second to the next. A
profile says how it was made (`method`). A "declared" one is a statement, not a measurement: the latency and bandwidth
of a named real system, for studies whose own disk means nothing.

Sizes are bytes, times milliseconds, rates MB/s (10^6 bytes).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from .errors import ContractError, RecordError

__all__ = ["DEPTHS", "METHODS", "SIZES", "DiskCell", "DiskProfile", "declared"]

METHODS = ("o_direct", "f_nocache", "buffered", "declared")
SIZES = (256 * 1024, 1 << 20, 4 << 20)
DEPTHS = (1, 4, 16)


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
