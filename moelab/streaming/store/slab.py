"""Expert slots: memory that a disk can fill and a kernel can multiply with, without a copy in between.

A slab is one mlx allocation of `slots` equal slots. Each slot holds one expert, its tensors one after the
other. The same bytes are seen twice: by the host as a page-aligned `u8[slots, slot_bytes]`, into which
direct reads go, and by mlx as one strided array `[slots, *shape]` for each tensor, which the layer's own
gathered products take in place of `[experts, *shape]`. So the cache is not copied from: it is computed on.

mlx offers no aligned allocation, so a slab has one slot more than it uses and begins at the first page.
That the views share memory is checked when a slab is made, not assumed.

Hazard: an mlx graph is lazy. A slot that is filled again before an evaluation that uses it has returned
gives wrong numbers without any error. Who may fill when is settled in `memory`.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from ...errors import GeometryError, UnsupportedModelError
from ...pages import PAGE, address, renew
from .layout import ExpertLayout, TensorSpec

TYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U8": mx.uint8,
}


class Slab:
    """`slots` slots for experts of one layout.

    Attributes:
        host: `u8[slots, slot_bytes]`, writable, page-aligned.
        arrays: tensor name → mlx array `[slots, *shape]` over the same memory.

    Raises:
        GeometryError: no slot, or a slot that is no whole number of pages.
        UnsupportedModelError: mlx cannot hold one of the types, or copied where it should share.
    """

    def __init__(self, layout: ExpertLayout, slots: int):
        if slots < 1 or layout.slot_bytes % PAGE:
            raise GeometryError(
                "a slab has whole slots",
                field="slots, slot_bytes",
                got=(slots, layout.slot_bytes),
                expected=">= 1, pages",
            )
        self.layout, self.slots = layout, slots
        # Two dimensions, because one could not count the bytes of a large slab in 31 bits.
        base = mx.zeros((slots + 1, layout.slot_bytes // 4), mx.uint32)
        mx.eval(base)
        flat = np.array(base, copy=False).reshape(-1).view(np.uint8)
        if mx.default_device() == mx.Device(mx.cpu):  # else it may be memory that a device shares
            renew(flat)
        first = -address(flat) % PAGE
        self.host = flat[first : first + slots * layout.slot_bytes].reshape(slots, layout.slot_bytes)
        self.host[:, ::PAGE] = 0  # touched now, so that memory that is not there is missed now
        self.arrays = {
            tensor.name: self._array(base, tensor, first + offset)
            for tensor, offset in zip(layout.tensors, layout.offsets, strict=True)
        }

    def _array(self, base: mx.array, tensor: TensorSpec, offset: int) -> mx.array:
        """Strided view of one tensor in every slot; `offset` bytes from the start of the allocation."""
        if tensor.run not in TYPES:
            raise UnsupportedModelError("no mlx type", field=tensor.name, got=tensor.run, expected=sorted(TYPES))
        kind = TYPES[tensor.run]
        inner = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
        array = mx.as_strided(
            mx.view(base, kind),
            (self.slots, *tensor.shape),
            (self.layout.slot_bytes // kind.size, *inner),
            offset // kind.size,
        )
        mx.eval(array)
        visible = mx.view(array, mx.uint16) if kind == mx.bfloat16 else array  # numpy knows no bfloat16
        if address(np.array(visible, copy=False)) != address(np.array(base, copy=False)) + offset:
            raise UnsupportedModelError("mlx copied a slab instead of sharing it", field=tensor.name)
        return array
