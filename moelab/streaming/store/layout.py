"""Where the tensors of one expert lie: in a record on disk, and in a slot in memory.

An expert is a handful of tensors (three projections; weight, scales and biases each where quantised). Both
forms lay them one after the other, each at a multiple of 64 bytes, and end at a multiple of 4096: the
*record* in the types they are stored in, the *slot* in the types the kernels run on. Where these are the same
the two forms are the same bytes, and reading an expert is one read of the disk into the slot. Slots of a source with
another order (`plan.fit_slots`) have their tensors where its reads leave them.

Types have the names of safetensors. numpy knows no bfloat16: its values travel as `uint16` bit patterns.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...errors import GeometryError, ParameterError, UnsupportedModelError
from ...pages import PAGE

__all__ = ["ExpertLayout", "TensorSpec", "convert", "run_dtype"]

ALIGN = 64
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),  # bit patterns
    "U8": np.dtype(np.uint8),
    "U16": np.dtype(np.uint16),
    "U32": np.dtype(np.uint32),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
}
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
PRECISIONS = (*FLOATS, "stored")


def run_dtype(stored: str, precision: str) -> str:
    """Type that a tensor stored as `stored` runs in: floats become `precision`, integers stay.

    Raises:
        ParameterError: a precision that is none of `PRECISIONS`.
        UnsupportedModelError: a stored type that `DTYPES` does not list.
    """
    if precision not in PRECISIONS:
        raise ParameterError("unknown precision", field="precision", got=precision, expected=PRECISIONS)
    if stored not in DTYPES:
        raise UnsupportedModelError("experts of this type cannot be read", got=stored, expected=sorted(DTYPES))
    return FLOATS[precision] if precision in FLOATS and stored in FLOATS.values() else stored


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of one expert: `shape` without the leading axis of experts, stored and run type."""

    name: str
    """As in the switch module, such as `gate_proj.weight`."""
    shape: tuple[int, ...]
    stored: str
    run: str

    @property
    def stored_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.stored].itemsize

    @property
    def run_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.run].itemsize

    @property
    def converted(self) -> bool:
        return self.stored != self.run


@dataclass(frozen=True)
class ExpertLayout:
    """The tensors of the experts of one layer, and where each lies.

    Args:
        slot_offsets: of each tensor in a slot, bytes; () = one after the other.
        least_bytes: of a slot, so that layers whose tensors lie differently can share slots.

    Attributes:
        offsets: of each tensor in a slot, bytes.
        slot_bytes: of a slot, a multiple of 4096.
        record_offsets, record_bytes: the same for a record.
        stored_bytes, run_bytes: without any padding.

    Raises:
        GeometryError: no tensor, or two of one name.
    """

    tensors: tuple[TensorSpec, ...]
    slot_offsets: tuple[int, ...] = ()
    least_bytes: int = 0

    def __post_init__(self):
        names = [tensor.name for tensor in self.tensors]
        if not names or len(set(names)) != len(names):
            raise GeometryError("an expert has tensors of different names", field="tensors", got=names)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.tensors, self.slot_offsets, self.least_bytes))  # once: layouts are keys at every turn

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        return self.slot_offsets or _starts([tensor.run_bytes for tensor in self.tensors])

    @cached_property
    def record_offsets(self) -> tuple[int, ...]:
        return _starts([tensor.stored_bytes for tensor in self.tensors])

    @cached_property
    def slot_bytes(self) -> int:
        ends = (offset + tensor.run_bytes for tensor, offset in zip(self.tensors, self.offsets, strict=True))
        return _up(max(*ends, self.least_bytes), PAGE)

    @cached_property
    def record_bytes(self) -> int:
        return _up(self.record_offsets[-1] + self.tensors[-1].stored_bytes, PAGE)

    @cached_property
    def stored_bytes(self) -> int:
        return sum(tensor.stored_bytes for tensor in self.tensors)

    @cached_property
    def run_bytes(self) -> int:
        return sum(tensor.run_bytes for tensor in self.tensors)

    def at(self, precision: str) -> ExpertLayout:
        """The same tensors, to be run in another precision."""
        return ExpertLayout(
            tuple(TensorSpec(t.name, t.shape, t.stored, run_dtype(t.stored, precision)) for t in self.tensors)
        )

    def arrays(self, slot: np.ndarray) -> dict[str, np.ndarray]:
        """Views into a slot `u8[slot_bytes]`: tensor name → array in its run type (BF16 as bit patterns)."""
        return {
            tensor.name: slot[offset : offset + tensor.run_bytes].view(DTYPES[tensor.run]).reshape(tensor.shape)
            for tensor, offset in zip(self.tensors, self.offsets, strict=True)
        }


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _starts(sizes: Sequence[int]) -> tuple[int, ...]:
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at = _up(at + size, ALIGN)
    return tuple(starts)


def convert(source: np.ndarray, stored: str, target: np.ndarray, run: str) -> None:
    """Write the values of `source` (bytes of type `stored`) into `target` (bytes of type `run`).

    Both are `u8[n]`, contiguous, at any address. Rounds to nearest even, as mlx's cast does; widening is exact.
    """
    if stored == run:
        target[:] = source
        return
    source, target = source.view(DTYPES[stored]), target.view(DTYPES[run])
    if (stored, run) == ("F16", "F32"):
        _widen(source, target)
        return
    if stored == "BF16":
        if run == "F32":
            np.left_shift(source, 16, out=target.view(np.uint32), dtype=np.uint32)
            return
        source = np.left_shift(source, 16, dtype=np.uint32).view(np.float32)
    if run == "BF16":
        target[:] = _to_bfloat16(source.astype(np.float32, copy=False))
        return
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):  # too large for float16 is infinite, as in mlx
        np.copyto(target, source, casting="unsafe")


_turns = threading.Semaphore(max(1, (os.cpu_count() or 1) // 2))
"""Every pass of numpy gives the interpreter up and waits to get it back. On two cores, two threads that convert mostly
wait for that: one after the other they are faster by a third (reports/LOG.md)."""


def _widen(source: np.ndarray, target: np.ndarray, block: int = 1 << 16) -> None:
    """float16 → float32, exact, in passes that numpy vectorises (its own cast goes one value at a time).

    Sign, exponent and fraction move to their places in float32; a factor of 2^112 makes up for the other
    bias of the exponent, and is exact for subnormal numbers too. What then reaches 2^16 was infinite or NaN.
    Blocks stay in the core's cache.
    """
    halves, bits = source.view(np.int16), target.view(np.int32)
    with _turns:
        for start in range(0, halves.size, block):
            part, values = bits[start : start + block], target[start : start + block]
            part[...] = halves[start : start + block]  # widens the sign too, into bits that the mask clears
            np.left_shift(part, 13, out=part)
            np.bitwise_and(part, np.int32(-0x70000001), out=part)
            np.multiply(values, np.float32(2.0**112), out=values)
            if values.max() >= 65536 or values.min() <= -65536:
                part[np.abs(values) >= 65536] |= 0x7F800000


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Upper half of float32, rounded to nearest even: half of the last kept bit is added before the cut."""
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    # The sum would carry a NaN into infinity or zero: it stays a quiet NaN.
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
