"""Routes: which experts every token used at every layer, as plain arrays.

A mixture-of-experts layer sends each token to `K` of its `E` experts. `Routes` holds that choice
for `T` tokens and `L` MoE layers: `ids u16[T,L,K]`. The *set* in a row is the model's own; the
order inside it is ours: descending selection score, ties by lowest id. Everything that moelab
asks of a model (can the next route be predicted, what would a cache have hit, which bytes move)
is asked of these arrays, wherever they came from: a captured decode, a replay, or another
project's trace file (`read_trace`).

Two habits protect the reader. Absent slots carry `MISSING` as id and NaN as weight, neither of
which can pass for an expert, and are named by `mask`. And "the previous token" is
`previous_row()`: the row before in the same thread *at the position before*, else none; a gap
or a thread boundary is never bridged.

In shapes: T tokens, L MoE layers, K experts a token, E experts a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from .errors import ContractError, GeometryError, RecordError

__all__ = ["CAPTURED", "DECODED", "MISSING", "PREFILLED", "REPLAYED", "Routes", "concat", "read_trace"]

MISSING = 0xFFFF
"""Id of an absent slot. Larger than any expert id, so that forgetting the mask fails loudly."""
PREFILLED, DECODED = 0, 1
"""Values of `phase`. Only decoded rows are evidence about decode."""
CAPTURED, REPLAYED = 0, 1
"""Values of `label_source`: exact by construction at decode, or recomputed by a replay."""

_SHAPES = {
    "ids": ("uint16", "TLK"),
    "weights": ("float32", "TLK"),
    "margin": ("float32", "TL"),
    "group_margin": ("float32", "TL"),
    "mask": ("bool", "TLK"),
    "phase": ("uint8", "T"),
    "thread": ("int32", "T"),
    "position": ("int32", "T"),
    "expert_bytes": ("int64", "L"),
    "label_source": ("uint8", "T"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """Routes of T tokens through L MoE layers.

    Shapes and types are checked when it is made; values by `validate()`, which readers call.

    Attributes:
        ids: `u16[T,L,K]` experts, best first; `MISSING` where `mask` is False.
        experts: E, experts in each layer.
        layer_ids: index in the model of each MoE layer, increasing.
        phase: `u8[T]`, `PREFILLED` or `DECODED`.
        thread: `i32[T]`, thread of each row; the rows of a thread are contiguous and in order.
        position: `i32[T]`, position in the thread, increasing within it.
        weights: `f32[T,L,K]` mixture weights aligned with `ids`; NaN where absent.
        margin: `f32[T,L]`, K-th minus (K+1)-th selection score.
        group_margin: `f32[T,L]`, the same for the choice of groups in group-limited routing.
        mask: `bool[T,L,K]`, True = present; None = all present.
        expert_bytes: `i64[L]`, bytes of one expert in each layer.
        label_source: `u8[T]`, `CAPTURED` or `REPLAYED`.

    Raises:
        GeometryError: a shape or type is wrong.
    """

    ids: np.ndarray
    experts: int
    layer_ids: tuple[int, ...]
    phase: np.ndarray
    thread: np.ndarray
    position: np.ndarray
    weights: np.ndarray | None = None
    margin: np.ndarray | None = None
    group_margin: np.ndarray | None = None
    mask: np.ndarray | None = None
    expert_bytes: np.ndarray | None = None
    label_source: np.ndarray | None = None

    def __post_init__(self):
        if not isinstance(self.ids, np.ndarray) or self.ids.ndim != 3:
            raise GeometryError(
                "routes need a three-dimensional id array", field="ids", got=np.shape(self.ids), expected="(T, L, K)"
            )
        size = dict(zip("TLK", self.ids.shape, strict=True))
        for name, (dtype, axes) in _SHAPES.items():
            value = getattr(self, name)
            if value is None and name in ("weights", "margin", "group_margin", "mask", "expert_bytes", "label_source"):
                continue
            got = (str(getattr(value, "dtype", type(value).__name__)), np.shape(value))
            expected = (dtype, tuple(size[a] for a in axes))
            if got != expected:
                raise GeometryError("a route array has the wrong type or shape", field=name, got=got, expected=expected)
        if len(self.layer_ids) != self.layers:
            raise GeometryError(
                "one layer id a layer", field="layer_ids", got=len(self.layer_ids), expected=self.layers
            )
        if any(b <= a for a, b in zip(self.layer_ids, self.layer_ids[1:], strict=False)):
            raise GeometryError(
                "layer ids must increase", field="layer_ids", got=self.layer_ids, expected="increasing indices"
            )
        if not max(self.top_k, 1) <= self.experts < MISSING:
            raise GeometryError(
                "the number of experts cannot be right",
                field="experts",
                got=self.experts,
                expected=f"{max(self.top_k, 1)} to {MISSING - 1}",
            )

    @property
    def tokens(self) -> int:
        """T."""
        return self.ids.shape[0]

    @property
    def layers(self) -> int:
        """L."""
        return self.ids.shape[1]

    @property
    def top_k(self) -> int:
        """K."""
        return self.ids.shape[2]

    def present(self) -> np.ndarray:
        """`bool[T,L,K]`: slots that hold an expert."""
        return np.ones(self.ids.shape, bool) if self.mask is None else self.mask

    def previous_row(self) -> np.ndarray:
        """`i64[T]`: row of the token before in the same thread, -1 where there is none here."""
        row = np.arange(self.tokens) - 1
        if self.tokens:
            follows = (np.diff(self.thread) == 0) & (np.diff(self.position) == 1)
            row[1:][~follows] = -1
        return row

    def select(self, rows: np.ndarray) -> Routes:
        """The rows named by a boolean mask `[T]` or by strictly increasing row numbers."""
        rows = np.asarray(rows)
        if rows.dtype == bool:
            if rows.shape != (self.tokens,):
                raise GeometryError(
                    "a row mask needs one value a row", field="rows", got=rows.shape, expected=(self.tokens,)
                )
            rows = np.flatnonzero(rows)
        elif rows.ndim != 1 or np.any(np.diff(rows) <= 0) or (rows.size and not 0 <= rows[0] <= rows[-1] < self.tokens):
            raise ContractError(
                "rows must be taken in order, each once", field="rows", got=rows[:8].tolist(), expected="increasing"
            )
        taken = {n: getattr(self, n)[rows] for n, (_, axes) in _SHAPES.items() if self._has(n) and axes[0] == "T"}
        return replace(self, **taken)

    def decoded(self) -> Routes:
        """The decoded rows only: the ones that are evidence about decode."""
        return self.select(self.phase == DECODED)

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    def validate(self, *, file: object = None) -> Routes:
        """Check every value and return self.

        Raises:
            RecordError: an id is out of range or twice in a row, a weight or margin is not finite, every
                id is zero, a thread is split or out of order, or a code is unknown. `file` is named in it.
        """

        def refuse(problem, field, where, got, expected):
            row = "" if where is None else f" at {tuple(int(i) for i in np.atleast_1d(where))}"
            raise RecordError(problem + row, file=file, field=field, got=got, expected=expected)

        def first(bad):
            return tuple(int(i[0]) for i in np.nonzero(bad))

        present = self.present()
        bad = present & (self.ids >= self.experts)
        if bad.any():
            refuse("an expert id is out of range", "ids", first(bad), int(self.ids[bad][0]), f"below {self.experts}")
        bad = ~present & (self.ids != MISSING)
        if bad.any():
            refuse("an absent slot holds an expert id", "ids", first(bad), int(self.ids[bad][0]), str(MISSING))
        if self.top_k > 1:
            order = np.sort(self.ids, axis=-1)
            bad = ((order[..., 1:] == order[..., :-1]) & (order[..., 1:] != MISSING)).any(-1)
            if bad.any():
                refuse("an expert is twice in one row", "ids", first(bad), self.ids[bad][0].tolist(), "distinct ids")
        if self.ids.size > 1 and not self.ids.any():
            refuse("every id is zero: nothing was captured", "ids", None, 0, "routes of a real model")
        if self.weights is not None:
            bad = present & ~(np.isfinite(self.weights) & (self.weights >= 0))
            if bad.any():
                refuse("a weight is impossible", "weights", first(bad), float(self.weights[bad][0]), "finite and >= 0")
            bad = ~present & ~np.isnan(self.weights)
            if bad.any():
                refuse("an absent slot holds a weight", "weights", first(bad), float(self.weights[bad][0]), "nan")
        for name in ("margin", "group_margin"):
            if self._has(name):
                bad = np.isnan(getattr(self, name)) & present.all(-1)
                if bad.any():
                    refuse("a margin is not a number", name, first(bad), "nan", "a score difference")
        for name in ("phase", "label_source"):
            if self._has(name) and (bad := getattr(self, name) > 1).any():
                refuse("an unknown code", name, first(bad), int(getattr(self, name)[bad][0]), "0 or 1")
        for name in ("thread", "position"):
            if (bad := getattr(self, name) < 0).any():
                refuse("a negative index", name, first(bad), int(getattr(self, name)[bad][0]), ">= 0")
        if self._has("expert_bytes") and (bad := self.expert_bytes <= 0).any():
            refuse("an expert without bytes", "expert_bytes", first(bad), int(self.expert_bytes[bad][0]), "> 0")
        if self.tokens:
            starts = np.flatnonzero(np.diff(self.thread, prepend=-1))
            seen, counts = np.unique(self.thread[starts], return_counts=True)
            if (counts > 1).any():
                refuse("the rows of a thread are not contiguous", "thread", None, int(seen[counts > 1][0]), "one run")
            bad = (np.diff(self.thread) == 0) & (np.diff(self.position) <= 0)
            if bad.any():
                at = first(bad)[0] + 1
                refuse("positions must increase", "position", at, int(self.position[at]), "above the row before")
        return self


def concat(parts: list[Routes], *, renumber: bool = False) -> Routes:
    """Routes one after another, validated.

    Args:
        parts: of equal geometry and with the same optional arrays.
        renumber: give the threads of every part fresh indices 0, 1, … (parts that each begin at 0);
            otherwise indices stay, and a thread that is split over parts that are not neighbours is refused.

    Raises:
        GeometryError: no parts, or parts that differ in geometry or in which arrays they carry.
    """
    if not parts:
        raise GeometryError("nothing to concatenate", field="parts", got=0, expected="at least one")
    head = parts[0]

    def geometry(part):
        bytes_ = None if part.expert_bytes is None else part.expert_bytes.tolist()
        optional = tuple(f.name for f in fields(Routes) if f.name != "mask" and getattr(part, f.name) is None)
        return part.layers, part.top_k, part.experts, part.layer_ids, bytes_, optional

    for part in parts[1:]:
        if geometry(part) != geometry(head):
            raise GeometryError(
                "routes of different geometry cannot be joined",
                field="layers, top_k, experts, layer_ids, expert_bytes, absent arrays",
                got=geometry(part),
                expected=geometry(head),
            )
    joined = {
        name: np.concatenate([getattr(p, name) for p in parts])
        for name, (_, axes) in _SHAPES.items()
        if axes[0] == "T" and name != "mask" and head._has(name)
    }
    if any(p.mask is not None for p in parts):
        joined["mask"] = np.concatenate([p.present() for p in parts])
    if renumber:
        fresh, base = [], 0
        for part in parts:
            _, index = np.unique(part.thread, return_inverse=True)
            fresh.append((index + base).astype(np.int32))
            base += 1 + int(index.max(initial=-1))
        joined["thread"] = np.concatenate(fresh)
    return replace(head, **joined).validate()


def read_trace(path: str | Path) -> Routes:
    """Read another project's route trace; see `moelab.traces` for the formats that are known."""
    from . import traces

    return traces.read_trace(path)
