"""Heads on the host, for predictions that only move bytes.

On a model whose token computes for milliseconds a call of a head in mlx is mostly dispatch: a dozen operations and a
synchronisation on a few hundred numbers. The same sums in numpy, for one token, take a fraction of that. They differ
from the mlx form by rounding, which may change the order of two equally likely experts. So a prediction that is a
route, or may become one, is always mlx's (`calls`); advice may be the host's.

Nothing is copied: the host reads the memory of the mlx heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import tanh

import mlx.core as mx
import numpy as np

from ..models.families import RoutingFamily
from .calls import LEAST, Features
from .heads import Head, HeadBank
from .modes import Prediction

__all__ = ["Advice", "HostHead"]

TAIL = tuple(factor / 2 for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592))
BEND = 0.3275911 * 0.5**0.5
"""With t = 1 / (1 + BEND·|x|), what lies beyond |x| in a normal distribution is (…(TAIL[0]·t + TAIL[1])·t + …)·t times
exp(-x² / 2), within 8e-8. Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26, for erf."""
SLACK = 1e-3
"""Confidences that lie nearer to a threshold are left to mlx: rounding moves them by a hundredth of it."""


def gelu(x: np.ndarray) -> np.ndarray:
    """As `heads.gelu`, x times what lies below x in a normal distribution, to 3e-7 · |x|: `TAIL`'s, and rounding."""
    size = np.abs(x)
    t = 1 / (1 + BEND * size)
    tail = TAIL[0] * t
    for factor in TAIL[1:]:
        tail = (tail + factor) * t
    return np.maximum(x, 0) - size * tail * np.exp(-0.5 * size * size)


def chooser(family: RoutingFamily, logits: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Selection scores `f64[E]` of one row: those of `RoutingFamily.selection`, in half its time."""
    scores = family.scores(logits)
    if bias is not None:
        scores = scores + bias
    if family.kept_groups < family.groups:
        grouped = scores.reshape(family.groups, -1)
        best = np.sort(grouped)[:, -2 if family.group_score == "top2" else -1 :].sum(1)
        grouped[(-best).argsort(kind="stable")[family.kept_groups :]] = family.dropped
    return scores


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
        scores, top_k = chooser(self.family, logits, self._biases.get(owner)), self.family.top_k
        top = (-scores).argsort(kind="stable")[: top_k + (self.extra if mode == "advise" else 0)]
        ids, sure = tuple(top.tolist()), None
        if self._pairs is not None:
            scale, offset = self._pairs[owner]
            sure = [0.5 + 0.5 * tanh(0.5 * (scale * logit + offset)) for logit in logits[top].tolist()]
        scores = [max(score, LEAST) for score in scores[top].tolist()]
        prediction = Prediction(ids[:top_k], ids[top_k:], scores, sure, None, mx.array(logits[None, None]))
        return prediction if mode == "advise" or prediction.confidence < threshold - SLACK else None
