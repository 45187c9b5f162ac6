"""What the routes of a layer are worth: quality, bytes and time, then the same with experts that come late.

Shapes: R tokens, N experts of the layer, K chosen by the router, H hidden.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from ..flywheel.estimates import clustered_mean, paired_difference
from ..flywheel.residency import Visits, replay
from ..flywheel.systems import SYSTEMS
from ..policies import degrade
from ..specialists.availability import available_by_token
from ..specialists.native import NativeTokens
from .resume import LayerInputs
from .routing import Clock, Part, RoutingOptions
from .routing_arms import NATIVE, Arm, executed

LATE_STRIDE = 4
"""Of the validation windows, every fourth is run on for the loss without late experts; all of them for the error.
What stands beside those losses is taken on the same windows."""


class Judge:
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
        self.some, self.few = held.every(LATE_STRIDE)
        self.losses: dict[bytes, np.ndarray] = {}
        self.native = self.loss(tokens.output)
        self.native_loss = clustered_mean(self.native, self.owner, weights=held.predicts).plain("owners")
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
        out = {"error": clustered_mean(error, self.owner).plain("owners")}
        if loss:
            same = error.max() < 1e-9  # the layer as trained, up to rounding: nothing to run again
            losses = self.native if same else self.loss(output)
            out["loss"] = paired_difference(losses, self.native, self.owner, weights=self.held.predicts).plain("owners")
            out["loss_beside_late"] = self.change(losses[self.few])
        self.clock.lap("loss" if loss else "outputs")
        return out

    def change(self, losses: np.ndarray) -> dict[str, Any]:
        """Loss over that of the layer as trained, paired, on every fourth window: the losses are of those alone."""
        few = self.few
        return paired_difference(losses, self.native[few], self.owner[few], weights=self.some.predicts).plain("owners")

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
                    "bytes": clustered_mean(found.read_bytes, self.owner).plain("owners"),
                    "time": {str(d): self.time(missed, d) for d in self.options.deadlines},
                    **quality,
                }
            )
        self.clock.lap("cache")
        return rows

    def time(self, missed: np.ndarray, deadline: int) -> dict[str, Any]:
        """Of a token that waits for all but the first `deadline` reads, its compute being 1."""
        return clustered_mean(1 + self.read_s * np.maximum(missed - deadline, 0), self.owner).plain("owners")

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
                    "late_tokens": clustered_mean((missing > 0).astype(float), self.owner).plain("owners"),
                    "late_experts": float(missing.mean()),
                }
                exact = self.time(miss.sum(1), deadline)
                nothing = {"value": 0.0, "se": 0.0, "n": int(self.some.predicts.sum()), "owners": 0}
                rows.append({**common, "mode": "exact", "time": exact, "loss": nothing, "error": nothing})
                with_loss = share == self.options.budgets[len(self.options.budgets) // 2]
                on_time = {**exact, "value": 1.0, "se": 0.0}
                for mode, output in self.fallbacks(weights, available):
                    quality = self.quality(output, loss=False)
                    if with_loss:
                        quality["loss"] = self.change(self.some.losses(np.ascontiguousarray(output[self.few].numpy())))
                        self.clock.lap("loss")
                    rows.append({**common, "mode": mode, "time": on_time, **quality})
        return rows

    def fallbacks(self, weights: torch.Tensor, available: torch.Tensor):
        """Outputs `[R, H]` of each way to do without: zero, promoted weights, and the anchor in the expert's place."""
        for mass in ("keep", "promote"):
            found = degrade(self.tokens.ids, weights, available, mass=mass)
            output = self.tokens.output - self._short(found)
            yield {"keep": "zero"}.get(mass, mass), output
            if mass == "keep":
                yield "anchor", output + found.lost[:, None] * self.tokens.anchor

    def _short(self, found) -> torch.Tensor:
        """`[R, H]` what the degraded route lacks of the full one."""
        lost = self.tokens.weights * self.tokens.chosen
        lost.scatter_add_(1, found.ids, -found.weights * found.mask)
        out = torch.zeros_like(self.tokens.output)
        for k in range(self.layer.experts):
            rows = (lost[:, k] != 0).nonzero().squeeze(-1)
            out[rows] += lost[rows, k, None] * self.layer.expert(k, self.tokens.x[rows])
        return out
