"""Heads set going in mlx, and read later: for predictions that are routes, or may become some (others: `advice`).

All that a head gives is evaluated in the pass that asked, whenever it is read: the graph of a head's input reads expert
slots, which a later pass may fill with others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import mlx.core as mx
import numpy as np

from ..errors import ContractError
from ..models.families import Selection
from .heads import Head, HeadBank
from .modes import Prediction

__all__ = ["Features", "HeadCalls"]

LEAST = -1e9
"""In place of -inf, the score of an expert of a dropped group: a score orders experts, and has to be finite."""


@dataclass(frozen=True, eq=False)
class Features:
    """Of one layer at one token: `hidden [1, 1, H]`, `current [1, 1, K]` and `previous [1, 1, K]` or None.

    Of several layers, with one more axis in front.
    """

    hidden: mx.array
    current: mx.array
    previous: mx.array | None

    @classmethod
    def stack(cls, rows: list[Self]) -> Self:
        """Of several layers. Raises ContractError: some know a previous token, and others do not."""
        previous = [row.previous for row in rows]
        known = sum(p is not None for p in previous)
        if known not in (0, len(rows)):
            raise ContractError("layers differ in what they have seen", field="previous", got=known, expected=len(rows))
        return cls(
            mx.stack([row.hidden for row in rows]), mx.stack([row.current for row in rows]),
            mx.stack(previous) if known else None,
        )  # fmt: skip


class HeadCalls:
    """At most one call in progress.

    Args:
        heads: by owner (decoder layer). names: MoE layer → that owner.
        calibration: owner → (scale, offset).
    """

    def __init__(
        self,
        heads: HeadBank | Mapping[int, Head],
        names: Mapping[int, int],
        calibration: Mapping[int, tuple[float, float]] | None,
    ):
        self.heads, self.names, self.calibration = heads, names, calibration
        self._owners: list[int] = []
        self._results: list[mx.array] = []

    def ask(self, owners: list[int], features: Features, choose: Callable[[mx.array], Selection]) -> None:
        """Set the heads of these MoE layers going. Several in one call: all of a bank, in order.

        Args:
            choose: logits `[n, 1, 1, E]` → the experts predicted.
        """
        if self._owners:
            raise ContractError("an answer has not been read", field="owners", got=self._owners, expected=[])
        inputs = features.hidden, features.current, features.previous
        if len(owners) == 1:
            name = self.names[owners[0]]
            head = self.heads.head(name) if isinstance(self.heads, HeadBank) else self.heads[name]
            logits = head(*inputs).reshape(1, 1, 1, -1)
        else:
            logits = self.heads(*inputs)
        chosen = choose(logits)
        results = [logits, chosen.ids, chosen.weights, mx.take_along_axis(chosen.scores, chosen.ids, axis=-1)]
        if self.calibration is not None:
            pairs = mx.array([self.calibration[self.names[owner]] for owner in owners]).reshape(-1, 1, 1, 2)
            picked = mx.take_along_axis(logits, chosen.ids, axis=-1)
            results.append(mx.sigmoid(pairs[..., :1] * picked + pairs[..., 1:]))
        mx.async_eval(*results)
        self._owners, self._results = owners, results

    def answer(self, top_k: int) -> list[tuple[int, Prediction]]:
        """(MoE layer of the owner, what its head says of the next layer), of the call in progress; then none is."""
        if not self._owners:
            return []
        owners, results = self._owners, self._results
        self.drop()
        mx.eval(*results)
        logits, ids, weights, scores, *sure = results
        ids, scores = host(ids), np.maximum(host(scores), LEAST).tolist()
        ids, sure = ids.tolist(), host(sure[0]).tolist() if sure else [None] * len(owners)
        return [
            (owner, Prediction(tuple(i[:top_k]), tuple(i[top_k:]), score, p, weight[..., :top_k], logit))
            for owner, i, score, p, weight, logit in zip(owners, ids, scores, sure, weights, logits, strict=True)
        ]

    def drop(self) -> None:
        """Forget a call in progress."""
        self._owners, self._results = [], []


def host(rows: mx.array) -> np.ndarray:
    """`[n, 1, 1, K]` as `[n, K]`."""
    return np.array(rows)[:, 0, 0]
