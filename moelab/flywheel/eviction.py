"""Eviction policies: which resident expert goes when a cache is full.

What a policy may know sets it apart. `Lru`, `LayerLfu` and `ExpectedNextUse` know the past.
`Lookahead(tokens)` also knows the next few tokens exactly: the bound for a perfect predictor that is
used for eviction at that horizon. `Opt` knows everything and evicts what is used last (Belady 1966;
with experts of unequal size a very good bound rather than the exact optimum).

LRU over all layers has a cliff: layers are visited in a cycle, so with less than one token's experts
in the cache it evicts precisely what comes next and hits nothing at all.

`residency.replay` drives a policy: `begin(visits)`, then for each visit `touch(visit, keys)`, and
`victim(visit, spared)` until the budget holds. A key is layer·E + expert; visit v is layer v mod L.
`spared` are the keys of this visit, which a policy gives up last.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ContractError

if TYPE_CHECKING:
    from .residency import Visits

__all__ = ["ExpectedNextUse", "LayerLfu", "Lookahead", "Lru", "Opt"]

NEVER = 1 << 60
"""Visit of an expert's next use when there is none."""


class Policy:
    """Base of all policies. `partitioned`: the budget is split equally among the layers."""

    name: str
    partitioned = False


class Lru(Policy):
    """Evict what was used longest ago, over all layers together."""

    name = "lru"

    def begin(self, visits: Visits) -> None:
        self.order: dict[int, None] = {}  # residents, least recent first

    def touch(self, visit: int, keys: list[int]) -> None:
        for key in keys:
            self.order.pop(key, None)
            self.order[key] = None

    def victim(self, visit: int, spared: frozenset[int]) -> int:
        key = next(iter(self.order))  # what the visit used is at the end
        del self.order[key]
        return key


class _Ranked(Policy):
    """Residents in a heap, lowest rank evicted first; entries that were ranked again or evicted are stale."""

    def begin(self, visits: Visits) -> None:
        self.rank: dict[int, tuple] = {}
        self.heap: list[tuple] = []

    def _put(self, key: int, rank: tuple) -> None:
        self.rank[key] = rank
        heapq.heappush(self.heap, (rank, key))

    def victim(self, visit: int, spared: frozenset[int]) -> int:
        held = []
        while self.heap:
            entry = heapq.heappop(self.heap)
            if self.rank.get(entry[1]) != entry[0]:
                continue
            held.append(entry)
            if entry[1] not in spared:
                break
        chosen = held.pop() if held[-1][1] not in spared else held.pop(0)
        for entry in held:
            heapq.heappush(self.heap, entry)
        del self.rank[chosen[1]]
        return chosen[1]


class LayerLfu(_Ranked):
    """An equal part of the budget for each layer; in it, evict what was used least often, then longest ago.

    Uses are counted for ever, also while not resident.
    """

    name = "layer-lfu"
    partitioned = True

    def begin(self, visits):
        self.uses = [0] * (visits.layers * visits.experts)
        self.stamp = 0
        self.ranks = [({}, []) for _ in range(visits.layers)]

    def touch(self, visit, keys):
        self.rank, self.heap = self.ranks[visit % len(self.ranks)]
        for key in keys:
            self.uses[key] += 1
            self.stamp += 1
            self._put(key, (self.uses[key], self.stamp))


class Lookahead(_Ranked):
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

    def begin(self, visits):
        super().begin(visits)
        self.visits, self.following = visits, visits.next_use()
        self.window = self.tokens * visits.layers
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
                self._put(key, (1, -following))
            else:
                self._put(key, (0, self.uses[key] * self.frequent, self.stamp))
        arriving = visit + self.window  # the visit that has just come into view
        if arriving < len(self.visits.offsets) - 1:
            for key in self.visits.keys[self.visits.offsets[arriving] : self.visits.offsets[arriving + 1]].tolist():
                if key in self.rank and self.next[key] == arriving:
                    self._put(key, (1, -arriving))


class Opt(_Ranked):
    """Know everything: evict what is used last or never, even if it has only just been read."""

    name = "opt"

    def begin(self, visits):
        super().begin(visits)
        self.visits, self.following = visits, visits.next_use()

    def touch(self, visit, keys):
        a = self.visits.offsets[visit]
        for key, following in zip(keys, self.following[a : a + len(keys)].tolist(), strict=True):
            self._put(key, (-following,))

    def victim(self, visit, spared):
        return super().victim(visit, frozenset())


class ExpectedNextUse(Policy):
    """Evict what is expected to be used last: visits to its layer's turn + L·(1-p)/p.

    p is the decayed share of the layer's passes that used the expert, and (1-p)/p the mean number of passes
    without it. Knows the past only.

    Args:
        decay: per pass, in (0, 1).
    """

    name = "expected-next-use"

    def __init__(self, *, decay: float = 0.9):
        if not 0 < decay < 1:
            raise ContractError("no such decay", field="decay", got=decay, expected="inside (0, 1)")
        self.decay = decay

    def begin(self, visits):
        self.layers, self.experts = visits.layers, visits.experts
        self.share = np.zeros(visits.layers * visits.experts)
        self.held = np.zeros(visits.layers * visits.experts, bool)
        self.turn = np.repeat(np.arange(visits.layers), visits.experts)
        self.order: Iterator[int] = iter(())
        self.ordered = -1

    def touch(self, visit, keys):
        layer = visit % self.layers
        mine = self.share[layer * self.experts : (layer + 1) * self.experts]
        mine *= self.decay
        self.share[keys] += 1 - self.decay
        self.held[keys] = True

    def victim(self, visit, spared):
        if self.ordered != visit:
            self.ordered = visit
            keys = np.flatnonzero(self.held)
            wait = (self.turn[keys] - visit - 1) % self.layers + 1
            share = np.maximum(self.share[keys], 1e-6)  # finite, and still longer than any thread
            expected = wait + self.layers * (1 - share) / share
            expected[np.isin(keys, list(spared))] = -1
            self.order = iter(keys[np.argsort(-expected, kind="stable")].tolist())
        key = next(self.order)
        self.held[key] = False
        return key
