"""The expert store: the bytes of one expert, from a stock checkpoint in place or from a pack.

A *source* (`checkpoint`, `pack`) says in which files the tensors of an expert lie and in which types they are
to be run; a *reader* (`readers`) fetches bytes. The store puts the two together. It plans each expert's
reads once: places that share or touch a page become one read. A record of a pack whose types are the run
types has the layout of a slot, and is read by one direct read into the slot itself; so are the larger tensors of a
checkpoint in place that run as they are stored (`plan`). Everything else goes through a page-aligned buffer of the
reading thread and is copied, or converted, into place.

The store knows nothing of mlx, and any number of threads may read from it at once.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any, Protocol

import numpy as np

from ...errors import GeometryError, ParameterError, StoreError
from ...pages import address, aligned
from .device import Throttle, VirtualDevice
from .layout import ExpertLayout
from .pack import MANIFEST, PackSource, checksum, half_written
from .plan import Read, plan_reads
from .processes import left_behind
from .readers import Bounce, open_reader

__all__ = ["ExpertStore", "Source", "open_store"]

VERIFY = ("header", "records")
U8, BYTE_BY_BYTE = np.dtype(np.uint8), (1,)


class Source(Protocol):
    """Where experts lie. `identity` says what the bytes are; `places` is one `(file, start)` a tensor."""

    layers: int
    experts: int
    layouts: tuple[ExpertLayout, ...]
    files: list[Path]

    def identity(self) -> dict[str, Any]: ...

    def places(self, layer: int, expert: int) -> Sequence[tuple[int, int]]: ...

    def checksum(self, layer: int, expert: int) -> int | None:
        """`pack.checksum` of the record, None where the source keeps none."""


class ExpertStore:
    """Experts by layer and number. Made by `open_store`.

    Attributes:
        layers: MoE layers L.
        experts: E in each.
        layouts: one `ExpertLayout` a layer.
        reads, payload_bytes, physical_bytes: experts read; their bytes as stored; the bytes asked of the device.
    """

    def __init__(
        self, source: Source, *, reader: str = "auto", device: VirtualDevice | None = None, check_reads: bool = False
    ):
        self.layers, self.experts, self.layouts = source.layers, source.experts, source.layouts
        self._source, self._check = source, check_reads
        if check_reads:
            self._require_checksums("check_reads")
        self._throttle = None if device is None else Throttle(device)
        self._plans: dict[tuple[int, int], tuple[Read, ...]] = {}
        self._bounce = Bounce()
        # By thread, so that no read waits for another one's books: who reads, and what it has read.
        self._reading: set[int] = set()
        self._counts: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._closed, self._process = False, os.getpid()
        self._reader = open_reader(reader, source.files)
        left_behind(self)

    reads = property(lambda self: self._count(0))
    payload_bytes = property(lambda self: self._count(1))
    physical_bytes = property(lambda self: self._count(2))

    def _count(self, number: int) -> int:
        return sum(counts[number] for counts in list(self._counts.values()))

    @property
    def identity(self) -> dict[str, Any]:
        """What is read and how: `source`, `model` (digest), `precision`, `reader` really used, `throttle`."""
        d = self._throttle and self._throttle.device
        throttle = d and {"latency_s": d.latency_s, "bytes_per_s": d.bytes_per_s, "lanes": d.lanes}
        return {**self._source.identity(), "reader": self._reader.kind, "throttle": throttle}

    @property
    def virtual_s(self) -> list[float]:
        """Seconds that each read so far took on the declared device; empty without one."""
        return self._throttle.virtual_s if self._throttle else []

    @property
    def overslept_s(self) -> float:
        """Mean seconds from a read's end on the declared device until its thread went on; 0 without a throttle."""
        return self._throttle.overslept_s / max(self._throttle.reads, 1) if self._throttle else 0.0

    def nbytes(self, layer: int) -> int:
        """Bytes of one expert of this layer as stored, without padding."""
        return self.layouts[layer].stored_bytes

    def read_into(self, layer: int, expert: int, out: np.ndarray) -> int:
        """Read one expert into `out`, `u8[slot_bytes]` of this layer's layout. Blocks; any thread.

        Page-aligned memory spares a copy. Returns the bytes asked of the device.

        Raises:
            GeometryError: no such expert, or memory of another size or kind.
            StoreError: closed, or opened in another process; the file ended early; the system reports an
                error; the checksum is wrong. The contents of `out` are then undefined: nothing may use them.
        """
        # The device idles until the next read is asked for, so on small experts every step made here shows in the rate.
        plan, layout = self._plans.get((layer, expert)) or self._plan(layer, expert), self.layouts[layer]
        if out.strides != BYTE_BY_BYTE or len(out) != layout.slot_bytes or out.dtype != U8:
            raise GeometryError(
                "memory does not fit an expert", field="out", got=(str(out.dtype), out.shape),
                expected=f"contiguous uint8 ({layout.slot_bytes},)",
            )  # fmt: skip
        me = get_ident()
        self._reading.add(me)  # first this, then a look at `_closed`: `close` sets that, then looks who is reading
        try:
            if self._closed:
                raise self._unusable()
            if self._throttle is None:
                physical = self._fetch(layer, expert, plan, out, self._check)
            else:
                with self._throttle.read(sum(read.length for read in plan)):
                    physical = self._fetch(layer, expert, plan, out, self._check)
        finally:
            self._reading.discard(me)
        counts = self._counts[me]
        counts[0] += 1
        counts[1] += layout.stored_bytes
        counts[2] += physical
        return physical

    def _fetch(self, layer: int, expert: int, plan: tuple[Read, ...], out: np.ndarray, check: bool) -> int:
        """All reads of one expert, through memory of this thread where the disk cannot fill the slot; bytes asked."""
        physical, fetch = 0, self._reader.fetch
        for read in plan:
            direct = read.into is not None
            if direct:
                buffer = out if read.whole else out[read.into : read.into + read.length]
                try:
                    physical += fetch(read.file, read.start, read.need, buffer)
                except StoreError:
                    if address(out) % self._reader.align == 0:
                        raise
                    direct = False  # a disk cannot fill such memory
            if not direct:
                buffer = self._bounce.take(read.length)
                physical += fetch(read.file, read.start, read.need, buffer)
            if check:
                self._compare(layer, expert, read, buffer)
            if not direct:
                read.place(self.layouts[layer], buffer, out)
        return physical

    def read(self, layer: int, expert: int) -> dict[str, np.ndarray]:
        """One expert as arrays in their run types, by tensor name (bfloat16 as `uint16` bit patterns)."""
        slot = aligned((layout := self._layout(layer, expert)).slot_bytes)
        self.read_into(layer, expert, slot)
        return layout.arrays(slot)

    def read_many(self, keys: Sequence[int], outs: Iterable[np.ndarray]) -> int:
        """`read_into` for each key (layer·E + expert) and its memory, in the order of the disk; bytes asked for."""
        pairs = sorted(zip(keys, outs, strict=True), key=lambda pair: pair[0])
        return sum(self.read_into(*divmod(key, self.experts), out) for key, out in pairs)

    def verify(self) -> None:
        """Read every expert of a pack and compare its checksum. Raises StoreError at the first that differs."""
        self._require_checksums("verify")
        me = get_ident()
        for layer, layout in enumerate(self.layouts):
            slot = aligned(layout.slot_bytes)
            for expert in range(self.experts):
                self._reading.add(me)
                try:
                    if self._closed:
                        raise self._unusable()
                    self._fetch(layer, expert, self._plan(layer, expert), slot, True)
                finally:
                    self._reading.discard(me)

    def close(self) -> None:
        """Wait for reads in progress, then close the files. Safe to call twice."""
        self._closed = True
        # A descriptor closed under a read could be given to another file, whose bytes would then be read. (Who was
        # reading when a process was forked reads in the parent.)
        while self._reading and os.getpid() == self._process:
            time.sleep(1e-3)
        self._reader.close()

    def left(self) -> None:
        """In a forked child: every read is refused from now on."""
        self._closed = True

    def __reduce__(self) -> None:
        raise StoreError(
            "a store belongs to the process that opened it", field="store", got="one to be copied or sent",
            expected="one opened where it is used", fix="pass its path, and open a store in each process",
        )  # fmt: skip

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _layout(self, layer: int, expert: int) -> ExpertLayout:
        if not (0 <= layer < self.layers and 0 <= expert < self.experts):
            raise GeometryError(
                "no such expert", field="layer, expert", got=(layer, expert),
                expected=f"below ({self.layers}, {self.experts})",
            )  # fmt: skip
        return self.layouts[layer]

    def _plan(self, layer: int, expert: int) -> tuple[Read, ...]:
        layout, places = self._layout(layer, expert), self._source.places(layer, expert)
        return self._plans.setdefault((layer, expert), plan_reads(layout, places, align=self._reader.align))

    def _compare(self, layer: int, expert: int, read: Read, buffer: np.ndarray) -> None:
        got, expected = checksum(buffer[: read.need]), self._source.checksum(layer, expert)
        if got != expected:
            raise StoreError(
                "the bytes of an expert are not those that were packed", file=self._reader.paths[read.file],
                field=f"layer {layer}, expert {expert}", got=f"{got:016x}", expected=f"{expected:016x}",
                fix="pack the model again",
            )  # fmt: skip

    def _require_checksums(self, field: str) -> None:
        if self._source.checksum(0, 0) is None:
            raise ParameterError(
                "a stock checkpoint has no checksums", field=field, got="a checkpoint", expected="a pack",
                fix="moelab pack MODEL OUT",
            )  # fmt: skip

    def _unusable(self) -> StoreError:
        if os.getpid() == self._process:
            return StoreError("this expert store is closed", field="store", got="closed", expected="open")
        return StoreError(
            "this store was opened in another process", field="process", got=os.getpid(), expected=self._process,
            fix="open a store in each process, and start processes by spawn",
        )  # fmt: skip


