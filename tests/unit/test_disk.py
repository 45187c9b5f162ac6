"""Disk profiles: measured on a small file, declared by formula, refused when they cannot be right."""

import mmap
import os
import time

import pytest

from moelab import disk
from moelab.disk import measure
from moelab.disk_profile import DiskCell, DiskProfile, declared
from moelab.errors import ContractError, RecordError

QUICK = dict(sizes=(4096, 65536), depths=(1, 3), file_bytes=1 << 20, seconds=0.02, repeats=2)


def cell(size=4096, depth=1, **changes):
    figures = dict(ms=1.0, ms_spread=0.1, mb_per_s=100.0, mb_per_s_spread=1.0, n=5)
    return DiskCell(size=size, depth=depth, **figures | changes)


def test_a_measurement_covers_every_cell_and_leaves_no_file(tmp_path):
    profile = measure(tmp_path, **QUICK)
    assert [(c.size, c.depth) for c in profile.cells] == [(4096, 1), (4096, 3), (65536, 1), (65536, 3)]
    assert profile.method in ("o_direct", "f_nocache", "buffered")
    assert all(c.n >= c.depth * QUICK["repeats"] for c in profile.cells)
    assert list(tmp_path.iterdir()) == []
    assert DiskProfile.from_json(profile.to_json()) == profile


def test_times_and_rates_of_a_disk_that_takes_two_milliseconds(tmp_path, monkeypatch):
    # A loaded machine may only be slower, so the bounds are one-sided; the other side is generous.
    monkeypatch.setattr(disk, "_read_fully", lambda fd, buffer, place: time.sleep(0.002))
    for c in measure(tmp_path, **QUICK).cells:
        assert 2 <= c.ms < 1000
        assert c.mb_per_s <= c.depth * c.size / 0.002 / 1e6
        assert c.mb_per_s > c.size / 1.0 / 1e6


def test_every_read_is_whole_and_inside_the_file(tmp_path, monkeypatch):
    seen = []
    real = os.preadv

    def short(fd, buffers, offset):
        """Half of what is asked, as O_DIRECT may give, in whole blocks."""
        wanted = len(buffers[0])
        seen.append((offset, wanted))
        return real(fd, [memoryview(buffers[0])[: max(4096, wanted // 2 // 4096 * 4096)]], offset)

    monkeypatch.setattr(os, "preadv", short)
    measure(tmp_path, **QUICK)
    assert all(offset % 4096 == 0 and offset + wanted <= QUICK["file_bytes"] for offset, wanted in seen)
    assert any(wanted == 32768 for _, wanted in seen)  # the second half of a short read was asked for
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: 0)
    with pytest.raises(RecordError, match="a read ended early"):
        measure(tmp_path, **QUICK)
    assert list(tmp_path.iterdir()) == []


def test_short_reads_are_put_together_in_place(tmp_path, monkeypatch):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 64)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:1000]], offset))
    with open(path, "rb") as file, mmap.mmap(-1, 8192) as buffer:
        disk._read_fully(file.fileno(), buffer, 256)
        assert buffer[:] == bytes(range(256)) * 32


def test_a_descriptor_that_opens_but_does_not_read_directly_is_closed(tmp_path, monkeypatch):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(8192))
    monkeypatch.setattr(os, "O_DIRECT", getattr(os, "O_DIRECT", 0), raising=False)

    def refuse(fd, buffers, offset):
        raise OSError(22, "Invalid argument")

    closed = []
    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr(os, "close", closed.append)
    fd, method = disk._open_uncached(str(path))
    monkeypatch.undo()
    assert method in ("buffered", "f_nocache")
    assert len(closed) == 1
    os.close(fd)
    os.close(closed[0])


def test_a_file_system_without_direct_reads_is_named(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *args, **kwargs):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    assert measure(tmp_path, **QUICK).method in ("buffered", "f_nocache")


