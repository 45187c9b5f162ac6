"""Routing policies on a real layer: what each costs in quality, bytes and time. Notebook 82.

The experts of one MoE layer become specialists beside an anchor (`specialists.native`), their scores are
calibrated on training owners, and every policy then decides every token of the validation owners. Its output
takes the layer's place and the rest of the model runs on (`resume`), so quality is next-token loss, beside the
output error against the layer as trained. Bytes are what a cache of a stated budget, for this layer's experts
alone, has to read for the experts that the policy runs, each token a decode step.

The split is that of the flywheel (whole owners, hashed), with a larger share for validation: standard errors are
clustered by owner, and a loss difference of hundredths of a nat needs tens of thousands of tokens.

Utility, in the sense of `specialists.calibrate`:

    loss    what a specialist takes off the next-token loss, in nats, to first order: minus its slope, averaged over
            the anchor and the layer's own output, -(g_a + g_y)/2 . d. Over the chosen experts this adds up to
            loss(a) - loss(y) by the trapezoid rule
    error   what it takes off the squared output error of the anchor alone, as a share of the mean of that
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import artifacts, models
from ..flywheel import stage
from ..flywheel.capture import facts, living
from ..flywheel.split import assign
from ..flywheel.systems import SYSTEMS
from ..flywheel.vault import Vault
from ..params import Options, param
from ..threads import read, render_sequences
from .resume import LayerInputs, cut, layer_inputs

RESULT = "routing.json"
FIGURES_VERSION = 10
"""Raise when the study writes other figures, so that older artefacts are not taken for these."""

LATE_PROMPT = 8
"""Tokens of a window that are computed exactly before late experts are done without."""


@dataclass(frozen=True, kw_only=True)
class RoutingOptions(Options):
    notebook: ClassVar[str] = "82"

    layer: int = param(-1, "MoE layer whose experts the policies run, from 0; negative counts from the end", min=-64)
    utility: str = param("loss", "what a score of a specialist predicts", choices=("loss", "error"))
    context: int = param(128, "tokens of a window", min=32)
    train_tokens: int = param(1536, "tokens of training owners that calibration may use, at most", min=128)
    validation_tokens: int = param(1536, "tokens of validation owners, at most", min=128)
    reliability_tokens: int = param(1024, "validation tokens on which the calibration is checked, at most", min=128)
    validation: float = param(0.25, "share of owners that are validation owners", min=0.05, max=0.5)
    budgets: list[float] = param(
        [0.125, 0.25, 0.5], "cache budgets, as shares of the layer's experts", min=0.02, max=1.0
    )
    mixture_threshold: float = param(0.004, "second score that adaptive top-1/top-2 asks for", min=0.0)
    dynamic_thresholds: list[float] = param([0.0, 0.004], "scores that dynamic-k asks for", min=0.0)
    deadlines: list[int] = param([0, 1], "reads that a token may wait for before an expert is late", min=0)
    system: str = param(
        "MER, Qwen3-Coder-30B", "system whose ratio of read to compute turns reads into time", choices=tuple(SYSTEMS)
    )
    late_tokens: int = param(200, "tokens decoded live without late experts, about", min=32)
    late_context: int = param(40, "tokens of a window of these, the prompt included", min=16)
    late_slots: int = param(16, "experts of a layer that are in time: staged slots, or slots of the cache", min=1)
    late_timed: int = param(6, "tokens of each of four windows that are decoded for times", min=2)
    late_ratio: float = param(1.0, "time of a token's reads over its compute, on the slowed store", min=0.01)
    bench_experts: list[int] = param([8], "specialists that dispatch is timed with", min=4)
    bench_tokens: list[int] = param([1, 64], "tokens that it is timed on", min=1)
    bench_hidden: int = param(128, "width of the model that it is timed for; the inner width is twice that", min=8)
    bench_rounds: int = param(
        1, "times that a loop over many tokens runs; shorter arms run more often, one token 200 times as often", min=1
    )

    def study(self) -> dict[str, Any]:
        """Parameters that the figures depend on: all but those of the timing."""
        return {name: value for name, value in self.own().items() if not name.startswith("bench_")}


def routing(options: RoutingOptions, *, on_progress: stage.Progress | None = None) -> dict[str, dict[str, Any]]:
    """Model → figures: `calibration`, `policies` (one row a policy and budget), `late`, `picture`, counts, and of the
    engine without late experts `live` and `live_times`."""
    found = stage.run(routing_model, options, {m: {} for m in options.models}, blas="auto", on_progress=on_progress)
    return {model: artifacts.read_json(artifact.file(RESULT)) for model, artifact in found.items()}


def routing_model(model: str, options: RoutingOptions) -> Path:
    """One model in this process; returns the folder of a `routing` artefact."""
    loaded = models.load(model)
    threads, forgotten = living(sorted(read(artifacts.root() / options.threads), key=lambda t: t.uid), Vault())

    def make(folder: Path) -> dict[str, Any]:
        from .late_experts import live
        from .routing_study import study

        corpus = Corpus.of(loaded, threads, options)
        result = study(loaded, corpus, options)
        content = artifacts.digest_json({name: value for name, value in result.items() if name != "seconds"})
        result["live"], result["live_times"] = live(
            loaded, corpus.validation, context=options.late_context, tokens=options.late_tokens,
            prompt=LATE_PROMPT, slots=options.late_slots, timed=options.late_timed, ratio=options.late_ratio,
        )  # fmt: skip
        artifacts.write_json(folder / RESULT, result)
        return {"content": content}

    built = artifacts.build(
        "routing",
        inputs={
            **loaded.digests,
            "threads": artifacts.digest_json([t.content for t in threads]),
            "forgotten": artifacts.digest_json(forgotten),
        },
        params={
            **options.study(),
            "runtime": models.runtime_identity(loaded.precision),
            "figures_version": FIGURES_VERSION,
        },
        make=make,
    )
    return built.path


@dataclass(frozen=True, eq=False)
class Part:
    """Windows of some owners. thread, owner: `i64[W]`, numbers of each window's thread and owner."""

    windows: list[np.ndarray]
    thread: np.ndarray
    owner: np.ndarray

    def inputs(self, loaded: models.LoadedModel, layer: int) -> LayerInputs:
        return layer_inputs(loaded, self.windows, layer)

    def by_token(self, of_window: np.ndarray) -> np.ndarray:
        """A figure of each window, repeated for its tokens."""
        return np.repeat(of_window, [len(w) for w in self.windows])


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation windows, and how many owners and threads stand behind them."""

    train: Part
    validation: Part
    counts: dict[str, int]

    @classmethod
    def of(cls, loaded: models.LoadedModel, threads: list[Any], options: RoutingOptions) -> Corpus:
        """Threads to windows. The runtime holdout, the stress set and the temporal set are left alone."""
        rendered = {t.uid: render_sequences(t, loaded.tokenizer) for t in threads}
        about = [facts(t, loaded.tokenizer, sum(len(r.token_ids) for r in rendered[t.uid])) for t in threads]
        sets = assign(about, seed=options.seed, validation=options.validation)
        owners = {owner: number for number, owner in enumerate(sorted({t.owner for t in threads}))}
        parts, counts = {}, {}
        for name, most in (("train", options.train_tokens), ("validation", options.validation_tokens)):
            mine = [(n, t) for n, t in enumerate(threads) if sets[t.uid] == name]
            sequences = [(n, t, r.token_ids) for n, t in mine for r in rendered[t.uid]]
            found = cut([ids for *_, ids in sequences], options.context)
            kept = _at_most(found, most, sequences)
            parts[name] = Part(
                [window for _, window in kept],
                np.array([sequences[i][0] for i, _ in kept]),
                np.array([owners[sequences[i][1].owner] for i, _ in kept]),
            )
            counts |= {
                f"{name}_tokens": sum(len(window) for _, window in kept),
                f"{name}_threads": len({sequences[i][0] for i, _ in kept}),
                f"{name}_owners": len({sequences[i][1].owner for i, _ in kept}),
            }
        return cls(parts["train"], parts["validation"], counts)


def _at_most(windows: list[tuple[int, np.ndarray]], tokens: int, sequences: list) -> list[tuple[int, np.ndarray]]:
    """At most so many tokens, in rounds over the owners, so that a small study still has all of them; order kept."""
    rounds: dict[str, int] = {}
    rank = []
    for place, (i, _) in enumerate(windows):
        owner = sequences[i][1].owner
        rank.append((rounds.setdefault(owner, 0), place))
        rounds[owner] += 1
    kept, total = set(), 0
    for _, place in sorted(rank):
        total += len(windows[place][1])
        if total > tokens and kept:
            break
        kept.add(place)
    return [window for place, window in enumerate(windows) if place in kept]


class Clock:
    """Seconds of processor time of each step of a study, by name: a busy machine does not change them."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self.last = time.process_time()

    def lap(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name] = round(self.seconds.get(name, 0.0) + now - self.last, 2)
        self.last = now
