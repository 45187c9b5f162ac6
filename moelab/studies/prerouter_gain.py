"""What a prerouter buys: exposed wait, bytes and time of a token against the engine without predictions.

Arms (`prerouter_arms.ARMS`) have an engine, and so a cache of the same bytes, each. They take turns on one text after
another; a first text does not count. The store is slowed to a declared disk, on which the reads of `off` take a
given *ratio* of a token's compute: those of a named real system among them, at its share of experts cached. A ratio of
None is this machine's own disk. Everything is paired: an arm's answer with that of `off` on the same text in the same
round, and with the compute-only engine's, which has every expert.

What an arm wins is its share of the possible, (T_off - T) / (T_off - T_bound), with T_bound = max(compute, reads of
`off`) token by token; it says nothing without the bytes beside it. `exposed` is waiting for reads, inside the layers
and at a synchronous boundary. An arm that keeps its own router must say what the compute-only engine said, at every
token; `replace` and `gated` take other routes, so only their times and bytes are shown.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from .. import artifacts, models, quiet
from ..errors import ContractError, RecordError
from ..flywheel import stage
from ..flywheel.capture import CaptureOptions, capture
from ..flywheel.engine import opened
from ..flywheel.head_training import FILES, train_heads
from ..flywheel.observations import Records
from ..flywheel.systems import SYSTEMS
from ..prerouter.files import find_weights
from ..streaming.cache.eviction import DEFAULT
from .prerouter_claims import claims
from .prerouter_depth import Bench, gains, side_by_side, uses
from .prerouter_study import PrerouterOptions

__all__ = ["GainPlan", "QUIET", "committed_model", "gain", "prerouter_gains", "texts_of"]

RESULT = "gain.json"
FIGURES_VERSION = 3
"""Raise when `gain` writes other figures, so that older artefacts are not taken for these."""


@dataclass(frozen=True, kw_only=True)
class GainPlan:
    """What is measured and simulated.

    Attributes:
        cycles, ratios: caches in token cycles × reads ÷ compute of `off`: every pair is measured.
        systems: of `flywheel.systems`, measured and simulated at their cache share and ratio; this machine's own disk
            is measured at the first one's cache.
        texts: that count, after one that does not. prompt, tokens: of each, prefilled, and decoded and counted.
        simulated: texts in the simulator, of `simulated_tokens`; `layers`: multiples of the model's own, simulated
            beside it and made of as many texts. `simulated_cycles`: caches, at ratio 1.
        threshold: least probability of a prediction that is read or protected; `thresholds` are simulated.
    """

    cycles: Sequence[float] = (0.5, 3.0)
    ratios: Sequence[float] = (0.5, 2.0)
    systems: Sequence[str] = ("MER, Qwen3-Coder-30B",)
    texts: int = 3
    prompt: int = 8
    tokens: int = 8
    simulated: int = 6
    simulated_tokens: int = 24
    simulated_cycles: Sequence[float] = (0.5, 1.5, 3.0)
    layers: Sequence[int] = (48,)
    threshold: float = 0.5
    thresholds: Sequence[float] = (0.0, 0.3, 0.7)
    policy: str = DEFAULT
    readers: int = 2

    @property
    def length(self) -> int:
        """Tokens that a text must have: one decoded before what counts, and one beyond it is known."""
        return self.prompt + max(self.tokens + 2, self.simulated_tokens)


QUIET = GainPlan(
    cycles=(0.5, 1.5, 3.0), ratios=(0.5, 1.0, 2.0), systems=tuple(SYSTEMS), texts=5, tokens=16, simulated=24
)
"""The whole grid, for a machine that does nothing else meanwhile."""


def texts_of(observed: Sequence[Any], plan: GainPlan) -> list[list[int]]:
    """Pieces of recorded sequences, of owners that heads were not trained on: the first of each, then the second, …

    Raises:
        RecordError: too few of that length.
    """
    count, size = max(plan.texts + 1, plan.simulated), plan.length
    most = max((len(o.token_ids) // size for o in observed), default=0)
    cut = [o.token_ids[at * size : (at + 1) * size] for at in range(most) for o in observed]
    whole = [[int(token) for token in piece] for piece in cut if len(piece) == size]
    if len(whole) < count:
        raise RecordError("too few texts", field="token_ids", got=len(whole), expected=f"{count} of {size} tokens")
    return whole[:count]


def gain(
    path: Path,
    weights: Path,
    texts: Sequence[Sequence[int]],
    plan: GainPlan,
    *,
    precision: str = "float32",
    alone: AbstractContextManager[None] | None = None,
) -> dict[str, Any]:
    """All figures of one model; plain numbers.

    Args:
        path: a pack, or a checkpoint in place. weights: a file of heads.
        alone: entered around what is timed.

    Returns:
        `rows` (measured, one a cell and arm), `heads` (what they cost where nothing is missing), `depth`, `sweep` and
        `uses` (simulated), `claims`, and what they rest on.

    Raises:
        ContractError: an arm that keeps its own router said other tokens than the compute-only engine.
    """
    from ..streaming import EngineOptions, StreamingEngine
    from .prerouter_arms import recorded
    from .prerouter_rounds import EVERYTHING

    options = {"threads": plan.readers, "policy": plan.policy, "precision": precision}
    with StreamingEngine.load(path, EngineOptions(cache_bytes=EVERYTHING, **options)) as full:
        answers = recorded(full, weights, texts, prompt=plan.prompt)
        store, top_k = full.store, full.loaded.geometry.top_k
        sizes = {
            "experts": store.experts, "layers": store.layers, "top_k": top_k,
            "expert_bytes": store.layouts[0].record_bytes,
            "cycle_bytes": top_k * sum(layout.slot_bytes for layout in store.layouts),
        }  # fmt: skip
        with alone or nullcontext():
            timed = _measured(full, path, weights, answers[: plan.texts + 1], plan, sizes, options)
    found = {"plan": asdict(plan), "sizes": sizes, **timed}
    found |= simulated(Bench(answers[: plan.simulated], sizes["experts"], plan.readers), plan, sizes)
    return found | {"claims": claims(found)}


def _measured(full, path, weights, answers, plan: GainPlan, sizes, options) -> dict[str, Any]:
    """What is timed: compute, heads, and every cell."""
    from .prerouter_arms import ARMS, feed
    from .prerouter_rounds import Rounds, head_cost

    answers = [answer.first(plan.tokens + 1) for answer in answers]
    timed = [feed(full, a.prompt, a.text) for a in answers]
    layer_s = np.median(np.concatenate([turn.layer_s for turn in timed]), axis=0).tolist()
    heads = head_cost(full, weights, answers[1:], layer_s)
    rounds = Rounds(
        full=full, path=path, weights=weights, answers=answers, cycle_bytes=sizes["cycle_bytes"],
        expert_bytes=sizes["expert_bytes"], layer_s=layer_s, threshold=plan.threshold, options=options,
        token_s=min(turn.seconds for turn in timed),  # other work on the machine only ever slows it
    )  # fmt: skip
    rows, cells = [], cells_of(plan, sizes)
    for cycles in dict.fromkeys(c for c, _, _ in cells):
        here = [(ratio, whose) for c, ratio, whose in cells if c == cycles]
        for (ratio, whose), arms in zip(here, rounds.at(cycles, [r for r, _ in here]), strict=True):
            rows += [{"cycles": cycles, "ratio": ratio, "whose": whose} | row for row in arms]
        models.report_progress({"done": len(rows) // len(ARMS), "total": len(cells) + 1})
    return {"layer_s": layer_s, "heads": heads, "rows": rows}


def cells_of(plan: GainPlan, sizes: Mapping[str, Any]) -> list[tuple[float, float | None, str]]:
    """`(cycles, ratio, whose)`: the grid, the named systems, and this machine at the first system's cache."""
    named = [(_cycles(SYSTEMS[s].cache_fraction, sizes), SYSTEMS[s].read_to_compute, s) for s in plan.systems]
    machine = [(named[0][0], None, "this machine")] if named else []
    return [(c, r, "") for c in plan.cycles for r in plan.ratios] + named + machine


