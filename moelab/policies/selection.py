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
candidate bank, which other policies build on. A single token, as in decode, is chosen for by `choose_one`
in plain numbers: a dozen calls of a tensor library cost more there than the whole choice. In the shape
descriptions, `B` is the batch, `T` the tokens, `N` the specialists and `S` the slots of a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import Row, best_of, check_count, check_number, check_scores
from moelab.policies.decisions import Decision, OneToken, Top1Decision, TopKDecision, rank, with_anchor


@dataclass(frozen=True)
class Selection:
    """A selection policy: `choose` and `choose_one` are the rule, the rest is common to all."""

    decision_type: ClassVar[type[Decision]] = TopKDecision

    def __call__(self, scores: Tensor, *, expert_ids: Sequence[str], package_scores: Tensor | None = None) -> Decision:
        """Decide every token.

        scores: `[B, T, N]` finite calibrated scores; N may be 0, and every token goes to the anchor.
        expert_ids: `[N]` distinct names in append order.
        package_scores: for a hierarchical selection with given evidence, else None.
        Raises `PolicyError` when one of them is anything else.
        """
        ids, row = check_scores(scores, expert_ids)
        return self.select(scores, ids, row=row, package_scores=package_scores)

    def select(
        self,
        scores: Tensor,
        expert_ids: tuple[str, ...],
        *,
        row: Row | None = None,
        package_scores: Tensor | None = None,
    ) -> Decision:
        """Decide on what `check_scores` has passed; row: `[N]` scores of a single token, else None."""
        self.check_experts(expert_ids)
        self.check_packages(scores, package_scores)
        if row is not None:
            return self.decide_one(scores, row, self.choose_one(row, scores.dtype), expert_ids)
        bank = with_anchor(scores)
        return self.decide(bank, self.choose(bank.detach()), expert_ids)

    def check_experts(self, expert_ids: tuple[str, ...]) -> None:
        """Refuse a bank of specialists that this policy cannot work on."""

    def check_packages(self, scores: Tensor, package_scores: Tensor | None) -> None:
        """Refuse package scores that are not what this policy needs."""
        if package_scores is not None:
            name, got = type(self).__name__, type(package_scores).__name__
            raise PolicyError(f"{name} has no packages", field="package_scores", got=got, expected="None")

    def choose(self, bank: Tensor) -> Tensor:
        """The rule: `[B, T, N + 1]` candidate scores to `[B, T, S]` candidates, 0 in inactive slots.

        A specialist that must not be chosen may have the score minus infinity.
        """
        raise NotImplementedError

    def choose_one(self, row: Row, dtype: torch.dtype) -> list[int]:
        """The rule for a single token: `[N]` scores, given in that dtype, to `[S]` candidates."""
        return self.choose(torch.tensor([[[0.0, *row]]], dtype=dtype)).flatten().tolist()

    def decide(self, bank: Tensor, indices: Tensor, expert_ids: tuple[str, ...], **extra: Tensor) -> Decision:
        """Attach to the chosen indices their own scores."""
        scores = bank.gather(-1, indices)
        if self.decision_type is Top1Decision:
            indices, scores = indices.squeeze(-1), scores.squeeze(-1)
        return self.decision_type(indices, scores, expert_ids, **extra)

    def decide_one(
        self, scores: Tensor, row: Row, chosen: list[int], expert_ids: tuple[str, ...], **more: int
    ) -> Decision:
        """The same for a single token."""
        if scores.requires_grad:  # they flow through tensors alone
            indices = torch.tensor([[chosen]], device=scores.device)
            extra = {name: torch.tensor([[value]], device=scores.device) for name, value in more.items()}
            return self.decide(with_anchor(scores), indices, expert_ids, **extra)
        own = tuple([float(row[k - 1]) if k else 0.0 for k in chosen])
        return self.decision_type.of_one(OneToken(tuple(chosen), own, scores.dtype, scores.device, more), expert_ids)


@dataclass(frozen=True)
class RankedSelection(Selection):
    """Keep of the ranking every slot whose score is above the slot's threshold.

    whole: keep all slots or none.
    """

    whole: ClassVar[bool] = False

    @property
    def thresholds(self) -> tuple[float, ...]:
        """`[S]` what the score of each slot must exceed, in ascending order."""
        raise NotImplementedError

    def choose(self, bank: Tensor) -> Tensor:
        limits = _limits(self.thresholds, bank.dtype, bank.device)
        ranked = rank(bank, len(limits))
        # Scores fall along the slots and thresholds do not, so what clears its threshold is a prefix.
        kept = bank.gather(-1, ranked) > limits
        return ranked * (kept[..., -1:] if self.whole else kept)

    def choose_one(self, row: Row, dtype: torch.dtype) -> list[int]:
        limits, chosen = _plain_limits(self.thresholds, dtype), []
        for limit in limits if len(row) else ():
            best, value = best_of(row)
            if not value > limit:
                break
            if not chosen:
                row = row.copy()
            row[best] = -math.inf
            chosen.append(best + 1)
        if self.whole and len(chosen) < len(limits):
            chosen = []
        return chosen + [0] * (len(limits) - len(chosen))


@dataclass(frozen=True)
class AnchoredTop1Selection(RankedSelection):
    """Run the best specialist if its score is strictly positive, else the anchor."""

    decision_type: ClassVar[type[Decision]] = Top1Decision
    thresholds: ClassVar[tuple[float, ...]] = (0.0,)

    def choose_one(self, row: Row, dtype: torch.dtype) -> list[int]:
        best, value = best_of(row) if len(row) else (0, 0.0)
        return [best + 1 if value > 0 else 0]


@dataclass(frozen=True)
class AnchorVetoTop2Selection(RankedSelection):
    """Run the two best specialists if both scores are strictly positive, else the anchor.

    The anchor vetoes the pair by ranking first or second: one strong specialist is not enough.
    """

    thresholds: ClassVar[tuple[float, ...]] = (0.0, 0.0)
    whole: ClassVar[bool] = True


@dataclass(frozen=True)
class AdaptiveTop1Top2Selection(RankedSelection):
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

    @property
    def thresholds(self) -> tuple[float, ...]:
        return (0.0, self.mixture_threshold)


@dataclass(frozen=True)
class DynamicKSelection(RankedSelection):
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

    @property
    def thresholds(self) -> tuple[float, ...]:
        return (self.threshold,) * self.k_max


@lru_cache
def _limits(thresholds: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The thresholds rounded to the dtype of the scores."""
    return torch.tensor(thresholds, dtype=dtype, device=device)


@lru_cache
def _plain_limits(thresholds: tuple[float, ...], dtype: torch.dtype) -> tuple[float, ...]:
    """The same as plain numbers."""
    return tuple(_limits(thresholds, dtype, torch.device("cpu")).tolist())