def open_store(
    path: str | Path,
    *,
    reader: str = "auto",
    precision: str = "float32",
    device: VirtualDevice | None = None,
    verify: str = "header",
    check_reads: bool = False,
    room: int | None = None,
) -> ExpertStore:
    """Open the experts of a pack, or of a stock checkpoint in place.

    Args:
        path: pack folder, checkpoint folder, or what `models.load` takes.
        reader: `auto` (direct where the file system allows, else buffered), `o_direct`, `buffered`, `mmap`.
        precision: floating tensors run in it (scales and biases too); `stored` leaves them.
        device: slow the reads down to this virtual device; an expert is one read of it, wherever its tensors lie.
        verify: `header` checks headers and sizes; `records` also reads every record of a pack and its checksum.
        check_reads: compare the checksum at every read (pack only).
        room: bytes of memory that opening a checkpoint may take for a moment; None = as many as it needs.

    Raises:
        ArtifactError: a file is missing, shorter than its header says, half written, or of an unknown version.
        UnsupportedModelError: experts of this checkpoint do not lie there as they are run; keys are listed.
        StoreError, ParameterError: as `ExpertStore` and `open_reader`.
        ContractError: opening takes more than `room`; nothing was read.
    """
    if verify not in VERIFY:
        raise ParameterError("unknown way to verify", field="verify", got=verify, expected=VERIFY)
    if (Path(path) / MANIFEST).is_file() or half_written(Path(path)):
        source = PackSource(path, precision)
    else:
        from .checkpoint import CheckpointSource

        source = CheckpointSource(path, precision, room=room)
    store = ExpertStore(source, reader=reader, device=device, check_reads=check_reads)
    if verify == "records":
        try:
            store.verify()
            source.verify_weights()
        except BaseException:
            store.close()
            raise
    return store
