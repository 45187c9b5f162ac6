"""Gates: pure functions from figures to a verdict.

A gate answers one question with one of three words. `pass`: the evidence meets the thresholds.
`fail`: the evidence is there and does not meet them. `refused`: the evidence is missing, so nothing is
said. The three are never folded into two: an absent measurement is not a bad one.

A verdict carries what it was decided on: figures with n and clustered standard errors, the thresholds
(committed before the run they judge), the digests of the inputs and the identity of the runtime.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ..errors import RecordError

PASS, FAIL, REFUSED = STATUSES = ("pass", "fail", "refused")
GATES = {
    0: "ceiling",
    1: "replay correctness",
    2: "integrity and leakage",
    3: "offline value",
    4: "decode distribution",
    5: "shadow I/O",
    6: "promotion",
}
QUESTIONS = {
    0: "Could a perfect predictor shorten a token enough to matter, on this disk and memory budget?",
    1: "Does replay as prefill give the routes that decode gave: same ids, same order, every layer?",
    2: "Is every row authorised, of one identity, and in exactly one set, by owner and by text?",
    3: "Does the learned predictor beat the best training-free control at equal candidates and equal bytes?",
    4: "Does recall hold on decode that was never replayed, and in time?",
    5: "What would its reads have cost and saved, without touching execution?",
    6: "Is a token faster, with equal output and bounded tails?",
}
NOT_YET = {
    4: "the runtime holdout has not been judged",
    5: "no shadow run yet",
    6: "no end-to-end measurement yet",
}
"""Gates that no notebook judges yet, and the evidence that is missing: they are refused."""

Figure = float | int | str | None


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a gate decided on one model. Unknown fields, unknown statuses and NaN are refused.

    Raises:
        RecordError: a gate or status that does not exist, no question, a figure that is not finite, a
            standard error or n of something that is no figure, or a refusal without a reason.
    """

    gate: int
    model: str
    status: str
    question: str
    """The question in one sentence, readable without the notebook."""
    figures: dict[str, Figure] = {}
    """What the same inputs give on any machine, up to rounding: recalls, rates, counts, bytes."""
    measured: dict[str, Figure] = {}
    """What depends on this machine and this moment: seconds, tokens/s, bytes/s. Shown, never compared in CI."""
    standard_errors: dict[str, float] = {}
    """Of figures, clustered by thread."""
    n: dict[str, int] = {}
    """Of figures, or of populations (`tokens`, `threads`)."""
    thresholds: dict[str, Figure] = {}
    inputs: dict[str, str] = {}
    """Content digests of the artefacts judged."""
    runtime: dict[str, Any] = {}
    """Runtime identity under which the figures were made."""
    reason: str = ""
    """Why it failed or was refused; what to do about it."""

    def __post_init__(self):
        def refuse(field, got, expected):
            raise RecordError("not a verdict", field=field, got=got, expected=expected)

        if self.gate not in GATES:
            refuse("gate", self.gate, sorted(GATES))
        if self.status not in STATUSES:
            refuse("status", self.status, STATUSES)
        if not self.question:
            refuse("question", self.question, "one sentence")
        if self.status != PASS and not self.reason:
            refuse("reason", self.reason, f"why it is {self.status}")
        for field in ("figures", "measured", "thresholds", "standard_errors", "n"):
            for name, value in getattr(self, field).items():
                if type(value) not in (int, float, str, type(None)):  # a numpy scalar or a bool would not survive JSON
                    refuse(f"{field}.{name}", value, "a plain int, float, str or None")
                if isinstance(value, float) and not math.isfinite(value):
                    refuse(f"{field}.{name}", value, "a finite number, or None for none")
        for name in self.standard_errors:
            if name not in self.figures and name not in self.measured:
                refuse(f"standard_errors.{name}", name, sorted({*self.figures, *self.measured}))


