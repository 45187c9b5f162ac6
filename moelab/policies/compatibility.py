"""Compatibility-constrained top-2: only pairs that are known to work together.

Two specialists trained apart may disagree when mixed. An immutable index, built once, lists the
pairs that may run together, and the policy searches those alone: among the pairs whose scores are
both strictly positive it runs the one with the largest sum, equal sums by append order of the pair.
With no such pair the token goes to the anchor, even when two incompatible specialists score higher.

In the shape descriptions, `B` is the batch, `T` the tokens, `N` the specialists and `M` the pairs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import torch
from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import check_ids
from moelab.policies.decisions import rank, with_anchor
from moelab.policies.selection import Selection

# Pair values held at once, so that one group of many specialists does not exhaust memory.
_VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class CompatibilityIndex:
    """The pairs of specialists that may run together.

    expert_ids: `[N]` the bank it was built for, in append order.
    pairs: `[M]` of (i, j), positions in `expert_ids` with i < j, in ascending order.
    """

    expert_ids: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]

    def __post_init__(self):
        object.__setattr__(self, "expert_ids", check_ids(self.expert_ids))
        object.__setattr__(self, "pairs", tuple(tuple(pair) for pair in self.pairs))
        for pair in self.pairs:
            if len(pair) != 2 or any(type(i) is not int for i in pair) or not 0 <= pair[0] < pair[1] < self.size:
                expected = f"(i, j) with 0 <= i < j < {self.size}"
                raise PolicyError("pairs holds an impossible pair", field="pairs", got=pair, expected=expected)
        for before, after in pairwise(self.pairs):
            if before >= after:
                expected = "distinct pairs in ascending order"
                raise PolicyError("pairs is out of order", field="pairs", got=(before, after), expected=expected)

    @property
    def size(self) -> int:
        """N."""
        return len(self.expert_ids)

    @classmethod
    def from_groups(cls, expert_ids: Sequence[str], groups: Sequence[Hashable]) -> CompatibilityIndex:
        """Specialists of the same group may run together; groups: `[N]` the group of each."""
        if len(groups) != len(expert_ids):
            raise PolicyError(
                "groups do not match the ids", field="groups", got=len(groups), expected=f"{len(expert_ids)} groups"
            )
        pairs = (pair for pair in combinations(range(len(groups)), 2) if groups[pair[0]] == groups[pair[1]])
        return cls(tuple(expert_ids), tuple(pairs))


@dataclass(frozen=True)
class CompatibilityTop2Selection(Selection):
    """Run the best compatible pair, else the anchor.

    index: the allowed pairs, built for exactly the specialists of the call.
    """

    index: CompatibilityIndex

    def __post_init__(self):
        if not isinstance(self.index, CompatibilityIndex):
            got = type(self.index).__name__
            raise PolicyError("index is not an index", field="index", got=got, expected="CompatibilityIndex")

    def check_experts(self, expert_ids: tuple[str, ...]) -> None:
        if expert_ids != self.index.expert_ids:
            raise PolicyError(
                "the index was built for another bank", field="index", got=self.index.expert_ids, expected=expert_ids
            )

    def choose(self, bank: Tensor) -> Tensor:
        # The pairs are the candidates of a bank of their own, again with the anchor first, at 0.
        pairs = torch.tensor(((-1, -1), *self.index.pairs), device=bank.device) + 1
        rows = bank.flatten(0, 1).split(max(1, _VALUES_AT_ONCE // len(pairs)))
        best = torch.cat([rank(with_anchor(pair_values(part, pairs[1:])), 1) for part in rows])
        pair = pairs[best.view(bank.shape[:2])]
        first, second = bank.gather(-1, pair).unbind(-1)
        return torch.where((second > first).unsqueeze(-1), pair.flip(-1), pair)


def pair_values(bank: Tensor, pairs: Tensor) -> Tensor:
    """`[R, N + 1]` bank rows to `[R, M]` values, minus infinity where a score is not positive.

    In float64, where the sum of two float32 scores of like size is exact, so that only real ties tie.
    """
    first, second = (bank[:, column].double() for column in pairs.unbind(-1))
    return (first + second).masked_fill((first <= 0) | (second <= 0), -torch.inf)
