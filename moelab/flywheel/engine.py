"""Decode as capture needs it: a sequence is fed, and its routes are taken.

An engine has three calls: `start()` begins a sequence, `feed(tokens, phase)` runs them through the model with its
cache, `take()` returns what was routed since the last call. One engine serves resident and streamed models,
since a model itself knows how a pass is run (`LoadedModel.run`). The phase is told, never guessed from sizes: a
prompt of one token is prefill all the same. Where the next token is known already nobody asks for logits, and
nothing after the last router is computed, as in replay: neither its experts nor the output layer has a route in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from .. import models
from .plan import Plan

if TYPE_CHECKING:
    from ..models import LoadedModel, TapRecord


@contextmanager
def opened(model: str) -> Iterator[LoadedModel]:
    """A model by its name: resident, or streamed where the name has a memory budget (`models.split_budget`).

    Raises:
        ParameterError, MissingArtifactError, UnsupportedModelError, StoreError: as `models.load` and
            `streaming.StreamedModel.load`.
    """
    name, budget = models.split_budget(model)
    if models.in_worker() and "transformers" not in sys.modules:
        models.without_torch()  # which takes longer to import than a small model to load
    if budget is None:
        yield models.load(name)
        return
    from ..streaming import StreamedModel

    with StreamedModel.load(name, memory_budget_bytes=budget) as streamed:
        yield streamed


class Engine(Protocol):
    def start(self) -> None:
        """Begin a sequence with an empty cache."""

    def feed(self, tokens: np.ndarray, phase: int, *, logits: bool = True) -> Any:
        """Run `i32[n]` tokens and return the logits `[V]` after the last one, evaluated, or None if not `logits`."""

    def take(self) -> TapRecord:
        """Routes of everything fed since the last call: arrays `[T, …]`."""


class LiveEngine:
    """A loaded model that decodes. Use as a context manager: taps and expert slots go on leaving.

    `taps=False` runs the same calls without recording, which is what capture's cost is measured against.
    """

    def __init__(self, loaded: LoadedModel, *, taps: bool = True, features: Iterable[str] = ()):
        self.loaded, self._taps, self._features = loaded, taps, features
        self._tap = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self.loaded.decoding())
            if self._taps:  # inside, since decoding may put other switch layers in place
                self._tap = stack.enter_context(self.loaded.tap(self._features))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.__exit__(*details)

    def start(self) -> None:
        self._cache = self.loaded.make_cache()

    def feed(self, tokens: np.ndarray, phase: int, *, logits: bool = True) -> Any:
        import mlx.core as mx

        out = self.loaded.run(mx.array(np.asarray(tokens)[None]), self._cache, phase)
        # All that a later step needs is behind what the last layer remembers.
        result = out[0, -1] if logits else self._cache[-1].state
        mx.eval(result, *(() if self._tap is None else self._tap.pending()))
        return result if logits else None

    def take(self) -> TapRecord:
        record = self._tap.take()
        group = None if record.group_margin is None else record.group_margin[0]
        return replace(
            record,
            ids=record.ids[0],
            weights=record.weights[0],
            margin=record.margin[0],
            group_margin=group,
            features={name: values[0] for name, values in record.features.items()},
        )


@dataclass
class Tape:
    """What one sequence fed, as it was fed."""

    tokens: list[int] = field(default_factory=list)
    phase: list[int] = field(default_factory=list)
    wall_ns: list[int] = field(default_factory=list)

    def feed(self, engine: Engine, tokens: np.ndarray, phase: int, *, logits: bool = True) -> Any:
        out = engine.feed(tokens, phase, logits=logits)
        self.tokens.extend(int(token) for token in tokens)
        self.phase.extend([phase] * len(tokens))
        self.wall_ns.extend([time.time_ns()] * len(tokens))
        return out


def follow(engine: Engine, plan: Plan, chunk: int) -> tuple[Tape, TapRecord]:
    """Feed a plan and return what was fed and routed. Routes are read in bulk, after the last step."""
    tape = Tape()
    engine.start()
    for phase, tokens in plan.pieces(chunk):
        tape.feed(engine, tokens, phase, logits=False)
    return tape, engine.take()
