r"""Combination: mix the outputs of the specialists that a token was approved to run.

Selection has already chosen; a combination sees only the $K$ approved outputs $y_i$ and their
scores $s_i$, and cannot change the choice. Every rule here gives weights $w$ that depend on the
scores alone, and $y = \sum_i w_i y_i$:

    score softmax                   w_i = exp(s_i) / sum_j exp(s_j)
    equal                           w_i = 1 / K
    normalised positive evidence    w_i = s_i / sum_j s_j       (s > 0, as selection approved it)

The always-on anchor is another way to mix: the dense anchor $a$ answers every token and the
specialists correct it, $y = a + \sum_i w_i (y_i - a)$. With complete specialists and weights that
sum to 1 this is the plain mix in another order; it differs with unit weights, which add every
correction whole, and for a token without specialists it is exactly $a$.

Weights are computed in float64 and rounded once, to float32 or to the scores' float64, so they are
the same on every machine; outputs are summed slot by slot in at least float32 and rounded to their
own dtype, so a token's result does not depend on the tokens beside it.

In the shape descriptions, `P` is the approved tokens, `K` the specialists of each and `H` the hidden
width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import check_choice, check_finite, check_tensor


@dataclass(frozen=True, eq=False)
class Mixture:
    """The output of a combination.

    output: `[P, H]` in the dtype of the specialists' outputs.
    weights: `[P, K]` the weight of each specialist, float32 or wider, non-negative and summing to 1
        (unit weights excepted).
    """

    output: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Combination:
    """A combination policy: `rule` is the weighting, the rest is common to all.

    needs: names of the further arguments that a call must have, of `features` and `anchor_output`.
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, ranked_outputs: Tensor, *, selected_scores: Tensor, features: Tensor | None = None) -> Mixture:
        """Mix.

        ranked_outputs: `[P, K, H]` outputs of the approved specialists, in the order of the decision.
        selected_scores: `[P, K]` their scores.
        features: `[P, F]` for a learned head, else None.
        Raises `PolicyError` for any other shape, a dtype that is not float, or scores that are not
        finite.
        """
        weights = self.weigh(selected_scores, features=features)
        check_tensor("ranked_outputs", ranked_outputs, (*weights.shape, "H"))
        return Mixture(mix(ranked_outputs, weights), weights)

    def weigh(self, selected_scores: Tensor, *, features: Tensor | None = None) -> Tensor:
        """`[P, K]` scores to `[P, K]` weights."""
        check_tensor("selected_scores", selected_scores, ("P", "K"))
        check_finite("selected_scores", selected_scores)
        if (features is not None) != ("features" in self.needs):
            expected = "a tensor" if features is None else f"none for {type(self).__name__}"
            got = None if features is None else type(features).__name__
            raise PolicyError("features do not fit the combination", field="features", got=got, expected=expected)
        extra = () if features is None else (features,)
        return self.rule(selected_scores.double(), *extra).to(weight_dtype(selected_scores.dtype))

    def rule(self, scores: Tensor) -> Tensor:
        """The weighting: `[P, K]` float64 scores to weights."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScoreSoftmaxCombination(Combination):
    """Weights are the softmax of the selected scores, at temperature 1: scores come calibrated."""

    def rule(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


@dataclass(frozen=True)
class EqualCombination(Combination):
    """Weights are 1 / K."""

    def rule(self, scores: Tensor) -> Tensor:
        return torch.full_like(scores, 1 / max(1, scores.shape[-1]), requires_grad=False)


@dataclass(frozen=True)
class PositiveEvidenceCombination(Combination):
    """Weights are the scores over their sum. A score that is not positive was never approved."""

    def rule(self, scores: Tensor) -> Tensor:
        if not (scores > 0).all():
            got = scores.min().item()
            raise PolicyError("a score is not positive", field="selected_scores", got=got, expected="scores > 0")
        shares = scores / scores.amax(-1, keepdim=True).detach()
        return shares / shares.sum(-1, keepdim=True)


@dataclass(frozen=True)
class UnitWeights(Combination):
    """Weights are 1: for the always-on anchor, whose corrections may add up whole."""

    def rule(self, scores: Tensor) -> Tensor:
        return torch.ones_like(scores, requires_grad=False)


@dataclass(frozen=True)
class AlwaysOnAnchorCombination(Combination):
    """The anchor's own output, corrected by each specialist: $a + \\sum_i w_i d_i$.

    weighting: the rule for the weights; `UnitWeights()` adds every correction whole.
    expert_outputs: `"complete"` when a specialist gives a whole output, so that $d_i = y_i - a$;
        `"delta"` when what it gives is the correction itself.
    """

    weighting: Combination = field(default_factory=ScoreSoftmaxCombination)
    expert_outputs: str = "complete"

    def __post_init__(self):
        check_choice("expert_outputs", self.expert_outputs, ("complete", "delta"))
        if not isinstance(self.weighting, Combination) or isinstance(self.weighting, AlwaysOnAnchorCombination):
            got = type(self.weighting).__name__
            raise PolicyError("weighting is not a weighting", field="weighting", got=got, expected="a Combination")

    @property
    def needs(self) -> frozenset[str]:
        return self.weighting.needs | {"anchor_output"}

    def __call__(
        self, ranked_outputs: Tensor, *, selected_scores: Tensor, anchor_output: Tensor, features: Tensor | None = None
    ) -> Mixture:
        """Mix, as `Combination` does; anchor_output: `[P, H]` of the dense anchor on these tokens."""
        weights = self.weighting.weigh(selected_scores, features=features)
        check_tensor("ranked_outputs", ranked_outputs, (*weights.shape, "H"))
        tokens, _, width = ranked_outputs.shape
        check_tensor("anchor_output", anchor_output, (tokens, width), dtypes=(ranked_outputs.dtype,))
        anchor = anchor_output.to(weight_dtype(anchor_output.dtype))
        output = anchor
        for correction, weight in zip(ranked_outputs.unbind(1), weights.unbind(1), strict=True):
            delta = correction if self.expert_outputs == "delta" else correction - anchor
            output = output + weight.unsqueeze(-1) * delta
        return Mixture(output.to(ranked_outputs.dtype), weights)


def weight_dtype(values: torch.dtype) -> torch.dtype:
    """The dtype that weights and sums of such values are kept in: float32, or float64 for float64."""
    return torch.promote_types(values, torch.float32)


def mix(ranked_outputs: Tensor, weights: Tensor) -> Tensor:
    """`[P, K, H]` outputs and `[P, K]` weights to `[P, H]`, summed in slot order.

    One product and one sum at a time: a fused kernel may round differently at the edge of a batch.
    """
    total = ranked_outputs[:, 0] * weights[:, :1]
    for output, weight in zip(ranked_outputs.unbind(1)[1:], weights.unbind(1)[1:], strict=True):
        total = total + output * weight.unsqueeze(-1)
    return total.to(ranked_outputs.dtype)
