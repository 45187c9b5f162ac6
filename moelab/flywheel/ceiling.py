"""Gate 0 on a model's own decode: is there anything to win, and how good must a predictor be?

The embedded models' experts are tiny, so *this* disk means little to them. What carries over is the ratio ρ
of read time to compute time of a token, and the share of the experts that a cache holds; both are known for
a few real systems. A study therefore throttles reads to the ρ and cache share of a *named* system, and shows
the measured disk and compute of this machine beside it.

Only decoded rows count. Nothing here needs a replay or a predictor, which is why this gate comes first.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import artifacts, disk, models, quiet
from ..params import Options, param
from ..routes import DECODED, PREFILLED, Routes, concat
from ..streaming.cache.eviction import ExpectedNextUse, LayerLfu, Lru
from . import stage
from .bounds import Ceiling, hit_curve, token_bytes
from .bounds import ceiling as bound
from .capture import CaptureOptions, capture
from .engine import LiveEngine, opened
from .foresight import Lookahead, Opt
from .gates import Verdict, gate0
from .observations import Records
from .observe import Observation
from .residency import Visits, replay
from .systems import SYSTEMS, System

RESULT = "ceiling.json"
FIGURES_VERSION = 4
"""Raise when `_study` writes other figures, so that older artefacts are not taken for these."""

MACHINE = "this machine"
"""Judged on the disk and compute measured here: what to ask of a model of your own."""


@dataclass(frozen=True, kw_only=True)
class CeilingOptions(Options):
    notebook: ClassVar[str] = "10"

    system: str = param(
        "MER, Qwen3-Coder-30B", "system whose ratio and cache share Gate 0 is judged at", choices=(*SYSTEMS, MACHINE)
    )
    machine_cache: float = param(
        0.125, "share of all expert bytes that a cache holds on this machine", min=0.01, max=1.0
    )
    lead: float = param(1.0, "layers between issuing a read and needing it", min=0.0)
    smallest_speedup: float = param(1.1, "speed-up by perfect prefetch that would matter", min=1.0)
    budgets: list[float] = param([0.1, 0.25, 0.5], "cache budgets, as shares of all expert bytes", min=0.01, max=1.0)
    compute_steps: int = param(12, "decoded steps timed for this machine's compute", min=2)
    disk_seconds: float = param(0.05, "seconds measured for each read size and depth", min=0.01)


def ceiling(options: CeilingOptions, *, on_progress: stage.Progress | None = None) -> dict[str, dict[str, Any]]:
    """Model → figures: `systems` (one ceiling each), `curves`, `contour` (of the judged system), `machine`."""
    observed = capture(options.upstream(CaptureOptions))
    jobs = {model: {"observations": observed[model]} for model in options.models}
    found = stage.run(ceiling_model, options, jobs, blas="auto", on_progress=on_progress)
    return {
        model: {
            **artifacts.read_json(a.file(RESULT)),
            "inputs": dict(a.manifest.inputs),
            "runtime": a.manifest.params["runtime"],
        }
        for model, a in found.items()
    }


def verdict(model: str, figures: dict[str, Any], options: CeilingOptions) -> Verdict:
    """Gate 0 on one model, at the system named by `options.system`."""
    judged = figures["systems"][options.system]
    return gate0(
        model=model,
        speedup_bound=judged["speedup"],
        precision_needed=judged["precision_needed"],
        smallest_speedup=options.smallest_speedup,
        figures={
            "system": options.system,
            **{
                name: judged[name]
                for name in (
                    "read_to_compute",
                    "cache_fraction",
                    "io_share",
                    "amdahl",
                    "hit_rate",
                    "opt_hit_rate",
                    "miss_bytes",
                    "opt_miss_bytes",
                    "token_bytes",
                )
            },
        },
        measured={
            "machine_speedup_bound": figures["machine"]["speedup"],
            "machine_compute_ms": figures["machine"]["compute_ms"],
            "machine_io_ms": figures["machine"]["io_ms"],
        },
        standard_errors={"hit_rate": judged["hit_rate_se"]} if judged["hit_rate_se"] is not None else {},
        n={"tokens": figures["tokens"], "threads": figures["threads"]},
        inputs=figures["inputs"],
        runtime=figures["runtime"],
    )


def statuses(options: Options) -> dict[str, str]:
    """Status of Gate 0 for every model, built if it is missing: what training asks before it begins."""
    mine = options.upstream(CeilingOptions)
    return {model: verdict(model, figures, mine).status for model, figures in ceiling(mine).items()}


def ceiling_model(model: str, options: CeilingOptions, observations: Path) -> Path:
    """One model in this process; returns the folder of a `ceiling` artefact."""
    with opened(model) as loaded:
        records = Records(artifacts.open_artifact(observations))
        entries = [e for e in records.replayable() if e["decoded"] and e["sequence"].startswith("forced")]

        def make(folder: Path) -> dict[str, Any]:
            observed = list(records.open(entries, loaded, purpose="evaluate"))
            result = _study(loaded, observed, options)
            artifacts.write_json(folder / RESULT, result)
            certain = {k: v for k, v in result.items() if k in ("tokens", "threads", "curves")}
            return {"content": artifacts.digest_json(certain)}

        built = artifacts.build(
            "ceiling",
            inputs={"observations": records.artifact.content},
            params={
                **options.own(),
                "runtime": models.runtime_identity(loaded.precision, loaded.residency),
                "figures_version": FIGURES_VERSION,
            },
            make=make,
        )
    return built.path


def routes_of(observed: list[Observation], expert_bytes: tuple[int, ...]) -> Routes:
    """Routes of whole recorded sequences, one thread index each."""
    return concat(
        [
            Routes(
                ids=o.ids,
                weights=o.weights,
                margin=o.margin,
                phase=o.phase,
                thread=np.full(len(o.token_ids), index, np.int32),
                position=o.ordinal.astype(np.int32),
                experts=o.header.experts,
                layer_ids=tuple(o.header.layer_ids),
                expert_bytes=np.array(expert_bytes, np.int64),
            )
            for index, o in enumerate(observed)
        ]
    )


def _study(loaded, observed: list[Observation], options: CeilingOptions) -> dict[str, Any]:
    routes = routes_of(observed, loaded.geometry.layer_expert_bytes)
    visits = Visits.of(routes.ids, routes.experts, routes.thread, prefilled=routes.phase == PREFILLED)
    total = int(routes.experts * routes.expert_bytes.sum())
    counted = routes.phase == DECODED

    def at(system: System) -> Ceiling:
        budget = int(system.cache_fraction * total)
        return at_ratio(routes, visits, counted, budget, system.read_to_compute, options.lead)

    found = {name: at(system) for name, system in SYSTEMS.items()}
    found[MACHINE], machine = _machine(loaded, observed, routes, visits, counted, total, options)
    judged = found[options.system].break_even
    return {
        "tokens": int(counted.sum()),
        "threads": len(observed),
        "total_bytes": total,
        "systems": {name: _figures(c, total) for name, c in found.items()},
        "curves": _curves(routes, visits, counted, [int(f * total) for f in options.budgets], options.budgets),
        "contour": [
            {"recall": float(r), "waste": float(w), "speedup": float(judged.speedup[i, j])}
            for i, r in enumerate(judged.recall)
            for j, w in enumerate(judged.waste)
        ],
        "precision": [
            {"recall": float(r), "precision": float(p)}
            for r, p in zip(judged.recall, judged.precision_needed, strict=True)
            if np.isfinite(p)
        ],
        "machine": machine,
    }


def at_ratio(routes: Routes, visits: Visits, counted, budget: int, ratio: float, lead: float) -> Ceiling:
    """The ceiling with a token's compute as one second and reads slowed until they take `ratio` of it."""
    missed = replay(visits, routes.expert_bytes, budget=budget, policy=Lru()).misses[counted].sum((1, 2)).mean()
    one = ratio / max(float(missed), 1e-12)
    read_s = np.tile(one * np.arange(routes.top_k + 1), (routes.layers, 1))
    return bound(
        visits, routes.expert_bytes, top_k=routes.top_k, budget=budget, compute_s=1.0, read_s=read_s,
        lead=lead, clusters=routes.thread, counted=counted,
    )  # fmt: skip


