"""One arm of the prerouter's gain study: an engine, heads at work in it, and one text after another fed through.

Texts are given, token by token, whatever the model says: so every arm computes the same tokens, and heads are judged
on text such as they were trained for, where a small model's own would soon repeat itself. What the model says at each
token is kept, and is the same in every arm that keeps its own router.

Arms differ in what becomes of the heads' predictions:

* `heads` moves bytes with them (mode `advise`);
* `perfect` runs the same heads at the same places, and then puts what they said right: the upper line of the horizon
  one token + one layer, at the price of real heads;
* `replace` takes them for the route. Its states are its own, so its routes and bytes are not those of the others;
* `gated` takes those for the route whose confidence reaches the default threshold, and moves bytes with the others.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from ..flywheel.head_recipe import tier_of
from ..prerouter import Prerouter, install_prerouter, read_heads
from ..prerouter.modes import DEFAULT_THRESHOLD
from ..routes import DECODED, PREFILLED
from ..streaming.schedule.prefetch import Prefetcher
from .prerouter_depth import Answer
from .streaming_answer import Recorder

if TYPE_CHECKING:
    from ..prerouter import Prediction
    from ..prerouter.fills import CacheFill
    from ..streaming import StreamingEngine
    from ..streaming.schedule.oracle import Candidate

__all__ = ["ARMS", "REROUTED", "Turn", "feed", "install", "recorded"]

ARMS: dict[str, tuple[str, str] | None] = {
    "off": None,
    "heads, in_forward": ("heads", "in_forward"),
    "heads, async_boundary": ("heads", "async_boundary"),
    "heads, step_boundary": ("heads", "step_boundary"),
    "perfect, in_forward": ("perfect", "in_forward"),
    "perfect, step_boundary": ("perfect", "step_boundary"),
    "replace, in_forward": ("replace", "in_forward"),
    "replace, step_boundary": ("replace", "step_boundary"),
    "gated, in_forward": ("gated", "in_forward"),
}
"""What predictions do, and when they are issued."""
REROUTED = ("replace", "gated")
"""Arms that do not keep their own router begin with one of these."""
UNSLOWED = 1e18
"""Bytes a second of a declared disk that slows nothing down."""


@dataclass(frozen=True, eq=False)
class Turn:
    """One text in one arm; figures are means of its decoded passes but the first, from the end of that one on: so every
    issue point has the reads of as many passes in them.

    Attributes:
        exposed: waiting for reads, in the layers and at a synchronous boundary.
        missing: `i64[T]`, experts of each pass that were not resident when asked for; `waited f64[T]`.
        layer_s: `f64[T, L]`, seconds of each layer in which it did not wait.
    """

    said: list[int]
    seconds: float
    exposed: float
    nbytes: float
    missing: np.ndarray
    waited: np.ndarray
    layer_s: np.ndarray


def feed(
    engine: StreamingEngine, prompt: Sequence[int], text: Sequence[int], *, bytes_per_s: float | None = None
) -> Turn:
    """Prefill `prompt` in one pass, at the speed of the disk as it is; decode along `text`, slowed to `bytes_per_s`."""
    memory, store, timeline, device = engine.memory, engine.store, engine.forward.timeline, engine.options.device
    said, took = [], []
    engine.reset()
    timeline.clear()
    cache = engine.loaded.make_cache()
    engine.run(mx.array([list(prompt)]), cache, PREFILLED)
    if device is not None:
        device.bytes_per_s = UNSLOWED if bytes_per_s is None else bytes_per_s
    for token in text:
        began = time.perf_counter()
        logits = engine.run(mx.array([[token]]), cache, DECODED)
        took.append(time.perf_counter() - began)
        said.append(int(mx.argmax(logits[0, -1]).item()))
        if len(said) == 1:
            read, drained = store.physical_bytes, memory.drained_s
    read, drained = store.physical_bytes - read, memory.drained_s - drained
    if device is not None:
        device.bytes_per_s = UNSLOWED
    memory.drain()  # what was asked for on account of a next token must not fall into the next turn
    count = len(text) - 1
    rows = {name: column[-count * store.layers :].reshape(count, -1) for name, column in timeline.arrays().items()}
    return Turn(
        said=said,
        seconds=float(np.mean(took[1:])),
        exposed=(float(rows["blocked"].sum()) + drained) / count,
        nbytes=read / count,
        missing=rows["missing"].sum(1),
        waited=rows["blocked"].sum(1),
        layer_s=rows["compute"],
    )


@dataclass
class Between:
    """Stands between heads and their fill, and passes on what they say. `step`: decoded passes begun in this text."""

    fill: CacheFill
    step: int = 0
    answer: Answer | None = None

    def begins(self, answer: Answer | None) -> None:
        """A text begins; `answer`: what will come true."""
        self.step, self.answer = 0, answer

    def begin(self) -> None:
        self.step += 1
        self.fill.begin()

    def ask(self, layer: int, prediction: Prediction, **when: Any) -> None:
        self.fill.ask(layer, prediction, **when)

    def drain(self) -> None:
        self.fill.drain()


@dataclass
class Noting(Between):
    """Notes what they say, and asks for nothing."""

    told: dict[tuple[int, int], list[Candidate]] = field(default_factory=dict)

    def ask(self, layer, prediction, **when):
        ids = prediction.ids + prediction.extra
        sure = prediction.probabilities or [1.0] * len(ids)
        self.told[self.step, layer - 1] = [(layer, expert, float(p)) for expert, p in zip(ids, sure, strict=True)]


@dataclass
class Certain(Between):
    """A prediction that will be the route is certain, whatever its experts' probabilities."""

    def ask(self, layer, prediction, **when):
        taken = prediction.confidence >= DEFAULT_THRESHOLD
        self.fill.ask(layer, replace(prediction, probabilities=None) if taken else prediction, **when)


