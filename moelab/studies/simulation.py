"""What a prefetch policy would do, before a byte is read: simulated decode of a model's own routes.

Three studies, none of which needs the engine to run:

* **Issue points.** A perfect oracle and experts that no cache holds, over depth and the ratio of read to compute
  time: how much of the overlap is lost by *when* a prediction is issued alone. It depends on no model.
* **Cache.** A model's decode through each eviction policy and budget, without prediction and with a perfect one layer
  of lead, beside OPT and the bounds.
* **Predictors.** What a predictor of given recall and waste would do to the time of a token, in closed loop: through a
  cache that its wrong reads displace, behind a queue that they fill. Beside it the fluid model of Gate 0.

The embedded models' experts are tiny, so the device is slowed until reads take as long, against compute, as in a
named system (`flywheel.systems`). A token computes for one second: times are shares of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import artifacts, models
from ..flywheel import stage
from ..flywheel.breakeven import break_even
from ..flywheel.capture import CaptureOptions, capture
from ..flywheel.ceiling import routes_of
from ..flywheel.engine import opened
from ..flywheel.foresight import Opt
from ..flywheel.observations import Records
from ..flywheel.residency import Visits, replay
from ..flywheel.systems import SYSTEMS
from ..params import Options, param
from ..routes import DECODED, PREFILLED, Routes
from ..streaming.cache import eviction
from ..streaming.cache.cache import Cache
from ..streaming.schedule.oracle import NoisyOracle, Oracle, PreviousToken
from ..streaming.schedule.passes import Passes
from ..streaming.schedule.prefetch import ISSUE
from ..streaming.schedule.schedule import Scheduler
from ..streaming.simulation.simulation import Simulation, share_of_possible
from ..streaming.simulation.simulator import simulate
from ..streaming.store.device import VirtualDevice

RESULT = "simulation.json"
FIGURES_VERSION = 3
"""Raise when `study` writes other figures, so that older artefacts are not taken for these."""


@dataclass(frozen=True, kw_only=True)
class SimulationOptions(Options):
    notebook: ClassVar[str] = "83"

    system: str = param("MER, Qwen3-Coder-30B", "system whose ratio and cache share are simulated", choices=(*SYSTEMS,))
    tokens: int = param(120, "decoded tokens simulated, at most; whole sequences", min=1)
    depths: list[int] = param([8, 48], "layers of the study of issue points", min=1)
    ratios: list[float] = param([0.25, 0.5, 1.0, 2.0, 4.0], "read time ÷ compute time of that study", min=0.01)
    budgets: list[float] = param([0.125, 0.25, 0.5], "cache budgets, as shares of all expert bytes", min=0.01, max=1.0)
    policies: list[str] = param(
        ["lru", "layer-lfu", "recent-lfu", "expected-next-use"], "eviction policies", choices=(*eviction.POLICIES,)
    )
    recalls: list[float] = param([0.5, 0.75, 1.0], "recall of simulated predictors", min=0.01, max=1.0)
    wastes: list[float] = param([0.0, 0.5, 1.0], "useless candidates for each useful one", min=0.0)
    lead: int = param(1, "layers that a simulated predictor looks ahead", min=1)
    latency: float = param(0.15, "latency of a read, as a share of the time of its bytes", min=0.0)
    before: float = param(0.5, "share of a layer's compute before its ids are known", min=0.0, max=1.0)
    sync: float = param(0.0, "a synchronisation, as a share of a layer's compute", min=0.0)
    readers: int = param(4, "reads in flight at most", min=1)
    check_tokens: int = param(16, "decoded tokens of each real run that is compared with its simulation", min=2)


def simulation(options: SimulationOptions, *, on_progress: stage.Progress | None = None) -> dict[str, dict[str, Any]]:
    """Model → figures: `cache`, `issue`, `contour` (lists of rows), and what they rest on."""
    observed = capture(options.upstream(CaptureOptions))
    jobs = {model: {"observations": observed[model]} for model in options.models}
    found = stage.run(simulation_model, options, jobs, on_progress=on_progress)
    return {model: artifacts.read_json(a.file(RESULT)) for model, a in found.items()}


def simulation_model(model: str, options: SimulationOptions, observations: Path) -> Path:
    """One model in this process; returns the folder of a `simulation` artefact."""
    with opened(model) as loaded:
        records = Records(artifacts.open_artifact(observations))
        entries = [e for e in records.replayable() if e["decoded"] and e["sequence"].startswith("forced")]

        def make(folder: Path) -> dict[str, Any]:
            observed = list(records.open(entries, loaded, purpose="evaluate"))
            result = study(routes_of(observed, loaded.geometry.layer_expert_bytes), options)
            artifacts.write_json(folder / RESULT, result)
            return {"content": artifacts.digest_json(result)}

        built = artifacts.build(
            "simulation",
            inputs={"observations": records.artifact.content},
            params={
                **{name: value for name, value in options.own().items() if name != "check_tokens"},
                "runtime": models.runtime_identity(loaded.precision),
                "figures_version": FIGURES_VERSION,
            },
            make=make,
        )
    return built.path


def issue_points(options: SimulationOptions) -> list[dict[str, Any]]:
    """One row a depth, ratio and issue point: time of a pass over its compute, with a perfect oracle.

    Every pass asks for experts that the cache has long forgotten, and all compute follows the ids: the fluid case.
    """
    rows = []
    for layers in options.depths:
        ids = np.zeros((1, layers, 1), int) + np.arange(12)[:, None, None]
        passes = Passes.of(ids.astype(np.uint16), experts=12)
        for ratio in options.ratios:
            setup = _Setup(passes, [1] * layers, bandwidth=1 / ratio, latency_s=0.0, compute_s=1.0, before=0.0)
            cells = {"off": setup.run(3 * layers, "lru")}
            for issue in ISSUE:
                lead = 1 if issue == "in_forward" else layers
                cells[issue] = setup.run(
                    3 * layers, "lru", predictor=Oracle(passes, lead=lead), issue=issue, patience=99.0
                )
            for name, got in cells.items():
                # The first pass fetches what nobody could foresee, and the last one foresees nothing.
                steady = float(got.pass_s[2:-1].mean() / layers)
                rows.append({"layers": layers, "ratio": ratio, "issue": name, "time": steady, "bound": max(1.0, ratio)})
    return rows


def study(routes: Routes, options: SimulationOptions) -> dict[str, Any]:
    """Figures of one model from its routes; plain numbers."""
    routes = first_sequences(routes, options.tokens)
    passes = Passes.of(
        routes.ids, experts=routes.experts, thread=routes.thread, phase=routes.phase, mask=routes.mask, order="sorted"
    )
    system, total = SYSTEMS[options.system], int(routes.experts * routes.expert_bytes.sum())
    budget = int(system.cache_fraction * total)
    setup = _throttled(passes, routes, budget, system.read_to_compute, options)
    visits = Visits.of(routes.ids, routes.experts, routes.thread, prefilled=routes.phase == PREFILLED, mask=routes.mask)
    decoded = routes.phase == DECODED
    cache = []
    for share in options.budgets:
        opt = replay(visits, routes.expert_bytes, budget=int(share * total), policy=Opt())
        for policy in options.policies:
            off = setup.run(int(share * total), policy)
            on = setup.run(int(share * total), policy, predictor=Oracle(passes, lead=options.lead))
            row = {"policy": policy, "share": share, **_row(off, off)}
            row |= {"opt_hit_rate": float(opt.hits[decoded].mean()), "opt_bytes": float(opt.read_bytes[decoded].mean())}
            cache.append(row | {"perfect_seconds": on.seconds_per_token, "possible": share_of_possible(off, on)})
    off = setup.run(budget, "lru")
    issue = [{"predictor": "none", "issue": "off", **_row(off, off)}]
    for name, make in {
        "oracle": lambda lead: Oracle(passes, lead=lead),
        "previous token": lambda lead: PreviousToken(passes),
    }.items():
        for point in ISSUE:
            near = name == "oracle" and point == "in_forward"
            on = setup.run(budget, "lru", predictor=make(options.lead if near else passes.layers), issue=point)
            issue.append({"predictor": name, "issue": point, **_row(off, on)})
    return {
        "system": options.system,
        "tokens": int(passes.decoded.sum()),
        "threads": len(np.unique(routes.thread)),
        "total_bytes": total,
        "token_bytes": int(routes.top_k * routes.expert_bytes.sum()),
        "cold_roofline": setup.bandwidth / int(routes.top_k * routes.expert_bytes.sum()),
        "cache": cache,
        "issue": issue,
        "contour": _contour(setup, off, budget, options),
    }


def _contour(setup: _Setup, off: Simulation, budget: int, options: SimulationOptions) -> list[dict[str, Any]]:
    """Speed-up of predictors by recall and waste in closed loop, and by the fluid model of Gate 0.

    The fluid model is given the useless reads a useful read that came about: a useless candidate is seldom resident, a
    useful one often is, so they are more than the useless candidates a useful one.
    """
    io_s = ((off.used - off.hits) * np.array(setup.nbytes) / setup.bandwidth)[off.decoded]
    rows = []
    for recall in options.recalls:
        for waste in options.wastes:
            noisy = NoisyOracle(
                setup.passes, lead=options.lead, recall=recall, precision=1 / (1 + waste), seed=options.seed
            )
            on = setup.run(budget, "lru", predictor=noisy)
            reads = 1 / on.useful_ratio - 1 if on.useful_bytes else waste
            fluid = break_even(io_s, setup.compute_s, lead=options.lead, recall=[recall], waste=[reads])
            row = {"speedup": off.seconds / on.seconds, "fluid_speedup": float(fluid.speedup[0, 0])}
            rows.append({"recall": recall, "waste": waste, "read_waste": reads, **_row(off, on), **row})
    return rows


@dataclass(frozen=True)
class _Setup:
    """A device, compute times and routes, to be run with one cache after the other."""

    passes: Passes
    nbytes: list[int]
    bandwidth: float
    latency_s: float
    compute_s: float
    before: float
    sync_s: float = 0.0
    threads: int = 4

    def run(self, budget: int, policy: str, **predicted: Any) -> Simulation:
        cache = Cache(
            layers=self.passes.layers, experts=self.passes.experts, slot_bytes=self.nbytes, budget=budget,
            policy=eviction.policy(policy), top_k=self.passes.top_k,
        )  # fmt: skip
        return simulate(
            self.passes,
            nbytes=self.nbytes,
            cache=cache,
            scheduler=Scheduler(max_inflight_bytes=(self.threads + 1) * max(self.nbytes), p0_reserve_bytes=0),
            device=VirtualDevice(latency_s=self.latency_s, bytes_per_s=self.bandwidth),
            compute_s=self.compute_s,
            before=self.before,
            sync_s=self.sync_s,
            threads=self.threads,
            **predicted,
        )


def _throttled(passes: Passes, routes: Routes, budget: int, ratio: float, options: SimulationOptions) -> _Setup:
    """A token computes for one second, and its reads through LRU at this budget take `ratio` seconds of the device."""
    sizes, one = [int(size) for size in routes.expert_bytes], 1.0 / passes.layers

    def at(bandwidth: float) -> _Setup:
        latency_s = options.latency * max(sizes) / bandwidth
        return _Setup(passes, sizes, bandwidth, latency_s, one, options.before, options.sync * one, options.readers)

    probe = at(1.0).run(budget, "lru")
    return at(probe.device_floor_s[probe.decoded].mean() / ratio)  # device time is inverse to the bandwidth


def _row(off: Simulation, on: Simulation) -> dict[str, float]:
    """Figures of a run beside the bounds of the one without prediction; absent figures are None."""
    tokens = off.tokens
    figures = on.summary() | {"bound_s": off.bound_s / tokens, "floor_s": off.floor_s / tokens}
    if on is not off:
        figures["possible"] = share_of_possible(off, on)
    return {name: None if np.isnan(value) else float(value) for name, value in figures.items()}


def first_sequences(routes: Routes, tokens: int) -> Routes:
    """Whole sequences from the start, as many as hold `tokens` decoded tokens at most; the first in any case."""
    decoded = np.bincount(routes.thread, weights=routes.phase == DECODED).cumsum()
    last = max(int(np.searchsorted(decoded, tokens, side="right")), 1)
    return routes.select(np.flatnonzero(routes.thread < last))
