"""Telemetry: figures about routes, computed after the fact from what dispatch returns.

Nothing here runs unless it is called, and dispatch records nothing, so telemetry that is off costs
nothing. Every function is pure.

In the shape descriptions, `N` is the specialists, `S` the slots of a token, `B` the batch and `T`
the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moelab.policies._validate import check_kind
from moelab.policies.decisions import CapacityResult, Decision


@dataclass(frozen=True, eq=False)
class RouteTelemetry:
    """Figures of one dispatch.

    expert_load: `[N]` i64 tokens that ran each specialist.
    expert_overflow: `[N]` i64 tokens that chose a specialist and could not have it.
    arity_histogram: `[S + 1]` i64 tokens by how many specialists they ran, 0 first.
    requested_arity_histogram: `[S + 1]` i64 tokens by how many they chose.
    regret: `[B, T]` evidence that each token lost to capacity.
    """

    expert_load: Tensor
    expert_overflow: Tensor
    arity_histogram: Tensor
    requested_arity_histogram: Tensor
    regret: Tensor


def measure(capacity: CapacityResult) -> RouteTelemetry:
    """Every figure of one dispatch."""
    check_kind("capacity", capacity, CapacityResult)
    return RouteTelemetry(
        expert_load(capacity.effective_routes),
        expert_overflow(capacity),
        arity_histogram(capacity.effective_routes),
        arity_histogram(capacity.decision),
        regret(capacity),
    )


def expert_load(routes: Decision) -> Tensor:
    """`[N]` i64 how many tokens have each specialist among their routes."""
    return torch.bincount(routes.slot_indices.flatten(), minlength=len(routes.expert_ids) + 1)[1:]


def expert_overflow(capacity: CapacityResult) -> Tensor:
    """`[N]` i64 how many tokens chose each specialist and did not get it."""
    return expert_load(capacity.decision) - expert_load(capacity.effective_routes)


def arity_histogram(routes: Decision) -> Tensor:
    """`[S + 1]` i64 how many tokens have 0, 1, ... S specialists."""
    return torch.bincount(routes.route_arity.flatten(), minlength=routes.slot_indices.shape[-1] + 1)


def regret(capacity: CapacityResult) -> Tensor:
    """`[B, T]` the evidence of the unconstrained route less that of the effective one.

    The evidence of a route is the sum of its specialists' scores, and the anchor's is 0. Every
    specialist of a route has positive evidence, so regret is positive exactly where capacity took
    something. Float64, without gradient.
    """
    wanted, got = (
        routes.slot_scores.detach().double().sum(-1) for routes in (capacity.decision, capacity.effective_routes)
    )
    return wanted - got
