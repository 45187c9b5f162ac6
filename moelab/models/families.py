"""Routing families: how a gate's logits become a set of experts and their weights.

Every mixture-of-experts gate does the same five steps; families differ in the choice made at each:

1. *score*   logits → scores: a softmax over all experts, a sigmoid each, sqrt(softplus), or the raw logit;
2. *bias*    a learned correction is added for the choice only, never for the weights;
3. *groups*  experts lie in equal groups; the worst groups are dropped (their scores masked);
4. *choose*  the K highest selection scores, unordered (`argpartition`);
5. *weigh*   gather scores of the chosen, perhaps normalise, times a constant.

SOFTMAX_TOPK is steps 1 softmax, 4, 5; SIGMOID_GROUP is all five with a sigmoid. Ties make step 4
ambiguous: `argpartition(-x)[:K]` and `argpartition(x)[-K:]` keep different experts, so the form belongs
to the family (`keeps`). What was recorded from a model is never chosen again here: `rank` only orders
a given set.

Shapes: logits `[..., E]`, ids and weights `[..., K]`. Numpy in, numpy out (float64 inside, so that the
order does not depend on how many rows are computed at once); `select` also takes an mlx array and then
repeats the model's own float32 steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..errors import GeometryError, ParameterError


class Selection(NamedTuple):
    """`ids [..., K]` in rank order, `weights [..., K]`, `scores [..., E]` (selection scores, groups masked)."""

    ids: Any
    weights: Any
    scores: Any


@dataclass(frozen=True, kw_only=True)
class RoutingFamily:
    """One gate's arithmetic. `kind` is the field's word for it; the other fields make it exact."""

    SOFTMAX_TOPK: ClassVar[str] = "SOFTMAX_TOPK"
    SIGMOID_GROUP: ClassVar[str] = "SIGMOID_GROUP"

    top_k: int
    score: str = "softmax"
    """`softmax`, `sigmoid`, `sqrtsoftplus`, or `logit` (choose on raw logits)."""
    weight: str = "score"
    """`score` of the chosen, `softmax` or `sigmoid` over the chosen logits, or `sparsemixer` (phimoe)."""
    normalise: bool = False
    epsilon: float = 0.0
    """Added to the sum that weights are divided by."""
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "top2"
    """A group is worth the sum of its `top2` selection scores, or its `max`."""
    dropped: float = 0.0
    """Selection score given to experts of dropped groups: 0 in some models' code, -inf in others."""
    keeps: str = "first"
    """`first`: argpartition(-x)[:K]; `last`: argpartition(x)[-K:]; `argmax`: one at a time, lowest id first."""
    temperature: float = 1.0
    softcap: float = 0.0
    jitter: float = 0.0
    expert_scaled: bool = False
    """Weights are also multiplied by a learned number an expert (gemma4): `expert_scale` must be given."""

    def __post_init__(self):
        for field, allowed in (
            ("score", ("softmax", "sigmoid", "sqrtsoftplus", "logit")),
            ("weight", ("score", "softmax", "sigmoid", "sparsemixer")),
            ("group_score", ("top2", "max")),
            ("keeps", ("first", "last", "argmax")),
        ):
            if getattr(self, field) not in allowed:
                raise ParameterError("unknown routing step", field=field, got=getattr(self, field), expected=allowed)
        if not 1 <= self.kept_groups <= self.groups:
            raise GeometryError(
                "groups kept", field="kept_groups", got=self.kept_groups, expected=f"1 to {self.groups}"
            )

    @property
    def kind(self) -> str:
        """SOFTMAX_TOPK, SIGMOID_GROUP, or the name of a rarer score."""
        if self.score in ("softmax", "logit"):
            return self.SOFTMAX_TOPK
        return self.SIGMOID_GROUP if self.score == "sigmoid" else self.score.upper()

    @property
    def name(self) -> str:
        return self.kind

    # ------------------------------------------------------------ numpy

    def scores(self, logits: np.ndarray) -> np.ndarray:
        """Step 1: raw scores `f64[..., E]`, no bias, no groups."""
        logits = np.asarray(logits, np.float64) / self.temperature
        if self.softcap > 0:
            logits = np.tanh(logits / self.softcap) * self.softcap
        if self.score == "softmax":
            return _softmax(logits)
        if self.score == "sigmoid":
            return _sigmoid(logits)
        if self.score == "sqrtsoftplus":
            return np.sqrt(np.logaddexp(logits, 0.0))
        return logits

    def selection(
        self, logits: np.ndarray, bias: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Steps 1-3: `(masked, unmasked, group_margin)`; group margin `[...]` is None without groups.

        The group margin is the worst kept group's score minus the best dropped group's.
        """
        free = self.scores(logits)
        if bias is not None:
            free = free + np.asarray(bias, np.float64)
        if self.kept_groups == self.groups:
            return free, free, None
        experts = free.shape[-1]
        if experts % self.groups:
            raise GeometryError("experts do not fill the groups", got=experts, expected=f"multiple of {self.groups}")
        grouped = free.reshape(*free.shape[:-1], self.groups, experts // self.groups)
        tops = np.sort(grouped, axis=-1)
        worth = tops[..., -2:].sum(-1) if self.group_score == "top2" else tops[..., -1]
        order = np.argsort(-worth, axis=-1, kind="stable")
        ranked = np.take_along_axis(worth, order, -1)
        kept = np.zeros(worth.shape, bool)
        np.put_along_axis(kept, order[..., : self.kept_groups], True, -1)
        masked = np.where(kept[..., None], grouped, self.dropped).reshape(free.shape)
        return masked, free, ranked[..., self.kept_groups - 1] - ranked[..., self.kept_groups]

    def weights(self, logits: np.ndarray, ids: np.ndarray, expert_scale: np.ndarray | None = None) -> np.ndarray:
        """Step 5: weights `f32[..., K]` of the given experts, in their order.

        Raises:
            ParameterError: the family needs `expert_scale f32[E]` and it is missing, or the reverse.
        """
        if self.expert_scaled != (expert_scale is not None):
            raise ParameterError("expert scale", field="expert_scale", got=expert_scale, expected=self.expert_scaled)
        ids = np.asarray(ids).astype(np.int64)
        if self.weight == "sparsemixer":
            return self._sparsemixer(np.asarray(logits, np.float64), ids).astype(np.float32)
        if self.weight == "score":
            chosen = np.take_along_axis(self.scores(logits), ids, -1)
        else:
            chosen = np.take_along_axis(np.asarray(logits, np.float64), ids, -1)
            chosen = _softmax(chosen) if self.weight == "softmax" else _sigmoid(chosen)
        if self.normalise:
            chosen = chosen / (chosen.sum(-1, keepdims=True) + self.epsilon)
        if expert_scale is not None:
            chosen = chosen * expert_scale[ids]
        return (chosen * self.scale).astype(np.float32)

    def _sparsemixer(self, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
        # Each pick is weighed by a softmax over the experts not yet picked that are within a relative
        # band of the best remaining one (inference path of SparseMixer-v2, arXiv:2409.12136).
        left, picked = logits.copy(), []
        for k in range(ids.shape[-1]):
            one = ids[..., k : k + 1]
            best = np.take_along_axis(left, one, -1)
            far = best - logits > 2 * self.jitter * np.maximum(np.abs(logits), best)
            picked.append(np.take_along_axis(_softmax(np.where(far, -np.inf, left)), one, -1))
            np.put_along_axis(left, one, -np.inf, -1)
        return np.concatenate(picked, -1)

    def select(self, logits: Any, bias: Any = None, expert_scale: Any = None) -> Selection:
        """All five steps. Numpy: ties by lowest id. mlx: the model's own tie rule and arithmetic."""
        if not isinstance(logits, np.ndarray):
            from .native import select

            return select(self, logits, bias, expert_scale)
        masked, _, _ = self.selection(logits, bias)
        ids = np.argsort(-masked, axis=-1, kind="stable")[..., : self.top_k]
        return Selection(ids.astype(np.uint16), self.weights(logits, ids, expert_scale), masked.astype(np.float32))


def rank(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Permutation `[..., K]` that puts a given set in rank order: score descending, ties by lowest id."""
    chosen = np.take_along_axis(scores, ids.astype(np.int64), -1)
    return np.lexsort((ids, -chosen), axis=-1)


def margin(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Lowest score inside a set minus the highest outside it, `[...]`; +inf when nothing is outside."""
    wide = ids.astype(np.int64)
    outside = scores.copy()
    np.put_along_axis(outside, wide, -np.inf, -1)
    return np.take_along_axis(scores, wide, -1).min(-1) - outside.max(-1)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))
