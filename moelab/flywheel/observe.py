"""Observations: what one decode did, token by token, in a record that cannot be half right.

An observation is one finished sequence: exactly the tokens that were fed to the model, how each was fed
(prefilled or decoded), and at every MoE layer which experts the model's own router chose, in rank order,
with weights and margins. Everything later in the flywheel is learned from these rows, so a damaged row
would become a learned error: a reader accepts a record whole or refuses it by name. There is no repair,
no truncation and no zero row.

The record holds no offset, cache slot, device handle or address: what a runtime did with its memory is
not what the model chose, and would not be true on the next machine.

`T` tokens, `L` MoE layers, `K` experts a token, `E` experts, `M` messages.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from datetime import date
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from moelab.artifacts import encode_tensors
from moelab.errors import RecordError
from moelab.routes import DECODED
from moelab.threads import ROLES, normalise_owner

from .records import (
    Shapes,
    builtins,
    check_kind,
    check_routes,
    check_shapes,
    convert_header,
    forbid,
    open_record,
    payload_digest,
    refuse_where,
)

SCHEMA_VERSION = 1
RUNTIME_KEYS = frozenset({"libraries", "device", "precision", "blas", "blas_threads", "compile", "residency"})
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OPTIONAL = frozenset({"group_margin"})

Scalar = str | int | float | bool | None


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answer number `index` of the thread: rows `start` to `end`. A sampled answer carries its seed."""

    index: int
    start: int
    end: int
    seed: int | None = None


