"""Which experts a cache of a given byte budget would have held: replaying routes through it.

A cache holds (layer, expert) records of unequal size up to a byte budget. A *visit* is one layer of
one pass; it looks up all its experts at once (the batch rule: a hit was resident before the visit),
then reads the misses, and only then evicts down to the budget, sparing what the visit just used. A
decoded token is a pass of its own. The prompt tokens of a thread are one pass, as engines prefill:
each layer once, over the experts of all of them. The cache stays warm from thread to thread.

Which resident goes is the policy's choice (`streaming.eviction`, `foresight`); what the visit has just used goes last.
The live `streaming.Cache` makes room before it reads, and hits the same.

Shapes: T tokens, L MoE layers, K experts a token, E experts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from ..errors import ContractError, GeometryError
from ..streaming.cache.eviction import Lru, Policy
from .foresight import Foresight

__all__ = ["NEVER", "Residency", "Visits", "replay"]

NEVER = 1 << 60
"""Visit of an expert's next use when there is none."""


@dataclass(frozen=True, eq=False)
class Visits:
    """Routes as the sequence of lookups a cache sees. Made by `Visits.of`.

    Attributes:
        keys: `i64[N]`, layer·E + expert of each lookup; a visit names an expert once.
        offsets: `i64[V+1]`, lookups of visit v are `keys[offsets[v]:offsets[v+1]]`; visit v is layer v mod L.
        lookup: `i64[T,L,K]`, lookup that serves each slot, -1 where the slot is absent.
        first_row: `i64[P]`, first token of each pass (a pass is L visits).
        layers, experts: L, E.
    """

    keys: np.ndarray
    offsets: np.ndarray
    lookup: np.ndarray
    first_row: np.ndarray
    layers: int
    experts: int

    @classmethod
    def of(
        cls,
        ids: np.ndarray,
        experts: int,
        thread: np.ndarray,
        *,
        prefilled: np.ndarray | None = None,
        mask: np.ndarray | None = None,
    ) -> Visits:
        """Lookups of `ids[T,L,K]`.

        Args:
            thread: `[T]`, thread of each row.
            prefilled: `bool[T]`; neighbouring prefilled rows of a thread are one pass. None = all decoded.
            mask: `bool[T,L,K]`, True = present.

        Raises:
            GeometryError: arrays disagree.
        """
        tokens, layers, _ = ids.shape
        prefilled = np.zeros(tokens, bool) if prefilled is None else np.asarray(prefilled)
        present = np.ones(ids.shape, bool) if mask is None else mask
        for name, array, shape in (
            ("thread", np.asarray(thread), (tokens,)),
            ("prefilled", prefilled, (tokens,)),
            ("mask", present, ids.shape),
        ):
            if array.shape != shape:
                raise GeometryError("arrays disagree", field=name, got=array.shape, expected=shape)
        opens = np.ones(tokens, bool)
        opens[1:] = ~(prefilled[1:] & prefilled[:-1] & (np.diff(thread) == 0))
        visit = (np.cumsum(opens) - 1)[:, None] * layers + np.arange(layers)
        key = np.arange(layers)[:, None] * experts + ids.astype(np.int64)
        code = (visit[..., None] * (layers * experts) + key)[present]
        # Keep the last lookup of a key within a visit, in the order of these: the prompt's tail is most recent.
        unique, backwards, inverse = np.unique(code[::-1], return_index=True, return_inverse=True)
        order = np.lexsort((-backwards, unique // (layers * experts)))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        lookup = np.full(ids.shape, -1, np.int64)
        lookup[present] = place[inverse][::-1]
        visits = np.arange(int(opens.sum()) * layers + 1)
        return cls(
            keys=unique[order] % (layers * experts),
            offsets=np.searchsorted(unique[order] // (layers * experts), visits),
            lookup=lookup,
            first_row=np.flatnonzero(opens),
            layers=layers,
            experts=experts,
        )

    def next_use(self) -> np.ndarray:
        """`i64[N]`: visit of the next lookup of the same key, `NEVER` if there is none."""
        visit = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        order = np.argsort(self.keys, kind="stable")
        following = np.full(len(self.keys), NEVER)
        same = self.keys[order][1:] == self.keys[order][:-1]
        following[order[:-1][same]] = visit[order[1:][same]]
        return following


@dataclass(frozen=True, eq=False)
class Residency:
    """What a cache held and what it had to read.

    Attributes:
        policy, budget: its name and bytes.
        hits: `bool[T,L,K]`, the slot's expert was resident before the visit; False where absent.
        misses: `bool[T,L,K]`, present and not resident.
        read_bytes: `i64[T]`, bytes read; a prompt pass is booked on its first row.
        resident: `u8[T,L,ceil(E/8)]`, experts of the layer held just before the visit, as `np.packbits` along
            E; None unless recorded.
    """

    policy: str
    budget: int
    hits: np.ndarray
    misses: np.ndarray
    read_bytes: np.ndarray
    resident: np.ndarray | None


def replay(
    visits: Visits, expert_bytes: np.ndarray, *, budget: int, policy: Policy | None = None, record: bool = False
) -> Residency:
    """Run the visits through a cache that starts empty.

    Args:
        expert_bytes: `i64[L]`, bytes of one expert of each layer.
        budget: bytes; a visit may exceed it while it runs, by what it reads.
        policy: one of `streaming.eviction`'s or `foresight`'s; default `Lru()`. It is reset.
        record: also keep what was resident before each visit.

    Raises:
        ContractError: the budget is not positive.
        GeometryError: not one size a layer.
    """
    policy = Lru() if policy is None else policy
    if budget <= 0:
        raise ContractError("a cache needs bytes", field="budget", got=budget, expected="> 0")
    if np.shape(expert_bytes) != (visits.layers,):
        raise GeometryError(
            "one size a layer", field="expert_bytes", got=np.shape(expert_bytes), expected=(visits.layers,)
        )
    layers, experts, passes = visits.layers, visits.experts, len(visits.first_row)
    size = [int(b) for b in expert_bytes]
    parts = layers if policy.partitioned else 1
    limit, held_bytes = budget / parts, [0] * parts
    held: set[int] = set()
    hit = np.zeros(len(visits.keys), bool)
    bits = np.zeros(layers * experts, bool)
    resident = np.zeros((passes, layers, -(-experts // 8)), np.uint8) if record else None
    policies = [copy.copy(policy) for _ in range(parts)]  # what a policy knows of the past it makes in `begin`
    for each in policies:
        if isinstance(each, Foresight):
            each.foresee(visits)
        each.begin(layers, experts)
    for start in range(0, passes * layers, 1 << 16):  # Python lists of a part of the lookups at a time
        stop = min(start + (1 << 16), passes * layers)
        offsets = visits.offsets[start : stop + 1].tolist()
        keys_here = visits.keys[offsets[0] : offsets[-1]].tolist()
        hits_here: list[bool] = []
        for visit in range(start, stop):
            layer = visit % layers
            keys = keys_here[offsets[visit - start] - offsets[0] : offsets[visit - start + 1] - offsets[0]]
            if record:
                resident[visit // layers, layer] = np.packbits(bits[layer * experts : (layer + 1) * experts])
            here = [key in held for key in keys]
            hits_here += here
            part = layer % parts
            if not all(here):
                held_bytes[part] += size[layer] * here.count(False)
                held.update(keys)
                if record:
                    bits[keys] = True
            chooser = policies[part]
            chooser.touch(visit, keys)
            if held_bytes[part] > limit:
                leaving = chooser.victims(visit, frozenset(keys))
                while held_bytes[part] > limit:
                    key = next(leaving, None)
                    if key is None:  # the visit alone is over the budget
                        key = chooser.victim(visit, frozenset())
                    held.discard(key)
                    held_bytes[part] -= size[key // experts]
                    bits[key] = False
                leaving.close()
        hit[offsets[0] : offsets[-1]] = hits_here
    return _residency(visits, np.asarray(size), hit, resident, policy.name, budget)


def _residency(visits, size, hit, resident, name, budget) -> Residency:
    present = visits.lookup >= 0
    hits = present & hit[visits.lookup] if len(hit) else present
    missed = np.bincount(
        np.repeat(np.arange(len(visits.offsets) - 1) // visits.layers, np.diff(visits.offsets)),
        weights=size[visits.keys // visits.experts] * ~hit,
        minlength=len(visits.first_row),
    )
    read = np.zeros(len(visits.lookup), np.int64)
    read[visits.first_row] = missed
    row_pass = np.searchsorted(visits.first_row, np.arange(len(read)), side="right") - 1
    return Residency(
        policy=name,
        budget=budget,
        hits=hits,
        misses=present & ~hits,
        read_bytes=read,
        resident=None if resident is None else resident[row_pass],
    )
