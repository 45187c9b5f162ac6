"""Real streamed runs beside their simulation, on this machine: may the figures of notebook 83 be believed?

Three runs of the engine over the same recorded tokens, with the same cache: its store slowed to a declared device,
the same with a perfect layer of lead, and this machine's own disk. Each is recorded, and simulated with the device it
read from. Compute times, and how late threads begin and wake, are the run's own: what is tested is the reading.
Prefetches race with the layers that want them: told how long every read really took (`told_*`), the simulator shows
whether it decides as the engine does; left to its device, whether the races end alike.

Models take turns, for two engines on two cores would wait for each other; and each run is made several times and the
fastest one kept, since other work on a machine only ever slows it; how its races ended is told of every one. How late
a sleeping thread wakes is measured beside them: on a machine with more work than cores that is milliseconds, and the
simulation then too fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import artifacts, models, quiet
from ..flywheel import stage
from ..flywheel.capture import CaptureOptions, capture
from ..flywheel.engine import opened
from ..flywheel.observations import Records
from ..streaming.schedule.oracle import Oracle
from ..streaming.schedule.passes import Passes
from ..streaming.store.device import VirtualDevice
from .simulation import FIGURES_VERSION, SimulationOptions

if TYPE_CHECKING:
    from ..streaming import StreamingEngine
    from ..streaming.simulation.validation import Recording

RESULT = "check.json"
PROMPT = 16
CACHE = 0.1875
"""Share of all expert bytes: a cache that misses every other expert of the embedded models."""
REPEATS = 2
OFF = {"hits": "simulated_hits", "told": "told_hits"}
READ_S = 2e-3
"""Latency of the declared device, and time of an expert's bytes: long against waking a thread."""


def check(options: SimulationOptions, *, on_progress: stage.Progress | None = None) -> dict[str, dict[str, Any]]:
    """Model → `rows`, one a run: real and simulated seconds a token, hits and bytes."""
    observed = capture(options.upstream(CaptureOptions))
    jobs = {model: {"observations": observed[model]} for model in options.models}
    found = {}
    for model, job in jobs.items():
        found |= stage.run(check_model, options, {model: job}, on_progress=on_progress)
    return {model: artifacts.read_json(a.file(RESULT)) for model, a in found.items()}


def check_model(model: str, options: SimulationOptions, observations: Path) -> Path:
    """One model in this process; returns the folder of a `simulation-check` artefact."""
    records = Records(artifacts.open_artifact(observations))
    with opened(model) as loaded:
        entry = next(e for e in records.replayable() if e["decoded"] and e["sequence"].startswith("forced"))
        (observed,) = records.open([entry], loaded, purpose="evaluate")
        tokens = observed.token_ids[: PROMPT + options.check_tokens].tolist()
        runtime = models.runtime_identity(loaded.precision)

    def make(folder: Path) -> dict[str, Any]:
        with quiet.timing():
            rows = runs(model, tokens)
        artifacts.write_json(folder / RESULT, {"rows": rows})
        return {"content": artifacts.digest_json([row["hits"] for row in rows if row["prediction"] == "none"])}

    return artifacts.build(
        "simulation-check",
        inputs={"observations": records.artifact.content},
        params={"tokens": options.check_tokens, "runtime": runtime, "figures_version": FIGURES_VERSION},
        make=make,
    ).path


def runs(
    model: str | Path, tokens: list[int], *, repeats: int = REPEATS, read_s: float = READ_S
) -> list[dict[str, Any]]:
    """The three runs of the module text, each the fastest of its repeats; `read_s` as `READ_S`.

    `hits_off`, `told_off`: simulated hits less the real ones, of every repeat.
    """
    found = zip(*(_runs(model, tokens, read_s) for _ in range(repeats)), strict=True)
    return [
        min(rows, key=lambda row: row["seconds"])
        | {f"{name}_off": [row[key] - row["hits"] for row in rows] for name, key in OFF.items()}
        for rows in found
    ]


def _runs(model: str | Path, tokens: list[int], read_s: float) -> list[dict[str, Any]]:
    from ..streaming.engine.issuing import Issuer
    from ..streaming.simulation.validation import device_of, record

    prompt, rest = tokens[:PROMPT], tokens[PROMPT:]
    rows = []
    with _engine(model, None) as engine:
        own = device_of(engine.store, depth=engine.options.threads + 1)
        rows.append(_row("this disk", "none", engine, record(engine, prompt, rest), own))
        size = engine.store.nbytes(0)
    device = VirtualDevice(latency_s=read_s, bytes_per_s=size / read_s)
    with _engine(model, device.idle_copy()) as engine:
        demand = record(engine, prompt, rest)
        rows.append(_row("declared", "none", engine, demand, device))
    passes = Passes.of(demand.ids, experts=engine.store.experts, phase=demand.phase, order="sorted")
    oracle = Oracle(passes)

    def predictor(step: int, layer: int):
        return oracle(step + 1, layer)  # the prompt is pass 0

    with _engine(model, device.idle_copy()) as engine:
        with Issuer(engine, predictor, compute_s=np.median(demand.compute_s[1:], 0).tolist()):
            ahead = record(engine, prompt, rest)
        rows.append(_row("declared", "perfect, a layer ahead", engine, ahead, device, predictor=predictor))
    return rows


def _engine(model: str | Path, device: VirtualDevice | None) -> StreamingEngine:
    """A fresh engine, so that its cache begins empty as the simulated one does."""
    from ..streaming import EngineOptions, StreamingEngine, open_store

    path = models.find(models.split_budget(str(model))[0])
    with open_store(path) as store:
        total = sum(store.experts * layout.slot_bytes for layout in store.layouts)
    return StreamingEngine.load(path, EngineOptions(cache_bytes=int(CACHE * total), device=device))


def _row(
    store: str, prediction: str, engine: StreamingEngine, real: Recording, device: VirtualDevice, **predicted: Any
) -> dict[str, Any]:
    from ..streaming.simulation.validation import RecordedDevice, resimulate, wake_late_s

    got, late_s = resimulate(engine, real, device, **predicted), wake_late_s()
    told = resimulate(engine, real, RecordedDevice(real.reads), **predicted)
    used = int(got.used[1:].sum())
    return {
        "store": store,
        "prediction": prediction,
        "tokens": len(real.wall_s) - 1,
        "seconds": real.seconds_per_token,
        "simulated_seconds": got.seconds_per_token,
        "wake_late_ms": 1e3 * late_s,
        "ratio": got.seconds_per_token / real.seconds_per_token,
        "hits": (used - int(real.missing[1:].sum())) / used,
        "simulated_hits": int(got.hits[1:].sum()) / used,
        "told_hits": int(told.hits[1:].sum()) / used,
        "told_seconds": told.seconds_per_token,
        "read_bytes": real.read_bytes,
        "simulated_bytes": round(int((got.demand_bytes + got.prefetch_bytes).sum()) / real.physical_ratio),
        "told_bytes": round(int((told.demand_bytes + told.prefetch_bytes).sum()) / real.physical_ratio),
    }
