"""Expert slots: memory that a disk can fill and a kernel can multiply with, without a copy in between.

A slab is one mlx allocation of `slots` equal slots. Each slot holds one expert. The same bytes are seen twice: by the
host as a page-aligned `u8[slots, slot_bytes]`, into which direct reads go, and by mlx as one strided array `[slots,
*shape]` for each tensor of a layout, which the layer's own gathered products take in place of `[experts, *shape]`. So
the cache is not copied from: it is computed on. Layers of different layouts share a slab if their slots are as large.

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
    """`slots` slots of `slot_bytes`.

    Attributes:
        host: `u8[slots, slot_bytes]`, writable, page-aligned.

    Raises:
        GeometryError: no slot, or a slot that is no whole number of pages.
    """

    def __init__(self, slot_bytes: int, slots: int):
        if slots < 1 or slot_bytes % PAGE:
            raise GeometryError(
                "a slab has whole slots", field="slots, slot_bytes", got=(slots, slot_bytes), expected=">= 1, pages"
            )
        self.slot_bytes, self.slots = slot_bytes, slots
        # Two dimensions, because one could not count the bytes of a large slab in 31 bits.
        self._base = mx.zeros((slots + 1, slot_bytes // 4), mx.uint32)
        mx.eval(self._base)
        flat = np.array(self._base, copy=False).reshape(-1).view(np.uint8)
        if mx.default_device() == mx.Device(mx.cpu):  # else it may be memory that a device shares
            renew(flat)
        self._first = -address(flat) % PAGE
        self.host = flat[self._first : self._first + slots * slot_bytes].reshape(slots, slot_bytes)
        self.host[:, ::PAGE] = 0  # touched now, so that memory that is not there is missed now
        self._views: dict[ExpertLayout, dict[str, mx.array]] = {}

    def arrays(self, layout: ExpertLayout) -> dict[str, mx.array]:
        """Tensor name → mlx array `[slots, *shape]` over the memory of slots of this layout; the same ones every time.

        Raises:
            GeometryError: slots of this layout have another size.
            UnsupportedModelError: mlx cannot hold one of the types, or copied where it should share.
        """
        if layout.slot_bytes != self.slot_bytes:
            raise GeometryError(
                "experts of this layout need other slots", field="slot_bytes", got=layout.slot_bytes,
                expected=self.slot_bytes,
            )  # fmt: skip
        if layout not in self._views:
            self._views[layout] = {
                tensor.name: self._array(tensor, self._first + offset)
                for tensor, offset in zip(layout.tensors, layout.offsets, strict=True)
            }
        return self._views[layout]

    def _array(self, tensor: TensorSpec, offset: int) -> mx.array:
        """Strided view of one tensor in every slot; `offset` bytes from the start of the allocation."""
        if tensor.run not in TYPES:
            raise UnsupportedModelError("no mlx type", field=tensor.name, got=tensor.run, expected=sorted(TYPES))
        kind = TYPES[tensor.run]
        inner = [math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
        array = mx.as_strided(
            mx.view(self._base, kind),
            (self.slots, *tensor.shape),
            (self.slot_bytes // kind.size, *inner),
            offset // kind.size,
        )
        mx.eval(array)
        visible = mx.view(array, mx.uint16) if kind == mx.bfloat16 else array  # numpy knows no bfloat16
        if address(np.array(visible, copy=False)) != address(np.array(self._base, copy=False)) + offset:
            raise UnsupportedModelError("mlx copied a slab instead of sharing it", field=tensor.name)
        return array
