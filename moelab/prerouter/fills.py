"""Where predicted experts are brought to: the layer's staged slots, if it has some, or the cache.

Slots are the surer place: nothing evicts from them, and a route that they hold needs no synchronisation. Both kinds are
read by the same threads, demand first. When they may be asked for is the issue point (`streaming.issuing`):

* `in_forward`: as soon as a prediction is known, in the middle of a pass;
* `async_boundary`: at the end of the pass, all layers in order; the next pass begins meanwhile;
* `step_boundary`: the same, and the next pass begins when all have landed.

Slots changed in place (`incr_stack`), or filled by the computing thread (`staged_sync`), leave only the last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import GeometryError, ParameterError
from ..streaming.schedule.prefetch import ISSUE, PrefetchCounters, Prefetcher

if TYPE_CHECKING:
    from ..streaming.engine.engine import StreamingEngine
    from .modes import Prediction

__all__ = ["CacheFill", "Clock", "Protection", "SlotFill", "fill_of"]


class Clock:
    """When a layer's next turn is due, on the timeline on which nothing ever waits.

    Args:
        compute_s: `[L]`, compute-only seconds from one layer's ids to the next layer's; None = not known: reads then go
            in the order in which they are asked for.
        patience: passes of compute after which a read that was not begun is given up.
    """

    def __init__(self, layers: int, compute_s: Sequence[float] | None, patience: float):
        if compute_s is not None and (len(compute_s) != layers or min(compute_s) < 0):
            raise GeometryError("one time a layer", field="compute_s", got=list(compute_s), expected=f"{layers}, >= 0")
        self._known = None if compute_s is None else [0.0, *itertools.accumulate(compute_s)]
        self._patience = patience

    def due(self, target: int, now: float, after: int | None) -> float:
        """Of layer `target` in the next pass; `after`: the layer whose turn it is, None between two passes."""
        if self._known is None:
            return math.inf
        last = len(self._known) - 2 if after is None else after
        whole = self._known[-1]
        return now + self._known[target] - self._known[last] + whole * (1 + self._patience)


class SlotFill:
    """Predicted experts into the staged slots of their layers."""

    def __init__(self, engine: StreamingEngine, clock: Clock):
        self.engine, self.clock = engine, clock

    def begin(self) -> None:
        """A decoded pass begins."""

    def ask(self, layer: int, prediction: Prediction, *, now: float, after: int | None) -> None:
        """For MoE layer `layer` in the next pass. The route's order is the order of the slots."""
        self.engine.switches[layer].staged.stage(
            prediction.ids + prediction.extra, weights=prediction.scores, deadline=self.clock.due(layer, now, after)
        )

    def drain(self) -> None:
        """Return when all that was asked for is there."""
        for switch in self.engine.switches:
            switch.staged.wait()

    def forget(self) -> None:
        """Predictions are switched off."""
        for switch in self.engine.switches:
            switch.staged.reset()

    def close(self) -> PrefetchCounters | None:
        self.forget()
        return None


class CacheFill:
    """Predicted experts into the cache, as tickets of a prefetcher.

    It protects what it names before the first read begins: or that read could take the slot of a resident which the
    same prediction names.
    """

    def __init__(self, engine: StreamingEngine, clock: Clock, prefetcher: Prefetcher | None, *, protect: bool = True):
        self.engine, self.clock = engine, clock
        self.prefetcher = prefetcher or Prefetcher(
            engine.cache, engine.scheduler, byte_budget=1 << 62, owner="prerouter", protect=protect,
            nbytes=[engine.store.nbytes(layer) for layer in range(engine.store.layers)],
        )  # fmt: skip
        engine.memory.observers.append(self.prefetcher.observe)

    def begin(self) -> None:
        self.engine.memory.begin_step(self.prefetcher)

    def ask(self, layer: int, prediction: Prediction, *, now: float, after: int | None) -> None:
        ids, ahead = prediction.ids + prediction.extra, after is not None and layer > after
        sure = prediction.probabilities or [1.0] * len(ids)
        self.engine.memory.predict(
            self.prefetcher, [(layer, expert, float(p)) for expert, p in zip(ids, sure, strict=True)],
            due=lambda target: self.clock.due(target, now, after), passes_ahead=int(ahead),
        )  # fmt: skip

    def drain(self) -> None:
        self.engine.memory.drain()

    def forget(self) -> None:
        self.engine.memory.cancel(owner=self.prefetcher.owner)

    def close(self) -> PrefetchCounters:
        found = self.engine.memory.retire(self.prefetcher)
        self.engine.memory.observers.remove(self.prefetcher.observe)
        return found


class Protection:
    """Predicted experts are not evicted before their turn. Given when a layer's turn is over, so that its next turn is
    the predicted one."""

    def __init__(self, engine: StreamingEngine):
        self.engine = engine
        self._expected: dict[int, tuple[int, ...]] = {}

    def give(self, layer: int, ids: tuple[int, ...]) -> None:
        """To these experts, in place of those given it before."""
        switch = self.engine.switches[layer]
        if hasattr(switch, "predict"):
            switch.predict(ids)
        else:
            self.engine.memory.expect(layer, ids, instead_of=self._expected.get(layer, ()))
            self._expected[layer] = ids

    def lift(self, layer: int) -> None:
        """No expert of the layer is predicted any more."""
        self.give(layer, ())
        self.engine.memory.expect(layer, (), instead_of=range(self.engine.store.experts))

    def reset(self) -> None:
        """A new request."""
        self._expected.clear()


def fill_of(
    engine: StreamingEngine, clock: Clock, prefetcher: Prefetcher | None, *, protect: bool
) -> SlotFill | CacheFill:
    """Slots where the layers have them. Raises ParameterError: a prefetcher that nothing would ask."""
    if not _has_slots(engine):
        return CacheFill(engine, clock, prefetcher, protect=protect)
    if prefetcher is not None:
        raise ParameterError(
            "predictions go to the staged slots", field="prefetcher", got="a prefetcher", expected="None with staged"
        )
    return SlotFill(engine, clock)


def issue_of(engine: StreamingEngine, issue: str | None) -> str:
    """The issue point; None: the earliest that the slots allow.

    Raises:
        ParameterError: no such point, or slots that cannot be filled there.
    """
    if issue is not None and issue not in ISSUE:
        raise ParameterError("no such issue point", field="issue", got=issue, expected=ISSUE)
    layer = engine.options.layer
    waits = _has_slots(engine) and (layer.incr_stack or layer.staged_sync)
    if waits and issue not in (None, "step_boundary"):
        raise ParameterError(
            "these slots are filled between two passes, by the thread that computes", field="issue", got=issue,
            expected="step_boundary", fix="LayerOptions(staged_sync=False, incr_stack=False)",
        )  # fmt: skip
    return issue or ("step_boundary" if waits else "in_forward")


def _has_slots(engine: StreamingEngine) -> bool:
    return engine.options.layer is not None and engine.options.layer.staged
