"""The training-free controls on held-out decode: what a learned predictor has to beat.

Every control is fitted on training rows and judged on decoded rows of the held-out sets. A control that
knows its answer earlier than a horizon asks for is admitted at that horizon too.

Source: AFN-021, Gate 3, controls 1 to 5. Control 6, learned, is `training`'s; control 7, a drafter's
sidecar, does not exist yet and its row says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import artifacts, models
from ..artifacts import Artifact
from ..params import Options, param
from . import stage
from .batches import BatchShape
from .capture import CaptureOptions, capture
from .controls import AdjacentLayer, Control, DecayedHistory, EarlyGate, Popularity, PreviousToken, Random, Recency
from .cooccurrence import CombinedCoOccurrence, CoOccurrence
from .dataset import Dataset, open_dataset
from .engine import opened
from .evaluation import HeldOut, Judged, judge, write_ranks
from .examples import ARMS, early_gate, known_layers, regenerate
from .metrics import union_growth
from .observations import Records
from .qualification import ReplayOptions
from .replay import replay
from .snapshot import SnapshotOptions, snapshot

TABLE, RANKS, UNION = "table.json", "ranks.safetensors", "union.json"


@dataclass(frozen=True, kw_only=True)
class BaselineOptions(Options):
    notebook: ClassVar[str] = "40"

    sets: list[str] = param(
        ["validation", "temporal", "stress"],
        "held-out sets; the first is the one judged on",
        choices=("validation", "temporal", "stress"),
    )
    cache_fraction: float = param(0.25, "share of all expert bytes that the stated cache holds", min=0.01, max=1.0)
    miss_recall: float = param(
        0.95, "share of misses to be fetched ahead when wasted bytes are compared", min=0.1, max=1.0
    )
    feature_blas: str = param("auto", "BLAS for regenerating features", choices=("auto", "reference", "openblas"))
    batch_tokens: int = param(1024, "padded tokens of a feature batch", min=1)
    chunk: int = param(96, "positions fed at once", min=1)


def controls(seed: int) -> list[Control]:
    """Controls that need routes alone."""
    return [
        Random(seed=seed),
        Popularity(),
        Recency(),
        PreviousToken(),
        DecayedHistory(),
        CoOccurrence(tokens_back=1),
        AdjacentLayer(),
        CoOccurrence(layers_back=1),
        CombinedCoOccurrence(),
        CoOccurrence(tokens_back=1, layers_back=1),
    ]


@dataclass(frozen=True)
class Upstream:
    """What notebooks 40 to 42 need of one model."""

    observations: Artifact
    routes: Artifact
    snapshot: Artifact

    def open(self) -> tuple[Records, Dataset]:
        return Records(self.observations), open_dataset(self.snapshot, self.routes)


def upstream(options: Options) -> dict[str, Upstream]:
    """Build or open everything before notebook 40, for every model."""
    observed = capture(options.upstream(CaptureOptions))
    routes = replay(options.upstream(ReplayOptions))
    snapshots = snapshot(options.upstream(SnapshotOptions))
    return {m: Upstream(observed[m], routes[m], snapshots[m]) for m in options.models}


def baselines(options: BaselineOptions, *, on_progress: stage.Progress | None = None) -> dict[str, Artifact]:
    """Judge every control on every model: model → artefact of kind `baselines`."""
    before = upstream(options)
    jobs = {m: {"before": before[m]} for m in options.models}
    return stage.run(baselines_model, options, jobs, blas=options.feature_blas, on_progress=on_progress)


def baselines_model(model: str, options: BaselineOptions, before: Upstream) -> Path:
    """One model in this process; returns the artefact's folder."""
    with opened(model) as loaded:
        records, dataset = before.open()
        built = artifacts.build(
            "baselines",
            inputs={"snapshot": dataset.artifact.content, "routes": before.routes.content},
            params={**options.own(), "runtime": models.runtime_identity(loaded.precision, loaded.residency)},
            make=lambda folder: _build(folder, loaded, records, dataset, options),
        )
    return built.path


def _build(folder: Path, loaded, records: Records, dataset: Dataset, options: BaselineOptions) -> dict[str, Any]:
    held = HeldOut.of(dataset, options.sets, cache_fraction=options.cache_fraction)
    train = dataset.routes.select(dataset.rows("train"))
    judged: list[Judged] = []
    todo = controls(options.seed)
    for number, control in enumerate(todo):
        control.fit(train)
        layers = control.predictable(held.routes).any(0)
        judged.append(
            judge(
                control.name, control.horizon, control.iter_scores, held, layers=layers, miss_recall=options.miss_recall
            )
        )
        models.report_progress({"done": number + 1, "total": len(todo) + len(ARMS)})
    shape = BatchShape(options.batch_tokens, options.chunk)
    features = regenerate(loaded, dataset, records, ("pre_attention", "moe_input"), shape)
    for number, arm in enumerate(ARMS.values()):
        gate = early_gate(loaded, features[arm.feature][held.rows], arm)
        layers = known_layers(arm, held.routes.layers)
        control = EarlyGate(gate, horizon=arm.horizon, known=np.broadcast_to(layers, gate.shape[:2])).fit(train)
        name = f"own gate early, {arm.feature.replace('_', ' ')}"
        judged.append(
            judge(name, arm.horizon, control.iter_scores, held, layers=layers, miss_recall=options.miss_recall)
        )
        models.report_progress({"done": len(todo) + number + 1, "total": len(todo) + len(ARMS)})
    header = {"snapshot": dataset.artifact.content, "miss_recall": options.miss_recall, "cache_bytes": held.cache_bytes}
    write_ranks(folder / RANKS, judged, held, header)
    table = [row for j in judged for row in j.rows]
    artifacts.write_json(folder / TABLE, table)
    counted = held.counted[options.sets[0]]
    part = held.routes.select(counted)
    starts = part.previous_row() < 0
    growth = {}
    for block in (2, 4, 8):
        found = union_growth(part.ids, starts, held.cluster[counted], block=block)
        growth[str(block)] = {**found.plain(), "break_even": None if found.value is None else found.value / part.top_k}
    artifacts.write_json(folder / UNION, growth)
    return {
        "controls": len(judged),
        "counted_rows": int(counted.sum()),
        "cache_bytes": held.cache_bytes,
        "cache_hit_rate": held.hit_rate,
    }
