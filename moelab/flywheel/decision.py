"""All verdicts of a profile in one place, the ten falsifiers, and the decision they allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..params import Options
from . import ceiling, qualification, snapshot, value
from .gates import FAIL, GATES, NOT_YET, PASS, QUESTIONS, REFUSED, Verdict

OBSERVED, NOT_OBSERVED, NO_EVIDENCE = "observed", "not observed", "no evidence yet"
SAYS = {
    "order_mismatches": "{} routes (a token in a layer) with experts in another order",
    "recall_gain": "recall less that of the best training-free control: {} of the experts",
    "wasted_bytes_learned": "{} bytes a token read ahead and not used",
    "recall_temporal": "recall of {} of the experts on the newest threads",
    "records_not_authorised": "{} records without authorisation",
    "speedup_bound": "at most {} × faster with perfect prefetch",
}
"""A verdict's figure in words, with its unit."""


@dataclass(frozen=True, kw_only=True)
class DecisionOptions(Options):
    notebook: ClassVar[str] = "90"


def verdicts(options: DecisionOptions) -> list[Verdict]:
    """Gates 0 to 6 of every model, each from its own notebook's evidence; built where it is missing."""
    bounds, replayed = options.upstream(ceiling.CeilingOptions), options.upstream(qualification.ReplayOptions)
    snapped, valued = options.upstream(snapshot.SnapshotOptions), options.upstream(value.ValueOptions)
    found = ceiling.ceiling(bounds)
    qualified = qualification.qualify(replayed)
    snapshots = snapshot.snapshot(snapped)
    evidence = value.evidence(valued)
    out = []
    for model in options.models:
        out += [
            ceiling.verdict(model, found[model], bounds),
            qualification.verdict(model, qualified[model], replayed),
            snapshot.verdict(model, snapshots[model], snapped),
            value.verdict(model, valued, evidence[model]),
            *(Verdict(gate=g, model=model, status=REFUSED, question=QUESTIONS[g], reason=NOT_YET[g]) for g in NOT_YET),
        ]
    return out


@dataclass(frozen=True)
class Falsifier:
    """One of the ten findings that should end or change the work, and what this run says about it."""

    number: int
    finding: str
    model: str
    state: str
    evidence: str


def falsifiers(found: Sequence[Verdict]) -> list[Falsifier]:
    """Ten rows a model."""
    by = {(v.gate, v.model): v for v in found}
    return [row for model in dict.fromkeys(v.model for v in found) for row in _ten(model, by)]


def _ten(model: str, by: dict[tuple[int, str], Verdict]) -> list[Falsifier]:
    zero, one, two, three = (by.get((gate, model)) for gate in range(4))
    rows = [
        ("replay and decode do not give the same routes", _from(one), _says(one, "order_mismatches")),
        ("a heuristic matches the learned predictor at the same bytes", _from(three), _says(three, "recall_gain")),
        ("drafter features predict tokens but not routes", NO_EVIDENCE, "no drafter"),
        ("useful recall needs too many experts", _from(three), _says(three, "wasted_bytes_learned")),
        ("predictions arrive too late", NO_EVIDENCE, "Gates 4 and 5"),
        ("candidate-path replay costs more than it saves", NO_EVIDENCE, "no drafter"),
        ("traffic drifts too quickly", _drift(three), _says(three, "recall_temporal")),
        ("privacy makes replay unacceptable", _from(two), _says(two, "records_not_authorised")),
        ("the disk's bytes dominate even with perfect prediction", _from(zero), _says(zero, "speedup_bound")),
        ("the trainer waits for feature shards", NO_EVIDENCE, "needs the trainer's machine"),
    ]
    return [Falsifier(i + 1, text, model, state, says) for i, (text, state, says) in enumerate(rows)]


def _from(verdict: Verdict | None) -> str:
    """A gate that passes rules its falsifier out; one that fails has observed it."""
    return {PASS: NOT_OBSERVED, FAIL: OBSERVED}.get(verdict.status if verdict else REFUSED, NO_EVIDENCE)


def _says(verdict: Verdict | None, figure: str) -> str:
    if verdict is None or verdict.figures.get(figure) is None:
        return "no figure"
    number = verdict.figures[figure]
    return SAYS[figure].format(f"{float(f'{number:.4g}'):,.9g}" if isinstance(number, float) else f"{number:,}")


def _drift(verdict: Verdict | None) -> str:
    """Observed if the predictor falls behind the control's validation recall on the newest threads."""
    if verdict is None or verdict.figures.get("recall_temporal") is None:
        return NO_EVIDENCE
    return NOT_OBSERVED if verdict.figures["recall_temporal"] >= verdict.figures["recall_control"] else OBSERVED


def decide(found: Sequence[Verdict]) -> dict[str, str]:
    """Model → what its verdicts allow: the first gate, in order, that is not a pass says why not."""
    out = {}
    for model in dict.fromkeys(v.model for v in found):
        mine = sorted((v for v in found if v.model == model), key=lambda v: v.gate)
        stop = next((v for v in mine if v.status != PASS), None)
        if stop is None:
            out[model] = "promote"
        else:
            out[model] = f"do not promote: gate {stop.gate} ({GATES[stop.gate]}) is {stop.status}, {stop.reason}"
    return out
