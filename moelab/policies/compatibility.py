"""Compatibility-constrained top-2: only pairs that are known to work together.

Two specialists trained apart may disagree when mixed. An immutable index, built once, lists the
pairs that may run together, and the policy searches those alone: among the pairs whose scores are
both strictly positive it runs the one with the largest sum, equal sums by append order of the pair.
With no such pair the token goes to the anchor, even when two incompatible specialists score higher.

The pairs of a bank of N may be half of N^2, but they come in *cliques*, groups in which every two may run
together, and the best pair of a clique is its two best members. So the pairs are covered by cliques once, and
what is searched for a token is the best pair of each.

In the shape descriptions, `B` is the batch, `T` the tokens, `N` the specialists, `M` the pairs and `C` the
cliques of `L` members.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, groupby, pairwise

import torch
from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import Row, best_of, check_ids, check_sequence, some_of
from moelab.policies.decisions import rank
from moelab.policies.selection import Selection

# Scores held at once, so that overlapping cliques of many specialists do not exhaust memory.
_SCORES_AT_ONCE = 1 << 22


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
        object.__setattr__(
            self, "pairs", tuple(check_sequence("pairs", pair) for pair in check_sequence("pairs", self.pairs))
        )
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

    @cached_property
    def cliques(self) -> tuple[tuple[int, ...], ...]:
        """`[C]` of ascending positions, the shortest first: every pair lies in one, and each holds only pairs."""
        beside = [set() for _ in range(self.size)]
        for i, j in self.pairs:
            beside[i].add(j)
        covered, found = set(), []
        for pair in self.pairs:
            if pair not in covered:
                clique, common = list(pair), beside[pair[0]] & beside[pair[1]]
                while common:
                    clique.append(min(common))
                    common &= beside[clique[-1]]
                covered.update(combinations(clique, 2))
                found.append(tuple(clique))
        return tuple(sorted(found, key=len))

    @cached_property
    def members(self) -> tuple[slice | list[int], ...]:
        """`[C]` where a clique's own are in a row of N: of those beside each other, a slice."""
        runs = ((clique, clique[-1] - clique[0] < len(clique)) for clique in self.cliques)
        return tuple(slice(clique[0], clique[-1] + 1) if run else list(clique) for clique, run in runs)

    @cached_property
    def tables(self) -> tuple[Tensor, ...]:
        """The same as candidates, `[C, L]` i64 for every length."""
        return tuple(torch.tensor([*some]) + 1 for _, some in groupby(self.cliques, key=len))

    @classmethod
    def from_groups(cls, expert_ids: Sequence[str], groups: Sequence[Hashable]) -> CompatibilityIndex:
        """Specialists of the same group may run together; groups: `[N]` the group of each."""
        expert_ids = check_ids(expert_ids)
        groups = groups if isinstance(groups, str) else check_sequence("groups", groups)  # "aab" is three groups
        if len(groups) != len(expert_ids):
            raise PolicyError(
                "groups do not match the ids", field="groups", got=len(groups), expected=f"{len(expert_ids)} groups"
            )
        pairs = (pair for pair in combinations(range(len(groups)), 2) if groups[pair[0]] == groups[pair[1]])
        return cls(expert_ids, tuple(pairs))


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
        if expert_ids is not self.index.expert_ids and expert_ids != self.index.expert_ids:
            raise PolicyError(
                "the index was built for another bank", field="index", got=self.index.expert_ids, expected=expert_ids
            )

    def choose(self, bank: Tensor) -> Tensor:
        rows = bank.flatten(0, 1)
        parts = rows.split(max(1, _SCORES_AT_ONCE // max(1, sum(map(len, self.index.cliques)))))
        return torch.cat([self._best_pairs(part) for part in parts]).view(*bank.shape[:2], 2)

    def _best_pairs(self, rows: Tensor) -> Tensor:
        """`[R, N + 1]` bank rows to `[R, 2]` candidates."""
        # The anchor twice, of value 0, is what any pair of two positive scores beats.
        pairs, values = [rows.new_zeros(len(rows), 1, 2, dtype=torch.int64)], [rows.new_zeros(len(rows), 1)]
        for table in self.index.tables:
            members = table.to(rows.device)
            scores = rows[:, members]
            two = rank(scores, 2)
            first, second = scores.gather(-1, two).double().unbind(-1)
            pairs.append(members.expand_as(scores).gather(-1, two))
            # In float64, where the sum of two float32 scores of like size is exact, so that only real ties tie.
            values.append((first + second).where(second > 0, -torch.inf))
        pair, value = torch.cat(pairs, 1), torch.cat(values, 1)
        order = pair.amin(-1) * rows.shape[-1] + pair.amax(-1)
        order = order.where(value == value.amax(-1, keepdim=True), rows.shape[-1] ** 2)
        return pair.gather(1, order.argmin(-1)[:, None, None].expand(-1, 1, 2)).squeeze(1)

    def choose_one(self, row: Row, dtype: torch.dtype) -> list[int]:
        best, found = 0.0, (0, 0)
        if not isinstance(row, list) and len(row) < 16 * len(self.index.cliques):
            row = row.tolist()  # an array is sooner handled only where the cliques are long
        for clique, members in zip(self.index.cliques, self.index.members, strict=True):
            scores = some_of(row, members)  # a clique has two at least
            i, first = best_of(scores)
            if first + first < best:  # none of its pairs has a larger sum
                continue
            scores[i] = -math.inf
            j, second = best_of(scores)
            if second > 0 and first + second >= best:
                pair = clique[i] + 1, clique[j] + 1
                if first + second > best or sorted(pair) < sorted(found):
                    best, found = first + second, pair
        return list(found)
