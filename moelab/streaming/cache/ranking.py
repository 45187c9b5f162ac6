"""What an eviction policy is, and the kind that gives every resident a rank.

A key is layer·E + expert. Visit v is one layer's turn in one pass, of layer v mod L. A policy's life:
`begin(layers, experts)` makes all state anew (what is there before it is configuration), then any order of
`touch`, `insert`, `victim`, `remove` and `expect`, with visits that never go back.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Iterator
from contextlib import closing

__all__ = ["Policy", "Ranked"]


class Policy:
    """Base of all policies. `partitioned`: each layer has an equal part of the budget, and its own copy of this."""

    name: str
    partitioned = False

    def begin(self, layers: int, experts: int) -> None:
        """Forget everything; L layers of E experts."""
        raise NotImplementedError

    def touch(self, visit: int, keys: list[int]) -> None:
        """`visit` uses `keys`, all of its layer; those that are not resident are being read and count as resident."""
        raise NotImplementedError

    def insert(self, key: int) -> None:
        """A prefetched key has become resident without being used."""
        raise NotImplementedError

    def victim(self, visit: int, spared: Container[int]) -> int | None:
        """Resident that goes first, of those not `spared`; no longer resident afterwards. None = all are spared."""
        raise NotImplementedError

    def victims(self, visit: int, spared: Container[int]) -> Iterator[int]:
        """Victims one after another, for who evicts several in one go. To be closed before anything else is called."""
        while (key := self.victim(visit, spared)) is not None:
            yield key

    def remove(self, key: int) -> None:
        """`key` is not resident after all (its read failed, say). Nothing happens if it was not."""
        raise NotImplementedError

    def expect(self, keys: Iterable[int]) -> None:
        """Predictions name these keys. Only a policy that scores with predictions cares."""

    def unexpect(self, keys: Iterable[int]) -> None:
        """The predictions of these keys have come true or lapsed."""


class Ranked(Policy):
    """Residents in a heap, lowest rank evicted first; entries that were ranked again or evicted are stale."""

    def begin(self, layers, experts):
        self.rank: dict[int, tuple] = {}
        self.heap: list[tuple] = []

    def put(self, key: int, rank: tuple) -> None:
        """`key` is resident and has this rank from now on."""
        self.rank[key] = rank
        heapq.heappush(self.heap, (rank, key))
        if len(self.heap) > 64 + 4 * len(self.rank):  # a long run must not grow by its stale entries
            self.heap = [(rank, key) for key, rank in self.rank.items()]
            heapq.heapify(self.heap)

    def victim(self, visit, spared):
        with closing(self.victims(visit, spared)) as leaving:
            return next(leaving, None)

    def victims(self, visit, spared):
        held = []  # what is spared is taken out and put back once, not for every victim
        try:
            while self.heap:
                entry = heapq.heappop(self.heap)
                rank, key = entry
                if self.rank.get(key) != rank:
                    continue
                if key in spared:
                    held.append(entry)
                else:
                    del self.rank[key]
                    yield key
        finally:
            for entry in held:
                heapq.heappush(self.heap, entry)

    def remove(self, key):
        self.rank.pop(key, None)
