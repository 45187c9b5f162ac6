"""Capacity: take what is unavailable out of a decision before anything runs.

The caller says which specialists are available; these policies estimate nothing. They only ever
take away: a token keeps some of the specialists that it was given, in the same order, or falls back
to the anchor. They never try a specialist that selection did not choose, and no token is dropped.

In the shape descriptions, `B` is the batch, `T` the tokens, `N` the specialists and `S` the slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import check_tensor
from moelab.policies.decisions import CapacityResult, Decision, Top1Decision, one_token


@dataclass(frozen=True)
class Capacity:
    """A capacity policy: `keep` says which slots remain, the rest is common to all."""

    def __call__(self, decision: Decision, *, expert_availability: Tensor | None) -> CapacityResult:
        """Apply availability to every token.

        decision: what a selection policy decided.
        expert_availability: bool `[N]`, or `[B, T, N]` when it differs by token; None when every
            specialist is available.
        Raises `PolicyError` for a decision or an availability of the wrong kind.
        """
        self.check_decision(decision)
        if expert_availability is None:
            return CapacityResult(decision, decision)
        check_availability(decision, expert_availability)
        if one_token(decision.selected_indices):
            routes = keep_in_one(decision, expert_availability)
        else:
            routes = keep(decision, slot_availability(decision, expert_availability))
        return CapacityResult(decision, routes)

    def check_decision(self, decision: Decision) -> None:
        """Refuse a decision that this policy has no rule for."""
        if not isinstance(decision, Decision):
            got = type(decision).__name__
            raise PolicyError("decision is not a decision", field="decision", got=got, expected="Decision")


@dataclass(frozen=True)
class OverflowToAnchorCapacity(Capacity):
    """Top-1: an unavailable specialist's token goes to the anchor, never to the runner-up."""

    def check_decision(self, decision: Decision) -> None:
        if not isinstance(decision, Top1Decision):
            super().check_decision(decision)
            got = type(decision).__name__
            raise PolicyError(
                "decision is not top-1",
                field="decision",
                got=got,
                expected="Top1Decision",
                fix="use PromoteSurvivorsCapacity",
            )


@dataclass(frozen=True)
class PromoteSurvivorsCapacity(Capacity):
    """Any arity: the available specialists of a token move up to its first slots.

    For a pair: both, or the survivor alone (whose weight is then exactly 1), or the anchor.
    """


def check_availability(decision: Decision, expert_availability: Tensor) -> None:
    """Refuse anything but bool `[N]` or `[B, T, N]`."""
    experts = len(decision.expert_ids)
    shared = not isinstance(expert_availability, Tensor) or expert_availability.dim() == 1
    shape = (experts,) if shared else (*decision.selected_indices.shape[:2], experts)
    check_tensor("expert_availability", expert_availability, shape, dtypes=(torch.bool,))


def slot_availability(decision: Decision, expert_availability: Tensor) -> Tensor:
    """`[B, T, S]` True where the candidate of a slot is available; the anchor always is."""
    available = torch.nn.functional.pad(expert_availability, (1, 0), value=True)
    indices = decision.slot_indices
    return available.take(indices) if available.dim() == 1 else available.gather(-1, indices)


def keep(decision: Decision, available: Tensor) -> Decision:
    """The decision with only the available slots `[B, T, S]`, moved up to the front."""
    if available.all():  # nothing to take
        return decision
    kept = decision.slot_mask & available
    order = (~kept).sort(dim=-1, stable=True).indices
    indices = decision.slot_indices.where(kept, 0).gather(-1, order)
    scores = decision.slot_scores.where(kept, 0).gather(-1, order)
    shape = decision.selected_indices.shape
    return replace(decision, selected_indices=indices.view(shape), selected_scores=scores.view(shape))


def keep_in_one(decision: Decision, expert_availability: Tensor) -> Decision:
    """The same for a single token, in plain numbers."""
    ((chosen,),), available = decision.selected_indices.tolist(), expert_availability.tolist()
    if isinstance(decision, Top1Decision):
        chosen = [chosen]
    if expert_availability.dim() == 3:
        ((available,),) = available
    kept = [slot for slot, candidate in enumerate(chosen) if candidate and available[candidate - 1]]
    if len(kept) == len(chosen) - chosen.count(0):  # nothing to take
        return decision
    lost, given = len(chosen) - len(kept), decision.selected_scores
    indices = decision.selected_indices.new_tensor([chosen[slot] for slot in kept] + [0] * lost)
    if given.requires_grad:
        scores = torch.nn.functional.pad(given.flatten()[kept], (0, lost))
    else:
        own = given.flatten().tolist()
        scores = given.new_tensor([own[slot] for slot in kept] + [0.0] * lost)
    shape = given.shape
    return replace(decision, selected_indices=indices.view(shape), selected_scores=scores.view(shape))