@pytest.mark.parametrize(
    "wrong", [{"sizes": (1000,)}, {"depths": (0,)}, {"repeats": 0}, {"seconds": 0}, {"file_bytes": 65536}]
)
def test_what_cannot_be_measured_is_refused(tmp_path, wrong):
    with pytest.raises(ContractError):
        measure(tmp_path, **QUICK | wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_declared_disk_follows_its_formula():
    profile = declared(latency_s=1e-3, bytes_per_s=1e9, sizes=(1_000_000, 100_000), depths=(4, 1), note="textbook")
    figures = {(c.size, c.depth): (c.ms, c.mb_per_s) for c in profile.cells}
    assert figures[1_000_000, 1] == pytest.approx((2.0, 500))  # 1 ms to find, 1 ms to read
    assert figures[1_000_000, 4] == pytest.approx((4.0, 1000))  # bandwidth binds: each read waits for the others
    assert figures[100_000, 1] == pytest.approx((1.1, 1e5 / 1.1e-3 / 1e6))
    assert figures[100_000, 4] == pytest.approx((1.1, 4e5 / 1.1e-3 / 1e6))  # latency binds: reads overlap
    assert (profile.method, profile.note, profile.cells[0].n) == ("declared", "textbook", 0)


def test_interpolation_between_cells_and_beyond():
    profile = DiskProfile(
        method="declared",
        cells=(
            cell(10_000, 1, ms=5, mb_per_s=10),
            cell(10_000, 4, ms=2, mb_per_s=20),
            cell(1_000_000, 1, ms=3, mb_per_s=100),
            cell(1_000_000, 4, ms=8, mb_per_s=400),
        ),
    )
    assert profile.bytes_per_second(100_000, 1) == pytest.approx(55e6)  # half way in log size
    assert profile.bytes_per_second(10_000, 2) == pytest.approx(15e6)  # half way in log depth
    assert profile.bytes_per_second(1, 1) == pytest.approx(10e6)
    assert profile.bytes_per_second(1e9, 99) == pytest.approx(400e6)
    assert profile.read_seconds(1_000_000, 4) == pytest.approx(8e-3)
    assert profile.read_seconds(2_000_000) == pytest.approx(6e-3)
    assert profile.read_seconds(100) == pytest.approx(5e-3)
    assert profile.batch_seconds(10_000, 2) == pytest.approx(5e-3)  # no batch is faster than one read
    assert profile.batch_seconds(1_000_000, 1) == pytest.approx(10e-3)  # the rate measured, not the median time
    assert profile.batch_seconds(1_000_000, 8) == pytest.approx(8e6 / 400e6)
    assert profile.batch_seconds(1_000_000, 8, depth=1) == pytest.approx(8e6 / 100e6)
    assert profile.batch_seconds(1_000_000, 0) == 0
    with pytest.raises(ContractError, match="a read has bytes"):
        profile.read_seconds(0)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "guess"},
        {"cells": ()},
        {"cells": (cell(), cell())},
        {"cells": (cell(depth=2), cell(depth=1))},
        {"cells": (cell(4096, 1), cell(8192, 1), cell(8192, 2))},
        {"cells": (cell(ms=0.0),)},
        {"cells": (cell(mb_per_s=float("nan")),)},
        {"cells": (cell(ms_spread=-1.0),)},
    ],
)
def test_an_impossible_profile_is_refused(change):
    with pytest.raises(RecordError, match="not a disk profile"):
        DiskProfile(**{"method": "declared", "cells": (cell(),)} | change)


def test_json_refuses_what_it_does_not_know():
    value = declared(latency_s=1e-3, bytes_per_s=1e9, note="").to_json()
    for wrong in (value | {"speed": 1}, value | {"cells": "fast"}, {k: v for k, v in value.items() if k != "method"}):
        with pytest.raises(RecordError, match=r"profile\.json"):
            DiskProfile.from_json(wrong, file="profile.json")


def test_the_median_has_its_quartiles():
    assert disk._middle([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 1.0)
    assert disk._middle([7.0]) == (7.0, 0.0)