class Authorisation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a record may exist, what it may be used for, and the last day (ISO date) on which it may."""

    basis: str
    purposes: tuple[str, ...]
    retention_until: str


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything about a sequence that is not a row.

    Attributes:
        model, tokenizer, template: sha256 digests, 64 hexadecimal digits each.
        owner, thread: the normalised owner, and `Thread.uid`.
        generation: number of the capture run; `sequence`: name within thread and generation.
        began: why the sequence does not continue an earlier one (a template rewrote history), or None.
        turns: the answers among the rows; all of their rows are decoded.
        tokens_fed: T as counted where tokens enter the model, independently of the arrays.
        layer_ids: `[L]` place of each MoE layer in the model. `experts`: E. `top_k`: K.
        sampling: settings of the sampler; empty where the answers were given (`forced`).
        runtime: `models.runtime_identity`: libraries, device, precision, BLAS, compile, residency.
        machine: which of the two roles made the record; no trainer's figure stands for the runtime.
        payload: sha256 of rows and header without `wall_ns`; `Observation.sealed` fills it in.
    """

    record: Literal["observation"] = "observation"
    schema_version: int = SCHEMA_VERSION
    model: str
    tokenizer: str
    template: str
    owner: str
    thread: str
    generation: int
    sequence: str
    began: str | None = None
    turns: tuple[Turn, ...]
    tokens_fed: int
    layer_ids: tuple[int, ...]
    experts: int
    top_k: int
    mode: Literal["forced", "sampled"]
    sampling: dict[str, Scalar]
    runtime: dict[str, Scalar | dict[str, Scalar]]
    machine: Literal["runtime", "trainer"] = "runtime"
    authorisation: Authorisation
    payload: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """One finished sequence. Arrays are not copied; what `from_bytes` returns is not to be written to.

    Attributes:
        token_ids: `i32[T]` exactly what was fed.
        phase: `u8[T]` `routes.PREFILLED` or `DECODED`.
        ordinal: `i64[T]` 0 … T-1.
        counter: `u64[T]` increasing, and shared by no other sequence of the thread and generation.
        wall_ns: `i64[T]` wall clock, a diagnostic: no identity depends on it.
        ids: `u16[T,L,K]` the model's own experts, best first.
        weights: `f32[T,L,K]` aligned with ids.
        margin: `f32[T,L]` K-th less (K+1)-th selection score; +inf where there is no (K+1)-th.
        group_margin: `f32[T,L]` the same between groups, for group-limited routing only.
        message_start: `i32[M]` where messages begin. `role`: `u8[M]` index into `threads.ROLES`.
    """

    header: Header
    token_ids: np.ndarray
    phase: np.ndarray
    ordinal: np.ndarray
    counter: np.ndarray
    wall_ns: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    margin: np.ndarray
    message_start: np.ndarray
    role: np.ndarray
    group_margin: np.ndarray | None = None

    SHAPES: ClassVar[Shapes] = {
        "token_ids": ("int32", "T"),
        "phase": ("uint8", "T"),
        "ordinal": ("int64", "T"),
        "counter": ("uint64", "T"),
        "wall_ns": ("int64", "T"),
        "ids": ("uint16", "TLK"),
        "weights": ("float32", "TLK"),
        "margin": ("float32", "TL"),
        "group_margin": ("float32", "TL"),
        "message_start": ("int32", "M"),
        "role": ("uint8", "M"),
    }

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are there, by name."""
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "header"}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def payload(self) -> str:
        """Identity of the content: rows and header, without the wall clock and whatever encrypts them."""
        return payload_digest(self.header, {name: a for name, a in self.arrays.items() if name != "wall_ns"})

    def sealed(self) -> Observation:
        """The same observation, validated, with its payload digest in the header."""
        self.validate()
        return replace(self, header=msgspec.structs.replace(self.header, payload=self.payload))

    def validate(self, *, file: Any = None) -> Observation:
        """Return self if every row can be believed.

        Raises:
            GeometryError: L or K contradict the header.
            RecordError: anything else.
        """
        _check_header(self.header, file)
        _check_rows(self, file)
        return self


def to_bytes(observation: Observation) -> bytes:
    """The observation, sealed, as one safetensors file: equal content, equal bytes."""
    sealed = observation.sealed()
    return encode_tensors(sealed.arrays, builtins(sealed.header, None))


def from_bytes(data: bytes, *, file: Any = None) -> Observation:
    """Inverse of `to_bytes`; errors name `file`.

    Raises:
        RecordError: truncated, altered, of an unknown version, with an unknown, missing or forbidden
            field, or with impossible rows.
        GeometryError: rows of another L or K than the header says.
    """
    header, arrays = open_record(data, Header, Observation.SHAPES, optional=_OPTIONAL, file=file)
    observation = Observation(header=header, **arrays).validate(file=file)
    if (got := observation.payload) != header.payload:
        raise RecordError("payload altered", file=file, field="payload", got=got, expected=header.payload)
    return observation


def _check_header(header: Header, file: Any) -> None:
    check_fields(header, file)

    def require(holds: bool, field: str, got: Any, expected: Any) -> None:
        if not holds:
            raise RecordError("impossible header", file=file, field=field, got=got, expected=expected)

    if header.tokens_fed < 1:
        raise RecordError("record is empty", file=file, field="tokens_fed", got=header.tokens_fed, expected=">= 1")
    edge, last = 0, -1
    for turn in header.turns:
        inside = edge <= turn.start <= turn.end <= header.tokens_fed and last < turn.index
        require(inside, "turns", [turn.index, turn.start, turn.end], f"in order, rows {edge} … {header.tokens_fed}")
        seeded = (turn.seed is not None) == (header.mode == "sampled")
        require(seeded, "turns.seed", turn.seed, "a seed for a sampled answer, none for a forced one")
        edge, last = turn.end, turn.index
    require(bool(header.sampling) == (header.mode == "sampled"), "sampling", header.sampling, f"as mode {header.mode}")


def check_fields(header: Any, file: Any) -> None:
    """What the header of every kind of record must hold: types, identity, ownership, geometry, grant.

    Raises:
        RecordError: the first field that does not.
    """

    def require(holds: bool, field: str, got: Any, expected: Any) -> None:
        if not holds:
            raise RecordError("impossible header", file=file, field=field, got=got, expected=expected)

    # A header made in Python has not been through a decoder, which is what checks types.
    raw = builtins(header, file)
    forbid(raw, file)
    check_kind(raw, type(header), file)
    convert_header(raw, type(header), file)
    for name in ("model", "tokenizer", "template"):
        value = getattr(header, name)
        require(bool(_DIGEST.fullmatch(value)), name, value, "64 hexadecimal digits")
    for name in ("owner", "thread", "sequence"):
        require(bool(getattr(header, name).strip()), name, getattr(header, name), "a name")
    require(header.owner == normalise_owner(header.owner), "owner", header.owner, normalise_owner(header.owner))
    require(header.generation >= 0, "generation", header.generation, ">= 0")
    layers = header.layer_ids
    rising = all(a < b for a, b in zip((-1, *layers), layers, strict=False))
    require(bool(layers) and rising, "layer_ids", layers, "increasing from 0 on, at least one")
    require(1 <= header.top_k <= header.experts < 0xFFFF, "top_k", header.top_k, f"1 … experts ({header.experts})")
    missing = sorted(RUNTIME_KEYS - set(header.runtime))
    require(not missing, "runtime", sorted(header.runtime), f"also {', '.join(missing)}")
    grant = header.authorisation
    require(bool(grant.basis.strip()), "authorisation.basis", grant.basis, "a basis")
    require(bool(grant.purposes), "authorisation.purposes", grant.purposes, "at least one purpose")
    try:
        date.fromisoformat(grant.retention_until)
    except ValueError:
        require(False, "authorisation.retention_until", grant.retention_until, "an ISO date")


def _check_rows(observation: Observation, file: Any) -> None:
    header, o = observation.header, observation
    sizes = {"T": header.tokens_fed, "L": len(header.layer_ids), "K": header.top_k, "M": o.message_start.size}
    check_shapes(o.arrays, Observation.SHAPES, sizes, "T", file)
    refuse_where(o.token_ids < 0, "token does not exist", "token_ids", o.token_ids, ">= 0", file)
    refuse_where(o.phase > DECODED, "unknown phase", "phase", o.phase, f"0 … {DECODED}", file)
    refuse_where(o.ordinal != np.arange(len(o.ordinal)), "ordinal gap", "ordinal", o.ordinal, "0, 1, …", file)
    back = np.concatenate([[False], o.counter[1:] <= o.counter[:-1]])
    refuse_where(back, "counter regression", "counter", o.counter, "more than the row before", file)
    margins = {name: array for name, array in o.arrays.items() if name in ("margin", "group_margin")}
    check_routes(o.ids, o.weights, margins, header.experts, file)
    decoded = np.ones(len(o.phase), bool)
    for turn in header.turns:
        decoded[turn.start : turn.end] = o.phase[turn.start : turn.end] == DECODED
    refuse_where(~decoded, "row of an answer was not decoded", "phase", o.phase, DECODED, file)
    starts = o.message_start
    if starts.tolist()[:1] != [0]:
        raise RecordError(
            "no message at the first row", file=file, field="message_start", got=starts[:1].tolist(), expected=[0]
        )
    wrong = np.concatenate([[False], starts[1:] <= starts[:-1]]) | (starts >= header.tokens_fed)
    refuse_where(wrong, "messages out of order", "message_start", starts, f"increasing, < {header.tokens_fed}", file)
    refuse_where(o.role >= len(ROLES), "unknown role", "role", o.role, f"< {len(ROLES)}", file)
