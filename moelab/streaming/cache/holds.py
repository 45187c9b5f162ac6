"""Reasons why an expert may not be evicted: leased, wanted, in flight; and, weaker, expected.

`Holds` counts the hard reasons. A lease lasts from a visit until its evaluation has returned; a want from the visit
that missed the expert until it is leased or released; a flight as long as a thread may write the slot.
`Expectations` are predictions with an end: they lapse by themselves when the visit they are for has begun.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pools import Grant

__all__ = ["Either", "Expectations", "Flight", "Holds"]


@dataclass(slots=True)
class Flight:
    """A read in progress. `touched`: a visit has named the key, so the policy knows it."""

    grant: Grant
    speculative: bool
    touched: bool


class Either:
    """Union of two containers, for `in`."""

    __slots__ = ("first", "second")

    def __init__(self, first: Container[int], second: Container[int]):
        self.first, self.second = first, second

    def __contains__(self, key: int) -> bool:
        return key in self.first or key in self.second


class Holds:
    """Hard reasons not to evict, by key.

    Args:
        layers, experts: L, E; a key is layer·E + expert.
        pins: keys that are never evicted anyway.

    Attributes:
        keys: held key -> number of reasons.
        here: distinct held keys of each layer, pins not counted.
        wanted: keys of each layer that its visit missed and nobody has leased or released yet.
    """

    def __init__(self, layers: int, experts: int, pins: frozenset[int]):
        self.experts, self.pins = experts, pins
        self.here = [0] * layers
        self.wanted: list[set[int]] = [set() for _ in range(layers)]
        self.keys: dict[int, int] = {}
        self._leases: dict[int, int] = {}

    def add(self, key: int) -> None:
        """One more reason (a flight)."""
        held = self.keys.get(key, 0)
        self.keys[key] = held + 1
        if not held and key not in self.pins:
            self.here[key // self.experts] += 1

    def drop(self, key: int) -> None:
        """One reason fewer."""
        held = self.keys[key] - 1
        if held:
            self.keys[key] = held
        else:
            del self.keys[key]
            if key not in self.pins:
                self.here[key // self.experts] -= 1

    def want(self, key: int) -> None:
        wanted = self.wanted[key // self.experts]
        if key not in wanted:
            wanted.add(key)
            self.add(key)

    def unwant(self, key: int) -> None:
        self.wanted[key // self.experts].remove(key)
        self.drop(key)

    def lease(self, key: int) -> None:
        """One more lease; it takes the place of a want."""
        self._leases[key] = self._leases.get(key, 0) + 1
        wanted = self.wanted[key // self.experts]
        if key in wanted:
            wanted.remove(key)
        else:
            self.add(key)

    def release(self, key: int) -> bool:
        """One lease fewer; False if there was none."""
        leases = self._leases.get(key, 0)
        if not leases:
            return False
        if leases == 1:
            del self._leases[key]
        else:
            self._leases[key] = leases - 1
        self.drop(key)
        return True

    def release_all(self) -> None:
        for key in list(self._leases):
            while self.release(key):
                pass


class Expectations:
    """Keys that predictions name, each until a visit. `keys` is for `in`."""

    def __init__(self):
        self.keys: dict[int, int] = {}  # key -> last visit it is expected for
        self._lapse: list[tuple[int, int]] = []  # heap of (visit, key), possibly outdated

    def add(self, keys: Iterable[int], until_visit: int) -> list[int]:
        """Expect `keys` until that visit, or longer if they were; returns those that were not expected."""
        fresh = []
        for key in keys:
            until = self.keys.get(key)
            if until is None:
                fresh.append(key)
            if until is None or until_visit > until:
                self.keys[key] = until_visit
                heapq.heappush(self._lapse, (until_visit, key))
        return fresh

    def lapsed(self, visit: int) -> list[int]:
        """Keys expected for no visit after this one; the caller removes them."""
        over = []
        while self._lapse and self._lapse[0][0] <= visit:
            until, key = heapq.heappop(self._lapse)
            if self.keys.get(key) == until:
                over.append(key)
        return over
