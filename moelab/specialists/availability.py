"""Which specialists may run now: those that a cache holds, or whose read is done before the deadline.

Policies are told what is available and estimate nothing; this module asks a streaming cache. It looks and
touches nothing: no recency is updated, no read is started, nothing is leased. Whoever executes the answer
takes the lease (`streaming.Cache.visit`) before anything else may evict.

A read *arrives* at the time at which the device is done with it, known from the engine's own booking
(`VirtualDevice.book`) or estimated. It is in time when that is not after the deadline. Times are seconds on
one clock.

In the shape descriptions, `T` is the tokens and `N` the experts of a layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moelab.errors import GeometryError, PolicyError


class Residents(Protocol):
    """What is asked of a cache, as `streaming.Cache` answers it."""

    def slot(self, key: int) -> int | None:
        """Where a resident key is; None when it is not resident. Key = layer * N + expert."""


def available_now(
    cache: Residents,
    layer: int,
    experts: int,
    *,
    arrivals: Mapping[int, float] | None = None,
    deadline: float = -math.inf,
) -> Tensor:
    """`[N]` bool: resident, or arriving by the deadline.

    arrivals: key → time at which its read is done, for reads in flight.
    deadline: the last moment that is in time; a read done exactly then is.
    Raises `PolicyError` for a time that is NaN.
    """
    if math.isnan(deadline):
        raise PolicyError("the deadline is no time", field="deadline", got=deadline, expected="seconds")
    first, found = layer * experts, torch.zeros(experts, dtype=torch.bool)
    for expert in range(experts):
        found[expert] = cache.slot(first + expert) is not None
    for key, done in (arrivals or {}).items():
        if math.isnan(done):
            raise PolicyError("an arrival is no time", field=f"arrivals[{key}]", got=done, expected="seconds")
        if first <= key < first + experts and done <= deadline:
            found[key - first] = True
    return found


def available_by_token(resident: np.ndarray, done: np.ndarray, deadline: np.ndarray | float) -> Tensor:
    """`[1, T, N]` bool for tokens that come one after another, as a policy takes it.

    resident: `bool[T, N]` held just before each token's visit.
    done: `[T, N]` seconds at which a read asked for at that visit is done, infinity where there is none.
    deadline: `[T]` or one for all.
    Raises `GeometryError` where the shapes disagree, `PolicyError` for a NaN.
    """
    resident, done, deadline = np.asarray(resident), np.asarray(done, np.float64), np.asarray(deadline, np.float64)
    if resident.ndim != 2 or resident.shape != done.shape:
        raise GeometryError("arrays disagree", field="done", got=done.shape, expected=resident.shape)
    if deadline.ndim and deadline.shape != resident.shape[:1]:
        raise GeometryError("one deadline a token", field="deadline", got=deadline.shape, expected=resident.shape[:1])
    for name, times in (("done", done), ("deadline", deadline)):
        if np.isnan(times).any():
            raise PolicyError("not a time", field=name, got="NaN", expected="seconds")
    late = done > (deadline[:, None] if deadline.ndim else deadline)
    return torch.from_numpy((resident.astype(bool) | ~late)[None])


@dataclass(frozen=True)
class CacheAvailability:
    """A cache as the `availability` of `attach`: asked anew at every call.

    cache: who holds what.
    experts: N of every layer; the cache numbers experts in append order.
    layers: the model's layer number → the cache's layer index; None when they are the same.
    arrivals: called for the reads in flight, key → time done.
    deadline: called with the layer for the last moment that is in time.
    """

    cache: Residents
    experts: int
    layers: Mapping[int, int] | None = None
    arrivals: Callable[[], Mapping[int, float]] = dict
    deadline: Callable[[int], float] = lambda layer: -math.inf

    def __call__(self, layer: int, expert_ids: tuple[str, ...]) -> Tensor:
        """`[N]` bool. Raises `GeometryError` when the layer has another number of specialists."""
        if len(expert_ids) != self.experts:
            raise GeometryError(
                "the cache has another number of experts", field="experts", got=len(expert_ids), expected=self.experts
            )
        place = layer if self.layers is None else self.layers[layer]
        return available_now(self.cache, place, self.experts, arrivals=self.arrivals(), deadline=self.deadline(layer))
