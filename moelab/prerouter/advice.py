"""Heads on the host, for predictions that only move bytes.

On a model whose token computes for milliseconds a call of a head in mlx is mostly dispatch: a dozen operations and a
synchronisation on a few hundred numbers. The same sums in numpy, for one token, take a tenth of that. They differ from
the mlx form by rounding, which may change the order of two equally likely experts. So a prediction that is a route, or
may become one, is always mlx's (`calls`); advice may be the host's.

Nothing is copied: the host reads the memory of the mlx heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from ..models.families import RoutingFamily
from .calls import LEAST, Features
from .heads import Head, HeadBank
from .modes import Prediction

__all__ = ["Advice", "HostHead"]

ERF, BEND = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592), 0.3275911
"""1 - erf(s) = (…(ERF[0]·t + ERF[1])·t + …)·t · exp(-s²) within 1.5e-7, for s >= 0 and t = 1 / (1 + BEND·s).
Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26."""
SLACK = 1e-3
"""Confidences that lie nearer to a threshold are left to mlx: rounding moves them by a hundredth of it."""


def gelu(x: np.ndarray) -> np.ndarray:
    """As `heads.gelu`, to 5e-7 · |x|: half of erf's error, and of float32's rounding in it."""
    s = np.abs(x) * 0.5**0.5
    t = 1 / (1 + BEND * s)
    beyond = ERF[0] * t
    for factor in ERF[1:]:
        beyond = (beyond + factor) * t
    return 0.5 * x * (1 + np.copysign(1 - beyond * np.exp(-s * s), x))


class HostHead:
    """One head's arithmetic, for one token."""

    @staticmethod
    def can_be(head: object) -> bool:
        """Whether this is a head of `heads`, and computes in float32."""
        return isinstance(head, Head) and head.arrays["map"].dtype == mx.float32

    def __init__(self, head: Head):
        self._arrays = {name: np.asarray(array) for name, array in head.arrays.items()}
        self._second, self._experts = head._second, head.experts

    def __call__(self, hidden: np.ndarray, current: np.ndarray, previous: np.ndarray | None = None) -> np.ndarray:
        """`hidden [H]`, `current`, `previous` ids `[K]` or None → `f32[E]` logits."""
        ids = current if previous is None else np.concatenate((current, previous.astype(np.int64) + self._experts))
        first = hidden @ self._arrays["map"] + self._arrays["columns"][ids].sum(0)
        return self._second(self._arrays, first, gelu).reshape(-1)


class Advice:
    """What heads say, where that is no route.

    Args:
        heads, names, calibration: as of `HeadCalls`. Heads that `HostHead` cannot be give no advice here.
        biases: of owners' consumers (`[E]`), added to scores for the choice. extra: candidates beyond K of `advise`.
    """

    def __init__(
        self,
        heads: HeadBank | Mapping[int, Head],
        names: Mapping[int, int],
        calibration: Mapping[int, tuple[float, float]] | None,
        family: RoutingFamily,
        biases: Mapping[int, mx.array | None],
        *,
        extra: int = 0,
    ):
        given = {layer: heads.head(o) if isinstance(heads, HeadBank) else heads[o] for layer, o in names.items()}
        self._heads = {layer: HostHead(head) for layer, head in given.items() if HostHead.can_be(head)}
        self._pairs = None if calibration is None else {layer: calibration[owner] for layer, owner in names.items()}
        self._biases = {layer: np.array(b.astype(mx.float32)) for layer, b in biases.items() if b is not None}
        self.family, self.extra = family, extra

    def __call__(self, owner: int, features: Features, mode: str, threshold: float) -> Prediction | None:
        """Of the head of MoE layer `owner`, whose `features` are computed. None: the head has to be asked in mlx."""
        if mode not in ("advise", "gated") or (head := self._heads.get(owner)) is None:
            return None
        hidden = np.asarray(features.hidden.astype(mx.float32)).reshape(-1)
        previous = None if features.previous is None else np.asarray(features.previous).reshape(-1)
        logits = head(hidden, np.asarray(features.current).reshape(-1), previous)
        scores, top_k = self.family.selection(logits, self._biases.get(owner))[0], self.family.top_k
        top = np.argsort(-scores, kind="stable")[: top_k + (self.extra if mode == "advise" else 0)]
        ids, sure = tuple(top.tolist()), None
        if self._pairs is not None:
            scale, offset = self._pairs[owner]
            sure = (0.5 + 0.5 * np.tanh(0.5 * (scale * logits[top] + offset))).tolist()
        prediction = Prediction(
            ids[:top_k], ids[top_k:], np.maximum(scores[top], LEAST).tolist(), sure, None, mx.array(logits[None, None])
        )
        return prediction if mode == "advise" or prediction.confidence < threshold - SLACK else None
