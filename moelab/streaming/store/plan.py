"""From the places of an expert's tensors to the reads that fetch them.

Places that share a page, or touch at one, are read together: direct reads are rounded to whole pages, and a
page read twice is bytes for nothing. So a record of a pack is one read, and so is an expert of a checkpoint
whose tensors happen to be neighbours; a stack of each projection takes one read a tensor.

A direct read puts a byte at the same place within a page of memory as it has within a page of the file. So where the
experts of a layer lie alike, and run as they are stored, slots can be laid out for their reads to need no copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...pages import PAGE
from .layout import ALIGN, DTYPES, ExpertLayout, convert

__all__ = ["Read", "fit_slots", "plan_reads"]

Places = Sequence[tuple[int, int]]
"""`(file, start)` of each tensor of one expert."""
WORTH = 16 * PAGE
"""A read is given pages of its own from these bytes on: what it then wastes, up to a page, is a sixteenth at most."""


@dataclass(frozen=True, slots=True)
class Read:
    """One contiguous read of file number `file`.

    Attributes:
        start, need: first byte, and bytes that must arrive.
        length: bytes asked for, `need` rounded up as the reader demands.
        pieces: `(number of the tensor, its place within the read)`.
        into: where in the slot it belongs, byte for byte; None if its pieces are converted or lie otherwise.
        whole: it fills the slot.
    """

    file: int
    start: int
    need: int
    length: int
    pieces: tuple[tuple[int, int], ...]
    into: int | None
    whole: bool

    def place(self, layout: ExpertLayout, buffer: np.ndarray, slot: np.ndarray) -> None:
        """Copy or convert each piece of `buffer` to where it belongs in `slot` (both `u8`)."""
        for number, at in self.pieces:
            tensor, offset = layout.tensors[number], layout.offsets[number]
            source = buffer[at : at + tensor.stored_bytes]
            convert(source, tensor.stored, slot[offset : offset + tensor.run_bytes], tensor.run)


def plan_reads(layout: ExpertLayout, places: Places, *, align: int) -> tuple[Read, ...]:
    """Reads of one expert whose tensors lie at `places`, by a reader of this alignment."""
    reads = []
    for group in _groups(layout, places):
        start, end = group[0][1] // align * align, _end(group)
        pieces = tuple((number, begin - start) for _, begin, _, number in group)
        length = -(-(end - start) // align) * align
        into = _into(layout, pieces, length, align)
        whole = into == 0 and length == layout.slot_bytes
        reads.append(Read(group[0][0], start, end - start, length, pieces, into, whole))
    return tuple(reads)


def _into(layout: ExpertLayout, pieces: Sequence[tuple[int, int]], length: int, align: int) -> int | None:
    """Where a read of these pieces may go in a slot: each piece to its place, and nothing over another tensor."""
    starts = {layout.offsets[number] - at for number, at in pieces}
    into = min(starts)
    if len(starts) > 1 or into < 0 or into % align:
        return None
    mine = {number for number, _ in pieces}
    for number, (tensor, offset) in enumerate(zip(layout.tensors, layout.offsets, strict=True)):
        if tensor.converted if number in mine else into < offset + tensor.run_bytes and offset < into + length:
            return None
    return into


def fit_slots(
    layouts: Sequence[ExpertLayout], places: Callable[[int, int], Places], experts: int
) -> tuple[ExpertLayout, ...]:
    """The same tensors in slots for which as many direct reads as possible need no copy.

    Layers of equal tensors keep slots of equal size, whatever their places.

    Args:
        layouts: one a layer, tensors one after the other.
        places: of the tensors, by layer and expert.
    """
    fitted = [_fit(layout, [places(layer, e) for e in range(experts)]) for layer, layout in enumerate(layouts)]
    room: dict[tuple, int] = defaultdict(int)
    for layout in fitted:
        room[layout.tensors] = max(room[layout.tensors], layout.slot_bytes)
    return tuple(replace(layout, least_bytes=room[layout.tensors]) for layout in fitted)


def _fit(layout: ExpertLayout, places: Sequence[Places]) -> ExpertLayout:
    """Pages of its own for each read that all experts share: of the same tensors, beginning alike within a page."""
    first, *others = [[_within_a_page(group) for group in _groups(layout, place)] for place in places]
    shared, offsets, end = set(first).intersection(*others), {}, 0
    for group in first:
        tensors = [layout.tensors[number] for number, _ in group]
        on_marks = all(at % DTYPES[t.run].itemsize == 0 for t, (_, at) in zip(tensors, group, strict=True))
        nbytes = sum(tensor.stored_bytes for tensor in tensors)
        if group in shared and on_marks and nbytes >= WORTH and not any(t.converted for t in tensors):
            offsets |= {number: end + at for number, at in group}
            last, at = group[-1]
            end = -(-(end + at + layout.tensors[last].stored_bytes) // PAGE) * PAGE
    if not offsets:
        return layout
    for number, tensor in enumerate(layout.tensors):
        if number not in offsets:
            offsets[number] = end
            end = -(-(end + tensor.run_bytes) // ALIGN) * ALIGN
    return replace(layout, slot_offsets=tuple(offsets[number] for number in range(len(layout.tensors))))


Span = tuple[int, int, int, int]
"""File, first byte, end, and number of a tensor."""


def _groups(layout: ExpertLayout, places: Places) -> list[list[Span]]:
    spans = sorted(
        (file, start, start + tensor.stored_bytes, number)
        for number, (tensor, (file, start)) in enumerate(zip(layout.tensors, places, strict=True))
    )
    groups: list[list[Span]] = []
    for span in spans:
        if groups and groups[-1][0][0] == span[0] and span[1] // PAGE <= -(-_end(groups[-1]) // PAGE):
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _within_a_page(group: list[Span]) -> tuple[tuple[int, int], ...]:
    """Tensors of a read, and where each begins after the page in which the first one begins."""
    page = group[0][1] // PAGE * PAGE
    return tuple((number, begin - page) for _, begin, _, number in group)


def _end(group: list[Span]) -> int:
    return max(end for _, _, end, _ in group)
