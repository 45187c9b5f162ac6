"""One answer of a streaming engine, timed from its first token to its last, and what listens to it meanwhile.

The first token is left out: it belongs to the prompt. Times are seconds, sizes bytes, both a token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..routes import DECODED

if TYPE_CHECKING:
    from ..streaming import Issuer, StreamingEngine
    from ..streaming.memory.forward import Forward

__all__ = ["Recorder", "Run", "Stamp", "answer"]


@dataclass(frozen=True, eq=False)
class Run:
    """One answer of one arm; figures are a decoded token's, the first left out."""

    tokens: list[int]
    seconds: float
    exposed: float
    """Waiting for reads inside the layers, and at a synchronous boundary."""
    nbytes: float
    timeline: dict[str, np.ndarray]


class Recorder:
    """Listener that keeps the route of every token of one answer, and of which phase it was."""

    def __init__(self, forward: Forward):
        self.forward = forward
        self.ids: list[list[np.ndarray]] = []
        self.phase: list[int] = []

    def routed(self, *, step: int, layer: int, ids: np.ndarray, x: Any, now: float) -> None:
        if layer == 0:
            self.ids.append([])
            self.phase.append(self.forward.phase)
        self.ids[-1].append(ids.reshape(-1, ids.shape[-1]))

    def ended(self, *, step: int) -> None:
        pass

    def routes(self) -> tuple[np.ndarray, np.ndarray]:
        """`ids [T,L,K]` and `phase [T]`."""
        passes = [np.stack(layers, axis=1) for layers in self.ids]
        return np.concatenate(passes), np.repeat(self.phase, [len(rows) for rows in passes])


class Stamp:
    """Listener that notes when each pass was told to have ended; two of them around an issuer time what it does."""

    def __init__(self):
        self.at: list[float] = []

    def routed(self, **_: Any) -> None:
        pass

    def ended(self, *, step: int) -> None:
        self.at.append(time.perf_counter())


def answer(engine: StreamingEngine, prompt: Sequence[int], tokens: int, issuer: Issuer | None = None) -> Run:
    """One greedy answer, timed from its first token to its last."""
    before, after = Stamp(), Stamp()
    engine.forward.timeline.clear()
    engine.forward.listeners.append(before)
    if issuer is not None:
        issuer.start()
    engine.forward.listeners.append(after)
    out, stamps, read = [], [], 0
    try:
        for token, _ in engine.stream_tokens(list(prompt), max_tokens=tokens):
            stamps.append(time.perf_counter())
            out.append(int(token))
            read = read if len(out) > 1 else engine.store.physical_bytes
    finally:
        engine.forward.listeners.remove(before)
        engine.forward.listeners.remove(after)
        if issuer is not None:
            issuer.stop()
    engine.memory.drain()
    counted, layers = tokens - 1, engine.store.layers
    columns = engine.forward.timeline.arrays()
    last = {name: column[columns["phase"] == DECODED][-counted * layers :] for name, column in columns.items()}
    boundary = 0.0
    if issuer is not None and issuer.issue == "step_boundary":
        boundary = sum(b - a for a, b in zip(before.at[-counted - 1 : -1], after.at[-counted - 1 : -1], strict=True))
    return Run(
        out,
        (stamps[-1] - stamps[0]) / counted,
        (float(last["blocked"].sum()) + boundary) / counted,
        (engine.store.physical_bytes - read) / counted,
        {name: column.reshape(counted, layers) for name, column in last.items()},
    )
