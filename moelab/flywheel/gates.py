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
        for field in ("figures", "measured", "thresholds", "standard_errors"):
            for name, value in getattr(self, field).items():
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
