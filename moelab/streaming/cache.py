"""Which experts are resident, and in which slot: a byte budget as a state machine.

The cache owns no memory and reads nothing. It numbers slots, says which expert may be read into which, and
counts. Layers whose experts have the same size share a *pool* of slots (one slab of memory); the budget is
divided among pools as a token's experts are, and eviction never leaves a pool.

The life of an expert's slot:

    absent --reserve--> in flight --settle--> resident --(evicted by another's reserve)--> absent
                            '------abandon--> absent

A layer's turn is a *visit*: it names its experts once, those resident are leased at once, and the missing ones
are *wanted* until they are leased or released. Nothing leased, wanted or in flight is ever evicted: a lazy
evaluation may still read the slot, or a thread write it. `expect` protects predicted experts as well, but a
demand that finds nothing else takes them all the same; a speculative read never does.

Room is made before a read, never after it, so the budget holds at every moment. For experts of one size,
demand-only hits and evictions are exactly those of `flywheel.residency.replay` with the same policy, as long as
each visit fits (`room`): the replay exceeds its budget during a visit and then evicts as many as the cache evicted
beforehand, by the same policy which has seen the same uses. A visit that does not fit (a long prompt's) must come in
`groups`; its own hits are still the replay's, what it leaves behind need not be.

One caller at a time: `ExpertMemory` holds a lock around every call. Key = layer·E + expert. Bytes are ints.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import ContractError
from ..routes import DECODED, PREFILLED
from .counters import Counters
from .eviction import Policy
from .pools import Part, divide

__all__ = ["Cache", "Grant"]


@dataclass(frozen=True, slots=True)
class Grant:
    """Leave to read one expert into one slot.

    Attributes:
        key, pool, slot: which expert, and where.
        generation: how often the slot has been granted; tells this grant from an earlier one of the slot.
        evicted: the key that had to go, if any.
    """

    key: int
    pool: int
    slot: int
    generation: int
    evicted: tuple[int, ...]


@dataclass(slots=True)
class _Flight:
    """A read in progress."""

    grant: Grant
    speculative: bool
    touched: bool  # a visit has named the key, so the policy knows it


class _Either:
    """Union of two containers, for `in`."""

    __slots__ = ("first", "second")

    def __init__(self, first, second):
        self.first, self.second = first, second

    def __contains__(self, key):
        return key in self.first or key in self.second


class Cache:
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
        self.pool_slots, self._pool, self._parts = divide(
            layers=layers, experts=experts, slot_bytes=self.slot_bytes, budget=budget, top_k=top_k, pins=self.pins,
            partitioned=policy.partitioned, below_cycle=below_cycle,
        )  # fmt: skip
        self._part: list[Part] = [part for layer in range(layers) for part in self._parts if layer in part.layers]
        for part in self._parts:
            part.policy = copy.copy(policy)
            part.policy.begin(layers, experts)
        self._free = [list(range(slots))[::-1] for slots in self.pool_slots]
        self._generation = [[0] * slots for slots in self.pool_slots]
        self._slot: dict[int, int] = {}  # resident key -> slot
        self._flight: dict[int, _Flight] = {}
        self._lease: dict[int, int] = {}  # key -> leases
        self._wanted: list[set[int]] = [set() for _ in range(layers)]
        self._held: dict[int, int] = {}  # key -> reasons not to evict: leases, wanted, in flight
        self._held_here = [0] * layers  # distinct held keys of each layer that are not pinned
        self._expected: dict[int, int] = {}  # key -> last visit it is expected for
        self._lapse: list[tuple[int, int]] = []  # heap of (visit, key), possibly outdated
        self._unused: set[int] = set()  # prefetched, resident, not used yet
        self._seen = bytearray(layers * experts)
        self.now = -1
        self.occupied_bytes = self.high_water_bytes = 0
        self._counters = {PREFILLED: Counters(), DECODED: Counters()}
        self._steady = {PREFILLED: Counters(), DECODED: Counters()}
        self._count = self._counters[DECODED]

    # ------------------------------------------------------------------ what is there

    def pool_of(self, layer: int) -> int:
        return self._pool[layer]

    def slot(self, key: int) -> int | None:
        """Slot of a resident expert; None while it is absent or in flight. Not a use."""
        return self._slot.get(key)

    def in_flight(self, key: int) -> Grant | None:
        """Grant of the read of this expert, if there is one in progress."""
        flight = self._flight.get(key)
        return None if flight is None else flight.grant

    def resident(self) -> list[int]:
        """Keys of all residents, ascending."""
        return sorted(self._slot)

    def next_visit(self, layer: int) -> int:
        """Number that the layer's next visit will have."""
        return self.now + 1 + (layer - self.now - 1) % self.layers

    def room(self, layer: int) -> int:
        """Experts of this layer that can be resident together now, while others' leases and reads last."""
        part = self._part[layer]
        others = sum(self._held_here[other] for other in part.layers) - self._held_here[layer]
        return part.limit - part.pinned - others

    def groups(self, layer: int, keys: Sequence[int]) -> list[list[int]]:
        """The keys in parts that fit one after the other: residents first, so that they are used before they go.

        Visit, compute, evaluate and release one group before the next; visiting the same layer again continues
        the visit.

        Raises:
            ContractError: others hold every slot.
        """
        room = self.room(layer)
        if room < 1:
            raise ContractError("no slot is left", field="layer", got=layer, expected="leases released before")
        ordered = sorted(keys, key=lambda key: key not in self._slot)
        return [ordered[at : at + room] for at in range(0, len(ordered), room)]

    # ------------------------------------------------------------------ visits and leases

    def visit(self, layer: int, keys: Sequence[int], *, phase: int) -> list[bool]:
        """The layer's turn: count, tell the policy, lease what is resident and want what is not.

        Visiting the layer that was visited last continues its visit (a prompt's group), unless it is the only one.

        Args:
            keys: distinct, all of this layer; at most `room` of them.
            phase: `routes.PREFILLED` or `DECODED`, for the counters.

        Returns:
            For each key, whether it was resident.

        Raises:
            ContractError: keys of another layer or named twice, more than fit, or an unknown phase.
        """
        part, base = self._part[layer], layer * self.experts
        if phase not in self._counters:
            raise ContractError("unknown phase", field="phase", got=phase, expected=(PREFILLED, DECODED))
        if len(set(keys)) != len(keys) or any(not base <= key < base + self.experts for key in keys):
            raise ContractError(
                "a visit names experts of its layer once", field="keys", got=list(keys), expected=(base, self.experts)
            )
        evictable = keys if not self.pins else [key for key in keys if key not in self.pins]
        if len(evictable) > part.limit - part.pinned:
            raise ContractError(
                "more experts than slots", field="keys", got=len(evictable), expected=f"<= {part.limit - part.pinned}",
                fix="visit in `groups`",
            )  # fmt: skip
        if self.layers == 1 or self.now < 0 or self.now % self.layers != layer:
            self._begin(self.next_visit(layer))
        count = self._count = self._counters[phase]
        hits = [key in self._slot for key in keys]
        for key, hit in zip(keys, hits, strict=True):
            seen, self._seen[key] = self._seen[key], 1
            if hit:
                self._hold(key)
                self._lease[key] = self._lease.get(key, 0) + 1
                if seen:
                    count.warm_hits += 1
                else:
                    count.cold_hits += 1
                if key in self._unused:
                    self._unused.discard(key)
                    count.prefetch_used += 1
                    count.prefetch_used_bytes += self.read_bytes[layer]
            else:
                self._want(layer, key)
                if seen:
                    count.warm_misses += 1
                    count.warm_miss_bytes += self.read_bytes[layer]
                else:
                    count.cold_misses += 1
                    count.cold_miss_bytes += self.read_bytes[layer]
        part.policy.touch(self.now, evictable)
        return hits

    def _begin(self, visit: int) -> None:
        self.now = visit
        for key in list(self._wanted[visit % self.layers]):  # of a visit that did not read them
            self._unwant(key)
        while self._lapse and self._lapse[0][0] < visit:
            until, key = heapq.heappop(self._lapse)
            if self._expected.get(key) == until:
                self.unexpect([key])

    def lease(self, keys: Iterable[int]) -> None:
        """Hold residents until they are released as often. Raises ContractError for a key that is not resident."""
        for key in keys:
            if key not in self._slot:
                raise ContractError("only a resident is leased", field="key", got=key, expected="resident")
            self._lease[key] = self._lease.get(key, 0) + 1
            wanted = self._wanted[key // self.experts]
            if key in wanted:
                wanted.discard(key)  # the visit's hold becomes the lease's
            else:
                self._hold(key)

    def release(self, keys: Iterable[int]) -> None:
        """End one lease of each key, or its being wanted, if it was never leased. ContractError if it is neither."""
        for key in keys:
            leases = self._lease.get(key, 0)
            if leases:
                if leases == 1:
                    del self._lease[key]
                else:
                    self._lease[key] = leases - 1
                self._let_go(key)
            elif key in self._wanted[key // self.experts]:
                self._unwant(key)
            else:
                raise ContractError("this expert is not leased", field="key", got=key, expected="leased or wanted")

    def reset_request(self) -> None:
        """Forget what belongs to a request: leases, wants, expectations. Residents and reads in flight stay."""
        for key in list(self._lease):
            self.release([key] * self._lease[key])
        for wanted in self._wanted:
            for key in list(wanted):
                self._unwant(key)
        self.unexpect(list(self._expected))

    def _hold(self, key: int) -> None:
        held = self._held.get(key, 0)
        self._held[key] = held + 1
        if not held and key not in self.pins:
            self._held_here[key // self.experts] += 1

    def _let_go(self, key: int) -> None:
        held = self._held[key] - 1
        if held:
            self._held[key] = held
        else:
            del self._held[key]
            if key not in self.pins:
                self._held_here[key // self.experts] -= 1

    def _want(self, layer: int, key: int) -> None:
        if key not in self._wanted[layer]:
            self._wanted[layer].add(key)
            self._hold(key)
        if key in self._flight:
            self._flight[key].touched = True

    def _unwant(self, key: int) -> None:
        layer = key // self.experts
        self._wanted[layer].discard(key)
        self._let_go(key)
        if key not in self._slot and key not in self._flight:
            self._part[layer].policy.remove(key)  # it was counted as resident, and never read

    # ------------------------------------------------------------------ reads

    def reserve(self, key: int, *, speculative: bool) -> Grant | None:
        """A slot to read `key` into, evicting if need be; None when nothing may go.

        A speculative read takes no expert that is expected; a demand takes those last.

        Raises:
            ContractError: the expert is resident or in flight.
        """
        if key in self._slot or key in self._flight:
            raise ContractError("this expert has a slot", field="key", got=key, expected="absent")
        layer = key // self.experts
        part, pool, evicted = self._part[layer], self._pool[layer], ()
        if part.used < part.limit:
            slot = self._free[pool].pop()
        else:
            victim = self._victim(part, speculative)
            if victim is None:
                return None
            slot, evicted = self._slot.pop(victim), (victim,)
            self._empty(part, layer)
            self._count.evictions += 1
            if victim in self._unused:
                self._unused.discard(victim)
                self._count.evictions_unused += 1
        part.used += 1
        self.occupied_bytes += self.slot_bytes[layer]
        self.high_water_bytes = max(self.high_water_bytes, self.occupied_bytes)
        self._generation[pool][slot] += 1
        grant = Grant(key, pool, slot, self._generation[pool][slot], evicted)
        self._flight[key] = _Flight(grant, speculative, touched=key in self._wanted[layer])
        self._hold(key)
        return grant

    def _victim(self, part: Part, speculative: bool) -> int | None:
        if self._expected:
            victim = part.policy.victim(self.now, _Either(self._held, self._expected))
            if victim is not None or speculative:
                return victim
        return part.policy.victim(self.now, self._held)

    def settle(self, key: int, generation: int | None = None) -> bool:
        """The read of `key` has landed: it is resident. False if that was a read of another generation.

        Raises:
            ContractError: the key is not in flight, and no generation was given to say which read is meant.
        """
        flight = self._landed(key, generation)
        if flight is None:
            return False
        layer, count = key // self.experts, self._count
        self._slot[key] = flight.grant.slot
        if not flight.touched and key not in self.pins:
            self._part[layer].policy.insert(key)
        if flight.speculative:
            count.prefetch_reads += 1
            count.prefetch_bytes += self.read_bytes[layer]
            if flight.touched:
                count.prefetch_used += 1
                count.prefetch_used_bytes += self.read_bytes[layer]
                count.prefetch_late += 1
                count.prefetch_late_bytes += self.read_bytes[layer]
            else:
                self._unused.add(key)
        else:
            count.demand_reads += 1
            count.demand_bytes += self.read_bytes[layer]
        return True

    def abandon(self, key: int, generation: int | None = None) -> bool:
        """The read of `key` failed or never began, and writes nothing any more: its slot is free. As `settle`."""
        flight = self._landed(key, generation)
        if flight is None:
            return False
        layer = key // self.experts
        part = self._part[layer]
        self._free[flight.grant.pool].append(flight.grant.slot)
        self._empty(part, layer)
        self._count.failed_reads += 1
        if flight.touched and key not in self._wanted[layer]:
            part.policy.remove(key)
        return True

    def _landed(self, key: int, generation: int | None) -> _Flight | None:
        flight = self._flight.get(key)
        if flight is None and generation is None:
            raise ContractError("no read of this expert is in flight", field="key", got=key, expected="a granted key")
        if flight is None or generation not in (None, flight.grant.generation):
            return None
        del self._flight[key]
        self._let_go(key)
        return flight

    def _empty(self, part: Part, layer: int) -> None:
        part.used -= 1
        self.occupied_bytes -= self.slot_bytes[layer]

    # ------------------------------------------------------------------ predictions and counters

    def expect(self, keys: Iterable[int], until_visit: int) -> None:
        """Predictions name these keys for visits up to `until_visit`: protect them from eviction until that is over."""
        fresh = []
        for key in keys:
            if until_visit > self._expected.get(key, -1):
                if key not in self._expected:
                    fresh.append(key)
                self._expected[key] = until_visit
                heapq.heappush(self._lapse, (until_visit, key))
        for key in fresh:
            self._part[key // self.experts].policy.expect((key,))

    def unexpect(self, keys: Iterable[int]) -> None:
        """End the protection of these keys. Nothing happens to those that had none."""
        for key in keys:
            if self._expected.pop(key, None) is not None:
                self._part[key // self.experts].policy.unexpect((key,))

    def counters(self, phase: int | None = None) -> Counters:
        """Sums since the cache was made, of one phase or both."""
        return self._sum(phase, self._counters)

    def steady(self, phase: int | None = None) -> Counters:
        """Sums since `mark_steady`."""
        return self._sum(phase, self._counters) - self._sum(phase, self._steady)

    def mark_steady(self) -> None:
        """What happened so far was warming up."""
        self._steady = {phase: count + Counters() for phase, count in self._counters.items()}

    def reset_high_water(self) -> int:
        """Start a new maximum of `occupied_bytes` (for a phase, say); returns the old one."""
        peak, self.high_water_bytes = self.high_water_bytes, self.occupied_bytes
        return peak

    @staticmethod
    def _sum(phase: int | None, counters: dict[int, Counters]) -> Counters:
        return sum(counters.values(), Counters()) if phase is None else counters[phase] + Counters()
