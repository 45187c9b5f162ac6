"""A stack: slots beside the cache that hold chosen experts, and the tables that say which slot is whose.

A *set* of experts of one layer is filled into a stack: those already in one of its slots stay there, the
others are copied from the cache or read, and only their slots are written. What a slot holds stays usable
until the slot is needed, so a set that differs little from an earlier one costs little.

A slot is never written while it is *kept* by a set in service, or *held* by an evaluation that has not
returned: mlx is lazy, and a graph reads its slots when it is evaluated, not when it is built. If no slot is
free of both, filling raises; it never waits and never guesses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ...errors import ContractError, GeometryError
from ..memory.fill import Fill, offer
from ..memory.memory import ExpertMemory
from ..store.slab import Slab

__all__ = ["Filling", "Stack", "StackCounters", "StagedSet"]


@dataclass
class StackCounters:
    """Experts, unless a unit is given."""

    kept: int = 0
    """Wanted, and in a slot of the stack already."""
    copied: int = 0
    """From the cache."""
    read: int = 0
    """From the store."""
    offered: int = 0
    """Taken by the cache."""
    refused: int = 0
    """Offered to the cache, which had it or nothing worth less."""
    fill_s: float = 0.0
    """Seconds in which the computing thread filled."""
    wait_s: float = 0.0
    """Seconds in which it waited for a fill by others."""


@dataclass(frozen=True, eq=False)
class StagedSet:
    """Experts of one layer in slots.

    Attributes:
        ids: as asked for; `slots i32[n]` are theirs, in that order.
        table: `i32[E]`, slot by expert, -1 where it has none; `device` is the same on the mlx side.
    """

    layer: int
    ids: tuple[int, ...]
    slots: np.ndarray
    table: np.ndarray
    device: mx.array


@dataclass(eq=False)
class Filling:
    """A set on its way into a stack."""

    stack: Stack
    ids: tuple[int, ...]
    slots: list[int]
    fill: Fill
    fresh: dict[int, int]
    """Expert to slot, for those that are being written."""

    def wait(self) -> StagedSet:
        """The set, all of it in its slots. Raises what a read raised; nothing of the set is then in service."""
        try:
            self.fill.wait()
        except BaseException:
            self.fill.cancel()  # interrupted: no slot may be given away that a thread still writes
            raise
        finally:
            self.stack._settle(self)
        return self.stack._set(self)

    def cancel(self) -> None:
        """Give up the set. Reads in progress are waited for, and what they brought stays usable."""
        self.fill.cancel()
        self.stack._settle(self)


class Stack:
    """Slots for experts of one size (see the module text).

    Args:
        layer: one whose experts have this size; sets may be of any layer whose experts have it.
        write_back: offer an expert to the cache when it leaves its slot. False: when it has been read.
        together: a fill asks for all its reads at once. False: one after the other, if it is urgent.
    """

    def __init__(
        self, memory: ExpertMemory, layer: int, slots: int, *, write_back: bool = False, together: bool = True
    ):
        self.memory, self.write_back, self.together = memory, write_back, together
        self.slab = Slab(memory.store.layouts[layer].slot_bytes, slots)
        self.counters = StackCounters()
        self._slot: dict[int, int] = {}  # key -> slot, wanted longest ago first
        self._empty = list(range(slots))[::-1]
        self._held: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of memory: the slots, and one more for alignment."""
        return (self.slab.slots + 1) * self.slab.slot_bytes

    def arrays(self, layer: int) -> dict[str, mx.array]:
        """Tensor name → `[slots, *shape]` over the slots, as this layer's experts lie in them."""
        return self.slab.arrays(self.memory.store.layouts[layer])

    def fill(
        self,
        layer: int,
        ids: Sequence[int],
        *,
        keep: Iterable[StagedSet] = (),
        urgent: bool = False,
        deadline: float = math.inf,
    ) -> Filling:
        """Begin to bring these experts of a layer into slots, without touching those of the sets to `keep`.

        Raises:
            GeometryError: an id outside of the layer, or twice.
            ContractError: too few slots that are neither kept nor held.
        """
        ids = self.checked(ids)
        began, base = self.memory.clock(), layer * self.memory.store.experts
        for i in ids:
            if base + i in self._slot:  # wanted again: last to go
                self._slot[base + i] = self._slot.pop(base + i)
        here = {i: self._slot[base + i] for i in ids if base + i in self._slot}
        blocked = self._held.union(here.values(), *(kept.slots.tolist() for kept in keep))
        old = {slot: key for key, slot in self._slot.items() if slot not in blocked}
        free = [slot for slot in self._empty[::-1] if slot not in blocked] + list(old)
        missing = [i for i in ids if i not in here]
        if len(missing) > len(free):
            raise ContractError(
                "slots are still in service, or used by an evaluation that has not returned", field="ids",
                got=f"{len(missing)} to fill, {len(free)} free", expected="as many free slots",
                fix="fill after the pass has ended, or beside the set in service (incr_stack=False)",
            )  # fmt: skip
        fresh = dict(zip(missing, free, strict=False))
        try:
            for slot in fresh.values():
                self._vacate(slot, old.get(slot))
            fill = Fill(
                self.memory, layer, missing, [self.slab.host[slot] for slot in fresh.values()], urgent=urgent,
                deadline=deadline, together=self.together or not urgent,
            )  # fmt: skip
        except BaseException:
            used = {*self._slot.values(), *self._empty}
            self._empty += [slot for slot in fresh.values() if slot not in used]
            raise
        self.counters.kept += len(here)
        self.counters.copied += len(fill.copied)
        self.counters.read += len(fill.read)
        self.counters.fill_s += self.memory.clock() - began
        return Filling(self, ids, [{**here, **fresh}[i] for i in ids], fill, fresh)

    def checked(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The ids, as integers. Raises GeometryError for one outside of a layer, or twice."""
        ids, experts = tuple(int(i) for i in ids), self.memory.store.experts
        if len(set(ids)) != len(ids) or any(not 0 <= i < experts for i in ids):
            raise GeometryError(
                "not experts of a layer", field="ids", got=ids, expected=f"distinct, 0 to {experts - 1}"
            )
        return ids

    def hold(self, rows: StagedSet) -> None:
        """A graph that reads this set's slots has been built."""
        self._held.update(rows.slots.tolist())

    def release(self) -> None:
        """Every graph that reads slots of this stack has been evaluated, or will never be."""
        self._held.clear()

    def _vacate(self, slot: int, key: int | None) -> None:
        if key is None:
            self._empty.remove(slot)
            return
        del self._slot[key]
        if self.write_back:
            self._offer(key, slot)

    def _offer(self, key: int, slot: int) -> None:
        if offer(self.memory, *divmod(key, self.memory.store.experts), self.slab.host[slot]):
            self.counters.offered += 1
        else:
            self.counters.refused += 1

    def _settle(self, filling: Filling) -> None:
        """What arrived is in its slot; slots of what did not are empty."""
        fill, base = filling.fill, filling.fill.layer * self.memory.store.experts
        arrived = set(fill.arrived())
        for expert, slot in filling.fresh.items():
            if expert not in arrived:
                self._empty.append(slot)
                continue
            self._slot[base + expert] = slot
            if not self.write_back and expert in fill.read:
                self._offer(base + expert, slot)
        filling.fresh.clear()

    def _set(self, filling: Filling) -> StagedSet:
        table = np.full(self.memory.store.experts, -1, np.int32)
        slots = np.array(filling.slots, np.int32)
        table[list(filling.ids)] = slots
        device = mx.array(table)
        mx.eval(device)  # a table still lazy could be evaluated after the next one was made
        return StagedSet(filling.fill.layer, filling.ids, slots, table, device)
