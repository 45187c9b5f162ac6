"""Weight files of prerouter heads: what lies in them, where they are found, and what they may be used with.

    layers.<N>.fc1.weight          [D, F]      F = H + 2E, one set an owner layer N
    layers.<N>.fc2.weight          [E, D]
    layers.<N>.linear_init.weight  [E, F]      absent in none or in all: zeros

or, in the shared form, `shared.trunk.weight [R, F]` once, and a layer `layers.<N>.scale.weight [R]` and
`layers.<N>.fc2.weight [E, R]`. `layers.<N>.mlp.prerouter.<part>.weight` is read as well; anything else is refused by
name.

The header says which model the heads belong to, K, E, H, the owners and the format version, and all of it is held
against the tensors and the model before a head is made (`identity`). Three headers are read: ours (one sealed JSON
text, as in all files here), the flat one of released files, and theirs inside a key that is itself called
`__metadata__`. A file that says nothing about its model is not loaded; `convert_legacy` gives it an identity, in words
that someone must write down.

Source: edge0, released weight files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..artifacts import artifacts_dir
from ..errors import ArtifactError, GeometryError, IdentityError, MissingArtifactError, ParameterError, RecordError
from ..files import HEADER_KEY, decode_tensors, write_tensors
from .identity import TRUNK, HeadFile, HeadIdentity, validate
from .spec import PrerouterSpec

if TYPE_CHECKING:
    from .heads import HeadBank

FORMAT_VERSION = 1
RECORD = "prerouter"
PARTS = {"full": ("fc1", "fc2", "linear_init"), "shared": ("scale", "fc2")}
LEGACY = "pregate"


def load_heads(
    path: str | Path,
    spec: PrerouterSpec,
    *,
    model: str | Sequence[str],
    layer_ids: Sequence[int],
    experts: int,
    top_k: int,
    width: int,
    n_layers: int | None = None,
    precision: str = "float32",
) -> HeadBank:
    """Heads of a file for a model: `layer_ids`, `experts` E, `top_k` K as used, `width` H. `model`: its digest, or the
    names it may go by as well.

    Raises:
        as `read_heads`, `HeadFile.check` and `PrerouterSpec.wiring`.
    """
    names = (model,) if isinstance(model, str) else tuple(model)
    found = read_heads(path)
    owners = spec.wiring(layer_ids, n_layers).owners
    found.check(spec, owners=owners, model=names, experts=experts, top_k=top_k, width=width)
    return found.bank(precision=precision)


def find_weights(name: str, model_dir: str | Path, *, fallback: str | Path | None = None) -> Path:
    """A weight file by name: in the model's folder first, then in `artifacts/` (or `fallback`).

    Raises:
        ParameterError: not a plain file name. MissingArtifactError: in neither, both named.
    """
    if name in ("", "..") or Path(name).name != name:
        raise ParameterError("not a file name", field="weights_file", got=name, expected="a name without folders")
    places = [Path(model_dir) / name, Path(artifacts_dir() if fallback is None else fallback) / name]
    for place in places:
        if place.is_file():
            return place
    raise MissingArtifactError(
        "no prerouter heads", file=name, field="weights_file", got=None, expected=" or ".join(str(p) for p in places)
    )


def write_heads(
    path: str | Path,
    identity: HeadIdentity,
    tensors: Mapping[int, Mapping[str, np.ndarray]],
    trunk: np.ndarray | None = None,
) -> None:
    """Write `tensors[owner][part]` in the first spelling, with the canonical header; equal input, equal bytes.

    Raises:
        as `read_heads` does on the same content: nothing is written that could not be read.
    """
    found = HeadFile(Path(path), identity, {o: dict(parts) for o, parts in tensors.items()}, trunk)
    validate(found)
    named = {f"layers.{o}.{part}.weight": value for o, parts in tensors.items() for part, value in parts.items()}
    if trunk is not None:
        named[TRUNK] = trunk
    own = {name: value for name, value in asdict(identity).items() if name != "policy" or value}
    header = {"record": RECORD, "format_version": FORMAT_VERSION, **own}
    write_tensors(path, named, header)


def read_heads(path: str | Path) -> HeadFile:
    """Read and validate a weight file of any known spelling and header.

    Raises:
        MissingArtifactError: no such file. ArtifactError: truncated, altered, or not safetensors.
        RecordError: unknown key, version or header field, a type that is not float16 or float32, or NaN.
        IdentityError: the header does not say what the heads belong to.
        GeometryError: tensor of another shape, or an owner without its tensors.
    """
    arrays, header = _open(Path(path))
    if header is None or any(key not in header for key in ("model", "K", "owners")):
        missing = (
            ["model", "K", "owners"] if header is None else [k for k in ("model", "K", "owners") if k not in header]
        )
        raise IdentityError(
            "header does not say what the heads belong to",
            file=path,
            field="__metadata__",
            got=f"no {', '.join(missing)}",
            expected="model, K, owners, format_version",
            fix="convert_legacy(source, target, identity) with an identity you know to be true",
        )
    if str(got := header.get("format_version")) != str(FORMAT_VERSION):
        raise RecordError("unknown version", file=path, field="format_version", got=got, expected=FORMAT_VERSION)
    if (got := header.get("kind", RECORD)) != RECORD:
        raise IdentityError("not prerouter heads", file=path, field="kind", got=got, expected=RECORD)
    tensors, trunk = _sort(arrays, Path(path))
    found = HeadFile(Path(path), _identity(header, tensors, trunk, path), tensors, trunk)
    validate(found)
    return found


def convert_legacy(source: str | Path, target: str | Path, identity: HeadIdentity) -> None:
    """Write the heads of a file that names its layers `pregate.N.…`, or has no header, under an identity given by hand.

    Raises:
        IdentityError: the file's own header contradicts the identity. Otherwise as `read_heads`.
    """
    arrays, header = _open(Path(source))
    for field, value in (("model", identity.model), ("K", identity.top_k), ("owners", list(identity.owners))):
        if header is not None and field in header and (got := _plain(header[field], type(value))) != value:
            raise IdentityError("the file says otherwise", file=source, field=field, got=got, expected=value)
    renamed = {}
    for name, value in arrays.items():
        head, dot, rest = name.partition(".")
        renamed[f"layers.{rest}" if head == LEGACY and dot else name] = value
    if len(renamed) != len(arrays):
        raise RecordError("two spellings of one tensor", file=source, got=sorted(arrays), expected="one spelling")
    tensors, trunk = _sort(renamed, Path(source))
    validate(HeadFile(Path(source), identity, tensors, trunk))
    write_heads(target, identity, tensors, trunk)


def _open(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any] | None]:
    """Arrays by name, and the header in upstream's words, or None."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise MissingArtifactError("file not found", file=path) from None
    try:
        entries = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = entries.pop("__metadata__", None)
        types = {name: entry["dtype"] for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ArtifactError("not a complete safetensors file", file=path, got=f"{len(data)} bytes") from None
    if metadata is not None and HEADER_KEY in metadata:
        arrays, header = decode_tensors(data, file=path)
        if (got := header.get("record")) != RECORD:
            raise IdentityError("not prerouter heads", file=path, field="record", got=got, expected=RECORD)
        return arrays, {**header, "K": header.get("top_k")}
    for name, dtype in types.items():
        if dtype not in ("F16", "F32"):
            raise RecordError("unknown number type", file=path, field=name, got=dtype, expected="F16 or F32")
    try:
        arrays = load(data)
    except (SafetensorError, ValueError) as error:
        raise ArtifactError("not a complete safetensors file", file=path, got=str(error)) from None
    return arrays, _unnested(metadata, path)


def _unnested(metadata: dict[str, Any] | None, path: Path) -> dict[str, Any] | None:
    """Released converters put the whole header, as JSON text, into a key that is called `__metadata__` once more."""
    if metadata is None or "__metadata__" not in metadata:
        return metadata
    try:
        inner = json.loads(metadata["__metadata__"])
        return {**{k: v for k, v in metadata.items() if k != "__metadata__"}, **dict(inner)}
    except (ValueError, TypeError) as error:
        raise RecordError(
            "header inside the header is not JSON",
            file=path,
            field="__metadata__.__metadata__",
            got=str(error),
            expected="a JSON object",
        ) from None


def _sort(arrays: Mapping[str, np.ndarray], path: Path) -> tuple[dict[int, dict[str, np.ndarray]], np.ndarray | None]:
    """`tensors[owner][part]` and the trunk, from names of either spelling."""
    trunk = arrays.get(TRUNK)
    known = PARTS["full" if trunk is None else "shared"]
    tensors: dict[int, dict[str, np.ndarray]] = {}
    for name, value in sorted(arrays.items()):  # safetensors returns them in no order
        if name == TRUNK:
            continue
        words = name.split(".")
        plain = len(words) == 4 or (len(words) == 6 and words[2:4] == ["mlp", "prerouter"])
        fits = plain and words[0] == "layers" and words[1].isdecimal() and words[-1] == "weight"
        if not fits or words[-2] not in known:
            raise RecordError(
                "unknown tensor", file=path, field=name, got=name, expected=f"layers.<N>.{{{','.join(known)}}}.weight"
            )
        parts = tensors.setdefault(int(words[1]), {})
        if words[-2] in parts:
            raise RecordError("two spellings of one tensor", file=path, field=name, expected="one spelling")
        parts[words[-2]] = value
    if not tensors:
        raise GeometryError("no heads in the file", file=path, field="layers", got=0, expected=">= 1")
    return dict(sorted(tensors.items())), trunk


def _identity(header: Mapping[str, Any], tensors, trunk, path: Any) -> HeadIdentity:
    """From a header: ours says everything; a released one leaves E, H and the width to the shapes."""
    first = next(iter(tensors.values()))
    features = trunk if trunk is not None else first.get("fc1")
    if features is None or "fc2" not in first or features.ndim != 2 or first["fc2"].ndim != 2:
        raise GeometryError(
            "tensor missing or not a matrix", file=path, field=f"layers.{next(iter(tensors))}", got=sorted(first)
        )
    experts = first["fc2"].shape[0]
    measured = {
        "experts": experts,
        "width": features.shape[1] - 2 * experts,
        "hidden": features.shape[0],
        "form": "full" if trunk is None else "shared",
    }
    said = {
        "model": _plain(header["model"], str),
        "top_k": _plain(header["K"], int),
        "owners": _plain(header["owners"], tuple),
    }
    ours = {name: header[name] for name in HeadIdentity.__dataclass_fields__ if name in header and name not in said}
    if "confidence" in ours:
        ours["confidence"] = tuple(tuple(pair) for pair in ours["confidence"])
    for name in measured:
        if name in ours and ours[name] != measured[name]:
            raise GeometryError(
                "tensors are not what the header says", file=path, field=name, got=measured[name], expected=ours[name]
            )
    return HeadIdentity(**{**measured, **ours, **said})


def _plain(value: Any, kind: type) -> Any:
    """A header value of a released file is text: "4", "[6, 7]"."""
    try:
        if kind in (tuple, list):
            return kind(int(v) for v in (json.loads(value) if isinstance(value, str) else value))
        return kind(value)
    except (ValueError, TypeError):
        return value
