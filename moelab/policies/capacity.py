"""Capacity: take what is unavailable out of a decision before anything runs.

The caller says which specialists are available; these policies estimate nothing. They only ever
take away: a token keeps some of the specialists that it was given, in the same order, or falls back
to the anchor. They never try a specialist that selection did not choose, and no token is dropped.

In the shape descriptions, `B` is the batch, `T` the tokens, `N` the specialists and `S` the slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn

import torch
from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import as_row, check_tensor
from moelab.policies.decisions import CapacityResult, Decision, Top1Decision


@dataclass(frozen=True)
class Capacity:
    """A capacity policy: which decisions it has a rule for; the rest is common to all."""

    decides_on: ClassVar[type[Decision]] = Decision

    def __call__(self, decision: Decision, *, expert_availability: Tensor | None) -> CapacityResult:
        """Apply availability to every token.

        decision: what a selection policy decided.
        expert_availability: bool `[N]`, or `[B, T, N]` when it differs by token; None when every
            specialist is available.
        Raises `PolicyError` for a decision or an availability of the wrong kind.
        """
        if not isinstance(decision, self.decides_on):
            self.refuse(decision)
        if expert_availability is None:
            return CapacityResult(decision, decision)
        experts = len(decision.expert_ids)
        shape = (experts,) if getattr(expert_availability, "ndim", 1) == 1 else (*decision.tokens, experts)
        check_tensor("expert_availability", expert_availability, shape, dtypes=(torch.bool,))
        if decision.plain is None:
            routes = keep(decision, slot_availability(decision, expert_availability))
        else:
            routes = keep_in_one(decision, expert_availability)
        return CapacityResult(decision, routes)

    def refuse(self, decision: object) -> NoReturn:
        """Say what is wrong with a decision that this policy has no rule for."""
        got = type(decision).__name__
        raise PolicyError("decision is not a decision", field="decision", got=got, expected="Decision")


@dataclass(frozen=True)
class OverflowToAnchorCapacity(Capacity):
    """Top-1: an unavailable specialist's token goes to the anchor, never to the runner-up."""

    decides_on: ClassVar[type[Decision]] = Top1Decision

    def refuse(self, decision: object) -> NoReturn:
        if not isinstance(decision, Decision):
            super().refuse(decision)
        raise PolicyError(
            "decision is not top-1",
            field="decision",
            got=type(decision).__name__,
            expected="Top1Decision",
            fix="use PromoteSurvivorsCapacity",
        )


@dataclass(frozen=True)
class PromoteSurvivorsCapacity(Capacity):
    """Any arity: the available specialists of a token move up to its first slots.

    For a pair: both, or the survivor alone (whose weight is then exactly 1), or the anchor.
    """


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
    """The same for a decision about one token, in plain numbers."""
    one, available = decision.plain, as_row(expert_availability)
    for candidate in one.candidates:
        if candidate and not available[candidate - 1]:
            break
    else:  # nothing to take
        return decision
    kept = [slot for slot, candidate in enumerate(one.candidates) if candidate and available[candidate - 1]]
    lost = len(one.candidates) - len(kept)
    candidates = (*(one.candidates[slot] for slot in kept), *[0] * lost)
    scores = (*(one.scores[slot] for slot in kept), *[0.0] * lost)
    return decision.of_one(one._replace(candidates=candidates, scores=scores), decision.expert_ids)
