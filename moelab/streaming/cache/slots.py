"""Which expert is in which slot, and which may be read into it: a byte budget as a state machine.

The cache owns no memory and reads nothing. It numbers slots, says which expert may be read into which, and
counts. Layers whose experts have the same size share a *pool* of slots (one slab of memory); the budget is
divided among pools as a token's experts are, and eviction never leaves a pool.

The life of an expert's slot:

    absent --reserve--> in flight --settle--> resident --(evicted by another's reserve)--> absent
                            '------abandon--> absent

Nothing leased, wanted or in flight is ever evicted: a lazy evaluation may still read the slot, or a thread write
it. What is expected is protected as well, but a demand that finds nothing else takes it all the same; a speculative
read never does. `cache` says when an expert is which.

Room is made before a read, never after it, so the budget holds at every moment.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

from ...errors import ContractError
from ...routes import DECODED, PREFILLED
from .counters import Counters, Tally
from .eviction import Policy
from .holds import Either, Expectations, Flight, Holds
from .pools import Grant, Part, Pools

__all__ = ["Slots"]


class Slots:
    """The state of all slots (see the module text).

    Args:
        layers, experts: L, E.
        slot_bytes: bytes of a slot of each layer; layers with equal figures share a pool.
        budget: bytes of all slots at most.
        policy: which resident goes first; copied, and begun anew.
        top_k: K, experts a token uses in a layer.
        pins: keys that are never evicted once resident.
        below_cycle: allow a budget below one token cycle, Σ K·slot_bytes, under which LRU hits nothing.
        read_bytes: bytes on disk of an expert of each layer, for the counters; default `slot_bytes`.

    Attributes:
        pool_slots: slots of each pool.
        now: number of the latest visit, -1 before the first; visit v is of layer v mod L.
        occupied_bytes, high_water_bytes: bytes of slots in use (resident or in flight), and their maximum.

    Raises:
        ContractError: the budget is below one token cycle, or pins leave no room for a token.
    """

    def __init__(
        self,
        *,
        layers: int,
        experts: int,
        slot_bytes: Sequence[int],
        budget: int,
        policy: Policy,
        top_k: int,
        pins: Iterable[int] = (),
        below_cycle: bool = False,
        read_bytes: Sequence[int] | None = None,
    ):
        self.layers, self.experts, self.top_k, self.budget = layers, experts, top_k, budget
        self.slot_bytes = tuple(int(size) for size in slot_bytes)
        self.read_bytes = self.slot_bytes if read_bytes is None else tuple(int(size) for size in read_bytes)
        self.pins = frozenset(pins)
        self._pools = Pools(
            layers=layers, experts=experts, slot_bytes=self.slot_bytes, budget=budget, top_k=top_k, pins=self.pins,
            partitioned=policy.partitioned, below_cycle=below_cycle,
        )  # fmt: skip
        self.pool_slots = self._pools.slots
        for part in self._pools.parts:
            part.policy = copy.copy(policy)
            part.policy.begin(layers, experts)
        self._slot: dict[int, int] = {}  # resident key -> slot
        self._flight: dict[int, Flight] = {}
        self._holds = Holds(layers, experts, self.pins)
        self._expected = Expectations()
        self._unused: set[int] = set()  # prefetched, resident, not used yet
        self._seen = [False] * (layers * experts)
        self.now = -1
        self._tally = Tally((PREFILLED, DECODED))
        self._count = self._tally.of[DECODED]

    def pool_of(self, layer: int) -> int:
        return self._pools.of[layer]

    def slot(self, key: int) -> int | None:
        """Slot of a resident expert; None while it is absent or in flight. Not a use."""
        return self._slot.get(key)

    def in_flight(self, key: int) -> Grant | None:
        """Grant of the read of this expert, if there is one in progress."""
        flight = self._flight.get(key)
        return None if flight is None else flight.grant

    @property
    def occupied_bytes(self) -> int:
        return self._pools.occupied

    @property
    def high_water_bytes(self) -> int:
        return self._pools.high_water

    def reset_high_water(self) -> int:
        """Start a new maximum (for a phase, say); returns the old one."""
        return self._pools.reset_high_water()

    def resident(self) -> list[int]:
        """Keys of all residents, ascending."""
        return sorted(self._slot)

    def reserve(self, key: int, *, speculative: bool) -> Grant | None:
        """A slot to read `key` into, evicting if need be; None when nothing may go.

        A speculative read takes no expert that is expected; a demand takes those last.

        Raises:
            ContractError: the expert is resident or in flight.
        """
        if key in self._slot or key in self._flight:
            raise ContractError("this expert has a slot", field="key", got=key, expected="absent")
        layer = key // self.experts
        part, evicted = self._pools.part[layer], ()
        slot = self._pools.take(layer)
        if slot is None:
            victim = self._victim(part, speculative)
            if victim is None:
                return None
            slot, evicted = self._slot.pop(victim), (victim,)
            self._count.evictions += 1
            if victim in self._unused:
                self._unused.remove(victim)
                self._count.evictions_unused += 1
        grant = self._pools.grant(key, layer, slot, evicted)
        self._flight[key] = Flight(grant, speculative, touched=key in self._holds.wanted[layer])
        self._holds.add(key)
        return grant

    def _victim(self, part: Part, speculative: bool) -> int | None:
        if self._expected.keys:
            victim = part.policy.victim(self.now, Either(self._holds.keys, self._expected.keys))
            if victim is not None or speculative:
                return victim
        return part.policy.victim(self.now, self._holds.keys)

    def settle(self, key: int, generation: int | None = None) -> bool:
        """The read of `key` has landed: it is resident. False if that was a read of another generation.

        Raises:
            ContractError: the key is not in flight, and no generation was given to say which read is meant.
        """
        flight = self._landed(key, generation)
        if flight is None:
            return False
        layer = key // self.experts
        self._slot[key] = flight.grant.slot
        if not flight.touched and key not in self.pins:
            self._pools.part[layer].policy.insert(key)
        self._count.landed(speculative=flight.speculative, asked=flight.touched, nbytes=self.read_bytes[layer])
        if flight.speculative and not flight.touched:
            self._unused.add(key)
        return True

    def abandon(self, key: int, generation: int | None = None) -> bool:
        """The read of `key` failed or never began, and writes nothing any more: its slot is free. As `settle`."""
        flight = self._landed(key, generation)
        if flight is None:
            return False
        layer = key // self.experts
        self._pools.give(layer, flight.grant.slot)
        self._count.failed_reads += 1
        if flight.touched and key not in self._holds.wanted[layer]:
            self._pools.part[layer].policy.remove(key)
        return True

    def _landed(self, key: int, generation: int | None) -> Flight | None:
        flight = self._flight.get(key)
        if flight is None and generation is None:
            raise ContractError("no read of this expert is in flight", field="key", got=key, expected="a granted key")
        if flight is None or generation not in (None, flight.grant.generation):
            return None
        del self._flight[key]
        self._holds.drop(key)
        return flight

    def _unwant(self, keys: Iterable[int]) -> None:
        for key in list(keys):
            self._holds.unwant(key)
            if key not in self._slot and key not in self._flight:
                self._pools.part[key // self.experts].policy.remove(key)  # it counted as resident, and was never read

    # ------------------------------------------------------------------ counters

    def counters(self, phase: int | None = None) -> Counters:
        """Sums since the cache was made, of one phase or both."""
        return self._tally.total(phase)

    def steady(self, phase: int | None = None) -> Counters:
        """Sums since `mark_steady`."""
        return self._tally.total(phase, since_mark=True)

    def mark_steady(self) -> None:
        """What happened so far was warming up."""
        self._tally.mark()
