"""Is the simulator right? An engine's run, run again without the engine, and both compared.

`record` decodes given tokens and keeps what the simulator needs: routes, and for each visit how long the engine
computed and how long it waited. `resimulate` replays that through a cache, scheduler and device of the same
figures. Compute times are the recording's own: what is compared is the reading. In a run on demand the simulated hits
are the engine's, visit by visit; in time the two differ by what the simulator leaves out: cores that read and compute
at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ...errors import ContractError
from ...pages import aligned
from ...routes import DECODED, PREFILLED
from ..cache.cache import Cache
from ..cache.eviction import policy
from ..schedule.passes import Passes
from ..schedule.schedule import Scheduler
from ..store.device import VirtualDevice
from .simulation import Simulation
from .simulator import simulate

if TYPE_CHECKING:
    from ..engine.engine import StreamingEngine
    from ..schedule.oracle import Candidate
    from ..schedule.tickets import Ticket
    from ..store.store import ExpertStore

__all__ = ["RecordedDevice", "Recording", "device_of", "record", "resimulate", "wake_late_s"]


@dataclass(frozen=True, eq=False)
class Recording:
    """One prompt and the tokens decoded after it: P passes, the first a prompt.

    Attributes:
        ids, phase: routes `[T,L,K]` and `[T]`, T = prompt and decoded tokens.
        wall_s: `f64[P]`, seconds of each pass.
        compute_s: `f64[P,L]`, time before the ids of each layer in which the engine did not wait.
        tail_s: `f64[P]`, the same after the last layer's ids.
        waited_s: `f64[P,L]`.
        missing: `i64[P,L]`, experts that were not resident.
        read_bytes: bytes of the experts that were read.
        physical_ratio: bytes asked of the device ÷ those; 1 where none was read.
        reads: `f64[reads]`, seconds of every read, in the order in which they were begun.
        wake_s: `f64[reads]`, seconds of these beside the time on a declared device: on the way there, and until the
            thread went on; 0 where this machine's own disk was read.
        start_s: median seconds from a wish that found every reader idle until one began on it.
        ask_s: median seconds from a layer's ids until what was predicted at them had been queued; 0 without prediction.
    """

    ids: np.ndarray
    phase: np.ndarray
    wall_s: np.ndarray
    compute_s: np.ndarray
    tail_s: np.ndarray
    waited_s: np.ndarray
    missing: np.ndarray
    read_bytes: int
    physical_ratio: float
    reads: np.ndarray
    wake_s: np.ndarray
    start_s: float = 0.0
    ask_s: float = 0.0

    @property
    def seconds_per_token(self) -> float:
        """Mean of the decoded passes."""
        return float(self.wall_s[1:].mean())


class RecordedDevice(VirtualDevice):
    """Reads that take as long as a recording's did, whatever is asked of the device at once.

    With it a simulation is told how every race went, and has to decide all else as the engine did.
    """

    def __init__(self, seconds: np.ndarray):
        self._seconds = seconds.tolist()
        super().__init__(latency_s=0.0, bytes_per_s=math.inf)

    def book(self, now: float, nbytes: int) -> tuple[float, float]:
        took = self._seconds[self.reads] if self.reads < len(self._seconds) else self._seconds[-1]
        self.reads += 1
        self.nbytes += nbytes
        self.busy_s += max(0.0, now + took - max(now, self._busy_until))
        self._busy_until = max(now + took, self._busy_until)
        return now, now + took


class _Routes:
    """Listener that keeps the ids of every layer."""

    def __init__(self):
        self.seen: list[np.ndarray] = []

    def routed(self, *, step, layer, ids, x, now):
        self.seen.append(np.array(ids, np.uint16).reshape(-1, ids.shape[-1]))

    def ended(self, *, step):
        pass


def record(engine: StreamingEngine, prompt: Sequence[int], tokens: Sequence[int]) -> Recording:
    """Prefill `prompt` as one pass and decode `tokens`, one a pass, whatever the model would have said.

    The engine's timeline is cleared. Residents are as they come: for an exact comparison, of a fresh engine.

    Raises:
        ContractError: nothing to prefill or to decode, or a prompt longer than one pass.
    """
    if not 1 <= len(prompt) <= engine.options.prefill_step_size or not len(tokens):
        raise ContractError(
            "a prompt of one pass and tokens to decode", field="prompt, tokens", got=(len(prompt), len(tokens)),
            expected=f"1 to {engine.options.prefill_step_size}, >= 1",
        )  # fmt: skip
    store, layers, routes = engine.store, engine.store.layers, _Routes()
    before = store.payload_bytes, store.physical_bytes, len(store.virtual_s)
    engine.reset()
    engine.forward.timeline.clear()
    reads: list[tuple[float, float, float]] = []  # begun, ended, wished
    predicted: list[float] = []  # wished

    def watch(ticket: Ticket, now: float) -> None:
        reads.append((ticket.started_at, now, ticket.submitted_at))
        if ticket.owner != "demand":
            predicted.append(ticket.submitted_at)

    engine.forward.listeners.append(routes)
    engine.memory.ended.append(watch)
    started, ended = [], []
    try:
        kv = engine.loaded.make_cache()
        for fed, phase in [(prompt, PREFILLED), *(([token], DECODED) for token in tokens)]:
            started.append(engine.memory.clock())
            engine.run(mx.array([list(fed)]), kv, phase)
            ended.append(engine.memory.clock())
        engine.memory.drain()
    finally:
        engine.forward.listeners.remove(routes)
        engine.memory.ended.remove(watch)
    flat = engine.forward.timeline.arrays()
    line = {name: column.reshape(-1, layers) for name, column in flat.items()}
    head = line["issue"][:, :1] - np.array(started)[:, None]
    payload, physical = store.payload_bytes - before[0], store.physical_bytes - before[1]
    virtual = np.array(store.virtual_s[before[2] :])
    took = np.array([ended - begun for begun, ended, _ in sorted(reads)])
    ids = [np.stack(routes.seen[at : at + layers], 1) for at in range(0, len(routes.seen), layers)]
    return Recording(
        ids=np.concatenate(ids),
        phase=np.repeat(np.array([PREFILLED, DECODED], np.uint8), [len(prompt), len(tokens)]),
        wall_s=np.array(ended) - np.array(started),
        compute_s=np.maximum(np.hstack([head, line["compute"][:, :-1]]), 0.0),
        tail_s=np.maximum(line["compute"][:, -1], 0.0),
        waited_s=line["blocked"],
        missing=line["missing"],
        read_bytes=payload,
        physical_ratio=physical / payload if payload else 1.0,
        reads=took,
        wake_s=np.maximum(took - virtual, 0.0) if len(virtual) else np.zeros(len(took)),
        start_s=_start_s(sorted(reads)),
        ask_s=_ask_s(predicted, flat["issue"]),
    )


def resimulate(
    engine: StreamingEngine,
    recording: Recording,
    device: VirtualDevice,
    *,
    predictor: Callable[[int, int], Sequence[Candidate] | None] | None = None,
    issue: str = "in_forward",
) -> Simulation:
    """The recording's routes through a cache and scheduler as the engine's.

    Args:
        device: what the engine read from.
        predictor, issue: of the `Issuer` that was at work; it is asked of decoded passes, counted from 0.
    """
    passes = Passes.of(recording.ids, experts=engine.store.experts, phase=recording.phase, order="sorted")
    # What asking takes lies between a layer's ids and the next layer's: the recording has it as compute.
    ask_s = recording.ask_s if predictor is not None and issue == "in_forward" else 0.0
    asking = ask_s * passes.decoded
    compute_s, tail_s = recording.compute_s.copy(), np.maximum(recording.tail_s - asking, 0.0)
    compute_s[:, 1:] = np.maximum(compute_s[:, 1:] - asking[:, None], 0.0)
    # How late threads go on scatters widely, and races depend on it: the run's own lateness, shuffled.
    wakes = np.random.default_rng(0).permutation(recording.wake_s)
    if isinstance(device, RecordedDevice) or not len(wakes):
        wakes = 0.0
    sizes = [engine.store.nbytes(layer) for layer in range(engine.store.layers)]
    return simulate(
        passes,
        nbytes=[round(size * recording.physical_ratio) for size in sizes],
        cache=Cache(
            layers=passes.layers,
            experts=passes.experts,
            slot_bytes=engine.cache.slot_bytes,
            budget=engine.cache.budget,
            policy=policy(engine.options.policy),
            top_k=engine.cache.top_k,
            below_cycle=engine.options.below_cycle,
            read_bytes=engine.cache.read_bytes,
        ),
        scheduler=Scheduler(
            max_inflight_bytes=math.ceil(engine.scheduler.max_inflight_bytes * recording.physical_ratio)
        ),
        device=device,
        compute_s=compute_s,
        # What the engine computes while it waits is not in its own compute times, and is little in any case.
        before=1.0,
        boundary_s=tail_s,
        threads=engine.options.threads,
        asking_reads=True,
        start_s=recording.start_s,
        wake_s=wakes,
        predict_s=ask_s,
        predictor=None if predictor is None else lambda step, layer: predictor(step - 1, layer) if step else None,
        issue=issue,
    )


def _start_s(reads: list[tuple[float, float, float]]) -> float:
    """`reads` (begun, ended, wished) in the order of their beginning."""
    delays, busy_until = [], -math.inf
    for begun, ended, wished in reads:
        if wished >= busy_until:
            delays.append(begun - wished)
        busy_until = max(busy_until, ended)
    return float(np.median(delays)) if delays else 0.0


def _ask_s(predicted: Sequence[float], issue: np.ndarray) -> float:
    """`issue` in ascending order: a prediction belongs to the last of them before it."""
    if not predicted:
        return 0.0
    return float(np.median(predicted - issue[np.searchsorted(issue, predicted, side="right") - 1]))


def device_of(store: ExpertStore, *, depth: int, reads: int = 64, seed: int = 0) -> VirtualDevice:
    """The device that a store amounts to: its rates with one and with `depth` threads reading at random.

    Everything on the way is in them: the disk, the reader, conversion, the interpreter.
    """
    size = sum(store.nbytes(layer) for layer in range(store.layers)) / store.layers
    rates = [_rate(store, threads, reads, seed) for threads in (1, depth)]
    return VirtualDevice.of_rates(*rates, size=size)


def wake_late_s(*, sleep_s: float = 4e-3, times: int = 25) -> float:
    """Mean seconds by which this machine, as busy as it is now, wakes a sleeping thread late.

    A throttled read and the wait for it end with a thread that wakes: what no simulated device knows of.
    """
    late = 0.0
    for _ in range(times):
        until = time.perf_counter() + sleep_s
        time.sleep(sleep_s)
        late += max(0.0, time.perf_counter() - until)
    return late / times


def _rate(store: ExpertStore, threads: int, reads: int, seed: int) -> float:
    keys = np.random.default_rng(seed).integers(0, store.layers * store.experts, (threads, reads))
    ready = threading.Barrier(threads + 1)

    def reader(mine: list[int]) -> None:
        outs = {}
        ready.wait()
        for layer, expert in (divmod(key, store.experts) for key in mine):
            size = store.layouts[layer].slot_bytes
            if size not in outs:
                outs[size] = aligned(size)
            store.read_into(layer, expert, outs[size])

    workers = [threading.Thread(target=reader, args=(row.tolist(),)) for row in keys]
    for worker in workers:
        worker.start()
    ready.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    took = time.perf_counter() - began
    return sum(store.nbytes(key // store.experts) for key in keys.reshape(-1).tolist()) / took
