"""Training predictors on a snapshot, offline, and judging them like every control.

Before anything is trained three doors are checked: Gate 0 must have found something to win (or be
overridden by name), the labels must come from an exact replay or from decode itself, and a predictor must
be able to learn a small sample by heart (an overfit check finds a broken loss in seconds).

Source: AFN-021, "Train three things separately", A.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import artifacts, models
from ..artifacts import Artifact
from ..errors import GateRefusedError
from ..params import Options, param
from ..routes import CAPTURED, Routes
from . import stage
from .baselines import BaselineOptions, Upstream, upstream
from .batches import BatchShape
from .dataset import Dataset
from .engine import opened
from .evaluation import HeldOut, Judged, judge, write_ranks
from .examples import (
    ARMS,
    Arm,
    arms,
    contextual_layers,
    early_gate,
    examples,
    known_layers,
    logit_scale,
    regenerate,
    shifted,
)
from .head_recipe import HeadRecipe
from .lesson import Examples, Recipe
from .metrics import ranks
from .observations import Records
from .predictors import NearTermPredictor, PredictorIdentity
from .train import fit

TABLE, RANKS, HISTORY = "table.json", "ranks.safetensors", "history.json"


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Options):
    notebook: ClassVar[str] = "41"

    arms: list[str] = param(["half layer", "1 layer"], "what the predictors are told, and when", choices=tuple(ARMS))
    rank: int = param(32, "width of the shared trunk", min=1)
    epochs: int = param(4, "passes over the training rows", min=1)
    batch: int = param(256, "tokens of a step", min=1)
    learning_rate: float = param(3.0e-3, "of AdamW", min=0.0)
    weight_decay: float = param(1.0e-2, "of AdamW", min=0.0)
    over: float = param(0.05, "weight of probability given to experts that are not used", min=0.0)
    calibration: float = param(1.0, "weight of the confidence term", min=0.0)
    overfit_tokens: int = param(256, "training tokens to be learnt by heart first", min=1)
    overfit_epochs: int = param(100, "passes over them", min=1)
    overfit_recall: float = param(0.99, "recall at 1 x K that counts as learnt", min=0.0, max=1.0)
    overfit_rank: int = param(128, "width of the trunk that learns by heart", min=1)
    override_gate0: bool = param(False, "train although Gate 0 found nothing to win")
    device: str = param("cpu", "torch device")
    head_width: int = param(128, "width of a full prerouter head", min=1)
    head_rank: int = param(56, "width of the trunk that shared heads have in common", min=1)
    head_epochs: int = param(8, "passes over the training rows, full heads", min=1)
    head_shared_epochs: int = param(12, "the same, shared heads", min=1)
    head_overfit_tokens: int = param(128, "training tokens that heads learn by heart first", min=1)
    head_overfit_epochs: int = param(150, "passes over them", min=1)

    def own(self) -> dict[str, Any]:
        """What the near-term predictors depend on: prerouter heads are another artefact (`heads`)."""
        return {name: value for name, value in super().own().items() if not name.startswith("head_")}

    def heads(self) -> HeadRecipe:
        """How prerouter heads are trained."""
        return HeadRecipe(
            hidden=self.head_width,
            rank=self.head_rank,
            epochs=self.head_epochs,
            shared_epochs=self.head_shared_epochs,
            overfit_tokens=self.head_overfit_tokens,
            overfit_epochs=self.head_overfit_epochs,
        )


def training(
    options: TrainingOptions, *, gate0: dict[str, str], on_progress: stage.Progress | None = None
) -> dict[str, Artifact]:
    """Train and judge every arm on every model: model → artefact of kind `predictors`.

    `gate0`: model → status of Gate 0.

    Raises:
        GateRefusedError: Gate 0 did not pass and `override_gate0` is not set, or labels are not exact.
    """
    wrong = {model: gate0.get(model) for model in options.models if gate0.get(model) != "pass"}
    if wrong and not options.override_gate0:
        raise GateRefusedError(
            "Gate 0 found nothing to win",
            field="gate0",
            got=wrong,
            expected="pass",
            fix="set override_gate0 to train all the same",
        )
    before, judged_as = upstream(options), options.upstream(BaselineOptions)
    jobs = {m: {"before": before[m], "judged_as": judged_as} for m in options.models}
    return stage.run(training_model, options, jobs, blas=judged_as.feature_blas, on_progress=on_progress)


def training_model(model: str, options: TrainingOptions, before: Upstream, judged_as: BaselineOptions) -> Path:
    """One model in this process; returns the artefact's folder."""
    with opened(model) as loaded:
        records, dataset = before.open()
        built = artifacts.build(
            "predictors",
            inputs={"snapshot": dataset.artifact.content, "routes": before.routes.content},
            params={
                **options.own(),
                "judged_as": judged_as.own(),
                "runtime": models.runtime_identity(loaded.precision, loaded.residency),
            },
            make=lambda folder: _Study(folder, loaded, records, dataset, options, judged_as).run(),
        )
    return built.path


def labels_status(dataset: Dataset, exact: bool) -> str:
    """`pass` if every training label is exact: decoded, or replayed under an identity that passed Gate 1."""
    rows = dataset.rows("train")
    return "pass" if exact or bool((dataset.routes.label_source[rows] == CAPTURED).all()) else "fail"


def checkpoint_name(arm: str) -> str:
    return f"predictor-{arm.replace(', ', '-').replace(' ', '-')}.safetensors"


