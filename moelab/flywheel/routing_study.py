"""The routing study of one model: calibrate, decide, run on, count bytes; then let experts come late.

Shapes: R tokens, N experts of the layer, K chosen by the router, H hidden.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from .. import models
from ..policies import degrade
from ..specialists.availability import available_by_token
from ..specialists.calibrate import by_score, fit_calibration
from ..specialists.native import NativeLayer, NativeTokens
from .ceiling import SYSTEMS
from .estimates import Estimate, clustered_mean, paired_difference
from .residency import Visits, replay
from .resume import LayerInputs
from .routing import Clock, Corpus, Part, RoutingOptions
from .routing_arms import NATIVE, Arm, arms, executed, fit_head

PICTURE_TOKENS = 24
BINS = 12
RIDGE = {"error": 1e-3, "loss": 1.0}
"""Shrinking of a specialist's own fit: a loss says far less a token than an output error."""


def study(loaded: models.LoadedModel, corpus: Corpus, options: RoutingOptions) -> dict[str, Any]:
    """All figures, as plain values."""
    torch.set_num_threads(1)
    clock, place = Clock(), range(loaded.geometry.layers)[options.layer]
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
    judge = _Judge(layer, tokens, held, corpus.validation, options, clock)
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
    kept = np.arange(0, len(held.windows), stride)  # spread over the owners
    rows = np.concatenate([np.arange(held.first[i], held.first[i + 1]) for i in kept])
    sub = _some(held, kept, rows)
    utility = (_utility(layer, tokens.rows(rows), sub, options.utility) / unit).numpy().astype(np.float64)
    said, owner = scores[rows].numpy().astype(np.float64), part.by_token(part.owner)[rows]
    bins = by_score(said, bins=BINS)
    table = []
    for b in range(BINS):
        inside = bins == b
        if inside.any():
            mean = clustered_mean(utility, owner, weights=inside)
            table.append(
                {"predicted": float(said[inside].mean()), **_row(mean), "positive": bool(said[inside].min() > 0)}
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
        "helps_when_positive": _row(clustered_mean(utility, owner, weights=positive)),
        "helps_when_not": _row(clustered_mean(utility, owner, weights=~positive)),
        "positive_a_token": float(positive.sum(-1).mean()),
        "anchor_wins": float((~positive.any(-1)).mean()),
        "best_helps": _row(clustered_mean(gain, owner)),
    }


def _some(held: LayerInputs, kept: np.ndarray, rows: np.ndarray) -> LayerInputs:
    """Some of the windows, ascending, with their batches cut down; rows: their tokens."""
    order, states = [], []
    for batch, state in zip(held.order, held.states, strict=True):
        inside = np.flatnonzero(np.isin(batch, kept))
        if len(inside):
            order.append(np.searchsorted(kept, batch[inside]))
            states.append(state[inside.tolist()][:, : max(len(held.windows[i]) for i in batch[inside])])
    windows = [held.windows[i] for i in kept]
    first = np.concatenate([[0], np.cumsum([len(w) for w in windows])])
    return replace(held, windows=windows, order=order, states=states, x=held.x[rows], ids=held.ids[rows], first=first)


def _row(estimate: Estimate) -> dict[str, Any]:
    """An estimate as plain values."""
    return {"value": estimate.value, "se": estimate.se, "n": estimate.n, "owners": estimate.clusters}


