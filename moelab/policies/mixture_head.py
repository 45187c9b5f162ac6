r"""A learned mixture: scores choose the specialists, a fitted head says how to weigh them.

The head is affine on a token's features, one logit a rank, $w = \mathrm{softmax}(W f + b)$. It is
fitted offline and frozen: at run time no gradient reaches it, nor the scores or features through
it. A token that keeps fewer specialists than the head has ranks, after capacity, uses the first
logits.

In the shape descriptions, `P` is the approved tokens, `K` the ranks of the head, `F` the features
and `H` the hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import check_count, check_finite, check_number, check_sequence, check_tensor
from moelab.policies.combination import Combination


@dataclass(frozen=True)
class LearnedMixtureCombination(Combination):
    """Weights are the softmax of a frozen affine head on the token's features.

    weight: `[K, F]` numbers.
    bias: `[K]` numbers.
    Plain tuples, so that the head cannot change and a manifest can hold it.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"features"})

    weight: tuple[tuple[float, ...], ...]
    bias: tuple[float, ...]

    def __post_init__(self):
        object.__setattr__(
            self, "weight", tuple(_numbers("weight", row) for row in check_sequence("weight", self.weight))
        )
        object.__setattr__(self, "bias", _numbers("bias", self.bias))
        widths = {len(row) for row in self.weight}
        if len(self.weight) != len(self.bias) or len(widths) != 1:
            got = [len(row) for row in self.weight]
            raise PolicyError("weight is not a [K, F] table", field="weight", got=got, expected=f"K = {len(self.bias)}")

    @cached_property
    def _head(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.weight, dtype=torch.float64), torch.tensor(self.bias, dtype=torch.float64)

    @torch.no_grad()
    def rule(self, scores: Tensor, features: Tensor) -> Tensor:
        tokens, kept = scores.shape
        weight, bias = (part.to(scores.device) for part in self._head)
        check_tensor("features", features, (tokens, weight.shape[1]))
        check_finite("features", features)
        if kept > len(bias):
            raise PolicyError(
                "the head has too few ranks", field="selected_scores", got=kept, expected=f"at most {len(bias)} ranks"
            )
        return (features.double() @ weight[:kept].T + bias[:kept]).softmax(-1)


def fit_mixture_head(
    features: Tensor, ranked_outputs: Tensor, targets: Tensor, *, l2: float = 1e-3, max_iter: int = 200
) -> LearnedMixtureCombination:
    """Fit the head that brings the mixed output nearest to the target, in mean squared error.

    Starts from equal weights and is deterministic (L-BFGS in float64, no sampling).

    features: `[P, F]`.
    ranked_outputs: `[P, K, H]` outputs of the approved specialists, in rank order; no gradient flows
        to them.
    targets: `[P, H]` what the mixture should have given.
    l2: weight of the penalty on `W`, which keeps weights near equal where features say little.
    max_iter: L-BFGS iterations at most.
    Raises `PolicyError` for arguments of other shapes, not finite, or without tokens.
    """
    check_tensor("features", features, ("P", "F"))
    check_tensor("ranked_outputs", ranked_outputs, (len(features), "K", "H"))
    check_tensor("targets", targets, (len(features), ranked_outputs.shape[2]))
    check_number("l2", l2, least=0)
    check_count("max_iter", max_iter)
    if not len(features):
        raise PolicyError("nothing to fit on", field="features", got=0, expected="at least one token")
    given = {"features": features, "ranked_outputs": ranked_outputs, "targets": targets}
    x, y, t = (check_finite(name, value).detach().double() for name, value in given.items())
    weight = torch.zeros(y.shape[1], x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(y.shape[1], dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [weight, bias], max_iter=max_iter, tolerance_grad=1e-10, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        solver.zero_grad()
        mixed = torch.einsum("pk,pkh->ph", (x @ weight.T + bias).softmax(-1), y)
        loss = (mixed - t).square().mean() + l2 * weight.square().mean()
        loss.backward()
        return loss

    solver.step(closure)
    return LearnedMixtureCombination(tuple(map(tuple, weight.tolist())), tuple(bias.tolist()))


def _numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Refuse anything but finite numbers."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise PolicyError(f"{name} is not a list", field=name, got=type(values).__name__, expected="numbers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            raise PolicyError(f"{name} holds no number", field=name, got=value, expected="finite numbers")
    return tuple(map(float, values))
