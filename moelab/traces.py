"""Other projects' route traces, read into `Routes`.

A user's first question, "is there anything to win on my traffic?", is asked of traces they have
already. Formats are told apart by their content, never by the file's name; whatever a format
cannot say (margins, say) stays None, and slots that it lacks are masked.
"""

from __future__ import annotations

import gzip
import io
import re
from pathlib import Path

import numpy as np

from .errors import RecordError
from .routes import MISSING, Routes

__all__ = ["read_trace"]


def read_trace(path: str | Path) -> Routes:
    """Read another project's route trace; `.gz` is unpacked.

    Known formats, told apart by their first line:
        `# route_trace v1`: BigMoeOnEdge's CSV (turn, phase, step, layer, slot, expert, weight, residency,
        expert_bytes), with geometry and bytes per expert in `#` lines. A turn becomes a thread.

    Raises:
        RecordError: unknown format or columns, a torn file, or values that `Routes.validate` refuses.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise RecordError("a trace cannot be read", file=path, got=error.strerror, expected="a file") from None
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (EOFError, gzip.BadGzipFile) as error:
            raise RecordError("a trace cannot be unpacked", file=path, got=str(error), expected="whole gzip") from error
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RecordError("a trace is not text", file=path, got=str(error), expected="UTF-8") from None
    first = text.split("\n", 1)[0]
    if first.strip() == "# route_trace v1":
        return _read_route_trace_v1(text, path)
    raise RecordError("unknown trace format", file=path, field="line 1", got=first[:80], expected="# route_trace v1")


_COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"


def _read_route_trace_v1(text: str, path: Path) -> Routes:
    comments, rows = [], []
    for line in text.split("\n"):
        (comments if line.startswith("#") else rows).append(line)
    if not text.endswith("\n"):
        raise RecordError("the last line is torn", file=path, got=rows[-1][:80], expected="a line end")
    header = "\n".join(comments)
    found = {key: re.search(rf"\b{key}=(\d+)", header) for key in ("n_expert", "n_expert_used")}
    for key, match in found.items():
        if match is None:
            raise RecordError("the trace header lacks a field", file=path, field=key, got="absent", expected="a number")
    experts, top_k = (int(match[1]) for match in found.values())
    layer_bytes = {int(a): int(b) for a, b in re.findall(r"^# layer=(\d+) expert_bytes=(\d+)", header, re.MULTILINE)}
    if not layer_bytes:
        raise RecordError("the trace names no MoE layer", file=path, field="layer", got=0, expected="# layer= lines")
    if not rows or rows[0] != _COLUMNS:
        raise RecordError("unknown columns", file=path, field="columns", got=rows[:1], expected=_COLUMNS)
    try:
        table = np.loadtxt(io.StringIO("\n".join(rows[1:])), delimiter=",", ndmin=2)
    except ValueError as error:
        raise RecordError("a trace line cannot be read", file=path, got=str(error), expected=_COLUMNS) from error
    if table.shape[1] != 9 or not np.array_equal(table[:, :6], table[:, :6].astype(np.int64)):
        raise RecordError("a trace line holds no integers", file=path, got=table.shape, expected="nine whole columns")
    turn, phase, step, layer, slot, expert = table[:, :6].T.astype(np.int64)
    layer_ids = tuple(sorted(layer_bytes))
    column = np.searchsorted(layer_ids, layer)
    known = np.isin(layer, layer_ids)
    checks = (
        ("layer", ~known, layer, "a layer named in the header"),
        ("slot", (slot < 0) | (slot >= top_k), slot, f"0 to {top_k - 1}"),
        ("expert", (expert < 0) | (expert >= experts), expert, f"0 to {experts - 1}"),
        ("phase", (phase < 0) | (phase > 1), phase, "0 or 1"),
    )
    for field, bad, value, expected in checks:
        if bad.any():
            line = int(np.flatnonzero(bad)[0])
            raise RecordError(
                f"row {line} is out of range", file=path, field=field, got=int(value[line]), expected=expected
            )
    (tokens, index) = np.unique(np.stack([turn, step]), axis=1, return_inverse=True)
    index = index.reshape(-1)
    shape = (tokens.shape[1], len(layer_ids), top_k)
    cell = np.ravel_multi_index((index, column, slot), shape)
    if np.unique(cell).size != cell.size:
        raise RecordError("a slot is recorded twice", file=path, field="slot", got=cell.size, expected="each slot once")
    ids, mask = np.full(shape, MISSING, np.uint16), np.zeros(shape, bool)
    weights, phases = np.full(shape, np.nan, np.float32), np.zeros(shape[0], np.uint8)
    ids.flat[cell], weights.flat[cell], mask.flat[cell] = expert, table[:, 6], True
    phases[index] = phase
    if not np.array_equal(phases[index], phase):
        raise RecordError("a step is both prefill and decode", file=path, field="phase", got="both", expected="one")
    return Routes(
        ids=ids,
        weights=weights,
        mask=None if mask.all() else mask,
        phase=phases,
        thread=tokens[0].astype(np.int32),
        position=tokens[1].astype(np.int32),
        experts=experts,
        layer_ids=layer_ids,
        expert_bytes=np.array([layer_bytes[i] for i in layer_ids], np.int64),
    ).validate(file=path)
