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
from moelab.policies.decisions import CapacityResult, Decision, Top1Decision


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
        available = slot_availability(decision, expert_availability)
        if available.all():  # nothing to take
            return CapacityResult(decision, decision)
        return CapacityResult(decision, keep_slots(decision, decision.slot_mask & available))

    def check_decision(self, decision: Decision) -> None:
        """Refuse a decision that this policy has no rule for."""
        if not isinstance(decision, Decision):
            got = type(decision).__name__
            raise PolicyError("decision is not a decision", field="decision", got=got, expected="Decision")


@dataclass(frozen=True)
class OverflowToAnchorCapacity(Capacity):
    """Top-1: an unavailable specialist's token goes to the anchor, never to the runner-up."""

    def check_decision(self, decision: Decision) -> None:
        super().check_decision(decision)
        if not isinstance(decision, Top1Decision):
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


def slot_availability(decision: Decision, expert_availability: Tensor) -> Tensor:
    """`[B, T, S]` True where the candidate of a slot is available; the anchor always is."""
    indices, experts = decision.slot_indices, len(decision.expert_ids)
    if not isinstance(expert_availability, Tensor) or expert_availability.dim() == 1:
        shape: tuple[int, ...] = (experts,)
    else:
        shape = (*indices.shape[:2], experts)
    check_tensor("expert_availability", expert_availability, shape, dtypes=(torch.bool,))
    available = torch.nn.functional.pad(expert_availability, (1, 0), value=True)
    return available.take(indices) if available.dim() == 1 else available.gather(-1, indices)


def keep_slots(decision: Decision, kept: Tensor) -> Decision:
    """The decision with only those slots, moved up to the front; kept: `[B, T, S]`."""
    order = (~kept).sort(dim=-1, stable=True).indices
    indices = decision.slot_indices.where(kept, 0).gather(-1, order)
    scores = decision.slot_scores.where(kept, 0).gather(-1, order)
    shape = decision.selected_indices.shape
    return replace(decision, selected_indices=indices.view(shape), selected_scores=scores.view(shape))
