"""`verdicts.json`: what one run decided, as a strict, versioned record.

Schema, version 1. Unknown fields, other types and other versions are refused on reading.

    schema_version  1
    run, profile    name of the report folder; profile the notebooks ran at
    finished        UTC time of the end of the run, ISO 8601
    notebooks       one entry a notebook of the run, in order:
        name, status        `done` | `failed` | `blocked` (an upstream notebook failed) | `interrupted`
        seconds             of the execution that made the report (not of a later no-op)
        digest              of everything it depends on; equal digest, no second execution
        cell, error         which cell failed and how; empty when done
    verdicts        one entry a model and gate, fields as in `moelab.flywheel.gates.Verdict`

`moelab gates --schema` prints the same as a JSON Schema document.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from .. import artifacts
from ..errors import MissingArtifactError, RecordError
from ..flywheel.gates import FAIL, GATES, NOT_YET, PASS, REFUSED, Verdict

SCHEMA_VERSION = 1
FILE = "verdicts.json"
NOT_JUDGED, NO_VERDICT = "not judged here", "no verdict in this run"
"""What is shown of a gate that the run asked nothing about, and why. It is no verdict."""


class NotebookRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    status: str
    seconds: float
    digest: str
    cell: str = ""
    error: str = ""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema_version: int
    run: str
    profile: str
    finished: str
    notebooks: list[NotebookRecord]
    verdicts: list[Verdict]

    def failures(self) -> list[NotebookRecord]:
        return [notebook for notebook in self.notebooks if notebook.status != "done"]


def write(folder: Path, record: RunRecord) -> None:
    """Write `verdicts.json`, verdicts ordered by gate and model."""
    ordered = msgspec.structs.replace(record, verdicts=sorted(record.verdicts, key=lambda v: (v.gate, v.model)))
    artifacts.write_json(folder / FILE, msgspec.to_builtins(ordered))


def read(folder: str | Path) -> RunRecord:
    """Read a run's record.

    Raises:
        MissingArtifactError: no such run.
        RecordError: unknown version, unknown or absent field, wrong type.
    """
    path = Path(folder) / FILE
    value = artifacts.read_json(path)
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise RecordError("unknown version", file=path, field="schema_version", got=version, expected=SCHEMA_VERSION)
    try:
        return msgspec.convert(value, RunRecord)
    except msgspec.ValidationError as error:
        raise RecordError("not a run record", file=path, got=str(error), expected="RunRecord") from None


def latest(reports: Path) -> Path:
    """The report folder whose record was written last."""
    records = sorted(reports.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
    if not records:
        raise MissingArtifactError("no run yet", file=reports, fix="moelab run --profile tiny")
    return records[-1].parent


def decide(verdicts: Iterable[Verdict], require: Iterable[int] = ()) -> tuple[str, list[tuple[int, str, str]]]:
    """One word for many verdicts, and the rows `(gate, model, status)` it was decided on.

    A required gate that a model has no verdict for counts as refused: missing evidence is never a pass.
    Fail is stronger than refused, refused stronger than pass. No rows at all is refused.
    """
    verdicts = list(verdicts)
    have = {(verdict.gate, verdict.model): verdict.status for verdict in verdicts}
    models = sorted({verdict.model for verdict in verdicts}) or ["(no model)"]
    wanted = sorted({(gate, model) for gate in require for model in models} or have)
    rows = [(gate, model, have.get((gate, model), REFUSED)) for gate, model in wanted]
    statuses = {status for _, _, status in rows} or {REFUSED}
    return next(status for status in (FAIL, REFUSED, PASS) if status in statuses), rows


class GateRow(NamedTuple):
    gate: int
    model: str
    status: str
    reason: str


def every_gate(verdicts: Iterable[Verdict]) -> list[GateRow]:
    """One row for each gate and model, by gate, also where the run has no verdict.

    A gate that no notebook judges yet is refused, in the words of the gate report; any other is not judged here.
    """
    found = {(verdict.gate, verdict.model): verdict for verdict in verdicts}
    rows = []
    for gate in GATES:
        for model in sorted({model for _, model in found}):
            if verdict := found.get((gate, model)):
                rows.append(GateRow(gate, model, verdict.status, verdict.reason))
            elif gate in NOT_YET:
                rows.append(GateRow(gate, model, REFUSED, NOT_YET[gate]))
            else:
                rows.append(GateRow(gate, model, NOT_JUDGED, NO_VERDICT))
    return rows


def json_schema() -> dict[str, Any]:
    return msgspec.json.schema(RunRecord)
