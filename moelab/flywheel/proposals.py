"""Proposals: the candidate path, what a drafter suggested and a verifier accepted or turned down.

Rows of rejected candidates are real routes (their experts would have been read) of tokens that were never
part of the thread. They live in records of their own kind, which a reader of observations refuses, and
each proposal carries its lineage: the observation it branches from, where, and the digest of the prefix
that was accepted there. Whether a candidate was accepted is no column of its own: it is "before the
accepted length", so the two cannot disagree.

`P` proposals, `C` candidates of all proposals in order, `L` MoE layers, `K` experts a token.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import msgspec
import numpy as np

from moelab.artifacts import encode_tensors
from moelab.errors import OwnershipError, RecordError

from .observe import SCHEMA_VERSION, Authorisation, Observation, Scalar, check_fields
from .records import Shapes, builtins, check_routes, check_shapes, open_record, payload_digest, refuse_where

_ROUTES = frozenset({"ids", "weights", "margin"})


class ProposalHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """As `observe.Header`, and:

    Attributes:
        observation: payload digest of the clean path that the proposals branch from.
        drafter: what proposed: a digest, or the name of a method without weights.
        candidates: C, as counted where they were verified.
    """

    record: Literal["proposals"] = "proposals"
    schema_version: int = SCHEMA_VERSION
    model: str
    tokenizer: str
    template: str
    owner: str
    thread: str
    generation: int
    sequence: str
    observation: str
    drafter: str
    candidates: int
    layer_ids: tuple[int, ...]
    experts: int
    top_k: int
    runtime: dict[str, Scalar | dict[str, Scalar]]
    machine: Literal["runtime", "trainer"] = "runtime"
    authorisation: Authorisation
    payload: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Proposals:
    """The proposals of one sequence, in the order they were made.

    Attributes:
        proposal: `i64[P]` increasing names. `proposal_generation`, `verifier_generation`: `i64[P]`.
        position: `i32[P]` place of the first candidate in the observation's rows.
        length: `i32[P]` candidates, at least 1. `accepted`: `i32[P]` how many of them were accepted.
        prefix: `u8[P,32]` `prefix_digest` of the accepted tokens before the position.
        token: `i32[C]` the candidates.
        ids, weights, margin: `[C,L,K]`, `[C,L,K]`, `[C,L]` the target's routes for them; all three or none.
    """

    header: ProposalHeader
    proposal: np.ndarray
    proposal_generation: np.ndarray
    verifier_generation: np.ndarray
    position: np.ndarray
    length: np.ndarray
    accepted: np.ndarray
    prefix: np.ndarray
    token: np.ndarray
    ids: np.ndarray | None = None
    weights: np.ndarray | None = None
    margin: np.ndarray | None = None

    SHAPES: ClassVar[Shapes] = {
        "proposal": ("int64", "P"),
        "proposal_generation": ("int64", "P"),
        "verifier_generation": ("int64", "P"),
        "position": ("int32", "P"),
        "length": ("int32", "P"),
        "accepted": ("int32", "P"),
        "prefix": ("uint8", "PB"),
        "token": ("int32", "C"),
        "ids": ("uint16", "CLK"),
        "weights": ("float32", "CLK"),
        "margin": ("float32", "CL"),
    }

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        named = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "header"}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def of(self) -> np.ndarray:
        """`i64[C]` index of each candidate's proposal."""
        return np.repeat(np.arange(len(self.length)), self.length)

    @property
    def depth(self) -> np.ndarray:
        """`i64[C]` place of each candidate in its proposal, from 0."""
        return np.arange(len(self.token)) - np.repeat(np.cumsum(self.length) - self.length, self.length)

    @property
    def kept(self) -> np.ndarray:
        """`bool[C]` True for accepted candidates."""
        return self.depth < np.repeat(self.accepted, self.length)

    def validate(self, *, file: Any = None) -> Proposals:
        """Return self if every row can be believed.

        Raises:
            GeometryError: L or K contradict the header.
            RecordError: anything else.
        """
        header = self.header
        check_fields(header, file)
        sizes = {"P": self.proposal.size, "B": 32, "C": header.candidates}
        sizes |= {"L": len(header.layer_ids), "K": header.top_k}
        check_shapes(self.arrays, self.SHAPES, sizes, "C", file)
        if not len(self.proposal):
            raise RecordError("record is empty", file=file, field="proposal", got=0, expected=">= 1")
        back = np.concatenate([[False], self.proposal[1:] <= self.proposal[:-1]])
        refuse_where(back, "proposals out of order", "proposal", self.proposal, "increasing", file)
        for name in ("proposal_generation", "verifier_generation", "position"):
            refuse_where(getattr(self, name) < 0, "impossible lineage", name, getattr(self, name), ">= 0", file)
        refuse_where(self.length < 1, "proposal without a candidate", "length", self.length, ">= 1", file)
        wrong = (self.accepted < 0) | (self.accepted > self.length)
        refuse_where(wrong, "accepted more than was proposed", "accepted", self.accepted, "0 … length", file)
        if (total := int(self.length.sum())) != header.candidates:
            raise RecordError(
                "rows are not what was counted", file=file, field="length", got=total, expected=header.candidates
            )
        refuse_where(self.token < 0, "token does not exist", "token", self.token, ">= 0", file)
        if there := _ROUTES & set(self.arrays):
            if gone := sorted(_ROUTES - there):
                raise RecordError("partial record", file=file, field=gone[0], got=sorted(there), expected="all or none")
            check_routes(self.ids, self.weights, {"margin": self.margin}, header.experts, file)
        return self

    def check_lineage(self, observation: Observation, *, file: Any = None) -> None:
        """Hold the proposals against the clean path that they say they branch from.

        Raises:
            OwnershipError: it is another observation.
            RecordError: an accepted prefix or an accepted candidate is not what the thread went on with.
        """
        if (got := self.header.observation) != observation.header.payload:
            raise OwnershipError(
                "lineage of another observation",
                file=file,
                field="observation",
                got=got,
                expected=observation.header.payload,
            )
        rows = observation.token_ids
        for index, position in enumerate(self.position.tolist()):
            digest = prefix_digest(rows[:position])
            if position > len(rows) or self.prefix[index].tobytes() != digest:
                raise RecordError(
                    "another accepted prefix",
                    file=file,
                    field=f"prefix[{index}]",
                    got=self.prefix[index].tobytes().hex(),
                    expected=f"{digest.hex()} of {position} tokens",
                )
        places = np.repeat(self.position, self.length) + self.depth
        kept = self.kept
        beyond = kept & (places >= len(rows))
        refuse_where(beyond, "accepted beyond the thread's end", "token", self.token, f"{len(rows)} rows", file)
        differs = kept & (rows[np.minimum(places, len(rows) - 1)] != self.token)
        refuse_where(differs, "accepted another token", "token", self.token, "the thread's", file)

    def sealed(self) -> Proposals:
        """The same proposals, validated, with their payload digest in the header."""
        self.validate()
        payload = payload_digest(self.header, self.arrays)
        return replace(self, header=msgspec.structs.replace(self.header, payload=payload))


def prefix_digest(token_ids: np.ndarray) -> bytes:
    """sha256 of token ids as little-endian i32: 32 bytes."""
    return hashlib.sha256(np.ascontiguousarray(token_ids, "<i4").tobytes()).digest()


def proposals_to_bytes(proposals: Proposals) -> bytes:
    """The proposals, sealed, as one safetensors file: equal content, equal bytes."""
    sealed = proposals.sealed()
    return encode_tensors(sealed.arrays, builtins(sealed.header, None))


def proposals_from_bytes(data: bytes, *, file: Any = None) -> Proposals:
    """Inverse of `proposals_to_bytes`; refuses observations. Raises as `observe.from_bytes`."""
    header, arrays = open_record(data, ProposalHeader, Proposals.SHAPES, optional=_ROUTES, file=file)
    proposals = Proposals(header=header, **arrays).validate(file=file)
    if (got := payload_digest(header, arrays)) != header.payload:
        raise RecordError("payload altered", file=file, field="payload", got=got, expected=header.payload)
    return proposals
