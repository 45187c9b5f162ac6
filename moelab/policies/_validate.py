"""Checks at the edge of a policy: each refusal names the argument, what came and what was due."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moelab.errors import PolicyError

Row = list[float] | np.ndarray
FEW = 64
"""Numbers that are sooner handled one by one than as an array."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, value: object, shape: tuple[int | str, ...], dtypes=FLOATS) -> Tensor:
    """Refuse anything but a tensor of that shape and one of those dtypes.

    shape: a number fixes a dimension, a letter leaves it free; `"..."` at the end leaves the rest
        of the dimensions free.
    """
    if not isinstance(value, Tensor):
        raise PolicyError(f"{name} is not a tensor", field=name, got=type(value).__name__, expected="torch.Tensor")
    if value.shape == shape and value.dtype in dtypes:
        return value
    fixed = shape[:-1] if shape[-1:] == ("...",) else shape
    fits = len(value.shape) == len(fixed) if fixed == shape else len(value.shape) >= len(fixed)
    if not fits or any(isinstance(want, int) and want != have for want, have in zip(fixed, value.shape, strict=False)):
        wanted = "[" + ", ".join(map(str, shape)) + "]"
        raise PolicyError(f"{name} has the wrong shape", field=name, got=list(value.shape), expected=wanted)
    if value.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = str(value.dtype).removeprefix("torch.")
        raise PolicyError(f"{name} has the wrong dtype", field=name, got=got, expected=wanted)
    return value


def check_finite(name: str, value: Tensor) -> Tensor:
    """Refuse NaN and infinities, and say where the first one is."""
    # The sum of finite values may overflow, but that of others is never finite: one cheap pass for good input.
    if math.isfinite(value.sum().item()):
        return value
    finite = torch.isfinite(value)
    if not finite.all():
        where = (~finite).nonzero()[0]
        got = f"{value[tuple(where)].item()} at {where.tolist()}"
        raise PolicyError(f"{name} holds a value that is not finite", field=name, got=got, expected="finite values")
    return value


def check_ids(expert_ids: Sequence[str]) -> tuple[str, ...]:
    """Refuse ids that are not distinct non-empty strings; returns them as a tuple, of equal ones the first."""
    known = _passed.get(id(expert_ids))
    if known and known[0] is expert_ids:  # a bank's ids are the same at every call
        return known[1]
    if isinstance(expert_ids, str) or not isinstance(expert_ids, Sequence):
        got = type(expert_ids).__name__
        raise PolicyError("expert_ids is not a sequence of ids", field="expert_ids", got=got, expected="tuple of str")
    ids = tuple(expert_ids)
    for position, name in enumerate(ids):
        if not isinstance(name, str) or not name:
            expected = "a non-empty string"
            raise PolicyError(f"expert_ids[{position}] is not an id", field="expert_ids", got=name, expected=expected)
    if len(set(ids)) != len(ids):
        twice = next(name for name in ids if ids.count(name) > 1)
        raise PolicyError("expert_ids repeats an id", field="expert_ids", got=twice, expected="distinct ids")
    first = next((other for _, other in [*_passed.values()] if other == ids), ids)  # at once: other threads may add
    if ids is expert_ids:
        if len(_passed) >= 64:
            _passed.clear()
        _passed[id(ids)] = ids, first
    return first


_passed: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
"""Tuples of ids that were checked, each with the first equal one, by where they lie; held, so that no other can."""


def check_scores(
    scores: Tensor,
    expert_ids: Sequence[str],
    *,
    name: str = "scores",
    tokens: tuple[int | str, int | str] = ("B", "T"),
) -> tuple[tuple[str, ...], Row | None]:
    """Refuse scores that are not finite floats `[B, T, N]` for these N ids.

    Returns the ids, and of a single token, as in decode, the `[N]` scores as plain numbers.
    """
    ids = check_ids(expert_ids)
    batch, length, experts = check_tensor(name, scores, (*tokens, len(ids))).shape
    if not batch == 1 == length:
        check_finite(name, scores)
        return ids, None
    row = as_row(scores)
    # Of finite numbers a sum may overflow, but that of others is never finite. To an array a NaN is the largest and the
    # smallest of all, and these two are found in less time.
    total = sum(row) if isinstance(row, list) else row.item(row.argmax()) - row.item(row.argmin())
    if not math.isfinite(total):
        check_finite(name, scores)
    return ids, row


def as_row(values: Tensor) -> Row:
    """The numbers `[N]` or `[1, 1, N]` of a token in plain: `[N]`, a list of few, an array of many.

    In decode none of this is in the caches: of few numbers the code of numpy takes the time, of many a list's memory.
    """
    if values.shape[-1] <= FEW:
        row = values.tolist()
        return row if values.ndim == 1 else row[0][0]
    try:
        return values.numpy().ravel()
    except (TypeError, RuntimeError):  # bfloat16, another device, a gradient to follow: an exact copy
        return values.detach().cpu().double().numpy().ravel()


def best_of(row: Row) -> tuple[int, float]:
    """Where the largest number is, the first of equal ones, and which it is. The row is not empty."""
    if isinstance(row, list):
        value = max(row)
        return row.index(value), value
    best = int(row.argmax())
    return best, row.item(best)


def some_of(row: Row, where: slice | list[int]) -> Row:
    """A copy of some of the numbers."""
    if not isinstance(row, list):
        return row[where].copy() if isinstance(where, slice) else row[where]
    return row[where] if isinstance(where, slice) else [row[i] for i in where]


def check_number(name: str, value: object, *, least: float) -> float:
    """Refuse anything but a real number (infinity included) that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= least:
        raise PolicyError(f"{name} is out of range", field=name, got=value, expected=f"a number >= {least:g}")
    return float(value)


def check_count(name: str, value: object, *, least: int = 1) -> int:
    """Refuse anything but an integer that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise PolicyError(f"{name} is out of range", field=name, got=value, expected=f"an integer >= {least}")
    return value


def check_sequence(name: str, value: object) -> tuple:
    """Refuse anything but a sequence that is no text; returns it as a tuple."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise PolicyError(f"{name} is not a sequence", field=name, got=type(value).__name__, expected="a tuple")
    return tuple(value)


def check_kind(name: str, value: object, kind: type) -> None:
    """Refuse anything but an instance of the class."""
    if not isinstance(value, kind):
        got = value.__name__ if isinstance(value, type) else type(value).__name__
        raise PolicyError(f"{name} is not a {kind.__name__}", field=name, got=got, expected=kind.__name__)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a name that is not one of the choices."""
    if value not in choices:
        raise PolicyError(f"{name} is unknown", field=name, got=value, expected=" or ".join(map(repr, choices)))
