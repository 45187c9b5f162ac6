r"""Degrading a model's own route: an expert that is not there in time is left to the anchor.

A native router has chosen K experts of a token and weighed them, $y = a + \sum_i w_i E_i$ with the shared
expert, if there is one, as the anchor $a$. Some of the K are unavailable. The capacity rule takes them out
before anything runs, moves the survivors up, tries no other expert and drops no token. What becomes of the
weight of the missing ones is a named choice:

    keep      survivors keep their weights, and `lost` says what is missing; the caller may give it to the
              anchor (`lost * a`, the anchor stands in for the expert) or to nothing
    promote   survivors share it in proportion, so that the token's total stays (a lone survivor gets all)

`promote` is the rule for specialists that are whole answers, mixed by weights that sum to 1. The experts of a
mixture-of-experts layer were trained to be added, each at its own weight; notebook 82 measures all three.

In the shape descriptions, `T` is the tokens, `K` the experts of each and `N` all experts of the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import check_choice, check_finite, check_tensor
from moelab.policies.capacity import PromoteSurvivorsCapacity
from moelab.policies.decisions import TopKDecision

MASSES = ("keep", "promote")
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16)


@dataclass(frozen=True, eq=False)
class DegradedRoutes:
    """What runs instead.

    ids: `[T, K]` i64 experts, survivors first in their order; 0 in inactive slots, which must not run.
    weights: `[T, K]` their weights, exactly 0 in inactive slots.
    mask: `[T, K]` True where a slot runs an expert.
    missing: `[T]` i64 experts that were taken out of each token.
    lost: `[T]` the weight that nobody has now: the sum of `weights` given less that of those left.
    """

    ids: Tensor
    weights: Tensor
    mask: Tensor
    missing: Tensor
    lost: Tensor

    @property
    def anchor_mask(self) -> Tensor:
        """`[T]` True where the anchor answers alone."""
        return ~self.mask.any(-1)


def degrade(ids: Tensor, weights: Tensor, expert_availability: Tensor, *, mass: str = "keep") -> DegradedRoutes:
    """A native route with its unavailable experts left to the anchor.

    ids: `[T, K]` integers below N, no expert twice in a token.
    weights: `[T, K]` non-negative floats in the order of `ids`.
    expert_availability: bool `[N]`, or `[T, N]` when it differs by token.
    mass: `"keep"` or `"promote"`.
    A token that misses nothing keeps ids and weights bit for bit. Raises `PolicyError` for anything else.
    """
    check_choice("mass", mass, MASSES)
    check_tensor("weights", weights, ("T", "K"))
    check_tensor("ids", ids, tuple(weights.shape), dtypes=INTEGERS)
    check_finite("weights", weights)
    if (weights < 0).any():
        raise PolicyError("a weight is negative", field="weights", got=weights.min().item(), expected="weights >= 0")
    shape = ("N",) if getattr(expert_availability, "ndim", 1) == 1 else (len(ids), "N")
    check_tensor("expert_availability", expert_availability, shape, dtypes=(torch.bool,))
    experts, wide = expert_availability.shape[-1], ids.long()
    if wide.numel() and not 0 <= int(wide.min()) <= int(wide.max()) < experts:
        got = [int(wide.min()), int(wide.max())]
        raise PolicyError("an id is out of range", field="ids", got=got, expected=f"0 to {experts - 1}")
    ordered = wide.sort(-1).values
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise PolicyError("a token names an expert twice", field="ids", got="a repeated id", expected="distinct ids")
    asked = TopKDecision(wide[None] + 1, weights[None], expert_names(experts))
    available = expert_availability if expert_availability.ndim == 1 else expert_availability[None]
    routes = PromoteSurvivorsCapacity()(asked, expert_availability=available).effective_routes
    mask, kept = routes.slot_mask[0], routes.slot_scores[0]
    missing = mask.shape[-1] - routes.route_arity[0]
    short, total = missing[:, None] > 0, weights.double().sum(-1, keepdim=True)
    if mass == "promote":
        left = kept.double().sum(-1, keepdim=True)
        kept = (kept * torch.where(short & (left > 0), total / left, 1.0)).to(weights.dtype)
    lost = torch.where(short, total - kept.double().sum(-1, keepdim=True), 0.0)[:, 0].to(weights.dtype)
    return DegradedRoutes((routes.slot_indices[0] - 1).where(mask, 0), kept, mask, missing, lost)


@lru_cache
def expert_names(experts: int) -> tuple[str, ...]:
    """`[N]` the names of a layer's native experts: their numbers."""
    return tuple(str(expert) for expert in range(experts))
