"""Every error moelab raises on purpose.

One shape for all of them: what is wrong, and where it is known, the file, the field, what was
got and what was expected. The text of an error is part of the contract and is tested.
"""

from __future__ import annotations

from typing import Any


class MoelabError(Exception):
    """Root of every error that moelab raises on purpose."""


class ContractError(MoelabError):
    """A record, argument or artefact broke its contract.

    Attributes:
        problem: one sentence that says what is wrong.
        file: the file concerned, as given by the caller.
        field: the field or argument concerned.
        got, expected: what was found, and what would have been right.
        fix: what the reader can do about it.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: Any = None,
        field: str | None = None,
        got: Any = None,
        expected: Any = None,
        fix: str | None = None,
    ):
        self.problem, self.file, self.field = problem, file, field
        self.got, self.expected, self.fix = got, expected, fix
        parts = [problem]
        for name, value in (("file", file), ("field", field)):
            if value is not None:
                parts.append(f"{name}: {value}")
        if got is not None or expected is not None:
            parts.append(f"got: {got!r}, expected: {expected if isinstance(expected, str) else repr(expected)}")
        if fix is not None:
            parts.append(f"fix: {fix}")
        super().__init__("; ".join(parts))

    def __reduce__(self):
        # Errors cross process boundaries (workers are spawned); keyword-only fields would be lost.
        return _rebuild, (type(self), self.problem, self.file, self.field, self.got, self.expected, self.fix)


def _rebuild(cls, problem, file, field, got, expected, fix):
    return cls(problem, file=file, field=field, got=got, expected=expected, fix=fix)


class ParameterError(ContractError):
    """A notebook or command parameter is unknown, mistyped or out of range."""


class ArtifactError(ContractError):
    """An artefact is altered, truncated or not what its manifest says."""


class MissingArtifactError(ArtifactError):
    """An artefact is not there (as opposed to there and altered)."""


class RecordError(ContractError):
    """A record is partial, of an unknown version, or holds impossible values."""


class IdentityError(ContractError):
    """Model, tokenizer, template, snapshot or runtime is not the one expected."""


class OwnershipError(ContractError):
    """A row crossed an owner, generation or holdout boundary."""


class GeometryError(ContractError):
    """A count of layers, experts, experts per token or a width does not match."""


class VaultError(ContractError):
    """An encrypted record cannot be opened: wrong key, destroyed key, or tampered bytes."""


class UnsupportedModelError(ContractError):
    """A model family cannot work here; the message says why."""


class GateRefusedError(ContractError):
    """A step needs a gate that has not passed."""


class PolicyError(ContractError):
    """A routing policy got an argument outside its contract."""


class StoreError(ContractError):
    """Expert bytes cannot be had as they should be: a short or failed read, a wrong checksum, a closed store."""