class _Judge:
    """Quality, bytes and time of routes of the validation tokens."""

    def __init__(
        self, layer, tokens: NativeTokens, held: LayerInputs, part: Part, options: RoutingOptions, clock: Clock
    ):
        self.layer, self.tokens, self.held, self.options, self.clock = layer, tokens, held, options, clock
        self.owner, self.thread = part.by_token(part.owner), part.by_token(part.thread)
        geometry = held.loaded.geometry
        self.expert_bytes = int(geometry.layer_expert_bytes[held.layer])
        per_weight = self.expert_bytes / (3 * layer.gate[0].numel())
        self.anchor_bytes = 0 if layer.dense is None else int(layer.dense.numel() * per_weight)
        self.scale = float(tokens.residual.double().square().sum(-1).mean())
        self.losses: dict[bytes, np.ndarray] = {}
        self.native = self.loss(tokens.output)
        self.native_loss = _row(clustered_mean(self.native, self.owner, weights=held.predicts))
        ratio, share = SYSTEMS[options.system].read_to_compute, SYSTEMS[options.system].cache_fraction
        misses = self.residency(self.own_routes(), share, anchored=False).misses.sum((1, 2)).mean()
        # Time of one read, a token's compute being 1, at which the layer as trained has the system's ratio.
        self.read_s = ratio / max(float(misses), 1e-12)

    def own_routes(self):
        return Arm(NATIVE, None, self.tokens.ids.shape[1]).decide(
            self.tokens, self.tokens.weights, self.layer.expert_ids
        )

    def loss(self, output: torch.Tensor) -> np.ndarray:
        """`f32[R]` next-token loss with this output in the layer's place."""
        values = np.ascontiguousarray(output.numpy())
        key = hashlib.sha256(values).digest()  # several arms may decide alike
        if key not in self.losses:
            self.losses[key] = self.held.losses(values)
        return self.losses[key]

    def residency(self, routes, share: float, *, anchored: bool, record: bool = False):
        """A cache of this layer's experts; a fitted anchor lies in it too, and leaves that much less."""
        ids, mask = (a.numpy() for a in executed(routes))
        budget = int(share * self.layer.experts * self.expert_bytes) - self.anchor_bytes * anchored
        visits = Visits.of(ids, self.layer.experts, self.thread, mask=mask)
        return replay(visits, np.array([self.expert_bytes]), budget=max(budget, 1), record=record)

    def quality(self, output: torch.Tensor, *, loss: bool) -> dict[str, Any]:
        """Output error, the anchor alone being 1, and loss over that of the layer as trained, paired."""
        error = (output - self.tokens.output).double().square().sum(-1).numpy() / self.scale
        out = {"error": _row(clustered_mean(error, self.owner))}
        if loss:
            same = error.max() < 1e-9  # the layer as trained, up to rounding: nothing to run again
            losses = self.native if same else self.loss(output)
            out["loss"] = _row(paired_difference(losses, self.native, self.owner, weights=self.held.predicts))
        self.clock.lap("loss" if loss else "outputs")
        return out

    def policy(self, arm: Arm, routes) -> list[dict[str, Any]]:
        """One row a budget: quality is the same, bytes and time are not."""
        result = self.layer.run(self.tokens, routes, arm.combination)
        self.clock.lap("outputs")
        quality = self.quality(result.output[0], loss=arm.loss)
        arity = routes.effective_routes.route_arity[0].numpy()
        rows = []
        for share in self.options.budgets:
            found = self.residency(routes, share, anchored=not arm.name.startswith(NATIVE[:6]))
            missed = found.misses.sum((1, 2))
            rows.append(
                {
                    "policy": arm.name,
                    "mixing": arm.mixing,
                    "share": share,
                    "arity": float(arity.mean()),
                    "anchor_share": float((arity == 0).mean()),
                    "bytes": _row(clustered_mean(found.read_bytes, self.owner)),
                    "time": {str(d): self.time(missed, d) for d in self.options.deadlines},
                    **quality,
                }
            )
        self.clock.lap("cache")
        return rows

    def time(self, missed: np.ndarray, deadline: int) -> dict[str, Any]:
        """Of a token that waits for all but the first `deadline` reads, its compute being 1."""
        return _row(clustered_mean(1 + self.read_s * np.maximum(missed - deadline, 0), self.owner))

    def late(self) -> list[dict[str, Any]]:
        """The router's own route with experts that are read too late, at every budget and deadline.

        Reads of a token are asked for at once, the heaviest expert first, and arrive one after another. The first
        `deadline` are hidden (asked for early, say); exact waits for the others, the rest do without them. What
        comes late still fills the cache, so all of them read the same bytes.
        """
        routes, rows = self.own_routes(), []
        weights = self.tokens.weights.gather(1, self.tokens.ids)
        for share in self.options.budgets:
            found = self.residency(routes, share, anchored=False, record=True)
            miss = found.misses[:, 0]
            done = np.full(self.tokens.weights.shape, np.inf)
            np.put_along_axis(done, self.tokens.ids.numpy(), np.where(miss, np.cumsum(miss, 1), np.inf), 1)
            resident = np.unpackbits(found.resident[:, 0], axis=-1, count=self.layer.experts).astype(bool)
            for deadline in self.options.deadlines:
                available = available_by_token(resident, done, float(deadline))[0]
                missing = degrade(self.tokens.ids, weights, available).missing.numpy()
                common = {
                    "share": share,
                    "deadline": deadline,
                    "late_tokens": _row(clustered_mean((missing > 0).astype(float), self.owner)),
                    "late_experts": float(missing.mean()),
                }
                exact = self.time(miss.sum(1), deadline)
                nothing = {"value": 0.0, "se": 0.0, "n": int(self.held.predicts.sum()), "owners": 0}
                rows.append({**common, "mode": "exact", "time": exact, "loss": nothing, "error": nothing})
                with_loss = share == self.options.budgets[len(self.options.budgets) // 2]
                on_time = {**exact, "value": 1.0, "se": 0.0}
                for mode, output in self.fallbacks(weights, available):
                    rows.append({**common, "mode": mode, "time": on_time, **self.quality(output, loss=with_loss)})
        return rows

    def fallbacks(self, weights: torch.Tensor, available: torch.Tensor):
        """Outputs `[R, H]` of each way to do without: zero, promoted weights, and the anchor in the expert's place."""
        for mode, mass in (("zero", "keep"), ("promote", "promote"), ("anchor", "keep")):
            found = degrade(self.tokens.ids, weights, available, mass=mass)
            output = self.tokens.output - self._short(found)
            yield mode, output + found.lost[:, None] * self.tokens.anchor if mode == "anchor" else output

    def _short(self, found) -> torch.Tensor:
        """`[R, H]` what the degraded route lacks of the full one."""
        lost = self.tokens.weights * self.tokens.chosen
        lost.scatter_add_(1, found.ids, -found.weights * found.mask)
        out = torch.zeros_like(self.tokens.output)
        for k in range(self.layer.experts):
            rows = (lost[:, k] != 0).nonzero().squeeze(-1)
            out[rows] += lost[rows, k, None] * self.layer.expert(k, self.tokens.x[rows])
        return out