def to_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as plain JSON values, all fields present."""
    return msgspec.to_builtins(verdict)


def from_json(value: Any, *, file: Any = None) -> Verdict:
    """Inverse of `to_json`. Raises RecordError on any field that is unknown, absent or of another type."""
    try:
        return msgspec.convert(value, Verdict, strict=True)
    except msgspec.ValidationError as error:
        raise RecordError("not a verdict", file=file, got=str(error), expected="Verdict") from None


def gate0(
    *,
    model: str,
    speedup_bound: float,
    precision_needed: float,
    smallest_speedup: float,
    figures: dict[str, Figure],
    measured: dict[str, Figure] | None = None,
    **evidence: Any,
) -> Verdict:
    """Ceiling: could a perfect predictor shorten a token enough to matter?

    `speedup_bound` is T_off / T_bound with perfect prefetch at the stated cache and I/O-to-compute ratio;
    `precision_needed` is the share of useful bytes at which the best prefetch would break even (above 1: never).
    """
    ok = speedup_bound >= smallest_speedup and precision_needed <= 1
    reason = (
        ""
        if ok
        else (f"nothing to win: perfect prefetch gives {speedup_bound:.3f}x, {smallest_speedup:g}x is what matters")
    )
    return Verdict(
        gate=0,
        model=model,
        status=PASS if ok else FAIL,
        question=QUESTIONS[0],
        figures={"speedup_bound": speedup_bound, "precision_needed": precision_needed, **figures},
        measured=measured or {},
        thresholds={"smallest_speedup": smallest_speedup},
        reason=reason,
        **evidence,
    )


def gate1(
    *,
    model: str,
    decoded_tokens: int,
    rows: int,
    order_mismatches: int,
    set_mismatches: int,
    token_mismatches: int,
    position_mismatches: int,
    prefix_mismatches: int,
    weight_error: float,
    weight_tolerance: float,
    smallest_n: int,
    figures: dict[str, Figure] | None = None,
    measured: dict[str, Figure] | None = None,
    **evidence: Any,
) -> Verdict:
    """Replay correctness for one runtime identity: ordered ids exact at every layer, weights within tolerance.

    Margins at disagreements may stand beside the figures; they never excuse one (source: AFN-021, Gate 1).
    """
    exact = {
        "order_mismatches": order_mismatches,
        "set_mismatches": set_mismatches,
        "token_mismatches": token_mismatches,
        "position_mismatches": position_mismatches,
        "prefix_mismatches": prefix_mismatches,
    }
    wrong = [f"{name} {count} of {rows}" for name, count in exact.items() if count]
    if not weight_error <= weight_tolerance:
        wrong.append(f"weight error {weight_error:.3g} above {weight_tolerance:g}")
    if wrong:
        status, reason = FAIL, "; ".join(wrong) + ": replay may not label tokens under this identity"
    elif decoded_tokens < smallest_n:
        status, reason = REFUSED, f"{decoded_tokens} decoded tokens compared, {smallest_n} needed"
    else:
        status, reason = PASS, ""
    return Verdict(
        gate=1,
        model=model,
        status=status,
        question=QUESTIONS[1],
        figures={**exact, "weight_error": weight_error, **(figures or {})},
        measured=measured or {},
        n={"decoded_tokens": decoded_tokens, "rows": rows},
        thresholds={"mismatches": 0, "weight_tolerance": weight_tolerance, "smallest_n": smallest_n},
        reason=reason,
        **evidence,
    )


def gate2(
    *,
    model: str,
    violations: dict[str, int],
    counts: dict[str, int],
    smallest: dict[str, int],
    figures: dict[str, Figure] | None = None,
    **evidence: Any,
) -> Verdict:
    """Integrity and leakage. `violations` must all be zero; each of `smallest` is a count that must be reached.

    A violation (an owner in two sets, a near-identical window in two sets, a row without authorisation, a
    runtime-holdout row that was replayed, a mixed identity) fails; too little of a set is refused.
    """
    wrong = [f"{name}: {count}" for name, count in violations.items() if count]
    short = [
        f"{name}: {counts.get(name, 0)} of {least}" for name, least in smallest.items() if counts.get(name, 0) < least
    ]
    if wrong:
        status, reason = FAIL, "; ".join(wrong)
    elif short:
        status, reason = REFUSED, "too little evidence: " + "; ".join(short)
    else:
        status, reason = PASS, ""
    return Verdict(
        gate=2,
        model=model,
        status=status,
        question=QUESTIONS[2],
        figures={**violations, **(figures or {})},
        n=counts,
        thresholds={**dict.fromkeys(violations, 0), **smallest},
        reason=reason,
        **evidence,
    )


def gate3(
    *,
    model: str,
    cell: str,
    difference: float,
    standard_error: float | None,
    smallest_effect: float,
    wasted_learned: float,
    wasted_control: float,
    sigmas: float = 2.0,
    missing: list[str] | None = None,
    figures: dict[str, Figure] | None = None,
    standard_errors: dict[str, float] | None = None,
    **evidence: Any,
) -> Verdict:
    """Offline value in the primary cell, against the best training-free control of the same horizon.

    Args:
        difference, standard_error: recall of the learned predictor minus that of the control, paired,
            clustered by thread; None for a single thread.
        smallest_effect: recall difference that matters.
        wasted_learned, wasted_control: bytes read and not used at the stated miss recall, net of the stated
            cache, per token.
        missing: what could not be had; with anything in it, the gate is refused.
    """
    missing = [*(missing or []), *(["a second thread"] if standard_error is None else [])]
    error = standard_error or 0.0
    checks = {
        f"recall gain {difference:.4f} is not above {sigmas:g} standard errors ({error:.4f})": difference
        > sigmas * error,
        f"recall gain {difference:.4f} is below the smallest effect that matters, {smallest_effect:g}": difference
        >= smallest_effect,
        f"wastes {wasted_learned:.0f} bytes a token, the control {wasted_control:.0f}": wasted_learned < wasted_control,
    }
    wrong = [text for text, ok in checks.items() if not ok]
    if missing:
        status, reason = REFUSED, "evidence missing: " + ", ".join(missing)
    elif wrong:
        status, reason = FAIL, "; ".join(wrong)
    else:
        status, reason = PASS, ""
    return Verdict(
        gate=3,
        model=model,
        status=status,
        question=QUESTIONS[3],
        figures={
            "cell": cell,
            "recall_gain": difference,
            "wasted_bytes_learned": wasted_learned,
            "wasted_bytes_control": wasted_control,
            **(figures or {}),
        },
        standard_errors={"recall_gain": error, **(standard_errors or {})},
        thresholds={"sigmas": sigmas, "smallest_effect": smallest_effect},
        reason=reason,
        **evidence,
    )
