"""The expert cache: layers take turns, and their experts are held, wanted or expected meanwhile.

A layer's turn is a *visit*: it names its experts once, those resident are leased at once, and the missing ones
are *wanted* until they are leased or released. `expect` protects predicted experts until their visit. What that means
for a slot is said in `slots`.

For experts of one size, demand-only hits and evictions are exactly those of `flywheel.residency.replay` with the same
policy, as long as each visit fits (`room`): the replay exceeds its budget during a visit and then evicts as many as
the cache evicted beforehand, by the same policy which has seen the same uses. A visit that does not fit (a long
prompt's) must come in `groups`; its own hits are still the replay's, what it leaves behind need not be.

One caller at a time: `ExpertMemory` holds a lock around every call. Key = layer·E + expert. Bytes are ints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...errors import ContractError
from ...routes import DECODED, PREFILLED
from .pools import Grant
from .slots import Slots

__all__ = ["Cache", "Grant"]


class Cache(Slots):
    """Slots, and who needs them (see the module text). Arguments, attributes and errors as `Slots`."""

    def next_visit(self, layer: int) -> int:
        """Number that the layer's next visit will have."""
        return self.now + 1 + (layer - self.now - 1) % self.layers

    def room(self, layer: int) -> int:
        """Experts of this layer that can be resident together now, while others' leases and reads last."""
        part = self._pools.part[layer]
        others = sum(self._holds.here[other] for other in part.layers) - self._holds.here[layer]
        return part.limit - part.pinned - others

    def groups(self, layer: int, keys: Sequence[int]) -> list[list[int]]:
        """The keys in parts that fit one after the other; as they are, if they fit at once.

        Otherwise residents come first, so that they are used before they go. Visit, compute, evaluate and release
        one group before the next; visiting the same layer again continues the visit.

        Raises:
            ContractError: others hold every slot.
        """
        room = self.room(layer)
        if room < 1:
            raise ContractError("no slot is left", field="layer", got=layer, expected="leases released before")
        if len(keys) <= room:
            return [list(keys)] if keys else []
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
        part, base = self._pools.part[layer], layer * self.experts
        if phase not in self._tally.of:
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
        count = self._count = self._tally.of[phase]
        size, hits = self.read_bytes[layer], [key in self._slot for key in keys]
        for key, hit in zip(keys, hits, strict=True):
            if hit:
                self._holds.lease(key)
                if key in self._unused:
                    self._unused.remove(key)
                    count.used(size)
            else:
                self._holds.want(key)
                if key in self._flight:
                    self._flight[key].touched = True
        count.visited(hits, [self._seen[key] for key in keys], size)
        for key in keys:
            self._seen[key] = True
        part.policy.touch(self.now, evictable)
        self.unexpect(self._expected.lapsed(self.now))  # what was expected for this visit is known by now
        return hits

    def used(self, layer: int, keys: Iterable[int]) -> None:
        """The layer's turn uses these in slots beside the cache: tell the policy. No lookup; a visit may follow."""
        if self.layers == 1 or self.now < 0 or self.now % self.layers != layer:
            self._begin(self.next_visit(layer))
        resident = [key for key in keys if key in self._slot and key not in self.pins]
        self._pools.part[layer].policy.touch(self.now, resident)
        self.unexpect(self._expected.lapsed(self.now))

    def _begin(self, visit: int) -> None:
        self.now = visit
        self._unwant(self._holds.wanted[visit % self.layers])  # of a visit that did not read them

    def lease(self, keys: Iterable[int]) -> None:
        """Hold residents until they are released as often. Raises ContractError for a key that is not resident."""
        for key in keys:
            if key not in self._slot:
                raise ContractError("only a resident is leased", field="key", got=key, expected="resident")
            self._holds.lease(key)

    def release(self, keys: Iterable[int]) -> None:
        """End one lease of each key, or its being wanted if it was never leased.

        Raises:
            ContractError: it is neither: one release too many would free a slot that is still being used.
        """
        for key in keys:
            if self._holds.release(key):
                continue
            if key not in self._holds.wanted[key // self.experts]:
                raise ContractError("this expert is not leased", field="key", got=key, expected="leased or wanted")
            self._unwant((key,))

    def reset_request(self) -> None:
        """Forget what belongs to a request: leases, wants, expectations. Residents and reads in flight stay."""
        self._holds.release_all()
        for wanted in self._holds.wanted:
            self._unwant(wanted)
        self.unexpect(self._expected.keys)

    # ------------------------------------------------------------------ predictions

    def expect(self, keys: Iterable[int], until_visit: int) -> None:
        """Predictions name these keys for `until_visit`: protect them from eviction until that has named its own."""
        for key in self._expected.add(keys, until_visit):
            self._pools.part[key // self.experts].policy.expect((key,))

    def unexpect(self, keys: Iterable[int]) -> None:
        """End the protection of these keys. Nothing happens to those that had none."""
        for key in list(keys):
            if self._expected.keys.pop(key, None) is not None:
                self._pools.part[key // self.experts].policy.unexpect((key,))