class _Study:
    """One model's training: features regenerated once, then every arm trained, saved and judged."""

    def __init__(self, folder: Path, loaded, records: Records, dataset: Dataset, options, judged_as):
        self.folder, self.loaded, self.dataset, self.options, self.judged_as = (
            folder,
            loaded,
            dataset,
            options,
            judged_as,
        )
        self.arms = arms(options.arms)
        self.status = labels_status(dataset, dataset.exact)
        self.held = HeldOut.of(dataset, judged_as.sets, cache_fraction=judged_as.cache_fraction)
        shape = BatchShape(judged_as.batch_tokens, judged_as.chunk)
        kinds = sorted({arm.feature for arm in self.arms})
        self.features = regenerate(loaded, dataset, records, kinds, shape)

    def run(self) -> dict[str, Any]:
        judged, history = [], {}
        for number, arm in enumerate(self.arms):
            gate = logit_scale(self.loaded, early_gate(self.loaded, self.features[arm.feature], arm))
            rows = examples(self.dataset, self.features, gate, arm, self.dataset.rows("train"))
            by_heart = self._learn_by_heart(arm, rows)
            predictor, history[arm.name] = self._train(arm, rows, number)
            history[arm.name]["overfit_recall"] = by_heart
            judged.append(self._judge(arm, predictor, gate))
        header = {"snapshot": self.dataset.artifact.content, "cache_bytes": self.held.cache_bytes}
        write_ranks(self.folder / RANKS, judged, self.held, header)
        artifacts.write_json(self.folder / TABLE, [row for j in judged for row in j.rows])
        files = {p.name: artifacts.digest_file(p) for p in sorted(self.folder.iterdir()) if p.name[0] != "."}
        artifacts.write_json(self.folder / HISTORY, history)  # holds times, so it is no part of the identity
        return {"train_tokens": int(self.dataset.rows("train").sum()), "content": artifacts.digest_json(files)}

    def _identity(self, arm: Arm) -> PredictorIdentity:
        shape = self.loaded.geometry
        return PredictorIdentity(
            model=self.loaded.digests["model"],
            layers=shape.layers,
            experts=shape.experts,
            top_k=shape.top_k,
            width=shape.hidden,
            horizon=arm.horizon,
            feature=arm.feature,
            shift=arm.shift,
            snapshot=self.dataset.artifact.content,
        )

    def _recipe(self, **changes: Any) -> Recipe:
        names = ("epochs", "batch", "learning_rate", "weight_decay", "over", "calibration", "seed")
        return Recipe(**{**{name: getattr(self.options, name) for name in names}, **changes})

    def _learn_by_heart(self, arm: Arm, rows: Examples) -> float:
        """Recall at 1 x K on a few training tokens after training on them alone, where there is context to learn.

        Raises:
            GateRefusedError: not learnt: features, labels or loss do not belong together.
        """
        few = rows.rows(np.linspace(0, len(rows) - 1, min(len(rows), self.options.overfit_tokens)).astype(int))
        recipe = self._recipe(
            epochs=self.options.overfit_epochs, batch=64, weight_decay=0.0, over=0.0, learning_rate=1e-2
        )
        predictor = NearTermPredictor(self._identity(arm), rank=self.options.overfit_rank, seed=self.options.seed)
        fit(predictor, few, recipe, gate1=self.status, device=self.options.device)
        layers = contextual_layers(arm, self.loaded.geometry.layer_ids)
        found = ranks(predictor.scores(few.features, few.gate_scores)[:, layers], few.ids[:, layers])
        recall = float((found < few.ids.shape[-1]).mean())
        if recall < self.options.overfit_recall:
            raise GateRefusedError(
                f"a predictor cannot learn {len(few)} tokens by heart",
                field=f"overfit_recall ({arm.name})",
                got=round(recall, 4),
                expected=f">= {self.options.overfit_recall}",
                fix="look at features, labels and loss; or give it more rank or epochs",
            )
        return recall

    def _train(self, arm: Arm, rows: Examples, number: int) -> tuple[NearTermPredictor, dict[str, Any]]:
        predictor = NearTermPredictor(self._identity(arm), rank=self.options.rank, seed=self.options.seed)
        state = self.folder / f".{number}.state"

        def progress(done: int, total: int, loss: float) -> None:
            models.report_progress({"done": number * total + done, "total": len(self.arms) * total})

        began = time.perf_counter()
        losses = fit(
            predictor,
            rows,
            self._recipe(),
            gate1=self.status,
            device=self.options.device,
            checkpoint=state,
            on_step=progress,
        )
        seconds = time.perf_counter() - began
        predictor.save(self.folder / checkpoint_name(arm.name))
        state.unlink(missing_ok=True)
        return predictor, {
            "loss": losses,
            "examples_per_second": len(rows) * len(losses) / seconds,
            "parameters": sum(p.numel() for p in predictor.parameters()),
            "bytes": predictor.nbytes,
        }

    def _judge(self, arm: Arm, predictor: NearTermPredictor, gate: np.ndarray) -> Judged:
        told = shifted(self.features[arm.feature], arm.shift)[self.held.rows]
        given = gate[self.held.rows]

        def blocks(routes: Routes, size: int = 2048) -> Iterator[tuple[slice, np.ndarray]]:
            for start in range(0, routes.tokens, size):
                rows = slice(start, min(start + size, routes.tokens))
                # the logistic function, in the form that cannot overflow
                yield rows, 0.5 * (1 + np.tanh(0.5 * predictor.scores(told[rows], given[rows])))

        layers = known_layers(arm, self.held.routes.layers)
        return judge(
            f"learned, {arm.feature.replace('_', ' ')}",
            arm.horizon,
            blocks,
            self.held,
            layers=layers,
            miss_recall=self.judged_as.miss_recall,
            probabilities=True,
        )