@dataclass
class PutRight(Between):
    """Says in their place what comes true: experts of the next pass, each with certainty."""

    def ask(self, layer, prediction, **when):
        coming = len(self.answer.prompt) + self.step
        ids = tuple(self.answer.ids[coming, layer].tolist()) if coming < len(self.answer.ids) else ()
        self.fill.ask(layer, replace(prediction, ids=ids, extra=(), probabilities=None), **when)


def install(
    engine: StreamingEngine,
    weights: Path,
    kind: str,
    issue: str,
    *,
    threshold: float,
    layer_s: Sequence[float] | None = None,
    extra: int = 0,
) -> tuple[Prerouter, Between]:
    """Heads of a file at work in an engine, and what stands between them and its cache.

    Args:
        kind: of `ARMS`. threshold: least probability of a read or of protection; a route of `replace` or `gated` is
            read whatever its heads think of its experts.
        layer_s: `[L]`, compute-only seconds of each layer, from which deadlines are made.
    """
    store, width = engine.store, read_heads(weights).identity.hidden
    prefetcher = Prefetcher(
        engine.cache, engine.scheduler, byte_budget=1 << 62, threshold=0.0 if kind == "replace" else threshold,
        nbytes=[store.nbytes(layer) for layer in range(store.layers)], owner="prerouter",
    )  # fmt: skip
    prerouter = install_prerouter(
        engine.loaded, tier_of(engine.loaded, width).spec, engine, weights=weights,
        mode=kind if kind in REROUTED else "advise", threshold=DEFAULT_THRESHOLD, issue=issue, extra=extra,
        prefetcher=prefetcher, compute_s=layer_s,
        # The prefetcher protects what it is sure of; of a predicted route nothing is evicted before its turn.
        protect=kind == "replace",
    )  # fmt: skip
    ways = {"heads": Between, "noted": Noting, "perfect": PutRight, "replace": Between, "gated": Certain}
    between = ways[kind](prerouter.fill)
    prerouter.stager.fill = between
    return prerouter, between


def recorded(engine: StreamingEngine, weights: Path, texts: Sequence[Sequence[int]], *, prompt: int) -> list[Answer]:
    """Each text through an engine that holds every expert: its routes, what was said, and what heads foretold."""
    out, extra = [], engine.loaded.geometry.top_k
    for text in texts:
        routes = Recorder(engine.forward)
        with install(engine, weights, "noted", "in_forward", threshold=0.0, extra=extra)[0] as prerouter:
            notes = prerouter.stager.fill
            engine.forward.listeners.append(routes)
            turn = feed(engine, text[:prompt], text[prompt:])
            engine.forward.listeners.remove(routes)
        ids = routes.routes()[0].astype(np.int64)
        out.append(Answer(list(text[:prompt]), list(text[prompt:]), turn.said, ids, notes.told))
    return out
