"""Staged slots of one layer: the experts that a prediction names, in place before their pass begins.

`stage(ids)` asks for the set of the *next* pass, also when it is called in the middle of a pass, before or
after the layer's own turn in it: the set in service never changes under a running pass. `swap` puts what was
asked for into service; a layer's turn does so by itself once the pass of a set has come.

    stage(ids) --fill--> next --swap--> active --stage--> ...

* in place (`incr_stack`): the set has exactly `staged_n` slots, changed between passes;
* beside (default): twice as many, and the next set is filled while the active one serves.

A set named while the one before is still being filled takes its place; that is counted as superseded, and
what had been read by then stays in its slots. More ids than slots are kept by weight, never by number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ContractError, GeometryError, ParameterError
from .options import LayerOptions
from .stack import Filling, Stack, StagedSet

if TYPE_CHECKING:
    from ..memory.forward import Forward

__all__ = ["StagedCounters", "StagedSlots"]


@dataclass
class StagedCounters:
    """Of one layer, since it was made. A pair is one expert of one token."""

    used: int = 0
    """Pairs computed in staged slots."""
    exact: int = 0
    """Pairs whose expert was not staged, computed on the exact path."""
    zeroed: int = 0
    """Pairs whose expert was not staged, and that gave nothing."""
    anchored: int = 0
    """Pairs whose expert was not staged, and for which the anchor stood in."""
    fallback: int = 0
    """Turns in decode for which nothing was staged: exact."""
    superseded: int = 0
    """Sets that another one replaced while they were filled."""
    unserved: int = 0
    """Sets that another one replaced before any turn."""
    overflow: int = 0
    """Ids beyond the slots, left out by weight."""

    @property
    def dropped(self) -> int:
        """Pairs that the layer's own experts did not compute."""
        return self.zeroed + self.anchored


class StagedSlots:
    """The staged sets of one layer (see the module text).

    Attributes:
        stack: the slots.
        counters: of this layer; those of the slots are `stack.counters`.
        served: a turn has used the active set.
    """

    def __init__(self, forward: Forward, layer: int, options: LayerOptions):
        self.layer, self.options, self._forward = layer, options, forward
        self.stack = Stack(
            forward.memory, layer, slot_count(options, forward.memory.store.experts), write_back=options.incr_writeback,
            together=options.warm_willneed,
        )  # fmt: skip
        self.counters = StagedCounters()
        self._active: StagedSet | None = None
        self._next: Filling | StagedSet | None = None
        self.served = False
        self._due = self._next_due = -1  # pass that each set is for

    def stage(self, ids: Sequence[int], *, weights: Sequence[float] | None = None, deadline: float = math.inf) -> None:
        """Ask for the set of the next pass. By the thread that runs the passes, in one or between two.

        Args:
            ids: distinct, in the order of their slots (`staged_replace`: of the route).
            weights: of the ids; the heaviest `staged_n` are kept, of equals those named first.
            deadline: seconds of the memory's clock when the set is needed, for the queue of reads.

        Raises:
            GeometryError: ids that are none, or twice; not one finite weight an id.
            ParameterError: more ids than slots, without weights.
            ContractError: `incr_stack` within a pass.
            StoreError: `staged_sync`: a read failed. Nothing is staged then.
        """
        in_place = self.options.incr_stack
        if in_place and self._forward.phase is not None:
            raise ContractError(
                "slots changed in place are filled between passes", field="incr_stack", got="in a pass",
                expected="no pass open", fix="incr_stack=False fills beside the set in service",
            )  # fmt: skip
        ids = self._fitting(self.stack.checked(ids), weights)
        self._advance()
        self._forget_next()
        if in_place:
            if self._active is not None and not self.served:
                self.counters.unserved += 1
            self._active = None  # its slots are about to change
        filling = self.stack.fill(
            self.layer, ids, keep=() if self._active is None else (self._active,), urgent=self.options.staged_sync,
            deadline=deadline,
        )  # fmt: skip
        self._next, self._next_due = filling, self._forward.step + 1
        if self.options.staged_sync:
            self.stack.counters.fill_s += self._filled()

    def wait(self) -> float:
        """Return when what was asked for is in its slots; seconds since the call. Raises what a read raised."""
        seconds = self._filled()
        self.stack.counters.wait_s += seconds
        return seconds

    def swap(self) -> None:
        """Put what was asked for into service, as `wait` first. Nothing happens if nothing was."""
        if self._next is None:
            return
        self.wait()
        if self._active is not None and not self.served:
            self.counters.unserved += 1
        self._active, self._due, self._next, self.served = self._next, self._next_due, None, False

    def serving(self) -> StagedSet | None:
        """The set for the layer's turn in the pass in progress; None when nothing is staged for it."""
        self._advance()
        lasting = self._active is not None and (self._lasts or self._due >= self._forward.step)
        return self._active if lasting else None

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The ids that the next turn would be served by, in slot order; None when nothing is staged for it."""
        step = self._forward.step + (self._forward.phase is None)
        if self._next is not None and self._next_due <= step:
            return self._next.ids
        return self._active.ids if self._active is not None and (self._lasts or self._due >= step) else None

    def reset(self) -> None:
        """A new request: nothing is staged. What is in the slots stays usable."""
        self._forget_next()
        self._active, self._due, self._next_due = None, -1, -1

    @property
    def _lasts(self) -> bool:
        """A set serves until the next one, not one pass. Only where ids that it lacks cost time and nothing else."""
        options = self.options
        return options.history_prefetch and options.on_missing == "exact" and not options.staged_replace

    def _advance(self) -> None:
        """The set of the pass in progress, if there is one, is in service."""
        if self._next is not None and self._next_due <= self._forward.step:
            self.swap()

    def _filled(self) -> float:
        """Wait for the fill; seconds."""
        if not isinstance(self._next, Filling):
            return 0.0
        began, filling, self._next = self._forward.memory.clock(), self._next, None
        self._next = filling.wait()
        return self._forward.memory.clock() - began

    def _forget_next(self) -> None:
        if isinstance(self._next, Filling):
            self._next.cancel()
            self.counters.superseded += 1
        elif self._next is not None:
            self.counters.unserved += 1
        self._next = None

    def _fitting(self, ids: tuple[int, ...], weights: Sequence[float] | None) -> tuple[int, ...]:
        slots = self.options.staged_n
        if weights is not None:
            weights = np.asarray(weights, np.float64)
            if weights.shape != (len(ids),) or not np.isfinite(weights).all():
                raise GeometryError("one weight an id", field="weights", got=weights.shape, expected=(len(ids),))
        if len(ids) <= slots:
            return ids
        if weights is None:
            raise ParameterError(
                "more experts than staged slots", field="ids", got=len(ids), expected=f"<= {slots}",
                fix="raise staged_n, or give weights, by which they are kept",
            )  # fmt: skip
        kept = sorted(np.argsort(-weights, kind="stable")[:slots])
        self.counters.overflow += len(ids) - slots
        return tuple(ids[at] for at in kept)


def slot_count(options: LayerOptions, experts: int) -> int:
    """Slots of a layer's stack: one set, or two where the next is filled beside the active one; at most E."""
    return min(options.staged_n * (1 if options.incr_stack else 2), experts)
