"""How a byte budget becomes slots: one pool for each size of expert, and in it one part or one a layer.

A token uses K experts of each layer, so a budget of c token cycles is c·K slots for each layer, whatever
their sizes: pools get c·K slots for each of their layers, which is the share of the budget that they have of
a token's bytes. Below one cycle a cache that evicts by recency hits nothing at all, and is refused.

A *part* is a set of layers that compete for slots. A pool is one part, unless the policy is partitioned:
then each of its layers is one, with an equal number of slots (±1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import ContractError, GeometryError
from .eviction import Policy

__all__ = ["Grant", "Part", "Pools"]


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to read one expert into one slot.

    Attributes:
        key, pool, slot: which expert, and where.
        generation: number of this grant; tells it from any earlier one, also of the same key in another slot.
        evicted: the key that had to go, if any.
    """

    key: int
    pool: int
    slot: int
    generation: int
    evicted: tuple[int, ...]


@dataclass(slots=True)
class Part:
    """Layers that compete for `limit` slots of a pool; `used` of them are resident or in flight, `pinned` never go."""

    layers: range | tuple[int, ...]
    limit: int
    pinned: int
    used: int = 0
    policy: Policy = field(init=False)


class Pools:
    """The slots: which are free, and how often any was granted. Arguments and errors as `divide`.

    Attributes:
        slots: of each pool.
        of: pool of each layer.
        parts, part: all parts; that of each layer.
        occupied, high_water: bytes of slots in use, and their maximum.
    """

    def __init__(self, *, layers: int, slot_bytes: Sequence[int], **figures):
        self.slots, self.of, self.parts = divide(layers=layers, slot_bytes=slot_bytes, **figures)
        self.part = [next(part for part in self.parts if layer in part.layers) for layer in range(layers)]
        self.slot_bytes = slot_bytes
        self.occupied = self.high_water = 0
        self._free = [list(range(count))[::-1] for count in self.slots]
        self._grants = 0

    def take(self, layer: int) -> int | None:
        """A free slot for this layer; None if its part is full."""
        part = self.part[layer]
        if part.used == part.limit:
            return None
        part.used += 1
        self.occupied += self.slot_bytes[layer]
        self.high_water = max(self.high_water, self.occupied)
        return self._free[self.of[layer]].pop()

    def give(self, layer: int, slot: int) -> None:
        """The slot is free again."""
        self.part[layer].used -= 1
        self.occupied -= self.slot_bytes[layer]
        self._free[self.of[layer]].append(slot)

    def grant(self, key: int, layer: int, slot: int, evicted: tuple[int, ...]) -> Grant:
        """The next generation, for this key."""
        self._grants += 1
        return Grant(key, self.of[layer], slot, self._grants, evicted)

    def reset_high_water(self) -> int:
        peak, self.high_water = self.high_water, self.occupied
        return peak


def divide(
    *,
    layers: int,
    experts: int,
    slot_bytes: Sequence[int],
    budget: int,
    top_k: int,
    pins: frozenset[int],
    partitioned: bool,
    below_cycle: bool,
) -> tuple[tuple[int, ...], list[int], list[Part]]:
    """Slots of each pool, pool of each layer, and the parts. Arguments as `Cache`.

    Raises:
        GeometryError: not one positive size a layer, or K experts of E.
        ContractError: the budget is below one token cycle (or one slot a part), or pins leave no room for a token.
    """
    if len(slot_bytes) != layers or min(slot_bytes, default=0) <= 0 or not 1 <= top_k <= experts:
        raise GeometryError(
            "no such geometry", field="slot_bytes, top_k", got=(list(slot_bytes), top_k),
            expected=f"{layers} positive sizes, 1 to {experts}",
        )  # fmt: skip
    if any(not 0 <= key < layers * experts for key in pins):
        raise GeometryError("no such expert", field="pins", got=sorted(pins), expected=f"0 to {layers * experts - 1}")
    cycle = top_k * sum(slot_bytes)
    if budget < cycle and not below_cycle:
        raise ContractError(
            "the cache is smaller than one token's experts", field="budget", got=budget, expected=f">= {cycle}",
            fix=f"raise the budget; or say below_cycle=True, with {sum(slot_bytes)} bytes or more, an expert a layer "
            "(a cache by recency then hits nothing)",
        )  # fmt: skip
    sizes = sorted(set(slot_bytes))
    members = [tuple(layer for layer in range(layers) if slot_bytes[layer] == size) for size in sizes]
    most = [len(of) * experts for of in members]
    slots = [min(budget * top_k * len(of) // cycle, cap) for of, cap in zip(members, most, strict=True)]
    for pool in reversed(range(len(sizes))):  # what rounding down left may be one more slot of some pool
        left = budget - sum(n * size for n, size in zip(slots, sizes, strict=True))
        slots[pool] += left >= sizes[pool] and slots[pool] < most[pool]
    parts = []
    for of, count in zip(members, slots, strict=True):
        for at, layer in enumerate(of) if partitioned else [(0, None)]:
            mine = of if layer is None else (layer,)
            share = count if layer is None else (at + 1) * count // len(of) - at * count // len(of)
            pinned = sum(key // experts in mine for key in pins)
            needed = 1 if below_cycle else top_k
            if share - pinned < needed:
                raise ContractError(
                    "too few slots of some layers are left to choose from", field="budget, pins",
                    got=f"{budget} bytes: {share} slots for layers {mine}, {pinned} of them pinned",
                    expected=f">= {needed} beside {pinned} pins", fix="raise the budget, or pin fewer",
                )  # fmt: skip
            parts.append(Part(mine, share, pinned))
    return tuple(slots), [sizes.index(size) for size in slot_bytes], parts
