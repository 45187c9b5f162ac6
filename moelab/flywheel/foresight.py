"""Eviction policies that are told the future: what better eviction could give, at most.

`Lookahead(tokens)` knows the next few tokens exactly: the bound for a perfect predictor that is used for
eviction at that horizon. `Opt` knows everything and evicts what is used last (Belady 1966; with experts of
unequal size a very good bound rather than the exact optimum).

`residency.replay` calls `foresee(visits)` before `begin`; otherwise they are policies like those of
`moelab.streaming.cache.eviction`, for a cache that is only ever filled by the visits themselves.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ..errors import ContractError
from ..streaming.cache.eviction import Ranked

if TYPE_CHECKING:
    from .residency import Visits

__all__ = ["Foresight", "Lookahead", "Opt"]


class Foresight(Ranked):
    """Base of policies that know the visits to come."""

    def foresee(self, visits: Visits) -> None:
        """These are the visits that `touch` will bring, all of them and in this order."""
        self.visits, self.following = visits, visits.next_use()


class Lookahead(Foresight):
    """Know the next `tokens` passes exactly: evict what they do not use, else what they use last.

    Args:
        tokens: passes known ahead, >= 1.
        fallback: how to choose among experts not used in that window: "lru", or "lfu" over all layers.
    """

    def __init__(self, *, tokens: int, fallback: str = "lru"):
        if tokens < 1 or fallback not in ("lru", "lfu"):
            raise ContractError(
                "no such lookahead", field="tokens, fallback", got=(tokens, fallback), expected=">= 1, 'lru' or 'lfu'"
            )
        self.tokens, self.frequent = tokens, fallback == "lfu"
        self.name = f"lookahead-{tokens}"

    def begin(self, layers, experts):
        super().begin(layers, experts)
        self.window = self.tokens * layers
        self.next: dict[int, int] = {}
        self.uses: dict[int, int] = defaultdict(int)
        self.stamp = 0

    def touch(self, visit, keys):
        a = self.visits.offsets[visit]
        for key, following in zip(keys, self.following[a : a + len(keys)].tolist(), strict=True):
            self.next[key] = following
            self.uses[key] += 1
            self.stamp += 1
            if following <= visit + self.window:
                self.put(key, (1, -following))
            else:
                self.put(key, (0, self.uses[key] * self.frequent, self.stamp))
        arriving = visit + self.window  # the visit that has just come into view
        if arriving < len(self.visits.offsets) - 1:
            for key in self.visits.keys[self.visits.offsets[arriving] : self.visits.offsets[arriving + 1]].tolist():
                if key in self.rank and self.next[key] == arriving:
                    self.put(key, (1, -arriving))


class Opt(Foresight):
    """Know everything: evict what is used last or never, even if it has only just been read."""

    name = "opt"

    def touch(self, visit, keys):
        a = self.visits.offsets[visit]
        for key, following in zip(keys, self.following[a : a + len(keys)].tolist(), strict=True):
            self.put(key, (-following,))

    def victims(self, visit, spared):
        return super().victims(visit, frozenset())
