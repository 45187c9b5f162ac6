"""Readers and the store: all bytes of an expert or a typed error, from any number of threads."""

import errno
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from moelab.errors import GeometryError, MissingArtifactError, ParameterError, StoreError
from moelab.pages import PAGE, aligned
from moelab.streaming import VirtualDevice
from moelab.streaming.store.layout import DTYPES, ExpertLayout, TensorSpec, convert, run_dtype
from moelab.streaming.store.plan import fit_slots, plan_reads
from moelab.streaming.store.readers import open_reader
from moelab.streaming.store.slab import Slab
from moelab.streaming.store.store import ExpertStore

READERS = ("auto", "buffered", "mmap")
EXPERTS, LAYERS = 6, 2
LAYOUT = ExpertLayout((TensorSpec("a.weight", (50, 70), "F32", "F32"), TensorSpec("a.bias", (50,), "F32", "F32")))


def make_source(folder: Path) -> SimpleNamespace:
    """Records of one layer a file, laid out as slots, of random bytes."""
    rng = np.random.default_rng(0)
    files = [folder / f"{layer}.bin" for layer in range(LAYERS)]
    for file in files:
        file.write_bytes(rng.bytes(EXPERTS * LAYOUT.record_bytes))
    return SimpleNamespace(
        layers=LAYERS, experts=EXPERTS, layouts=(LAYOUT,) * LAYERS, files=files, identity=dict,
        places=lambda layer, expert: [(layer, expert * LAYOUT.record_bytes + o) for o in LAYOUT.record_offsets],
        checksum=lambda layer, expert: None,
    )  # fmt: skip


def truth(source, layer: int, expert: int) -> list[bytes]:
    data = source.files[layer].read_bytes()
    starts = [start for _, start in source.places(layer, expert)]
    return [data[s : s + t.stored_bytes] for s, t in zip(starts, LAYOUT.tensors, strict=True)]


def got(store, layer: int, expert: int) -> list[bytes]:
    return [array.tobytes() for array in store.read(layer, expert).values()]


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path)


@pytest.fixture(params=READERS)
def store(request, source):
    with ExpertStore(source, reader=request.param) as store:
        yield store


# ---------------------------------------------------------------- bytes, places, counters


def test_every_expert_by_every_reader(store, source):
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            assert got(store, layer, expert) == truth(source, layer, expert)
    assert store.reads == LAYERS * EXPERTS
    assert store.payload_bytes == store.reads * store.nbytes(0) == store.reads * LAYOUT.stored_bytes
    assert store.payload_bytes <= store.physical_bytes <= store.reads * LAYOUT.record_bytes


def test_memory_around_the_slot_is_never_touched_and_unaligned_memory_is_filled_too(store, source):
    size = LAYOUT.slot_bytes
    for first in (4096, 4096 + 64, 1):
        memory = aligned(size + 3 * 4096)
        memory[:] = 0x7F
        store.read_into(1, 3, memory[first : first + size])
        assert (memory[:first] == 0x7F).all() and (memory[first + size :] == 0x7F).all()
        arrays = LAYOUT.arrays(memory[first : first + size].copy())
        assert [array.tobytes() for array in arrays.values()] == truth(source, 1, 3)


def test_one_read_goes_straight_into_the_slot(source):
    """No bounce buffer: a record in run types is one read of the whole record."""
    with ExpertStore(source) as store:
        store._bounce = None
        assert store.read_into(0, 2, aligned(LAYOUT.slot_bytes)) == LAYOUT.record_bytes


def test_read_many_takes_any_order(store, source):
    keys = [EXPERTS + 4, 0, EXPERTS, 5]
    outs = [aligned(LAYOUT.slot_bytes) for _ in keys]
    store.read_many(keys, outs)
    for key, out in zip(keys, outs, strict=True):
        assert [a.tobytes() for a in LAYOUT.arrays(out).values()] == truth(source, *divmod(key, EXPERTS))


