"""Predictions at work: a predictor asked while the pass runs, its candidates queued as reads.

When it is asked decides what its reads can hide (DESIGN §7):

* `in_forward`: right after a layer's route is known; reads run under the rest of the pass;
* `async_boundary`: at the end of the pass for every layer, in layer order; reads run under the next pass;
* `step_boundary`: the same, and the next pass begins only when they have all landed.

The same three are simulated by `simulator`. A deadline is the time of the predicted visit on the compute-only
timeline, on which nothing ever waits: that of a stalled run would be too generous. `patience` passes of compute
beyond it a read not begun is given up; the visit itself withdraws it in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

from ..errors import ParameterError
from ..routes import DECODED
from .forward import Forward
from .oracle import Candidate
from .simulator import ISSUE
from .tickets import P1, Ticket

__all__ = ["Issuer"]


class Issuer:
    """A `Listener` that turns a predictor's candidates into reads.

    Args:
        forward: of the engine; add the issuer to `forward.listeners` to put it to work.
        predictor: asked `(step, layer)` for the candidates `[(layer, expert, confidence)]` of a later visit; `step`
            counts decoded passes since the issuer was made.
        compute_s: `[L]`, compute-only seconds of each layer, from one router's ids to the next.
        issue: one of `ISSUE`.
        tokens_ahead: whole passes to add to the horizon, for a predictor that looks a token and a layer ahead.
        patience: passes of compute.

    Attributes:
        asked, issued: predictions asked for; candidates queued that were not resident.
    """

    def __init__(
        self,
        forward: Forward,
        predictor: Callable[[int, int], Sequence[Candidate] | None],
        *,
        compute_s: Sequence[float],
        issue: str = "in_forward",
        tokens_ahead: int = 0,
        patience: float = 1.0,
        owner: str = "predictor",
    ):
        if issue not in ISSUE:
            raise ParameterError("no such issue point", field="issue", got=issue, expected=ISSUE)
        self.forward, self.predictor, self.issue, self.owner = forward, predictor, issue, owner
        self.tokens_ahead = tokens_ahead
        self.layers, self.experts = forward.memory.store.layers, forward.memory.store.experts
        self._known = np.concatenate([[0.0], np.cumsum(compute_s)])  # when each layer's ids are known, in a pass
        self._patience = math.inf if issue == "step_boundary" else patience * float(self._known[-1])
        self._begun = -1  # decoded passes begun since the issuer was made
        self.asked = self.issued = 0

    def routed(self, *, step: int, layer: int, ids: np.ndarray, x: mx.array, now: float) -> None:
        if self.forward.phase != DECODED:
            return
        if layer == 0:
            self._begun += 1
        if self.issue == "in_forward":
            self._queue(self.predictor(self._begun, layer), layer, now)

    def ended(self, *, step: int) -> None:
        if self.issue == "in_forward" or self._begun < 0:
            return
        now = self.forward.memory.clock()
        for layer in range(self.layers):
            self._queue(self.predictor(self._begun, layer), self.layers - 1, now)
        if self.issue == "step_boundary":
            self.forward.memory.drain()

    def _queue(self, candidates: Sequence[Candidate] | None, layer: int, now: float) -> None:
        """Queue reads for the next visit of each candidate's layer after the visit of `layer` that has begun."""
        memory = self.forward.memory
        self.asked += 1
        tickets = []
        for target, expert, confidence in candidates or ():
            wraps = target <= layer
            ahead = self._known[target] - self._known[layer] + wraps * self._known[-1]
            if self.issue == "in_forward":
                ahead += self.tokens_ahead * self._known[-1]
            tickets.append(
                Ticket(
                    key=target * self.experts + expert, layer=target, priority=P1, owner=self.owner,
                    generation=self._begun, deadline=now + float(ahead) + self._patience,
                    nbytes=memory.store.nbytes(target), confidence=confidence,
                )  # fmt: skip
            )
        self.issued += memory.prefetch(tickets)
