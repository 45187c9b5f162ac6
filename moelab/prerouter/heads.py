"""Prerouter heads in mlx: one layer's head, and all of a model's at once.

    f = concat[h, c, p]                                        F = H + 2E
    full    logits = linear_init · f + fc2 · gelu(fc1 · f)     bias-free, exact-erf GELU
    shared  logits = fc2_l · gelu(scale_l * (trunk · f))       bias-free too

`h [H]` is the input of layer N's experts at token t; `c` and `p` are multi-hot over E: the experts executed in layer N
at t and at t-1. The logits are layer N+1's at token t+1. A multi-hot vector times a matrix is a sum of its columns,
so `c` and `p` are given as ids and 2K columns are added up: nothing of width 2E is ever multiplied. `fc1` and
`linear_init` read the same features and are kept as one matrix.

The shared form has one low-rank trunk for all layers, scaled by a layer embedding, and is a tenth of the bytes or less.

Arithmetic is float32 on weights widened from the head's own type, which keeps mlx, torch and a batched call together
to rounding (`precision="stored"` computes in the head's own type instead, as edge0 does: half the memory, and on a CPU
slower). Without a previous token `p` is zero.

Source: edge0, "Head structure"; AFN-021, shared low-rank trunk with layer embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

import mlx.core as mx

from ..errors import GeometryError, ParameterError

PRECISIONS = ("float32", "stored")


def gelu(x: mx.array) -> mx.array:
    """0.5 · x · (1 + erf(x / √2)): the exact form, not the tanh one."""
    return 0.5 * x * (1 + mx.erf(x * (1 / sqrt(2))))


def multi_hot(ids: mx.array, experts: int) -> mx.array:
    """`[..., K]` ids → `f32[..., E]`: the sum of K one-hot rows."""
    return (ids[..., None] == mx.arange(experts)).astype(mx.float32).sum(-2)


class Head:
    """What both forms share. `arrays` are named per form; `FIRST` maps features, `SECOND` what comes of it.

    Call with `hidden [..., H]`, `current` ids `[..., K]` and `previous` ids `[..., K]` or None: `f32[..., E]` logits.
    """

    arrays: dict[str, mx.array]
    """`map [H, A]`, `columns [2E, A]`, and the form's own; with one more axis in front in a `HeadBank`. Inputs come
    first, unlike in files: one row times such a matrix is twice as fast on a CPU."""
    experts: int

    def __call__(self, hidden: mx.array, current: mx.array, previous: mx.array | None = None) -> mx.array:
        return self._apply(self.arrays, hidden, self._pairs(current, previous))

    def _pairs(self, current: mx.array, previous: mx.array | None) -> mx.array:
        if previous is None:
            return current
        # a narrow type of id has no room for the offset
        return mx.concatenate([current, previous.astype(mx.int32) + self.experts], axis=-1)

    @property
    def width(self) -> int:
        """H."""
        return self.arrays["map"].shape[-2]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    @classmethod
    def _apply(cls, arrays: Mapping[str, mx.array], hidden: mx.array, ids: mx.array) -> mx.array:
        first = hidden.astype(arrays["map"].dtype) @ arrays["map"]
        columns = arrays["columns"]
        if columns.ndim == 3:  # one table a head: ids of head i lie in rows of table i
            rows = columns.shape[1]
            base = mx.arange(columns.shape[0]) * rows
            ids = ids + base.reshape(-1, *[1] * (ids.ndim - 1))
            columns = columns.reshape(-1, columns.shape[-1])
        return cls._second(arrays, first + columns[ids].sum(-2)).astype(mx.float32)

    @staticmethod
    def _second(arrays, first, gelu=gelu):
        """Logits, of features through `FIRST`; in numpy as well, given numpy arrays and a `gelu` of them."""
        raise NotImplementedError

    def dense(self, features: mx.array) -> mx.array:
        """The formula on `f [..., F]` as written, multi-hot parts multiplied in full: the slow form."""
        weights = mx.concatenate([self.arrays["map"], self.arrays["columns"]])
        return self._second(self.arrays, features.astype(weights.dtype) @ weights).astype(mx.float32)


class PrerouterHead(Head):
    """`fc1 [D, F]`, `fc2 [E, D]`, `linear_init [E, F]` or None (zeros), as in a weight file.

    Raises:
        GeometryError: shapes that do not belong together, or weights of several types.
    """

    def __init__(self, fc1: mx.array, fc2: mx.array, linear_init: mx.array | None, *, precision: str = "float32"):
        experts, hidden = fc2.shape
        if linear_init is None:
            linear_init = mx.zeros((experts, fc1.shape[-1]), fc1.dtype)
        width = fc1.shape[-1] - 2 * experts
        _require("fc1", fc1, (hidden, fc1.shape[-1]), fc1.dtype)
        _require("fc2", fc2, (experts, hidden), fc1.dtype)
        _require("linear_init", linear_init, (experts, fc1.shape[-1]), fc1.dtype)
        if width < 1:
            raise GeometryError("no room for the hidden state", field="fc1", got=fc1.shape, expected=f"> {2 * experts}")
        self.experts, self.stored = experts, fc1.dtype
        both = mx.concatenate([fc1, linear_init]).T
        self.arrays = _settled({"map": both[:width], "columns": both[width:], "fc2": fc2.T}, precision)

    @staticmethod
    def _second(arrays, first, gelu=gelu):
        hidden = arrays["fc2"].shape[-2]
        return first[..., hidden:] + gelu(first[..., :hidden]) @ arrays["fc2"]


class SharedHead(Head):
    """`trunk [R, F]` of all layers, and this layer's `scale [R]` and `fc2 [E, R]`.

    Raises:
        GeometryError: as `PrerouterHead`.
    """

    def __init__(self, trunk: mx.array, scale: mx.array, fc2: mx.array, *, precision: str = "float32"):
        (experts, rank), features = fc2.shape, trunk.shape[-1]
        for name, array, shape in (
            ("trunk", trunk, (rank, features)),
            ("scale", scale, (rank,)),
            ("fc2", fc2, (experts, rank)),
        ):
            _require(name, array, shape, trunk.dtype)
        if features <= 2 * experts:
            raise GeometryError("no room for the hidden state", field="trunk", got=trunk.shape, expected="> 2E columns")
        self.experts, self.stored = experts, trunk.dtype
        width = features - 2 * experts
        parts = {"map": trunk.T[:width], "columns": trunk.T[width:], "scale": scale[None], "fc2": fc2.T}
        self.arrays = _settled(parts, precision)

    @staticmethod
    def _second(arrays, first, gelu=gelu):
        return gelu(first * arrays["scale"]) @ arrays["fc2"]


class HeadBank:
    """All heads of a model. `bank.head(owner)` is one of them; `bank(…)` runs all in one call.

    Both read the same memory: the heads hold views of the bank's arrays.

    Args:
        heads: owner layer → head, of one form, shape, type and precision.

    Raises:
        GeometryError: heads that cannot be run together; the owner and what differs are named.
    """

    def __init__(self, heads: Mapping[int, Head]):
        if not heads:
            raise GeometryError("no heads", field="heads", got=0, expected=">= 1")
        self.owners = tuple(sorted(heads))
        first = heads[self.owners[0]]
        for owner in self.owners:
            if (got := _form(heads[owner])) != (expected := _form(first)):
                raise GeometryError(
                    "heads differ and cannot be run together",
                    field=f"layer {owner}",
                    got=got,
                    expected=expected,
                    fix="call each head by itself",
                )
        self.form, self.experts, self.width, self.stored = type(first), first.experts, first.width, first.stored
        shared = {"map", "columns"} if self.form is SharedHead else set()
        self.arrays = {
            name: first.arrays[name] if name in shared else mx.stack([heads[o].arrays[name] for o in self.owners])
            for name in first.arrays
        }
        mx.eval(self.arrays)
        self._heads = {o: self._view(i, shared) for i, o in enumerate(self.owners)}

    def _view(self, index: int, shared: set[str]) -> Head:
        head = object.__new__(self.form)
        head.experts, head.stored = self.experts, self.stored
        head.arrays = {name: a if name in shared else a[index] for name, a in self.arrays.items()}
        mx.eval(head.arrays)
        return head

    def head(self, owner: int) -> Head:
        """The head of decoder layer `owner`. Raises GeometryError: it has none."""
        if owner not in self._heads:
            raise GeometryError("layer has no head", field="owner", got=owner, expected=list(self.owners))
        return self._heads[owner]

    def __call__(self, hidden: mx.array, current: mx.array, previous: mx.array | None = None) -> mx.array:
        """All heads: `hidden [n, ..., H]`, `current`, `previous [n, ..., K]`, row i for `owners[i]` → `f32[n, ..., E]`.

        Raises:
            GeometryError: not one row a head.
        """
        for name, value in (("hidden", hidden), ("current", current), ("previous", previous)):
            if value is not None and (value.ndim < 2 or value.shape[0] != len(self.owners)):
                raise GeometryError("not one row a head", field=name, got=value.shape, expected=(len(self), "..."))
        lead = hidden.shape[1:-1]
        hidden = hidden.reshape(len(self), -1, hidden.shape[-1])
        pairs = self._heads[self.owners[0]]._pairs(current, previous)
        pairs = pairs.reshape(len(self), -1, pairs.shape[-1])
        return self.form._apply(self.arrays, hidden, pairs).reshape(len(self), *lead, self.experts)

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, in the precision that is computed in."""
        return sum(array.nbytes for array in self.arrays.values())


def _form(head: Head) -> tuple[Any, ...]:
    shapes = {name: (array.shape, str(array.dtype)) for name, array in head.arrays.items()}
    return type(head).__name__, str(head.stored), shapes


def _settled(arrays: Mapping[str, mx.array], precision: str) -> dict[str, mx.array]:
    """Contiguous arrays of the precision to compute in, evaluated."""
    if precision not in PRECISIONS:
        raise ParameterError("unknown precision", field="precision", got=precision, expected=PRECISIONS)
    if precision == "float32":
        arrays = {name: array.astype(mx.float32) for name, array in arrays.items()}
    settled = {name: mx.contiguous(array) for name, array in arrays.items()}
    mx.eval(settled)
    return settled


def _require(name: str, array: mx.array, shape: Sequence[int], dtype: mx.Dtype) -> None:
    if array.shape != tuple(shape):
        raise GeometryError("tensor of another shape", field=name, got=array.shape, expected=tuple(shape))
    if array.dtype != dtype:
        raise GeometryError("tensor of another type", field=name, got=str(array.dtype), expected=str(dtype))
