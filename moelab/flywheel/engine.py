"""What capture needs of a runtime, and the simplest runtime that offers it.

An engine has three calls: `start()` begins a sequence, `feed(tokens)` runs them through the model with its
cache, `take()` returns what was routed since the last call. A streaming engine can stand in for
`ResidentEngine` without capture knowing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from ..routes import DECODED
from .plan import Plan

if TYPE_CHECKING:
    from ..models import LoadedModel, TapRecord


class Engine(Protocol):
    def start(self) -> None:
        """Begin a sequence with an empty cache."""

    def feed(self, tokens: np.ndarray) -> Any:
        """Run `i32[n]` tokens and return the logits `[V]` after the last one, evaluated."""

    def take(self) -> TapRecord:
        """Routes of everything fed since the last call: arrays `[T, …]`."""


class ResidentEngine:
    """The whole model in memory. Use as a context manager: the taps come off on leaving.

    `taps=False` runs the same calls without recording, which is what capture's cost is measured against.
    """

    def __init__(self, loaded: LoadedModel, *, taps: bool = True):
        self.loaded = loaded
        self._context = loaded.tap() if taps else None
        self._tap = None

    def __enter__(self) -> Self:
        if self._context is not None:
            self._tap = self._context.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        if self._context is not None:
            self._context.__exit__(*details)

    def start(self) -> None:
        self._cache = self.loaded.make_cache()

    def feed(self, tokens: np.ndarray) -> Any:
        import mlx.core as mx

        logits = self.loaded.model(mx.array(np.asarray(tokens)[None]), cache=self._cache)[0, -1]
        mx.eval(logits, *(() if self._tap is None else self._tap.pending()))
        return logits

    def take(self) -> TapRecord:
        record = self._tap.take()
        group = None if record.group_margin is None else record.group_margin[0]
        return replace(
            record,
            ids=record.ids[0],
            weights=record.weights[0],
            margin=record.margin[0],
            group_margin=group,
            features={},
        )


@dataclass
class Tape:
    """What one sequence fed, as it was fed. `seconds` is the time spent in decoded steps alone."""

    tokens: list[int] = field(default_factory=list)
    phase: list[int] = field(default_factory=list)
    wall_ns: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def feed(self, engine: Engine, tokens: np.ndarray, phase: int) -> Any:
        began = time.perf_counter()
        logits = engine.feed(tokens)
        if phase == DECODED:
            self.seconds += time.perf_counter() - began
        self.tokens.extend(int(token) for token in tokens)
        self.phase.extend([phase] * len(tokens))
        self.wall_ns.extend([time.time_ns()] * len(tokens))
        return logits


def follow(engine: Engine, plan: Plan, chunk: int) -> tuple[Tape, TapRecord]:
    """Feed a plan and return what was fed and routed. Routes are read in bulk, after the last step."""
    tape = Tape()
    engine.start()
    for phase, tokens in plan.pieces(chunk):
        tape.feed(engine, tokens, phase)
    return tape, engine.take()
