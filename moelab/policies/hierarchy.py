r"""Hierarchical selection: choose a package against the anchor, then specialists inside it.

Specialists are appended package by package, so package p owns a run of candidates. Level one ranks
the packages by their own evidence with the anchor at 0, by the rule of anchored top-1. Level two
applies any other selection policy to the specialists of that package alone, against the anchor
again. Packages may have different sizes.

Where the evidence of a package comes from is a named choice:

    given       the caller's `package_scores`
    max         the best score in the package
    logsumexp   $\log\sum_k e^{s_k}$ over the package, which many fair specialists can win

In the shape descriptions, `B` is the batch, `T` the tokens, `N` the specialists and `P` the
packages.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import (
    Row,
    as_row,
    best_of,
    check_choice,
    check_count,
    check_finite,
    check_sequence,
    check_tensor,
)
from moelab.policies.decisions import Decision, TopKDecision, rank, with_anchor
from moelab.policies.selection import AnchorVetoTop2Selection, RankedSelection, Selection

EVIDENCE = ("given", "max", "logsumexp")


@dataclass(frozen=True, eq=False)
class HierarchicalDecision(TopKDecision):
    """A decision that also says which package won.

    selected_indices: `[B, T, S]` i64 candidates over all packages, as in `TopKDecision`.
    selected_scores: `[B, T, S]`.
    package_indices: `[B, T]` i64, package p as p + 1, 0 where the anchor won the first level. A
        token whose package has too little evidence inside keeps its package here and still goes to
        the anchor.
    """

    package_indices: Tensor


@dataclass(frozen=True)
class HierarchicalSelection(Selection):
    """One package, then `local` inside it.

    package_sizes: `[P]` specialists of each package, in append order, summing to N.
    local: the policy inside the package, one that fills slots.
    package_evidence: `"given"`, `"max"` or `"logsumexp"`.
    """

    decision_type: ClassVar[type[Decision]] = HierarchicalDecision

    package_sizes: tuple[int, ...]
    local: Selection = field(default_factory=AnchorVetoTop2Selection)
    package_evidence: str = "max"

    def __post_init__(self):
        object.__setattr__(self, "package_sizes", check_sequence("package_sizes", self.package_sizes))
        for size in self.package_sizes:
            check_count("package_sizes", size)
        check_choice("package_evidence", self.package_evidence, EVIDENCE)
        if not isinstance(self.local, Selection) or self.local.decision_type is not TopKDecision:
            got = type(self.local).__name__
            raise PolicyError("local cannot choose in a package", field="local", got=got, expected="a top-k selection")
        if isinstance(self.local, HierarchicalSelection):
            raise PolicyError(
                "local is itself hierarchical", field="local", got="HierarchicalSelection", expected="a flat selection"
            )

    def select(
        self,
        scores: Tensor,
        expert_ids: tuple[str, ...],
        *,
        row: Row | None = None,
        package_scores: Tensor | None = None,
    ) -> HierarchicalDecision:
        """Decide on checked scores; package_scores: `[B, T, P]` finite, exactly with evidence `"given"`."""
        self.check_experts(expert_ids)
        self.check_packages(scores, package_scores)
        if row is not None:
            package, chosen = self.choose_both(scores, row, package_scores)
            return self.decide_one(scores, row, chosen, expert_ids, package_indices=package)
        bank = with_anchor(scores)
        package = rank(with_anchor(self.evidence(scores, package_scores)), 1).squeeze(-1)
        return self.decide(
            bank, self.local.choose(self.inside(bank.detach(), package)), expert_ids, package_indices=package
        )

    def choose_both(self, scores: Tensor, row: Row, package_scores: Tensor | None) -> tuple[int, list[int]]:
        """For a single token, the package and the `[S]` candidates inside it."""
        largest = self.package_evidence == "max"
        evidence = row if largest else as_row(self.evidence(scores, package_scores))
        best, value = best_of(evidence) if len(evidence) else (0, 0.0)
        package = first = stop = 0
        if value > 0:
            # The package of the best specialist, or the best package.
            package = bisect_left(self.bounds, best + 1) if largest else best + 1
            first, stop = self.bounds[package - 1], self.bounds[package]
        if isinstance(self.local, RankedSelection):  # it knows no specialist by position
            chosen = self.local.choose_one(row[first:stop], scores.dtype)
            return package, [first + k if k else 0 for k in chosen]
        inside = [-math.inf] * len(row)
        inside[first:stop] = map(float, row[first:stop])
        return package, self.local.choose_one(inside, scores.dtype)

    def check_experts(self, expert_ids: tuple[str, ...]) -> None:
        if self.bounds[-1] != len(expert_ids):
            expected = f"sizes that sum to {len(expert_ids)}"
            raise PolicyError(
                "the packages do not cover the bank", field="package_sizes", got=self.package_sizes, expected=expected
            )
        self.local.check_experts(expert_ids)

    def check_packages(self, scores: Tensor, package_scores: Tensor | None) -> None:
        if (package_scores is not None) != (self.package_evidence == "given"):
            expected = "a tensor" if self.package_evidence == "given" else f"none with {self.package_evidence!r}"
            got = None if package_scores is None else type(package_scores).__name__
            raise PolicyError(
                "package_scores do not fit the policy", field="package_scores", got=got, expected=expected
            )
        if package_scores is not None:
            check_tensor("package_scores", package_scores, (*scores.shape[:2], len(self.package_sizes)))
            check_finite("package_scores", package_scores)

    def evidence(self, scores: Tensor, package_scores: Tensor | None) -> Tensor:
        """`[B, T, P]` the evidence that ranks the packages; it carries no gradient."""
        if package_scores is not None:
            return package_scores.detach()
        if not self.package_sizes:
            return scores.detach()
        parts = scores.detach().split(self.package_sizes, dim=-1)
        if self.package_evidence == "max":
            return torch.stack([part.amax(-1) for part in parts], dim=-1)
        # In float64, so that a package of one specialist has exactly that specialist's evidence.
        return torch.stack([part.double().logsumexp(-1) for part in parts], dim=-1)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """`[P + 1]` 0 for the anchor, then the last candidate of each package: where the scores of the next begin."""
        return tuple(accumulate(self.package_sizes, initial=0))

    def inside(self, bank: Tensor, package: Tensor) -> Tensor:
        """The candidate bank with every specialist outside the token's package ruled out."""
        sizes = torch.tensor((1, *self.package_sizes), device=bank.device)
        owner = torch.arange(len(sizes), device=bank.device).repeat_interleave(sizes)
        allowed = (owner == package.unsqueeze(-1)) | (owner == 0)
        return bank.masked_fill(~allowed, -torch.inf)
