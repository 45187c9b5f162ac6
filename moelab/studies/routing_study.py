"""The routing study of one model: calibrate, decide, and let the judge weigh every arm.

Shapes: R tokens, N experts of the layer, K chosen by the router, H hidden.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .. import models
from ..errors import ParameterError
from ..flywheel.estimates import clustered_mean
from ..specialists.calibrate import by_score, fit_calibration
from ..specialists.native import NativeLayer, NativeTokens
from .resume import LayerInputs
from .routing import Clock, Corpus, Part, RoutingOptions
from .routing_arms import arms, executed, fit_head
from .routing_judge import Judge

PICTURE_TOKENS = 24
BINS = 12
RIDGE = {"error": 1e-3, "loss": 1.0}
"""Shrinking of a specialist's own fit: a loss says far less a token than an output error."""


def study(loaded: models.LoadedModel, corpus: Corpus, options: RoutingOptions) -> dict[str, Any]:
    """All figures, as plain values. Raises ParameterError: a layer that the model does not have."""
    torch.set_num_threads(1)
    clock, layers = Clock(), loaded.geometry.layers
    if not -layers <= options.layer < layers:
        raise ParameterError(
            "no such MoE layer", field="layer", got=options.layer, expected=f"{-layers} to {layers - 1}"
        )
    place = range(layers)[options.layer]
    layer = NativeLayer.of(loaded, place)
    train, held = (part.inputs(loaded, place) for part in (corpus.train, corpus.validation))
    clock.lap("model up to the layer")
    known = layer.tokens(torch.from_numpy(train.x), train.ids)
    if layer.anchor_kind == "zero":
        layer = layer.with_dense_anchor(known)
        known = layer.tokens(torch.from_numpy(train.x), train.ids)
    tokens = layer.tokens(torch.from_numpy(held.x), held.ids)
    unit = _unit(known, options.utility)
    calibration = fit_calibration(
        _utility(layer, known, train, options.utility), known.weights, known.chosen,
        unit=unit, ridge=RIDGE[options.utility],
    )  # fmt: skip
    clock.lap("calibration")
    scores = calibration(tokens.weights, tokens.chosen)
    checked = _reliability(layer, tokens, held, scores, corpus.validation, options, unit)
    clock.lap("reliability")
    family = layer.block.family
    every = arms(
        layer.expert_ids, top_k=family.top_k, groups=_groups(layer.experts, family.groups),
        mixture_threshold=options.mixture_threshold, dynamic_thresholds=options.dynamic_thresholds,
        head=fit_head(layer, known, calibration(known.weights, known.chosen)),
    )  # fmt: skip
    judge = Judge(layer, tokens, held, corpus.validation, options, clock)
    policies, picture = [], []
    for number, arm in enumerate(every):
        routes = arm.decide(tokens, scores, layer.expert_ids)
        policies += judge.policy(arm, routes)
        ids, mask = (a[:PICTURE_TOKENS, 0].numpy() for a in executed(routes))
        picture += [
            {"policy": arm.name, "token": int(t), "expert": int(ids[t, s]) if mask[t, s] else -1}
            for t in range(len(ids)) for s in range(ids.shape[1]) if mask[t, s] or (s == 0 and not mask[t].any())
        ]  # fmt: skip
        models.report_progress({"done": number + 1, "total": len(every) + 1})
    late = judge.late()
    return {
        **corpus.counts,
        "layer": place,
        "anchor": layer.anchor_kind,
        "anchor_bytes": judge.anchor_bytes,
        "expert_bytes": judge.expert_bytes,
        "experts": layer.experts,
        "top_k": family.top_k,
        "native_loss": judge.native_loss,
        "calibration": checked,
        "policies": policies,
        "late": late,
        "picture": picture,
        "seconds": clock.seconds,
    }


def _unit(tokens: NativeTokens, utility: str) -> float:
    return float(tokens.residual.double().square().sum(-1).mean()) if utility == "error" else 1.0


def _groups(experts: int, groups: int) -> list[int]:
    """The router's own groups; eight equal runs where it has none."""
    count = groups if groups > 1 else next(g for g in (8, 4, 2, 1) if experts % g == 0)
    return [k * count // experts for k in range(experts)]


def _utility(layer: NativeLayer, tokens: NativeTokens, inputs: LayerInputs, kind: str) -> torch.Tensor:
    """`[R, N]`, not yet divided by its unit."""
    if kind == "error":
        return layer.error_utility(tokens)
    slope = torch.from_numpy(sum(inputs.gradients(y.numpy()) for y in (tokens.anchor, tokens.output)) / 2)
    out = torch.empty_like(tokens.weights)
    for k in range(layer.experts):
        out[:, k] = -(layer.correction(k, tokens.x, tokens.weights, tokens.anchor) * slope).sum(-1)
    return out


def _reliability(layer, tokens, held, scores, part: Part, options: RoutingOptions, unit: float) -> dict[str, Any]:
    """What scores promised against what came, on validation owners; pairs are (token, specialist)."""
    stride = -(-int(held.first[-1]) // options.reliability_tokens)
    sub, rows = held.every(stride)
    utility = (_utility(layer, tokens.rows(rows), sub, options.utility) / unit).numpy().astype(np.float64)
    said, owner = scores[rows].numpy().astype(np.float64), part.by_token(part.owner)[rows]
    bins = by_score(said, bins=BINS)
    table = []
    for b in range(BINS):
        inside = bins == b
        if inside.any():
            mean = clustered_mean(utility, owner, weights=inside)
            table.append(
                {
                    "predicted": float(said[inside].mean()),
                    **mean.plain("owners"),
                    "positive": bool(said[inside].min() > 0),
                }
            )
    positive = said > 0
    explained = 1 - ((utility - said) ** 2).sum() / ((utility - utility.mean()) ** 2).sum()
    best = said.argmax(-1)
    gain = utility[np.arange(len(best)), best]
    return {
        "bins": table,
        "tokens": len(said),
        "unit": unit,
        "r2": float(explained),
        "signs_agree": float(((utility > 0) == positive).mean()),
        "bins_agree": float(np.mean([(row["value"] > 0) == row["positive"] for row in table])),
        "helps_when_positive": clustered_mean(utility, owner, weights=positive).plain("owners"),
        "helps_when_not": clustered_mean(utility, owner, weights=~positive).plain("owners"),
        "positive_a_token": float(positive.sum(-1).mean()),
        "anchor_wins": float((~positive.any(-1)).mean()),
        "best_helps": clustered_mean(gain, owner).plain("owners"),
    }