def test_memory_and_numbers_that_do_not_fit_are_refused(store):
    size = LAYOUT.slot_bytes
    for out in (aligned(size - 4096), np.zeros(size // 4, np.float32), np.zeros(2 * size, np.uint8)[::2]):
        with pytest.raises(GeometryError, match="memory does not fit"):
            store.read_into(0, 0, out)
    for layer, expert in ((LAYERS, 0), (0, EXPERTS), (-1, 0), (0, -1)):
        with pytest.raises(GeometryError, match="no such expert"):
            store.read(layer, expert)
    assert store.reads == 0


def test_what_threads_read_side_by_side_is_counted_once_and_whole(source):
    with ExpertStore(source) as store:
        keys = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)] * 20
        threads = [threading.Thread(target=lambda part=keys[n::4]: [store.read(*k) for k in part]) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.reads == len(keys) and store.payload_bytes == len(keys) * LAYOUT.stored_bytes
        assert store.physical_bytes >= store.payload_bytes


def held_up(monkeypatch):
    """Reads that wait for the second event, once the first says that one has begun."""
    real, begun, on = os.preadv, threading.Event(), threading.Event()

    def slow(*arguments):
        begun.set()
        on.wait()
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", slow)
    return begun, on


def test_a_forked_child_does_not_wait_for_the_reads_of_its_parent(source, monkeypatch):
    store = ExpertStore(source)
    begun, on = held_up(monkeypatch)
    reader = threading.Thread(target=store.read, args=(0, 0))
    reader.start()
    begun.wait()
    if (child := os.fork()) == 0:
        signal.alarm(10)
        store.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    on.set()
    reader.join()
    store.close()


def test_closing_waits_for_a_verification_that_reads(source, monkeypatch):
    source.checksum = lambda layer, expert: 0
    monkeypatch.setattr(ExpertStore, "_compare", lambda *_: None)
    store = ExpertStore(source)
    begun, on = held_up(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        verifying = pool.submit(store.verify)
        begun.wait()
        closing = pool.submit(store.close)
        time.sleep(0.05)
        early = closing.done()
        on.set()
        closing.result()
        assert not early
        with pytest.raises(StoreError, match="this expert store is closed"):
            verifying.result()


def test_a_declared_device_slows_reads_down(source):
    device = VirtualDevice(latency_s=0.004, bytes_per_s=1e9)
    with ExpertStore(source, device=device) as store:
        began = time.perf_counter()
        for expert in range(EXPERTS):
            store.read(0, expert)
        assert time.perf_counter() - began >= EXPERTS * 0.004
        assert store.identity["throttle"] == {"latency_s": 0.004, "bytes_per_s": 1e9, "lanes": None}
        assert device.nbytes == store.physical_bytes


# ---------------------------------------------------------------- faults


def patched(monkeypatch, behaviour):
    """`os.preadv` that asks `behaviour(call number, descriptor, views, place)`; None = the real one."""
    real, calls = os.preadv, iter(range(1 << 30))

    def preadv(fd, views, place):
        answer = behaviour(next(calls), fd, views, place)
        return real(fd, views, place) if answer is None else answer

    monkeypatch.setattr(os, "preadv", preadv)
    return real


@pytest.mark.parametrize("reader", ["auto", "buffered"])
def test_short_reads_go_on_and_interrupted_ones_are_repeated(reader, source, monkeypatch):
    with ExpertStore(source, reader=reader) as store:

        def behave(call, fd, views, place):
            if call % 3 == 1:
                raise InterruptedError(errno.EINTR, "interrupted")
            half = len(views[0]) // 2 // 4096 * 4096
            # Said to be shorter than it was, and no whole number of blocks: a direct read cannot go on there.
            return real(fd, [views[0][:half]], place) - 500 if call % 3 == 0 and half else None

        real = patched(monkeypatch, behave)
        for expert in range(EXPERTS):
            memory = aligned(LAYOUT.slot_bytes)
            memory[:] = 0x7F
            store.read_into(0, expert, memory)
            assert [a.tobytes() for a in LAYOUT.arrays(memory).values()] == truth(source, 0, expert)


@pytest.mark.parametrize("reader", ["auto", "buffered"])
@pytest.mark.parametrize("before", [0, 4096, 5000])
def test_a_read_that_ends_early_says_what_it_got(reader, before, source, monkeypatch):
    with ExpertStore(source, reader=reader) as store:
        monkeypatch.setattr(os, "preadv", lambda fd, views, place: max(0, min(before - place, len(views[0]))))
        with pytest.raises(StoreError, match="ended early") as refusal:
            store.read(0, 0)
        need = LAYOUT.offsets[-1] + LAYOUT.tensors[-1].run_bytes
        assert (refusal.value.got, refusal.value.expected) == (f"{before} bytes", f"{need} bytes")
        assert refusal.value.file == source.files[0]
        assert (store.reads, store.payload_bytes) == (0, 0)


@pytest.mark.parametrize("reader", ["auto", "buffered"])
def test_an_error_of_the_device_is_typed_and_the_store_stays_usable(reader, source, monkeypatch):
    with ExpertStore(source, reader=reader) as store:
        with monkeypatch.context() as patch:

            def fail(*_):
                raise OSError(errno.EIO, "Input/output error")

            patch.setattr(os, "preadv", fail)
            with pytest.raises(StoreError, match="errno 5"):
                store.read(0, 1)
        assert got(store, 0, 1) == truth(source, 0, 1)
        assert store.reads == 1


@pytest.mark.parametrize("reader", READERS)
def test_a_file_cut_short_while_open_is_an_error_of_the_read(reader, source):
    with ExpertStore(source, reader=reader) as store:
        os.truncate(source.files[1], 3 * LAYOUT.record_bytes + 5000)
        with pytest.raises(StoreError, match="ended early") as refusal:
            store.read(1, 3)
        assert refusal.value.got == "5000 bytes"
        with pytest.raises(StoreError, match="ended early"):
            store.read(1, 5)
        assert got(store, 1, 2) == truth(source, 1, 2)


def test_a_closed_store_refuses_and_closing_waits_for_reads(source, monkeypatch):
    real, inside, go = os.preadv, threading.Event(), threading.Event()

    def wait(*arguments):
        inside.set()
        assert go.wait(10)
        return real(*arguments)

    store, results = ExpertStore(source), []
    monkeypatch.setattr(os, "preadv", wait)
    reading = threading.Thread(target=lambda: results.append(got(store, 0, 0)))
    reading.start()
    assert inside.wait(10)
    closing = threading.Thread(target=store.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive(), "a descriptor closed under a read may be another file's by the time it is used"
    go.set()
    closing.join(10)
    reading.join(10)
    assert results == [truth(source, 0, 0)]
    with pytest.raises(StoreError, match="closed"):
        store.read(0, 0)
    store.close()


def test_direct_reads_refused_by_the_file_system(source, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr("sys.platform", "linux")
    with ExpertStore(source) as store:
        assert store.identity["reader"] == "buffered"
        assert got(store, 1, 5) == truth(source, 1, 5)
    with pytest.raises(StoreError, match="refuses direct reads.*fix: reader='auto'"):
        ExpertStore(source, reader="o_direct")


def test_direct_reads_refused_at_the_first_read(source, monkeypatch):
    real = os.preadv

    def refuse(fd, views, place):
        if len(views[0]) == 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, views, place)

    monkeypatch.setattr(os, "preadv", refuse)
    monkeypatch.setattr("sys.platform", "linux")
    with ExpertStore(source) as store:
        assert store.identity["reader"] == "buffered"


def test_readers_and_files_that_are_not_there(source, tmp_path):
    with pytest.raises(ParameterError, match="unknown reader"):
        ExpertStore(source, reader="uring")
    with pytest.raises(MissingArtifactError):
        open_reader("auto", [tmp_path / "none"])
    with pytest.raises(ParameterError, match="no checksums"):
        ExpertStore(source, check_reads=True)


def test_descriptors_do_not_leak(source):
    count = lambda: len(os.listdir("/dev/fd"))  # noqa: E731
    before = count()
    for reader in READERS:
        ExpertStore(source, reader=reader).close()
    with pytest.raises(MissingArtifactError):
        ExpertStore(SimpleNamespace(**{**vars(source), "files": [*source.files, Path("none")]}))
    assert count() == before


# ---------------------------------------------------------------- threads and processes


@pytest.mark.parametrize("reader", READERS)
def test_sixteen_threads_read_the_same_bytes(reader, source):
    expected = {(layer, e): truth(source, layer, e) for layer in range(LAYERS) for e in range(EXPERTS)}
    wrong = []

    def work(seed):
        rng = np.random.default_rng(seed)
        memory = aligned(LAYOUT.slot_bytes + 64)
        for layer, expert, first in rng.integers((LAYERS, EXPERTS, 2), size=(200, 3)).tolist():
            slot = memory[64 * first :][: LAYOUT.slot_bytes]  # straight into the slot, or by way of a buffer
            store.read_into(layer, expert, slot)
            if [array.tobytes() for array in LAYOUT.arrays(slot).values()] != expected[layer, expert]:
                wrong.append((layer, expert))

    with ExpertStore(source, reader=reader) as store:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong and store.reads == 16 * 200


def test_a_store_inherited_by_another_process_is_refused(source):
    with ExpertStore(source) as store:
        if (child := os.fork()) == 0:
            refused = 0
            for use in (lambda: store.read(0, 0), lambda: store.read_into(0, 0, aligned(LAYOUT.slot_bytes))):
                try:
                    use()
                except StoreError as error:
                    refused += "another process" in str(error) and "spawn" in str(error)
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
        assert got(store, 0, 0) == truth(source, 0, 0)  # the parent's own goes on


# ---------------------------------------------------------------- layouts and types


def test_record_and_slot_are_the_same_bytes_where_nothing_is_converted():
    kinds = (("w", (3, 5), "U32"), ("s", (3, 1), "BF16"), ("g", (), "F32"))
    stored = ExpertLayout(tuple(TensorSpec(name, shape, kind, kind) for name, shape, kind in kinds))
    assert not any(t.converted for t in stored.tensors)
    assert stored.offsets == stored.record_offsets == (0, 64, 128)
    assert stored.slot_bytes == stored.record_bytes == 4096
    run = stored.at("float32")
    assert [t.converted for t in run.tensors] == [False, True, False]
    assert run.stored_bytes == 60 + 6 + 4 and run.run_bytes == 60 + 12 + 4
    assert [t.run for t in run.tensors] == ["U32", "F32", "F32"]
    with pytest.raises(GeometryError):
        ExpertLayout(())
    with pytest.raises(GeometryError):
        ExpertLayout((TensorSpec("w", (1,), "F32", "F32"),) * 2)
    with pytest.raises(ParameterError):
        run_dtype("F32", "double")


def test_padding_of_a_real_expert_is_below_two_per_cent():
    """Qwen3-MoE, 4 bits in groups of 64: 2048 wide, 768 inside. A 3.5 MB expert of the same kind in float16."""
    for shapes in (
        [((768, 256), "U32"), ((768, 32), "BF16"), ((768, 32), "BF16")] * 2
        + [((2048, 96), "U32"), ((2048, 12), "BF16"), ((2048, 12), "BF16")],
        [((1024, 576), "F16"), ((1024, 576), "F16"), ((576, 1024), "F16")],
    ):
        layout = ExpertLayout(tuple(TensorSpec(str(n), shape, t, t) for n, (shape, t) in enumerate(shapes)))
        plan = plan_reads(layout, [(0, 5 * layout.record_bytes + at) for at in layout.record_offsets], align=4096)
        assert len(plan) == 1 and plan[0].into == 0 and plan[0].whole
        assert plan[0].length / layout.stored_bytes <= 1.02


def test_neighbours_are_read_together_and_others_are_not():
    layout = ExpertLayout(tuple(TensorSpec(name, (1000,), "U8", "U8") for name in "abc"))
    near = plan_reads(layout, [(0, 3000), (0, 1000), (0, 5000)], align=4096)
    assert [(r.start, r.need, r.length) for r in near] == [(0, 6000, 8192)]
    far = plan_reads(layout, [(0, 3000), (0, 40000), (1, 3000)], align=4096)
    assert [(r.file, r.start, r.length) for r in far] == [(0, 0, 4096), (0, 36864, 8192), (1, 0, 4096)]
    exact = plan_reads(layout, [(0, 3000), (0, 40000), (1, 3000)], align=1)
    assert [(r.start, r.length) for r in exact] == [(3000, 1000), (40000, 1000), (3000, 1000)]


def test_tensors_that_lie_alike_in_place_are_read_without_a_copy(tmp_path):
    """Stacks of three projections that begin anywhere: one of them is converted, one is too small to be worth it."""
    shapes, base = {"gate": (256, 128), "up": (256, 128), "small": (16, 128), "down": (128, 256)}, 1912
    tensors = tuple(TensorSpec(n, s, "F16", "F32" if n == "up" else "F16") for n, s in shapes.items())
    starts, end = [], base
    for tensor in tensors:
        starts.append(end)
        end += 3 * tensor.stored_bytes
    content = np.random.default_rng(0).bytes(end)
    (tmp_path / "experts").write_bytes(content)

    def places(layer, expert):
        return [(0, start + expert * t.stored_bytes) for start, t in zip(starts, tensors, strict=True)]

    (layout,) = fit_slots([ExpertLayout(tensors)], places, 3)
    assert layout.slot_offsets == (1912, 34 * PAGE, 66 * PAGE, 17 * PAGE + 1912)  # gate and down in 17 pages each
    source = SimpleNamespace(
        layers=1, experts=3, layouts=(layout,), files=[tmp_path / "experts"], identity=dict, places=places,
        checksum=lambda layer, expert: None,
    )  # fmt: skip
    with ExpertStore(source) as store:
        plan = store._plan(0, 2)
        assert [layout.tensors[number].name for r in plan if r.into is None for number, _ in r.pieces] == [
            "up",
            "small",
        ]
        for expert in range(3):
            slot = aligned(layout.slot_bytes)
            store.read_into(0, expert, slot)
            for (name, array), (_, start) in zip(layout.arrays(slot).items(), places(0, expert), strict=True):
                stored = np.frombuffer(content, np.float16, array.size, start)
                same = array.view(np.uint16 if name != "up" else np.uint32).reshape(-1)
                want = stored if name != "up" else stored.astype(np.float32)
                np.testing.assert_array_equal(same, want.view(same.dtype))
    apart = [*places(0, 0)], [(0, start + 2) for _, start in places(0, 1)]  # another place within a page
    assert fit_slots([ExpertLayout(tensors)], lambda layer, expert: apart[expert], 2)[0].slot_offsets == ()


def test_a_read_goes_straight_into_a_slot_only_where_it_covers_nothing_else():
    two = ExpertLayout(tuple(TensorSpec(name, (100,), "U8", "U8") for name in "ab"))
    for places in ([(0, 8192), (0, 128)], [(0, 8192), (1, 128)]):  # whole pages of either would cover the other
        assert [read.into for read in plan_reads(two, places, align=4096)] == [None, None]
        assert sorted(read.into for read in plan_reads(two, places, align=1)) == [0, 128]
    moved = ExpertLayout(two.tensors[:1], slot_offsets=(64,), least_bytes=8192)
    assert [plan_reads(moved, [(0, 0)], align=align)[0].into for align in (1, 4096)] == [64, None]
    assert plan_reads(moved, [(0, 4160)], align=4096)[0].into == 0


def test_layers_of_equal_tensors_keep_slots_of_equal_size():
    layout = ExpertLayout((TensorSpec("a", (16 * PAGE,), "U8", "U8"),))
    fitted = fit_slots([layout, layout], lambda layer, expert: [(0, 100 * layer + expert * 16 * PAGE)], 2)
    assert [f.slot_offsets for f in fitted] == [(0,), (100,)]
    assert [f.slot_bytes for f in fitted] == [17 * PAGE, 17 * PAGE]


def test_slots_of_another_size_are_refused_by_a_slab():
    layout = ExpertLayout((TensorSpec("a", (3000,), "F32", "F32"),))
    slab = Slab(layout.slot_bytes, 2)
    assert slab.arrays(layout) is slab.arrays(ExpertLayout(layout.tensors))
    with pytest.raises(GeometryError, match="other slots.*slot_bytes.*got: 16384.*expected: 12288"):
        slab.arrays(ExpertLayout(layout.tensors, least_bytes=16384))


def test_what_is_converted_never_goes_straight_into_the_slot():
    narrow, same = (ExpertLayout((TensorSpec("a", (8,), kind, "F32"),)) for kind in ("F16", "F32"))
    assert plan_reads(narrow, [(0, 0)], align=1)[0].into is None
    assert plan_reads(same, [(0, 0)], align=1)[0].into == 0


MLX = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


def special_values(stored: str) -> np.ndarray:
    """Every 16-bit pattern; of float32 random patterns, halfway cases and their neighbours."""
    if stored != "F32":
        return np.arange(1 << 16, dtype=np.uint16)
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    halves = (rng.integers(0, 1 << 16, 20_000, dtype=np.uint32) << 16) + 0x8000
    values = np.concatenate([bits, halves, halves + 1, halves - 1])
    return values.view(np.float32)


@pytest.mark.parametrize("stored", list(MLX))
@pytest.mark.parametrize("run", list(MLX))
def test_conversions_are_those_of_mlx(stored, run):
    values = special_values(stored)
    out = np.empty(values.size * DTYPES[run].itemsize, np.uint8)
    convert(values.view(np.uint8), stored, out, run)
    given = mx.view(mx.array(values), MLX[stored]) if stored != "F32" else mx.array(values)
    expected = np.array(mx.view(given.astype(MLX[run]), mx.uint32 if run == "F32" else mx.uint16))
    found = out.view(expected.dtype)
    wide = np.array(mx.view(mx.array(found), MLX[run]).astype(mx.float32))
    nan = np.isnan(np.array(given.astype(mx.float32)))
    assert np.array_equal(found[~nan], expected[~nan])
    assert np.isnan(wide[nan]).all(), "a NaN stays one; which of its patterns is no value"


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("start", [0, 1, 4095, 4097])
def test_an_expert_that_begins_anywhere_is_converted(reader, start, tmp_path):
    layout = ExpertLayout((TensorSpec("a", (300,), "F16", "F32"), TensorSpec("b", (7,), "BF16", "F32")))
    a = np.random.default_rng(2).normal(size=300).astype(np.float16)
    b = (np.arange(7, dtype=np.float32) * 1.5).view(np.uint32) >> 16
    data = bytes(start) + a.tobytes() + b.astype(np.uint16).tobytes()
    (tmp_path / "x").write_bytes(data)
    places = lambda layer, expert: [(0, start), (0, start + 600)]  # noqa: E731
    source = SimpleNamespace(layers=1, experts=1, layouts=(layout,), files=[tmp_path / "x"], places=places,
                             identity=dict, checksum=lambda *_: None)  # fmt: skip
    with ExpertStore(source, reader=reader) as store:
        read = store.read(0, 0)
        assert np.array_equal(read["a"], a.astype(np.float32))
        assert read["b"].tolist() == [1.5 * n for n in range(7)]
        assert math.prod(read["a"].shape) == 300
