"""The one thread that computes, between its synchronisations.

A streamed layer reports here when its ids are wanted (`arrive`) and when its output has been built
(`depart`). In between, `demand` and `wait` lead to the expert memory. What this module owns is order:

* **one synchronisation a layer.** `arrive` evaluates the ids together with the previous layer's output;
  when it returns, that layer's slots have been used and are released. Never earlier.
* **phase is told, not guessed.** A pass is prefill or decode because its caller said so.
* **predictions are issued inside the pass.** As soon as a layer's route is known, and its own demand is queued or,
  where nothing is missing, its experts are being computed, each `listener` may queue reads for later layers.
* **one thread.** Lazy mlx arrays belong to the thread that made them. Any thread may run a pass, but two may
  not run one at a time, and nobody forgets a request while a pass of it runs (`between_passes`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import mlx.core as mx
import numpy as np

from ...errors import ContractError
from ...routes import DECODED, PREFILLED
from .memory import Demand, ExpertMemory
from .timeline import Timeline

__all__ = ["Forward", "Listener"]

PHASES = (PREFILLED, DECODED)


class Listener(Protocol):
    """Told of every route the moment it is known, inside the pass."""

    def routed(self, *, step: int, layer: int, ids: np.ndarray, x: mx.array, now: float) -> None:
        """`ids [..., K]` of MoE layer `layer` in pass `step`, and the block input `x [..., H]`.

        `x` is evaluated, except in a turn on staged slots that needs no synchronisation (see `paths`).
        """

    def ended(self, *, step: int) -> None:
        """The pass has been evaluated to its end."""


class Forward:
    """State of the current pass. Attributes: `memory`, `timeline`, `listeners`, `step` (passes begun), `phase`."""

    def __init__(self, memory: ExpertMemory):
        self.memory = memory
        self.timeline = Timeline()
        self.listeners: list[Listener] = []
        self.step, self.phase = -1, None
        self._open = threading.Lock()  # held while a pass is open
        self._thread: int | None = None
        self._outputs: list[mx.array] = []
        self._then: list[Callable[[], None]] = []
        self._tallies: list[tuple[mx.array, Callable[[np.ndarray], None]]] = []
        self._leased: list[int] = []
        self._ids, self._x = np.zeros(0, np.uint32), mx.zeros(0)  # of the last arrival

    def begin(self, phase: int) -> None:
        """Open a pass. Raises ContractError on an unknown phase, or while another pass is open."""
        if phase not in PHASES:
            raise ContractError("a pass is prefill or decode", field="phase", got=phase, expected=PHASES)
        self._alone()
        self._thread, self.phase = threading.get_ident(), phase
        self.step += 1

    @contextmanager
    def between_passes(self) -> Iterator[None]:
        """No pass begins meanwhile. Raises ContractError while one is open."""
        self._alone()
        try:
            yield
        finally:
            self._open.release()

    def _alone(self) -> None:
        if not self._open.acquire(blocking=False):
            whose = "this" if self._thread == threading.get_ident() else "another"
            raise ContractError(
                "a pass is running", field="thread", got=f"{whose} thread is in it", expected="one pass at a time"
            )

    def end(self, *arrays: mx.array) -> None:
        """Close the pass: evaluate `arrays` and what is left of it, and release its slots."""
        mx.eval(*arrays, *self._outputs, *(array for array, _ in self._tallies))
        self.timeline.close(self.memory.clock())
        tallies = [(np.array(array), add) for array, add in self._tallies]
        self._close()
        for values, add in tallies:
            add(values)
        for listener in self.listeners:
            listener.ended(step=self.step)

    def abort(self) -> None:
        """Close this thread's pass, if it is open, without evaluating: its lazy results must not be used."""
        if self._thread != threading.get_ident():
            return
        try:
            self.memory.give_up()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._used()
        finally:
            self._tallies.clear()
            self._thread = self.phase = None
            self._open.release()

    def arrive(self, layer: int, x: mx.array, indices: mx.array) -> np.ndarray:
        """The ids `[..., K]` on the host. The synchronisation of this layer.

        Raises:
            ContractError: no pass is open, or it is another thread's.
        """
        self.enter()
        mx.eval(indices, *self._outputs)
        self._used()
        ids = np.array(indices)
        self._x, self._ids = x, ids
        self.timeline.arrive(step=self.step, layer=layer, phase=self.phase, now=self.memory.clock())
        return ids

    def enter(self) -> None:
        """A turn that needs no ids from the device may skip `arrive`. Raises ContractError as that does."""
        if self._thread != threading.get_ident():
            raise ContractError(
                "a streamed layer runs inside a pass of its own thread",
                field="thread",
                got="no pass open" if self._thread is None else "another thread's pass",
                expected="begin(phase) on the thread that calls the model",
                fix="use StreamingEngine.forward, or generate",
            )

    def depart(self, output: mx.array, *, then: Callable[[], None] | None = None) -> None:
        """The layer's output, still lazy: evaluated at the next synchronisation, and its slots leased until then.

        `then` is called when it has been evaluated, or never will be.
        """
        self._outputs.append(output)
        if then is not None:
            self._then.append(then)

    def tally(self, values: mx.array, add: Callable[[np.ndarray], None]) -> None:
        """A figure still lazy: evaluated with the end of the pass, then given to `add`. Not if the pass is aborted."""
        self._tallies.append((values, add))

    def announce(self, layer: int, ids: np.ndarray | None = None, x: mx.array | None = None) -> None:
        """Tell the listeners a route; without one, that of the last arrival."""
        ids, x, now = self._ids if ids is None else ids, self._x if x is None else x, self.memory.clock()
        for listener in self.listeners:
            listener.routed(step=self.step, layer=layer, ids=ids, x=x, now=now)

    def demand(self, layer: int, experts: np.ndarray) -> Demand:
        """Begin a visit; the slots are leased until the next synchronisation. Then `announce`, before any waiting."""
        demand = self.memory.demand(layer, experts.tolist(), phase=self.phase)
        self._leased += demand.keys
        missing = int(demand.missing.sum())
        self.timeline.asked(experts=len(experts), missing=missing, read_bytes=missing * self.memory.store.nbytes(layer))
        return demand

    def served(self, layer: int, experts: np.ndarray) -> None:
        """The layer's turn has these experts in slots beside the cache."""
        self.memory.used(layer, experts.tolist())
        if self.timeline.is_open(self.step, layer):  # a turn without a synchronisation has no row
            self.timeline.asked(experts=len(experts), missing=0, read_bytes=0)

    def wait(self, demand: Demand, *, leave: int = 0) -> None:
        self.timeline.waited(demand.wait(leave), self.memory.clock())

    def groups(self, layer: int, experts: np.ndarray) -> list[np.ndarray]:
        """Positions in `experts`, in parts that each have a slot for every member; residents first."""
        parts = self.memory.groups(layer, experts.tolist())
        if len(parts) == 1:
            return [np.arange(len(experts))]
        place = {expert: at for at, expert in enumerate(experts.tolist())}
        return [np.array([place[expert] for expert in part]) for part in parts]

    def done(self, output: mx.array) -> None:
        """Evaluate one group of a visit and release its slots for the next."""
        mx.eval(output)
        self._release()

    def _used(self) -> None:
        """Every output so far has been evaluated, or never will be."""
        self._outputs.clear()
        self._release()
        done, self._then = self._then, []
        for then in done:
            then()

    def _release(self) -> None:
        if self._leased:
            self.memory.release(self._leased)
            self._leased = []