def _figures(c: Ceiling, total: int) -> dict[str, Any]:
    return {
        "read_to_compute": c.overlap.io_s / c.overlap.compute_s,
        "cache_fraction": c.budget / total,
        "speedup": c.overlap.speedup,
        "amdahl": c.overlap.amdahl,
        "io_share": c.overlap.io_share,
        # Against today's time with this cache: OPT reads less, and what it still reads is hidden.
        "opt_speedup": (c.overlap.compute_s + c.overlap.io_s) / c.opt_overlap.perfect_s,
        "precision_needed": c.precision_needed,
        "hit_rate": c.hits.value,
        "hit_rate_se": c.hits.se,
        "opt_hit_rate": c.opt_hits.value,
        "miss_bytes": c.miss_bytes.value,
        "opt_miss_bytes": c.opt_miss_bytes.value,
        "token_bytes": c.token_bytes,
        "budget": c.budget,
    }


def _curves(routes: Routes, visits: Visits, counted, budgets: list[int], shares: list[float]) -> list[dict[str, Any]]:
    policies = [Lru(), LayerLfu(), ExpectedNextUse(), Lookahead(tokens=1), Lookahead(tokens=8), Opt()]
    rows = []
    for policy in policies:
        curve = hit_curve(
            visits, routes.expert_bytes, budgets=budgets, policy=policy, clusters=routes.thread, counted=counted
        )
        rows += [
            {
                "policy": policy.name,
                "share": share,
                "budget": budget,
                "value": h.value,
                "se": h.se,
                "n": h.n,
                "miss_bytes": b.value,
            }
            for share, budget, h, b in zip(shares, budgets, curve.hits, curve.miss_bytes, strict=True)
        ]
    return rows


