"""Predictions at work: a predictor asked while the pass runs, its candidates queued as reads.

When it is asked decides what its reads can hide:

* `in_forward`: right after a layer's route is known; reads run under the rest of the pass;
* `async_boundary`: at the end of the pass for every layer, in layer order; reads run under the next pass;
* `step_boundary`: the same, and the next pass begins only when they have all landed.

The same three are simulated by `simulator`. A deadline is the time of the predicted visit on the compute-only
timeline, on which nothing ever waits: that of a stalled run would be too generous. `patience` passes of compute
beyond it a read not begun is given up; the visit itself withdraws it in any case.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ...errors import GeometryError, ParameterError
from ...routes import DECODED
from ..schedule.oracle import Candidate
from ..schedule.prefetch import ISSUE, PrefetchCounters, Prefetcher

if TYPE_CHECKING:
    import mlx.core as mx

    from .engine import StreamingEngine

__all__ = ["Issuer"]


class Issuer:
    """A `Listener` that puts a predictor to work, between `start` and `stop` (or as a context manager).

    Args:
        engine: whose passes it follows.
        predictor: asked `(step, layer)` for the candidates `[(layer, expert, confidence)]` of a later visit; `step`
            counts decoded passes since the issuer was started.
        compute_s: `[L]`, compute-only seconds of each layer, from one router's ids to the next.
        issue: one of `ISSUE`.
        tokens_ahead: whole passes to add to the horizon, for a predictor that looks a token and a layer ahead.
        patience: passes of compute.
        prefetcher: makes tickets of candidates, of the engine's cache and scheduler; default: of all of them, P1.
    """

    def __init__(
        self,
        engine: StreamingEngine,
        predictor: Callable[[int, int], Sequence[Candidate] | None],
        *,
        compute_s: Sequence[float],
        issue: str = "in_forward",
        tokens_ahead: int = 0,
        patience: float = 1.0,
        prefetcher: Prefetcher | None = None,
    ):
        if issue not in ISSUE:
            raise ParameterError("no such issue point", field="issue", got=issue, expected=ISSUE)
        if len(compute_s) != engine.store.layers or min(compute_s) < 0:
            raise GeometryError(
                "one time a layer", field="compute_s", got=list(compute_s), expected=f"{engine.store.layers} of >= 0"
            )
        self.forward, self.memory, self.predictor = engine.forward, engine.memory, predictor
        self.issue, self.layers = issue, engine.store.layers
        self.passes_ahead = tokens_ahead if issue == "in_forward" else 0
        self.prefetcher = prefetcher or Prefetcher(
            engine.cache, engine.scheduler, byte_budget=1 << 62,
            nbytes=[engine.store.nbytes(layer) for layer in range(self.layers)],
        )  # fmt: skip
        self._known = [0.0, *itertools.accumulate(compute_s)]  # when each layer's ids are known, in a pass
        self._patience = math.inf if issue == "step_boundary" else patience * self._known[-1]
        self._step = -1

    def start(self) -> Self:
        self._step = -1
        self.forward.listeners.append(self)
        self.memory.observers.append(self.prefetcher.observe)
        return self

    def stop(self) -> PrefetchCounters:
        """Take it off again; what is queued is withdrawn, what was read and not used by now is wasted. Its counters."""
        self.forward.listeners.remove(self)
        found = self.memory.retire(self.prefetcher)
        self.memory.observers.remove(self.prefetcher.observe)
        return found

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *details: Any) -> None:
        self.stop()

    def routed(self, *, step: int, layer: int, ids: np.ndarray, x: mx.array, now: float) -> None:
        if self.forward.phase != DECODED:
            return
        if layer == 0:
            self._step += 1
            self.memory.begin_step(self.prefetcher)
        if self.issue == "in_forward":
            self._ask([layer], layer, now)

    def ended(self, *, step: int) -> None:
        if self.issue == "in_forward" or self._step < 0:
            return
        self._ask(range(self.layers), self.layers - 1, self.memory.clock())
        if self.issue == "step_boundary":
            self.memory.drain()

    def _ask(self, layers: Sequence[int], last: int, now: float) -> None:
        """Ask for `layers` when the visit of layer `last` has begun; a candidate's visit is the next of its layer.

        All answers are queued at once: what one layer's prediction protects, another's read must not evict.
        """

        def due(target: int) -> float:
            wait = self._known[target] - self._known[last] + self._known[-1] * (self.passes_ahead + (target <= last))
            return now + wait + self._patience

        candidates = [one for layer in layers for one in self.predictor(self._step, layer) or ()]
        if candidates:
            self.memory.predict(self.prefetcher, candidates, due=due, passes_ahead=self.passes_ahead)
