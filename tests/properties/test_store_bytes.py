"""Over random layouts in random files: every byte of every expert is the source's, by every reader."""

import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.pages import PAGE, aligned
from moelab.streaming.store import plan
from moelab.streaming.store.layout import ALIGN, DTYPES, ExpertLayout, TensorSpec
from moelab.streaming.store.plan import fit_slots, plan_reads
from moelab.streaming.store.store import ExpertStore

READERS = ("auto", "buffered", "mmap")
SHAPES = st.lists(st.integers(1, 40), max_size=3).map(tuple)


@st.composite
def layouts(draw) -> ExpertLayout:
    """One to nine tensors, stored in any type and run in it, or in float32 where it is a float."""
    tensors = []
    for number in range(draw(st.integers(1, 9))):
        stored = draw(st.sampled_from(sorted(DTYPES)))
        wide = stored in ("F16", "BF16") and draw(st.booleans())
        tensors.append(TensorSpec(f"t{number}", draw(SHAPES), stored, "F32" if wide else stored))
    return ExpertLayout(tuple(tensors))


@st.composite
def sources(draw):
    """Layers whose tensors lie as records of a pack, as stacks, or anywhere in any of up to three files."""
    experts, chosen = draw(st.integers(1, 4)), draw(st.lists(layouts(), min_size=1, max_size=3))
    count, ends, places = draw(st.integers(1, 3)), [0, 0, 0], {}
    for layer, layout in enumerate(chosen):
        file, kind = draw(st.integers(0, count - 1)), draw(st.sampled_from(["records", "stacks", "anywhere"]))
        if kind == "records":
            base = -(-ends[file] // PAGE) * PAGE
            for expert in range(experts):
                places[layer, expert] = [
                    (file, base + expert * layout.record_bytes + offset) for offset in layout.record_offsets
                ]
            ends[file] = base + experts * layout.record_bytes
            continue
        for expert in range(experts):
            places[layer, expert] = []
        for tensor in layout.tensors:
            for expert in range(experts):
                if kind == "anywhere":
                    file = draw(st.integers(0, count - 1))
                    ends[file] += draw(st.integers(0, 9000))
                places[layer, expert].append((file, ends[file]))
                ends[file] += tensor.stored_bytes
    return experts, chosen, [max(end, 1) for end in ends[:count]], places


def slow(data: bytes, tensor: TensorSpec) -> bytes:
    """The tensor in its run type, one value after the other."""
    if tensor.stored == tensor.run:
        return data
    if tensor.stored == "F16":
        return np.array([np.float32(v) for v in np.frombuffer(data, np.float16)], np.float32).tobytes()
    return b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))


def fitted(chosen, places, experts, worth):
    """Slots laid out for the reads of these sources, if `worth`: bytes from which a read has pages of its own."""
    if not worth:
        return tuple(chosen)
    with mock.patch.object(plan, "WORTH", worth):
        return fit_slots(chosen, lambda layer, expert: places[layer, expert], experts)


@given(sources(), st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 64]), st.sampled_from([0, 1, PAGE]))
@settings(max_examples=120, deadline=None)
def test_every_byte_by_every_reader(drawn, seed, shift, worth):
    experts, chosen, sizes, places = drawn
    chosen = fitted(chosen, places, experts, worth)
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(number) for number in range(len(sizes))]
        contents = [rng.bytes(size) for size in sizes]
        for file, content in zip(files, contents, strict=True):
            file.write_bytes(content)
        source = SimpleNamespace(
            layers=len(chosen), experts=experts, layouts=chosen, files=files, identity=dict,
            places=lambda layer, expert: places[layer, expert], checksum=lambda layer, expert: None,
        )  # fmt: skip
        for reader in READERS:
            with ExpertStore(source, reader=reader) as store:
                for (layer, expert), where in places.items():
                    layout = chosen[layer]
                    memory = aligned(layout.slot_bytes + 2 * PAGE)
                    memory[:] = 0x7F
                    slot = memory[shift : shift + layout.slot_bytes]
                    store.read_into(layer, expert, slot)
                    for tensor, offset, (file, start) in zip(layout.tensors, layout.offsets, where, strict=True):
                        stored = contents[file][start : start + tensor.stored_bytes]
                        found = slot[offset : offset + tensor.run_bytes].tobytes()
                        assert found == slow(stored, tensor), (reader, tensor)
                    assert (memory[:shift] == 0x7F).all() and (memory[shift + layout.slot_bytes :] == 0x7F).all()


@given(sources(), st.sampled_from([1, PAGE]))
@settings(max_examples=200, deadline=None)
def test_a_plan_reads_every_piece_once_and_no_page_twice(drawn, align):
    _, chosen, _, places = drawn
    for (layer, _), where in places.items():
        layout, pages, pieces = chosen[layer], [], []
        for read in plan_reads(layout, where, align=align):
            assert read.start % align == read.length % align == 0 and read.need <= read.length < read.need + align
            pages += [(read.file, page) for page in range(read.start // PAGE, -(-(read.start + read.length) // PAGE))]
            pieces += [number for number, _ in read.pieces]
            for number, at in read.pieces:
                assert (read.file, read.start + at) == where[number]
                assert at + layout.tensors[number].stored_bytes <= read.need
        assert sorted(pieces) == list(range(len(layout.tensors)))
        assert len(pages) == len(set(pages))


@given(sources(), st.sampled_from([1, PAGE]))
@settings(max_examples=200, deadline=None)
def test_fitted_slots_hold_every_tensor_apart_and_on_its_marks(drawn, worth):
    experts, chosen, _, places = drawn
    sizes = {}
    for layout, plainer in zip(fitted(chosen, places, experts, worth), chosen, strict=True):
        assert layout.tensors == plainer.tensors and layout.slot_bytes % PAGE == 0
        assert sizes.setdefault(layout.tensors, layout.slot_bytes) == layout.slot_bytes  # they can share slots
        spans = sorted((o, o + t.run_bytes) for t, o in zip(layout.tensors, layout.offsets, strict=True))
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise([*spans, (layout.slot_bytes, 0)]))
        assert all(o % DTYPES[t.run].itemsize == 0 for t, o in zip(layout.tensors, layout.offsets, strict=True))


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_tensors_lie_apart_and_on_their_marks(layout):
    for offsets, sizes, total in (
        (layout.offsets, [t.run_bytes for t in layout.tensors], layout.slot_bytes),
        (layout.record_offsets, [t.stored_bytes for t in layout.tensors], layout.record_bytes),
    ):
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        assert all(offset % ALIGN == 0 for offset in offsets) and total % PAGE == 0
        assert all(end <= start for end, start in zip(ends, (*offsets[1:], total), strict=True))
        assert sum(sizes) <= total < sum(sizes) + ALIGN * len(sizes) + PAGE
    assert (layout.at("stored") == layout) == (not any(tensor.converted for tensor in layout.tensors))
