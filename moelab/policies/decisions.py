"""What a routing policy decided, in a form that execution and evaluation can audit.

Candidate 0 is the anchor, the frozen dense path, whose score is exactly 0. Candidate k is the
specialist `expert_ids[k - 1]`, in stable append order. A decision stores only the chosen
candidates and their scores. Every mask is derived from the indices, so a mask cannot disagree with
the choice: a slot is active exactly when it holds a specialist, and an inactive slot holds index 0
with score 0, whether the anchor was chosen or the slot is padding.

A single token, as in decode, is decided in plain numbers, since every call of a tensor library costs more there
than the choice. Its decision keeps them, for those who come after, and makes its tensors when they are looked at.
Nobody writes to the tensors of a decision: what was made from them, or they from, would not follow.

In the shape descriptions, `B` is the batch, `T` the tokens, `N` the specialists and `S` the slots
of a token, that is the most specialists it may run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

SORT_AT_MOST = 4096
"""Scores up to which one stable sort is faster than a pass over the bank for every slot."""


class OneToken(NamedTuple):
    """A decision about a single token in plain numbers.

    candidates: `[S]` 0 where a slot is inactive; the active ones first.
    scores: `[S]` theirs, 0 where a slot is inactive.
    dtype, device: of the scores that were given, and so of the decision's tensors.
    more: other whole numbers of the decision, by the name of their field.
    """

    candidates: tuple[int, ...]
    scores: tuple[float, ...]
    dtype: torch.dtype
    device: torch.device
    more: dict[str, int]


@dataclass(frozen=True, eq=False)
class Decision:
    """The candidates that each token runs.

    selected_indices: `[B, T]` or `[B, T, S]` i64 candidates, 0 where a slot is inactive.
    selected_scores: same shape, the scores of those candidates, 0 where a slot is inactive. The
        only field that carries a gradient, back to the scores that were given.
    expert_ids: `[N]` the specialists' names in append order.
    """

    selected_indices: Tensor
    selected_scores: Tensor
    expert_ids: tuple[str, ...]

    plain: ClassVar[OneToken | None] = None
    """What a decision about one token was made from, else None."""
    one_token_shape: ClassVar[tuple[int, ...]] = (1, 1, -1)

    @classmethod
    def of_one(cls, plain: OneToken, expert_ids: tuple[str, ...]) -> Self:
        """The decision about a single token; its tensors are made when they are first looked at."""
        decision = object.__new__(cls)
        object.__setattr__(decision, "plain", plain)
        object.__setattr__(decision, "expert_ids", expert_ids)
        return decision

    def __getattr__(self, name: str) -> Tensor:
        one = self.plain
        if one is not None and name == "selected_scores":
            made = torch.tensor(one.scores, dtype=one.dtype, device=one.device).view(self.one_token_shape)
        elif one is not None and name == "selected_indices":
            made = torch.tensor(one.candidates, dtype=torch.int64, device=one.device).view(self.one_token_shape)
        elif one is not None and name in one.more:
            made = torch.tensor([[one.more[name]]], device=one.device)
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__[name] = made
        return made

    @property
    def tokens(self) -> tuple[int, int]:
        """(B, T)."""
        return (1, 1) if self.plain is not None else tuple(self.selected_indices.shape[:2])

    @property
    def slot_indices(self) -> Tensor:
        """`[B, T, S]` the indices with a slot axis, of length 1 for a top-1 decision."""
        return self.selected_indices

    @property
    def slot_scores(self) -> Tensor:
        """`[B, T, S]` the scores with a slot axis."""
        return self.selected_scores

    @cached_property
    def slot_mask(self) -> Tensor:
        """`[B, T, S]` True where a slot runs a specialist. Active slots come first."""
        return self.slot_indices > 0

    @cached_property
    def route_arity(self) -> Tensor:
        """`[B, T]` i64 how many specialists each token runs."""
        return self.slot_mask.sum(-1)

    @cached_property
    def anchor_mask(self) -> Tensor:
        """`[B, T]` True where the anchor answers alone."""
        return self.route_arity == 0


@dataclass(frozen=True, eq=False)
class Top1Decision(Decision):
    """At most one specialist for each token.

    selected_indices: `[B, T]` i64 candidates in 0..N.
    selected_scores: `[B, T]`.
    """

    one_token_shape: ClassVar[tuple[int, ...]] = (1, 1)

    @property
    def slot_indices(self) -> Tensor:
        return self.selected_indices.unsqueeze(-1)

    @property
    def slot_scores(self) -> Tensor:
        return self.selected_scores.unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class TopKDecision(Decision):
    """Up to S specialists for each token, by descending score, equal scores in append order.

    selected_indices: `[B, T, S]` i64; the active slots of a token are a prefix of its slots.
    selected_scores: `[B, T, S]`.
    """

    @cached_property
    def expert_pair_mask(self) -> Tensor:
        """`[B, T]` True where exactly two specialists are approved."""
        return self.route_arity == 2


@dataclass(frozen=True, eq=False)
class CapacityResult:
    """A decision before and after availability.

    decision: what selection asked for.
    effective_routes: what may run, of the same type and shapes as `decision`. A token's routes are
        a subset of what it asked for, in the same order, with the survivors in the first slots.
    """

    decision: Decision
    effective_routes: Decision

    @property
    def route_arity(self) -> Tensor:
        """`[B, T]` i64 how many specialists each token really runs."""
        return self.effective_routes.route_arity


def with_anchor(scores: Tensor) -> Tensor:
    """`[B, T, N]` specialist scores to the `[B, T, N + 1]` candidate bank, anchor first at 0."""
    return torch.nn.functional.pad(scores, (1, 0))


def rank(bank: Tensor, slots: int) -> Tensor:
    """The best `slots` candidates by descending score; equal scores by lowest index.

    Libraries do not promise which of two tied entries `topk` returns, so the tie is broken here.
    A slot beyond the last candidate holds 0, and one for which only candidates at minus infinity are left
    may hold any of them.

    bank: `[B, T, N + 1]` candidate scores, below infinity.
    Returns `[B, T, slots]` i64.
    """
    if bank.numel() <= SORT_AT_MOST and slots <= bank.shape[-1]:
        return bank.sort(dim=-1, descending=True, stable=True).indices[..., :slots]
    bank = bank.clone()
    candidates = torch.arange(bank.shape[-1], dtype=torch.int32, device=bank.device)
    ranked = []
    for _ in range(slots):
        tied = bank == bank.amax(-1, keepdim=True)
        best = torch.where(tied, candidates, bank.shape[-1]).amin(-1).long()
        ranked.append(best)
        bank.scatter_(-1, best.unsqueeze(-1), -torch.inf)
    return torch.stack(ranked, dim=-1)
