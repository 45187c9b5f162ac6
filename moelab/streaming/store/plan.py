"""From the places of an expert's tensors to the reads that fetch them.

Places that share a page, or touch at one, are read together: direct reads are rounded to whole pages, and a
page read twice is bytes for nothing. So a record of a pack is one read, and so is an expert of a checkpoint
whose tensors happen to be neighbours; a stack of each projection takes one read a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...pages import PAGE
from .layout import ExpertLayout, convert

__all__ = ["Read", "plan_reads"]


@dataclass(frozen=True, slots=True)
class Read:
    """One contiguous read of file number `file`.

    Attributes:
        start, need: first byte, and bytes that must arrive.
        length: bytes asked for, `need` rounded up as the reader demands.
        pieces: `(number of the tensor, its place within the read)`.
        direct: the bytes are those of the slot, each where it belongs.
        whole: and with their rounding they are as long as the slot.
    """

    file: int
    start: int
    need: int
    length: int
    pieces: tuple[tuple[int, int], ...]
    direct: bool
    whole: bool

    def place(self, layout: ExpertLayout, buffer: np.ndarray, slot: np.ndarray) -> None:
        """Copy or convert each piece of `buffer` to where it belongs in `slot` (both `u8`)."""
        for number, at in self.pieces:
            tensor, offset = layout.tensors[number], layout.offsets[number]
            source = buffer[at : at + tensor.stored_bytes]
            convert(source, tensor.stored, slot[offset : offset + tensor.run_bytes], tensor.run)


def plan_reads(layout: ExpertLayout, places: Sequence[tuple[int, int]], *, align: int) -> tuple[Read, ...]:
    """Reads of one expert whose tensors lie at `places`, `(file, start)` each, by a reader of this alignment."""
    spans = sorted(
        (file, start, start + tensor.stored_bytes, number)
        for number, (tensor, (file, start)) in enumerate(zip(layout.tensors, places, strict=True))
    )
    groups: list[list[tuple[int, int, int, int]]] = []
    for span in spans:
        if groups and groups[-1][0][0] == span[0] and span[1] // PAGE <= -(-_end(groups[-1]) // PAGE):
            groups[-1].append(span)
        else:
            groups.append([span])
    reads = []
    for group in groups:
        start, end = group[0][1] // align * align, _end(group)
        pieces = tuple((number, begin - start) for _, begin, _, number in group)
        direct = layout.plain and len(pieces) == len(layout.tensors)
        direct = direct and all(at == layout.offsets[number] for number, at in pieces)
        length = -(-(end - start) // align) * align
        whole = direct and length == layout.slot_bytes
        reads.append(Read(group[0][0], start, end - start, length, pieces, direct, whole))
    return tuple(reads)


def _end(group: list[tuple[int, int, int, int]]) -> int:
    return max(end for _, _, end, _ in group)
