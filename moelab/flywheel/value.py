"""Gate 3: is the learned predictor worth its bytes, against the best that needs no training?

Both sides are ranked on the same decoded rows, so their difference is paired and its standard error is
clustered by thread. The control is chosen as the best *on these very rows*, which favours it. At equal
candidates the bytes asked for are equal; net of a cache they are not, so the bytes wasted at an equal share
of misses fetched are compared too.

The primary cell (arm, candidates, set), the smallest effect that matters and the number of standard errors
are parameters of notebook 42, committed before the run they judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .. import artifacts
from ..artifacts import Artifact
from ..errors import ContractError
from ..params import Options, param
from . import ceiling
from .baselines import RANKS, TABLE, BaselineOptions, baselines
from .estimates import Estimate, paired_difference
from .evaluation import LATER, read_ranks
from .examples import ARMS, Arm
from .gates import Verdict, gate3
from .metrics import MULTIPLES
from .training import TrainingOptions, training

EARLIER = {
    "half layer": ("half layer", "1 layer", "1 token", "1 token + 1 layer"),
    "1 layer": ("1 layer", "1 token", "1 token + 1 layer"),
}
"""Horizons whose rankings are known in time at each horizon."""


@dataclass(frozen=True, kw_only=True)
class ValueOptions(Options):
    notebook: ClassVar[str] = "42"

    primary_arm: str = param("1 layer", "arm of the primary cell", choices=tuple(ARMS))
    primary_multiple: int = param(1, "candidates of the primary cell, times K", choices=MULTIPLES)
    smallest_effect: float = param(0.01, "recall difference that matters", min=0.0)
    sigmas: float = param(2.0, "standard errors that the difference must exceed", min=0.0)


@dataclass(frozen=True)
class Comparison:
    """Learned against the best control in one cell: paired recall difference and both recalls."""

    arm: str
    multiple: int
    control: str
    learned: float
    against: float
    difference: Estimate


class Evidence:
    """What notebooks 40 and 41 left for one model, lined up row by row.

    Raises:
        ContractError: the two were judged on different rows.
    """

    def __init__(self, baselines: Artifact, predictors: Artifact, where: str = "validation"):
        self.where = where
        arrays, header = read_ranks(baselines.file(RANKS))
        mine, mine_header = read_ranks(predictors.file(RANKS))
        for name in ("rows", "cluster", f"counted {where}"):
            if not np.array_equal(arrays[name], mine[name]):
                raise ContractError("controls and predictors were judged on different rows", field=name)
        self.counted, self.cluster = arrays[f"counted {where}"], arrays["cluster"]
        self.ranks = {n.removeprefix("ranks "): a for n, a in {**arrays, **mine}.items() if n.startswith("ranks ")}
        self.layers = {**header["layers"], **mine_header["layers"]}
        self.table = artifacts.read_json(baselines.file(TABLE)) + artifacts.read_json(predictors.file(TABLE))
        self.runtime = predictors.manifest.params["runtime"]
        self.inputs = {"baselines": baselines.content, "predictors": predictors.content}

    def learned(self, arm: Arm) -> str:
        return f"learned, {arm.feature.replace('_', ' ')} | {arm.horizon}"

    def controls(self, arm: Arm) -> list[str]:
        """Training-free rankings known in time for this arm."""
        return [n for n in self.ranks if not n.startswith("learned") and n.split(" | ")[1] in EARLIER[arm.horizon]]

    def hits(self, name: str, layers: list[int], multiple: int) -> np.ndarray:
        ranks = self.ranks[name][self.counted][:, layers]
        return ranks < multiple * ranks.shape[-1]

    def compare(self, arm: Arm, multiple: int) -> Comparison:
        """The learned predictor of an arm against the control that is best in this very cell."""
        name = self.learned(arm)
        layers = self.layers[name]
        best = max(self.controls(arm), key=lambda n: (self.hits(n, layers, multiple).mean(), n))
        mine, other = self.hits(name, layers, multiple), self.hits(best, layers, multiple)
        difference = paired_difference(mine, other, self.cluster[self.counted])
        return Comparison(arm.name, multiple, best, float(mine.mean()), float(other.mean()), difference)

    def wasted(self, name: str, other: str) -> list[dict[str, Any]]:
        """Bytes that two rankings waste on the layers that both were judged on: a layer more wastes more."""
        common = sorted({*self.layers[name]} & {*self.layers[other]})
        return [
            self.figure(n, "wasted bytes/token", group="all" if self.layers[n] == common else LATER)
            for n in (name, other)
        ]

    def figure(self, name: str, metric: str, where: str | None = None, *, group: str = "all") -> dict[str, Any] | None:
        """A row of the tables of notebooks 40 and 41 on the judged set (or another), or None."""
        ranking, horizon = name.split(" | ")
        return next(
            (
                row
                for row in self.table
                if (row["ranking"], row["horizon"], row["set"], row["metric"], row["group"])
                == (ranking, horizon, where or self.where, metric, group)
            ),
            None,
        )

    def arms(self) -> list[Arm]:
        return [arm for arm in ARMS.values() if self.learned(arm) in self.ranks]


def verdict(model: str, options: ValueOptions, evidence: Evidence) -> Verdict:
    """The verdict of Gate 3 on one model. The drafter's sidecar, which does not exist yet, is not decided on."""
    arm = ARMS[options.primary_arm]
    found = evidence.compare(arm, options.primary_multiple)
    name = evidence.learned(arm)
    wasted, against = evidence.wasted(name, found.control)
    mine = {metric: evidence.figure(name, metric) for metric in ("recall@2x", "recall@4x", "exact set", "ece")}
    other = {f"recall_{where}": evidence.figure(name, "recall@1x", where) for where in ("temporal", "stress")}
    return gate3(
        model=model,
        cell=f"{arm.name}, {arm.feature.replace('_', ' ')}, {options.primary_multiple} x K, {evidence.where}",
        difference=found.difference.value,
        standard_error=found.difference.se,
        smallest_effect=options.smallest_effect,
        sigmas=options.sigmas,
        wasted_learned=wasted["value"],
        wasted_control=against["value"],
        figures={
            "control": found.control,
            "recall_learned": found.learned,
            "recall_control": found.against,
            **{metric: row["value"] for metric, row in {**mine, **other}.items() if row is not None},
            "learned_sidecar": "refused: no drafter yet",
        },
        standard_errors={
            metric: row["se"] for metric, row in mine.items() if row is not None and row["se"] is not None
        },
        n={"rows": int(evidence.counted.sum()) * len(evidence.layers[name]), "threads": found.difference.clusters},
        inputs=evidence.inputs,
        runtime=evidence.runtime,
    )


def evidence(options: ValueOptions) -> dict[str, Evidence]:
    """What notebooks 40 and 41 found, built if it is missing; model → evidence."""
    trained = options.upstream(TrainingOptions)
    found = baselines(options.upstream(BaselineOptions))
    learned = training(trained, gate0=ceiling.statuses(trained))
    return {model: Evidence(found[model], learned[model]) for model in options.models}
