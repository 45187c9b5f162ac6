"""Ways of using predictions, and what happened under them: what `lockstep` is asked and what it tells.

Shapes: A arms, n texts, T tokens, L MoE layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ..errors import ParameterError

__all__ = ["OWN", "Arm", "Steps"]

OWN = -1
"""In place of a token: the row's likeliest one, given those before it."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A way of using predictions. `mode`, `threshold` as in `prerouter.modes` ("off" and "advise" are the same here).

    `layers`: MoE layers whose predictions are used; None = all consumers. `native_history`: see the module.
    """

    name: str
    mode: str
    threshold: float = 0.0
    layers: tuple[int, ...] | None = None
    native_history: bool = False

    def __post_init__(self):
        from .modes import MODES  # which needs mlx

        if self.mode not in MODES:
            raise ParameterError("no such mode", field="mode", got=self.mode, expected=MODES)


@dataclass(frozen=True, eq=False)
class Steps:
    """What happened to each arm and text at each token fed.

    tokens: `i32[A, n, T]` fed. greedy: `i32[A, n, T]` likeliest next token. loss: `f64[A, n, T]` nats of the token that
    follows in the text, NaN where none does. decoded: `bool[n, T]`.
    hits: `u8[A, n, T, L]` predicted experts that the layer's own gate also chooses, on the state that it has then.
    replaced: `bool[A, n, T, L]` layers whose route was the prediction.
    drift: `f32[A, n, T, L]` distance of the input of a layer's experts from the first arm's, as a share of its length.
    """

    tokens: np.ndarray
    greedy: np.ndarray
    loss: np.ndarray
    decoded: np.ndarray
    hits: np.ndarray
    replaced: np.ndarray
    drift: np.ndarray

    @classmethod
    def empty(cls, arms: int, tokens: np.ndarray, decoded: np.ndarray, layers: int) -> Self:
        """Of texts `tokens`, `decoded [n, T]`, before anything has happened."""
        shape = (arms, *tokens.shape)
        return cls(
            np.broadcast_to(tokens, shape).astype(np.int32), np.full(shape, -1, np.int32), np.full(shape, np.nan),
            decoded.copy(), np.zeros((*shape, layers), np.uint8), np.zeros((*shape, layers), bool),
            np.zeros((*shape, layers), np.float32),
        )  # fmt: skip

    def some(self, arms: Sequence[int], texts: int) -> Self:
        """Of these arms, in this order, and the first `texts` texts."""
        parts = {name: value[list(arms), :texts] for name, value in vars(self).items() if name != "decoded"}
        return type(self)(**parts, decoded=self.decoded[:texts])
