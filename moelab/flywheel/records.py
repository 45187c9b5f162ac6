"""Opening a record: the checks that come before any row is looked at, for every kind of record.

A record is a safetensors file with one canonical header. Its kind and version are judged first, so that a
record of the future is called that and not a record with odd fields; then names, known or refused.
"""

from __future__ import annotations

import re
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np

from moelab.artifacts import decode_tensors, digest_json, digest_tensors
from moelab.errors import ArtifactError, GeometryError, RecordError

_FORBIDDEN = re.compile(r"(?:^|_)(?:offsets?|slots?|handles?|address(?:es)?|pointers?|ptrs?)(?:$|_)", re.IGNORECASE)
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b", re.IGNORECASE)

Shapes = dict[str, tuple[str, str]]
"""Array name → dtype and dimensions, one letter each."""


def open_record(
    data: bytes, kind: type[msgspec.Struct], shapes: Shapes, *, optional: frozenset[str] = frozenset(), file: Any = None
) -> tuple[Any, dict[str, np.ndarray]]:
    """`(header, arrays)` of a record of one kind; rows are not looked at.

    Raises:
        RecordError: truncated, altered, of another kind, of an unknown version, or with a field that is
            unknown, missing, forbidden or of the wrong type.
    """
    try:
        arrays, raw = decode_tensors(data, file=file)
    except ArtifactError as error:
        field = error.field or "bytes"
        raise RecordError(error.problem, file=file, field=field, got=error.got, expected=error.expected) from None
    check_kind(raw, kind, file)
    forbid(arrays, file)
    forbid(raw, file)
    if unknown := sorted(set(arrays) - set(shapes)):
        raise RecordError("unknown field", file=file, field=unknown[0], got=unknown, expected=sorted(shapes))
    if missing := sorted(set(shapes) - optional - set(arrays)):
        raise RecordError("partial record", file=file, field=missing[0], got=sorted(arrays), expected=sorted(shapes))
    return convert_header(raw, kind, file), arrays


def check_kind(raw: dict[str, Any], kind: type[msgspec.Struct], file: Any) -> None:
    """A header says what it is in `record` and `schema_version`, whose defaults in `kind` are the only values."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    for name, problem in (("record", "another kind of record"), ("schema_version", "unknown version")):
        if raw.get(name) != defaults[name]:
            raise RecordError(problem, file=file, field=name, got=raw.get(name), expected=defaults[name])


def builtins(header: msgspec.Struct, file: Any) -> dict[str, Any]:
    """A header as plain values; one that holds anything else (a numpy scalar) is refused."""
    try:
        return msgspec.to_builtins(header)
    except TypeError as error:
        raise RecordError(
            "header is not plain", file=file, field="header", got=str(error), expected="JSON types"
        ) from None


def payload_digest(header: msgspec.Struct, arrays: dict[str, np.ndarray]) -> str:
    """Identity of a record's content: its rows, and its header but for this digest."""
    plain = builtins(msgspec.structs.replace(header, payload=""), None)
    return digest_json({"rows": digest_tensors(arrays), "header": plain})


def convert_header(raw: dict[str, Any], kind: type[msgspec.Struct], file: Any) -> Any:
    """A header as its struct, every name and type checked."""
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    if unknown := sorted(set(raw) - set(known)):
        raise RecordError("unknown field", file=file, field=unknown[0], got=unknown, expected=sorted(known))
    # What is written is written whole: a default is a convenience of the writer, not of the file.
    if missing := sorted(set(known) - set(raw)):
        raise RecordError("partial record", file=file, field=missing[0], got=sorted(raw), expected=sorted(known))
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        field = place.rstrip("`") or "header"
        raise RecordError(
            "wrong field in header", file=file, field=field, got=text, expected=_described(kind, field)
        ) from None


def _described(kind: type, field: str) -> str:
    """The declared type of a header field, in words for a message."""
    hint = get_type_hints(kind).get(re.split(r"[.\[]", field)[0])
    return " or ".join(map(str, get_args(hint))) if get_args(hint) else getattr(hint, "__name__", str(hint))


def forbid(value: Any, file: Any, where: str = "") -> None:
    """Refuse what a record may never hold: offsets, cache slots, device handles, addresses."""
    if isinstance(value, dict):
        for name, item in value.items():
            field = f"{where}.{name}".lstrip(".")
            if _FORBIDDEN.search(name):
                raise RecordError("forbidden field", file=file, field=field, got=name, expected="no place in memory")
            forbid(item, file, field)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            forbid(item, file, f"{where}[{index}]")
    elif isinstance(value, str) and _ADDRESS.search(value):
        raise RecordError("forbidden value", file=file, field=where, got=value, expected="no address")


def check_shapes(arrays: dict[str, np.ndarray], shapes: Shapes, sizes: dict[str, int], rows: str, file: Any) -> None:
    """Types and shapes of arrays. `sizes`: letter → length; `rows` is the letter of the record's rows.

    Raises:
        RecordError: a wrong type, or more or fewer rows than were counted.
        GeometryError: another length in any other dimension.
    """
    for name, array in arrays.items():
        dtype, letters = shapes[name]
        if array.dtype != dtype or array.ndim != len(letters):
            raise RecordError(
                "wrong type of array",
                file=file,
                field=name,
                got=f"{array.dtype} with {array.ndim} dimensions",
                expected=f"{dtype}[{','.join(letters)}]",
            )
        for axis, letter in enumerate(letters):
            got, expected = array.shape[axis], sizes[letter]
            if got != expected:
                raise (RecordError if letter == rows else GeometryError)(
                    "rows are not what was counted" if letter == rows else "wrong geometry",
                    file=file,
                    field=f"{name} ({letter})",
                    got=got,
                    expected=expected,
                )


def refuse_where(bad: np.ndarray, problem: str, name: str, array: np.ndarray, expected: Any, file: Any) -> None:
    """Raise RecordError for the first place where `bad` is True; `bad` may have fewer axes than `array`."""
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        got = array[place].tolist()
        field = f"{name}[{','.join(map(str, place))}]"
        raise RecordError(problem, file=file, field=field, got=got, expected=expected)


def check_routes(
    ids: np.ndarray,
    weights: np.ndarray,
    margins: dict[str, np.ndarray],
    experts: int,
    file: Any,
) -> None:
    """Values of routes: `ids u16[T,L,K]`, `weights f32[T,L,K]`, each margin `f32[T,L]`.

    Raises:
        RecordError: an expert that does not exist or is chosen twice in a row of K, a weight that is no
            number, rows of zeros (what an unwritten row looks like), a negative margin.
    """
    refuse_where(ids >= experts, "expert does not exist", "ids", ids, f"< {experts}", file)
    ranked = np.sort(ids, axis=-1)
    twice = (ranked[..., 1:] == ranked[..., :-1]).any(axis=-1)
    if len(weights) and not weights.any():
        raise RecordError("all-zero capture", file=file, field="weights", got="only zeros", expected="routing weights")
    refuse_where(twice, "expert chosen twice", "ids", ids, "distinct experts", file)
    refuse_where(~np.isfinite(weights), "weight is not a number", "weights", weights, "finite", file)
    refuse_where(~weights.any(axis=-1), "row of zeros", "weights", weights, "routing weights", file)
    for name, margin in margins.items():
        refuse_where(~(margin >= 0), "margin is negative or not a number", name, margin, ">= 0", file)
