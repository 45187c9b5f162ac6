"""The five-minute tour: the whole loop once, at the size of profile `tiny` whatever the profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..artifacts import Artifact
from ..params import Options, param
from . import ceiling, stage
from .baselines import BaselineOptions, baselines
from .capture import CaptureOptions, capture
from .qualification import ReplayOptions, label_identity, qualify
from .replay import replay
from .training import TrainingOptions, training


@dataclass(frozen=True, kw_only=True)
class TourOptions(Options):
    notebook: ClassVar[str] = "00"

    models: list[str] = param(["softmax"], "models: names under artifacts/models, paths or repo ids")

    def upstream(self, other: type[Options]) -> Any:
        return other.from_profile("tiny", models=self.models, threads=self.threads, seed=self.seed)


@dataclass(frozen=True)
class Replayed:
    """What was captured and replayed. `exact`: model → whether replay gave decode's routes."""

    observations: dict[str, Artifact]
    qualified: dict[str, dict[str, dict[str, Any]]]
    routes: dict[str, Artifact]
    exact: dict[str, bool]


@dataclass(frozen=True)
class Predicted:
    """Controls and trained predictors, judged on the same rows."""

    baselines: dict[str, Artifact]
    predictors: dict[str, Artifact]


def capture_and_replay(options: TourOptions, *, on_progress: stage.Progress | None = None) -> Replayed:
    """Decode a few threads, replay them, and compare route by route."""
    replayed = options.upstream(ReplayOptions)
    observed = capture(options.upstream(CaptureOptions), on_progress=on_progress)
    qualified = qualify(replayed, on_progress=on_progress)
    exact = {model: label_identity(qualified[model], replayed) is not None for model in options.models}
    return Replayed(observed, qualified, replay(replayed, on_progress=on_progress), exact)


def predict(options: TourOptions, *, on_progress: stage.Progress | None = None) -> Predicted:
    """Judge the controls, train the small predictors, judge those."""
    trained = options.upstream(TrainingOptions)
    found = baselines(options.upstream(BaselineOptions), on_progress=on_progress)
    learned = training(trained, gate0=ceiling.statuses(trained), on_progress=on_progress)
    return Predicted(found, learned)
