r"""Selection: turn one token's scores into the specialists that it runs, or into the anchor.

Write $s_k$ for the score of specialist $k$, the calibrated evidence that it beats the anchor, and
$s_0 = 0$ for the anchor. Rank the candidates by descending score, equal scores by lowest index:
$c_1, c_2, \dots$. The anchor is ranked with the rest, and nothing after it has positive evidence,
so it cuts the ranking. The four policies differ only in what they keep before the cut:

    anchored top-1      c_1
    anchor-veto top-2   c_1, c_2  if neither is the anchor, else the anchor
    adaptive top-1/2    c_1, and c_2 if its score is above tau
    dynamic-k           every c_j with j <= k_max and a score above theta

so a specialist runs only on strictly positive evidence, a tie at 0 goes to the anchor and a
positive tie goes to the earliest appended. A threshold is rounded to the dtype of the scores, so that
a score of 0.3 is never above a threshold of 0.3. The choice is discrete and carries no gradient; the
selected scores are the original ones and do.

A policy is a frozen callable `policy(scores, expert_ids=...)`. Its `choose` is the bare rule over a
candidate bank, which other policies build on. In the shape descriptions, `B` is the batch, `T` the
tokens and `N` the specialists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import check_count, check_number, check_scores
from moelab.policies.decisions import Decision, Top1Decision, TopKDecision, rank, with_anchor


@dataclass(frozen=True)
class Selection:
    """A selection policy: `choose` is the rule, the rest is common to all."""

    decision_type: ClassVar[type[Decision]] = TopKDecision

    def __call__(self, scores: Tensor, *, expert_ids: Sequence[str]) -> Decision:
        """Decide every token.

        scores: `[B, T, N]` finite calibrated scores; N may be 0, and every token goes to the anchor.
        expert_ids: `[N]` distinct names in append order.
        Raises `PolicyError` when either is anything else.
        """
        ids = check_scores(scores, expert_ids)
        self.check_experts(ids)
        bank = with_anchor(scores)
        return self.decide(bank, self.choose(bank.detach()), ids)

    def check_experts(self, expert_ids: tuple[str, ...]) -> None:
        """Refuse a bank of specialists that this policy cannot work on."""

    def choose(self, bank: Tensor) -> Tensor:
        """The rule: `[B, T, N + 1]` candidate scores to candidate indices, 0 in inactive slots.

        A specialist that must not be chosen may have the score minus infinity.
        """
        raise NotImplementedError

    def decide(self, bank: Tensor, indices: Tensor, expert_ids: tuple[str, ...], **extra: Tensor) -> Decision:
        """Attach to the chosen indices their own scores."""
        if indices.dim() == bank.dim():
            scores = bank.gather(-1, indices)
        else:
            scores = bank.gather(-1, indices.unsqueeze(-1)).squeeze(-1)
        return self.decision_type(indices, scores, expert_ids, **extra)


@dataclass(frozen=True)
class AnchoredTop1Selection(Selection):
    """Run the best specialist if its score is strictly positive, else the anchor."""

    decision_type: ClassVar[type[Decision]] = Top1Decision

    def choose(self, bank: Tensor) -> Tensor:
        return rank(bank, 1).squeeze(-1)


@dataclass(frozen=True)
class AnchorVetoTop2Selection(Selection):
    """Run the two best specialists if both scores are strictly positive, else the anchor.

    The anchor vetoes the pair by ranking first or second: one strong specialist is not enough.
    """

    def choose(self, bank: Tensor) -> Tensor:
        pair = rank(bank, 2)
        # The second score is positive only where the first is.
        return pair * (bank.gather(-1, pair[..., 1:]) > 0)


@dataclass(frozen=True)
class AdaptiveTop1Top2Selection(Selection):
    """Run no, one or two specialists, as the evidence allows.

    Best score not positive: the anchor. Positive: the best specialist. Second score strictly above
    `mixture_threshold` as well: both.

    mixture_threshold: at least 0, since a second specialist without positive evidence must not
        run; infinity gives anchored top-1.
    """

    mixture_threshold: float = 0.0

    def __post_init__(self):
        threshold = check_number("mixture_threshold", self.mixture_threshold, least=0)
        object.__setattr__(self, "mixture_threshold", threshold)

    def choose(self, bank: Tensor) -> Tensor:
        pair = rank(bank, 2)
        return pair * (bank.gather(-1, pair) > limits(bank, 0.0, self.mixture_threshold))


@dataclass(frozen=True)
class DynamicKSelection(Selection):
    """Run every specialist whose score is positive and above `threshold`, the best `k_max` at most.

    k_max: slots of a token, from 1 to N.
    threshold: at least 0.
    """

    k_max: int
    threshold: float = 0.0

    def __post_init__(self):
        check_count("k_max", self.k_max)
        object.__setattr__(self, "threshold", check_number("threshold", self.threshold, least=0))

    def check_experts(self, expert_ids: tuple[str, ...]) -> None:
        if self.k_max > len(expert_ids):
            expected = f"at most {len(expert_ids)} (the specialists)"
            raise PolicyError("k_max is larger than the bank", field="k_max", got=self.k_max, expected=expected)

    def choose(self, bank: Tensor) -> Tensor:
        ranked = rank(bank, self.k_max)
        # Scores fall along the slots, so what clears the threshold is a prefix.
        return ranked * (bank.gather(-1, ranked) > limits(bank, self.threshold))


def limits(bank: Tensor, *thresholds: float) -> Tensor:
    """What the score of each slot must exceed, rounded to the dtype of the scores."""
    return _limits(thresholds, bank.dtype, bank.device)


@lru_cache
def _limits(thresholds: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(thresholds, dtype=dtype, device=device)
