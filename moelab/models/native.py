"""The routing steps of `families`, repeated in mlx as the models themselves do them (float32, same tie rule).

Used where a *prediction* takes the place of a gate's logits: its choice must then be made exactly as
the model would have made it. Never used to choose again what a model has already chosen.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..errors import ParameterError, UnsupportedModelError
from .families import RoutingFamily, Selection


def select(
    family: RoutingFamily, logits: mx.array, bias: mx.array | None = None, expert_scale: mx.array | None = None
) -> Selection:
    """Route `logits [..., E]`: ids `u32[..., K]` in rank order, weights f32, masked selection scores f32."""
    if family.weight == "sparsemixer":
        raise UnsupportedModelError("sparsemixer weights are not offered in mlx", field="weight", got=family.weight)
    if family.expert_scaled != (expert_scale is not None):
        raise ParameterError("expert scale", field="expert_scale", got=expert_scale, expected=family.expert_scaled)
    logits = logits.astype(mx.float32) / family.temperature
    if family.softcap > 0:
        logits = mx.tanh(logits / family.softcap) * family.softcap
    if family.score == "softmax":
        scores = mx.softmax(logits, axis=-1, precise=True)
    elif family.score == "sigmoid":
        scores = mx.sigmoid(logits)
    elif family.score == "sqrtsoftplus":
        scores = mx.sqrt(nn.softplus(logits))
    else:
        scores = logits
    chooser = scores if bias is None else scores + bias
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
    if family.weight == "score":
        weights = mx.take_along_axis(scores, ids, axis=-1)
    else:
        picked = mx.take_along_axis(logits, ids, axis=-1)
        weights = mx.softmax(picked, axis=-1, precise=True) if family.weight == "softmax" else mx.sigmoid(picked)
    if family.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + family.epsilon)
    if expert_scale is not None:
        weights = weights * expert_scale[ids]
    return Selection(ids, weights * family.scale, chooser)