def _machine(
    loaded, observed, routes: Routes, visits, counted, total: int, options: CeilingOptions
) -> tuple[Ceiling, dict[str, Any]]:
    """This machine: measured disk, measured compute, and the bound they give at the judged cache share."""
    with tempfile.TemporaryDirectory(dir=artifacts.artifacts_dir()) as folder, quiet.timing():
        profile = disk.measure(folder, file_bytes=64 << 20, seconds=options.disk_seconds, repeats=3)
        compute_s = _compute_seconds(loaded, observed[0].token_ids, options.compute_steps)
    budget = int(options.machine_cache * total)
    found = bound(
        visits, routes.expert_bytes, top_k=routes.top_k, budget=budget, compute_s=compute_s,
        read_s=profile.miss_table(routes.expert_bytes, routes.top_k), lead=options.lead,
        clusters=routes.thread, counted=counted,
    )  # fmt: skip
    return found, {
        "compute_ms": compute_s * 1e3,
        "io_ms": found.io_s.value * 1e3,
        "speedup": found.overlap.speedup,
        "tokens_per_second_by_disk": found.roofline,
        "token_bytes": token_bytes(routes.expert_bytes, routes.top_k),
        "disk_method": profile.method,
        "disk": [
            dataclasses.asdict(c) if dataclasses.is_dataclass(c) else {n: getattr(c, n) for n in c.__struct_fields__}
            for c in profile.cells
        ],
    }


def _compute_seconds(loaded, tokens: np.ndarray, steps: int) -> float:
    """Median seconds of a cached decode step with every expert resident; a streamed model's waits are taken off."""
    with LiveEngine(loaded, taps=False) as engine:
        engine.start()
        engine.feed(tokens[:8], PREFILLED)
        times = []
        for token in tokens[8 : 8 + steps]:
            began, waited = time.perf_counter(), loaded.waited_s
            engine.feed(np.array([token], np.int32), DECODED)
            times.append(time.perf_counter() - began - (loaded.waited_s - waited))
    return float(np.median(times))