def _cycles(share: float, sizes: Mapping[str, Any]) -> float:
    """Token cycles of a cache that holds this share of all experts."""
    return share * sizes["experts"] / sizes["top_k"]


def simulated(bench: Bench, plan: GainPlan, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """`depth`: at each depth; `sweep`: other thresholds at the model's own; `uses`: protection and `pin_bonus`.

    Raises:
        ContractError: a depth that the texts do not give.
    """
    named = [(_cycles(SYSTEMS[s].cache_fraction, sizes), SYSTEMS[s].read_to_compute) for s in plan.systems]
    cells = [(c, 1.0) for c in plan.simulated_cycles] + named
    given = {"policy_name": plan.policy, "thresholds": [plan.threshold]}
    depth = gains(bench, cells, **given)
    for layers in plan.layers:
        copies, rest = divmod(layers, sizes["layers"])
        if rest or not 1 < copies <= len(bench.answers):
            most = sizes["layers"] * len(bench.answers)
            raise ContractError("no such depth", field="layers", got=layers, expected=f"a multiple, up to {most}")
        groups = [bench.answers[at : at + copies] for at in range(0, len(bench.answers) - copies + 1, copies)]
        deep = Bench([side_by_side(g, sizes["experts"]) for g in groups], sizes["experts"], bench.readers)
        depth += gains(deep, cells, **given)
    at = named[0] if named else cells[-1]
    return {
        "depth": depth,
        "sweep": gains(bench, [at], policy_name=plan.policy, thresholds=plan.thresholds, perfect=False),
        "uses": uses(bench, *at, threshold=plan.threshold),
    }


def prerouter_gains(
    options: PrerouterOptions, *, on_progress: stage.Progress | None = None
) -> dict[str, dict[str, Any]]:
    """Model → figures of `gain`, with the heads of notebook 41."""
    observed, heads = capture(options.upstream(CaptureOptions)), train_heads(options)
    jobs = {m: {"observations": observed[m], "heads": heads[m]} for m in options.models}
    found = stage.run(gain_model, options, jobs, blas="auto", on_progress=on_progress)
    return {model: artifacts.read_json(artifact.file(RESULT)) for model, artifact in found.items()}


def gain_model(model: str, options: PrerouterOptions, observations: Path, heads: Path) -> Path:
    """One model in this process; returns the folder of a `prerouter-gain` artefact."""
    trained = artifacts.open_artifact(heads)
    plan = GainPlan(
        cycles=options.gain_cycles, ratios=options.gain_ratios, threshold=options.gain_threshold,
        texts=options.gain_texts, tokens=options.gain_tokens, simulated_tokens=options.gain_simulated_tokens,
    )  # fmt: skip
    subject = _Subject.of(model, observations, plan)

    def make(folder: Path) -> dict[str, Any]:
        gc.freeze()  # every arm's load collects garbage: what this process has by now need not be looked at each time
        result = subject.gain(plan, trained.file(FILES[options.form]), folder)
        artifacts.write_json(folder / RESULT, result)
        return {"content": artifacts.digest_json({name: result[name] for name in ("depth", "sweep", "uses")})}

    return artifacts.build(
        "prerouter-gain",
        inputs={"observations": subject.records, "heads": trained.content},
        params={
            "plan": asdict(plan), "form": options.form, "runtime": models.runtime_identity(subject.precision),
            "figures_version": FIGURES_VERSION,
        },
        make=make,
    ).path  # fmt: skip


def committed_model(model: str, observations: Path, plan: GainPlan) -> dict[str, Any]:
    """One model in this process, with the heads that are committed beside it."""
    subject = _Subject.of(model, observations, plan)
    return subject.gain(plan, find_weights(FILES["full"], subject.path), artifacts.artifacts_dir())


@dataclass(frozen=True)
class _Subject:
    """A model's folder and recorded texts of owners that heads were not trained on. `records`: their content."""

    path: Path
    precision: str
    texts: list[list[int]]
    records: str

    @classmethod
    def of(cls, model: str, observations: Path, plan: GainPlan) -> Self:
        with opened(model) as loaded:
            records = Records(artifacts.open_artifact(observations))
            held = [e for e in records.replayable() if e["set"] == "validation" and e["mode"] == "forced"]
            texts = texts_of(list(records.open(held, loaded, purpose="evaluate")), plan)
            return cls(loaded.path, loaded.precision, texts, records.artifact.content)

    def gain(self, plan: GainPlan, weights: Path, folder: Path) -> dict[str, Any]:
        """The model is packed below `folder`, and the pack removed."""
        from ..streaming import write_pack

        with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
            write_pack(self.path, Path(scratch) / "pack", precision=self.precision)
            return gain(
                Path(scratch) / "pack", weights, self.texts, plan, precision=self.precision, alone=quiet.timing()
            )  # fmt: skip
