"""Decoding without a model: recorded routes through the cache, the scheduler and a device made of arithmetic.

The policy objects are those of the running engine, called in the order in which `ExpertMemory` calls them;
only the clock, the disk and the compute are numbers. So a prefetch policy can be tried on a recorded day of
traffic in seconds, and what it does to the cache is what it would do there.

A pass goes through its layers. For each one:

    compute before the ids │ sync │ visit: lease the hits, queue the misses in front of every prefetch
                                  │ predict (in_forward): queue reads for later layers
                                  │ compute the resident experts, while reads go on
                                  │ wait for the misses (exposed), compute them

The slots of a layer are released at the next layer's synchronisation, when its output has been evaluated.
Reads are in flight on `threads` readers; each ends when the device says so, and the next begins at once.

When predictions are issued decides what they can hide:

* `in_forward`: right after a layer's route is known; reads run under the rest of the pass.
* `async_boundary`: all of them at the end of the pass, in layer order; reads run under the next pass, whose first
  layers are needed before the device can have them.
* `step_boundary`: the same, but the next pass begins only when they have been read. Nothing overlaps.

A predicted layer is met next in the same pass if it lies ahead, else in the next (`tokens_ahead` passes later).
Its deadline is the time of that visit on the *compute-only* timeline, on which nothing ever waits; the timeline of a
stalled run would be too generous. After `patience` further passes of compute an unread prediction is given up,
and as soon as the visit has taken place.

Sources: AFN-021, gates 4 and 5. Times are seconds, sizes bytes. Shapes: P passes, L MoE layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ContractError, GeometryError
from ...routes import DECODED, PREFILLED
from ..schedule.oracle import Candidate
from ..schedule.passes import Passes
from ..schedule.prefetch import ISSUE, Prefetcher
from ..schedule.schedule import Scheduler
from ..store.device import VirtualDevice
from .demand_only import DemandOnlyMemory
from .simulated_memory import SimulatedMemory
from .simulation import Simulation

if TYPE_CHECKING:
    from ..cache.cache import Cache

__all__ = ["simulate"]


def simulate(
    passes: Passes,
    *,
    nbytes: Sequence[int],
    cache: Cache,
    scheduler: Scheduler,
    device: VirtualDevice,
    compute_s: np.ndarray | float,
    before: float = 0.5,
    sync_s: float = 0.0,
    boundary_s: np.ndarray | float = 0.0,
    threads: int = 4,
    asking_reads: bool = False,
    wake_s: float | Sequence[float] = 0.0,
    start_s: float = 0.0,
    predictor: Callable[[int, int], Sequence[Candidate] | None] | None = None,
    predict_s: float = 0.0,
    issue: str = "in_forward",
    tokens_ahead: int = 0,
    patience: float = 1.0,
    prefetcher: Prefetcher | None = None,
    event_loop: bool = False,
) -> Simulation:
    """Run the passes. Deterministic: the same arguments give the same times to the last bit.

    Args:
        passes: recorded routes.
        nbytes: `[L]`, bytes that a read of one expert takes from the device.
        cache, scheduler: fresh ones; they are changed.
        device: is reset.
        compute_s: compute of a layer with every expert resident: a number, `[L]` or `[P,L]`.
        before: the part of it that comes before the layer's ids are known (attention, gate); the rest is divided
            equally among the visit's experts.
        sync_s: of each synchronisation, one a layer.
        boundary_s: compute after the last layer of a pass (head, sampling): a number or `[P]`.
        threads: reads in flight at most.
        asking_reads: the waiting thread reads a miss itself, as `ExpertMemory` does: one more in flight then.
        wake_s: from the end of a read on the device until the thread that waited for it goes on: what a busy machine
            and the interpreter add to every read. Of several numbers, each read has the next in turn.
        start_s: from a wish until an idle reader begins on it; the asking thread begins at once.
        predictor: asked for every visit (see `oracle`); None = no prediction. What it says of a prompt is not used.
        predict_s: compute of one prediction.
        issue: one of `ISSUE`.
        tokens_ahead: whole passes to add to a prediction's horizon, for one that looks a token and a layer ahead.
        patience: passes of compute by which a prediction may be late before it is given up.
        prefetcher: makes tickets of candidates, of the same cache and scheduler; default: of all of them, P1.
        event_loop: use the scheduler also where nothing is predicted, and it could reorder nothing.

    Raises:
        GeometryError: times or sizes of another geometry.
        ContractError: no such issue point, a time below zero, or a visit that the cache cannot hold.
    """
    layers = passes.layers
    compute, boundary = np.asarray(compute_s, np.float64), np.asarray(boundary_s, np.float64)
    if (
        boundary.shape not in ((), (len(passes),))
        or compute.shape not in ((), (layers,), (len(passes), layers))
        or len(nbytes) != layers
    ):
        raise GeometryError(
            "times or sizes of another model", field="compute_s, boundary_s, nbytes",
            got=(compute.shape, boundary.shape, len(nbytes)),
            expected=f"a number, [{layers}] or [{len(passes)},{layers}]; a number or [{len(passes)}]; {layers} sizes",
        )  # fmt: skip
    for field, value, ok, expected in (
        ("issue", issue, issue in ISSUE, ISSUE),
        ("compute_s", compute.min(), (compute >= 0).all(), ">= 0"),
        ("before", before, 0 <= before <= 1, "0 to 1"),
        ("sync_s", sync_s, sync_s >= 0, ">= 0"),
        ("boundary_s", boundary.min(), (boundary >= 0).all(), ">= 0"),
        ("wake_s", wake_s, np.size(wake_s) > 0 and np.min(wake_s) >= 0, ">= 0"),
        ("start_s", start_s, start_s >= 0, ">= 0"),
        ("predict_s", predict_s, predict_s >= 0, ">= 0"),
        ("threads", threads, threads >= 1, ">= 1"),
        ("prefetcher", prefetcher, prefetcher is None or predictor is not None, "a predictor to serve"),
        ("tokens_ahead, patience", (tokens_ahead, patience), min(tokens_ahead, patience) >= 0, ">= 0"),
    ):  # fmt: skip
        if not ok:
            raise ContractError("this cannot be simulated", field=field, got=value, expected=expected)
    in_order = predictor is None and not asking_reads and threads * max(nbytes) <= scheduler.max_inflight_bytes
    memory = (DemandOnlyMemory if in_order and not event_loop else SimulatedMemory)(
        cache,
        scheduler,
        device,
        nbytes=nbytes,
        experts=passes.experts,
        threads=threads,
        asking_reads=asking_reads,
        wake_s=wake_s,
        start_s=start_s,
    )
    run = _Run(
        passes,
        memory,
        np.broadcast_to(compute, (len(passes), layers)),
        before=before, sync_s=sync_s, boundary_s=np.broadcast_to(boundary, len(passes)), predict_s=predict_s,
        predictor=predictor, prefetcher=prefetcher, issue=issue, tokens_ahead=tokens_ahead, patience=patience,
    )  # fmt: skip
    for step in range(len(passes)):
        run.step(step)
    return run.result()


class _Run:
    """The asking thread: compute, visits, waits and predictions of one pass after the other."""

    def __init__(self, passes, memory, compute, *, before, sync_s, boundary_s, predict_s, predictor,
                 issue, tokens_ahead, patience, prefetcher):  # fmt: skip
        self.passes, self.memory, self.layers = passes, memory, passes.layers
        self.predictor, self.issue, self.tokens_ahead = predictor, issue, tokens_ahead
        self.boundary_s, self.predict_s = boundary_s.tolist(), predict_s
        ahead, after = before * compute + sync_s, (1 - before) * compute
        self.ahead, self.after = ahead.tolist(), after.tolist()
        self.compute = compute.sum(1) + passes.layers * sync_s + boundary_s
        # The compute-only timeline: when the ids of each visit are known, and when each pass ends, if nothing waits.
        self.pass_end = np.cumsum(self.compute)
        within = np.cumsum(ahead + after, 1) - after
        self.known = ((self.pass_end - self.compute)[:, None] + within).reshape(-1).tolist()
        self.patience = math.inf if issue == "step_boundary" else patience * float(self.compute.mean())
        # A token's experts always fit, unless the cache is smaller than that or prefetches hold its slots.
        cache = memory.cache
        self.fits = predictor is None and cache.budget >= passes.top_k * sum(cache.slot_bytes)
        self.prefetcher = prefetcher
        if predictor is not None:
            if prefetcher is None:
                self.prefetcher = Prefetcher(cache, memory.scheduler, nbytes=memory.nbytes, byte_budget=1 << 62)
            memory.observe = self.prefetcher.observe
        self.visits: list[tuple] = []
        self.ends: list[tuple] = []
        self.held: list[int] = []
        memory.device.reset()

    def step(self, step: int) -> None:
        """One pass through all layers, and what happens at its end."""
        memory, device = self.memory, self.memory.device
        start, busy = memory.now, device.busy_by(memory.now)
        phase = DECODED if self.passes.decoded[step] else PREFILLED
        if self.prefetcher is not None:
            self.prefetcher.begin_step()
        for layer, keys in enumerate(self.passes.keys[step]):
            memory.advance(memory.now + self.ahead[step][layer])
            self._release()
            self.visits.append(self._visit(step, layer, keys, phase))
        memory.advance(memory.now + self.boundary_s[step])
        self._release()
        waited = 0.0
        if self.predictor is not None and self.issue != "in_forward":
            self._predict(step, range(self.layers), (step + 1) * self.layers - 1, self.pass_end[step])
            if self.issue == "step_boundary":
                began = memory.now
                waited = memory.drain() - began
        self.ends.append((start, memory.now, waited, device.busy_by(memory.now) - busy))

    def _visit(self, step: int, layer: int, keys: list[int], phase: int) -> tuple:
        """A layer from its ids to the end of its experts: one row of the result."""
        memory, route = self.memory, self.memory.now
        each = self.after[step][layer] / max(len(keys), 1)
        groups = [keys] if self.fits and len(keys) <= self.passes.top_k else memory.groups(layer, keys)
        hits = timely = late = 0
        exposed, behind = memory.now - route, 0.0  # where prefetches held every slot
        issued, ready, consume = math.nan, route, route
        for number, group in enumerate(groups):
            if number:  # the group before has been evaluated
                self._release()
            asked = memory.now
            found = sum(memory.demand(layer, group, phase=phase))
            self.held = group
            hits, timely, late = hits + found, timely + memory.timely, late + memory.late
            if not number and self.predictor is not None and self.issue == "in_forward":
                visit = step * self.layers + layer
                self._predict(step, [layer], visit, self.known[visit])
            memory.advance(memory.now + each * found)
            if found < len(group):
                idle = memory.now
                consume = memory.wait()
                exposed += consume - idle
                ready = memory.landed
                if self.predictor is not None:
                    behind += max(0.0, ready - asked - memory.alone(layer, len(group) - found))
                memory.advance(consume + each * (len(group) - found))
            if math.isnan(issued):
                issued = memory.issued
        counts = len(keys), hits, timely, late, *memory.books.take()
        return (issued, route, ready, consume, exposed, behind, *counts)

    def _release(self) -> None:
        self.memory.release(self.held)
        self.held = []

    def _predict(self, step: int, layers: Sequence[int], visit: int, at: float) -> None:
        """Ask the predictor and queue what it says; `visit` is the last one begun, `at` its compute-only time.

        All answers are queued at once: what one layer's prediction protects, another's read must not evict.
        """
        memory = self.memory
        memory.advance(memory.now + self.predict_s * len(layers))
        ahead = self.tokens_ahead if self.issue == "in_forward" else 0

        def of(target: int) -> int:
            return visit + 1 + (target - visit - 1) % self.layers + ahead * self.layers

        def due(target: int) -> float:
            return memory.now + self.known[of(target)] - at + self.patience

        told = [
            candidate
            for layer in layers
            for candidate in self.predictor(step, layer) or ()
            if (to := of(candidate[0])) < len(self.known) and self.passes.decoded[to // self.layers]
        ]
        if told:
            memory.prefetch(self.prefetcher.tickets(told, memory.now, due=due, passes_ahead=ahead))

    def result(self) -> Simulation:
        memory, shape = self.memory, (len(self.passes), self.layers)
        memory.close()
        columns = [np.array(column).reshape(shape) for column in zip(*self.visits, strict=True)]
        start, end, waited, busy = (np.array(column) for column in zip(*self.ends, strict=True))
        times, counts = columns[:6], columns[6:]
        read = (counts[4] + counts[5]) / np.array(memory.nbytes)
        names = ("issue", "route", "ready", "consume", "exposed", "behind", "used", "hits", "timely", "late",
                 "demand_bytes", "prefetch_bytes", "evicted")  # fmt: skip
        return Simulation(
            **dict(zip(names, [*times, *counts], strict=True)),
            start=start,
            end=end,
            compute_s=self.compute,
            boundary_wait=waited,
            busy_s=busy,
            device_floor_s=memory.device.least_seconds(read, np.array(memory.nbytes), memory.most),
            decoded=self.passes.decoded,
            useful_bytes=memory.books.useful_total,
            late_bytes=memory.books.late_total,
            wasted_bytes=memory.books.wasted_total,
            counters={
                "cache": memory.cache.counters(),
                "scheduler": memory.scheduler.counters,
                "prefetch": None if self.prefetcher is None else self.prefetcher.close(),
            },
        )
