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

from ..errors import ContractError, GeometryError
from .eviction import Policy

__all__ = ["Part", "divide"]


@dataclass(slots=True)
class Part:
    """Layers that compete for `limit` slots of a pool; `used` of them are resident or in flight, `pinned` never go."""

    layers: range | tuple[int, ...]
    limit: int
    pinned: int
    used: int = 0
    policy: Policy = field(init=False)


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
            fix="raise the budget, or say below_cycle=True (a cache by recency then hits nothing)",
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
                    "too few slots are left to choose", field="budget, pins", got=(budget, pinned),
                    expected=f">= {needed} slots beside {pinned} pins, not {share - pinned}, in layers {mine}",
                )  # fmt: skip
            parts.append(Part(mine, share, pinned))
    return tuple(slots), [sizes.index(size) for size in slot_bytes], parts
