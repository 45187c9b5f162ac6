"""Recorded routes as a decoder meets them: pass after pass, layer after layer, each expert once a visit.

A *pass* is one forward of the model and a *visit* one layer of it. A decoded token is a pass of its own; the
prompt tokens of a thread are one pass, as engines prefill: each layer once, over the experts of all of them.

The order of a visit's experts breaks ties in a cache that evicts by recency. "route" is that of the record
(descending score; in a prompt the last mention counts), as `flywheel.residency` replays; "sorted" is by
number, as the streaming engine asks.

Shapes: T tokens, P passes, L MoE layers, E experts, K experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import ContractError, GeometryError
from ...routes import DECODED

__all__ = ["Passes"]


@dataclass(frozen=True, eq=False)
class Passes:
    """Made by `Passes.of`.

    Attributes:
        keys: for each pass and layer the keys, layer·E + expert.
        decoded: `bool[P]`; the others are prompts.
        thread: `i64[P]`.
        experts, top_k: E, K.
    """

    keys: list[list[list[int]]]
    decoded: np.ndarray
    thread: np.ndarray
    experts: int
    top_k: int

    @property
    def layers(self) -> int:
        return len(self.keys[0])

    def __len__(self) -> int:
        return len(self.keys)

    @classmethod
    def of(
        cls,
        ids: np.ndarray,
        *,
        experts: int,
        thread: np.ndarray | None = None,
        phase: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        order: str = "route",
    ) -> Passes:
        """Passes of `ids[T,L,K]`.

        Args:
            experts: E.
            thread: `[T]`; None = one thread.
            phase: `[T]`, `routes.PREFILLED` or `routes.DECODED`; None = all decoded.
            mask: `bool[T,L,K]`, True = present.
            order: "route" or "sorted", of a visit's keys (see the module text).

        Raises:
            GeometryError: arrays disagree, or nothing is there.
            ContractError: no such order.
        """
        if order not in ("route", "sorted"):
            raise ContractError("no such order", field="order", got=order, expected=("route", "sorted"))
        if ids.ndim != 3 or not ids.size:
            raise GeometryError("not routes", field="ids", got=ids.shape, expected="[T,L,K], none of them 0")
        tokens, layers, top_k = ids.shape
        thread = np.zeros(tokens, np.int64) if thread is None else np.asarray(thread, np.int64)
        decoded = np.ones(tokens, bool) if phase is None else np.asarray(phase) == DECODED
        present = np.ones(ids.shape, bool) if mask is None else mask
        for name, array, shape in (
            ("thread", thread, (tokens,)),
            ("phase", decoded, (tokens,)),
            ("mask", present, ids.shape),
        ):
            if array.shape != shape:
                raise GeometryError("arrays disagree", field=name, got=array.shape, expected=shape)
        if int(ids[present].max(initial=0)) >= experts:
            raise GeometryError("no such expert", field="ids", got=int(ids[present].max()), expected=f"< {experts}")
        opens = np.ones(tokens, bool)
        opens[1:] = decoded[1:] | decoded[:-1] | (np.diff(thread) != 0)
        first = np.flatnonzero(opens)
        key = ids.astype(np.int64) + experts * np.arange(layers)[:, None]
        absent = np.where(present, key, -1).transpose(1, 0, 2)  # [L,T,K]: a layer's slots of a pass lie together
        table = absent.reshape(layers, -1).tolist()
        ends = [*(first[1:] * top_k).tolist(), tokens * top_k]
        visits = [
            [_once(row[a:b], order) for row in table] for a, b in zip((first * top_k).tolist(), ends, strict=True)
        ]
        return cls(visits, decoded[first], thread[first], experts, top_k)


def _once(keys: list[int], order: str) -> list[int]:
    """Each key once, by its last mention or by number; -1 is no key."""
    found = list(dict.fromkeys(reversed(keys)))[::-1]
    if -1 in found:
        found.remove(-1)
    return sorted(found) if order == "sorted" else found
