"""The routing steps of `families`, repeated in mlx as the models themselves do them (float32, same tie rule).

Used where a *prediction* takes the place of a gate's logits: its choice must then be made exactly as
the model would have made it. Never used to choose again what a model has already chosen.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..errors import ParameterError, UnsupportedModelError
from .families import RoutingFamily, Selection


def scores(family: RoutingFamily, logits: mx.array) -> mx.array:
    """Step 1: raw scores `f32[..., E]`, no bias, no groups."""
    logits = _capped(family, logits)
    if family.score == "softmax":
        return mx.softmax(logits, axis=-1, precise=True)
    if family.score == "sigmoid":
        return mx.sigmoid(logits)
    if family.score == "sqrtsoftplus":
        return mx.sqrt(nn.softplus(logits))
    return logits


def weigh(
    family: RoutingFamily,
    logits: mx.array,
    ids: mx.array,
    expert_scale: mx.array | None = None,
    *,
    raw: mx.array | None = None,
) -> mx.array:
    """Step 5: weights `f32[..., K]` of the experts `ids`, in their order, for `logits [..., E]`.

    `raw`: `scores` of the logits, where they are there already.

    Raises:
        UnsupportedModelError: weights that depend on the order in which experts were picked.
        ParameterError: the family needs `expert_scale f32[E]` and it is missing, or the reverse.
    """
    if family.weight == "sparsemixer":
        raise UnsupportedModelError("sparsemixer weights are not offered in mlx", field="weight", got=family.weight)
    if family.expert_scaled != (expert_scale is not None):
        raise ParameterError("expert scale", field="expert_scale", got=expert_scale, expected=family.expert_scaled)
    if family.weight == "score":
        weights = mx.take_along_axis(scores(family, logits) if raw is None else raw, ids, axis=-1)
    else:
        picked = mx.take_along_axis(_capped(family, logits), ids, axis=-1)
        weights = mx.softmax(picked, axis=-1, precise=True) if family.weight == "softmax" else mx.sigmoid(picked)
    if family.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + family.epsilon)
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    return weights * family.scale


def select(
    family: RoutingFamily, logits: mx.array, bias: mx.array | None = None, expert_scale: mx.array | None = None
) -> Selection:
    """Route `logits [..., E]`: ids `u32[..., K]` in rank order, weights f32, masked selection scores f32.

    Raises:
        as `weigh`.
    """
    raw = scores(family, logits)
    chooser = raw if bias is None else raw + bias
    if (drop := family.groups - family.kept_groups) > 0:
        grouped = mx.unflatten(chooser, -1, (family.groups, -1))
        if family.group_score == "top2":
            worth = mx.topk(grouped, 2, axis=-1).sum(axis=-1, keepdims=True)
        else:
            worth = grouped.max(axis=-1, keepdims=True)
        worst = mx.argpartition(worth, kth=drop - 1, axis=-2)[..., :drop, :]
        chooser = mx.put_along_axis(grouped, worst, mx.array(family.dropped), axis=-2).flatten(-2, -1)
    k = family.top_k
    if family.keeps == "last":
        ids = mx.argpartition(chooser, kth=-k, axis=-1)[..., -k:]
    else:
        ids = mx.argpartition(-chooser, kth=k - 1, axis=-1)[..., :k]
    ids = mx.sort(ids, axis=-1)  # ties by lowest id: the sort below is stable
    order = mx.argsort(-mx.take_along_axis(chooser, ids, axis=-1), axis=-1)
    ids = mx.take_along_axis(ids, order, axis=-1)
    return Selection(ids, weigh(family, logits, ids, expert_scale, raw=raw), chooser)


def _capped(family: RoutingFamily, logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32) / family.temperature
    return mx.tanh(logits / family.softcap) * family.softcap if family.softcap > 0 else logits
