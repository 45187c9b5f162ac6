"""Reading many observations as one set: each valid by itself, and together free of contradictions.

A set can be wrong where every record is right: records of two models, a thread under two owners, a
sequence captured twice under one name, counters that run back because two captures were mixed up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moelab.errors import GeometryError, IdentityError, OwnershipError, RecordError

from .observe import Header, Observation, from_bytes


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What every observation of a set must have been made with. `runtime`: None accepts any."""

    model: str
    tokenizer: str
    template: str
    layer_ids: tuple[int, ...]
    experts: int
    top_k: int
    runtime: dict[str, Any] | None = None

    @classmethod
    def of(cls, loaded: Any, *, runtime: dict[str, Any] | None = None) -> Identity:
        """The identity of a loaded model (`models.LoadedModel`)."""
        shape = loaded.geometry
        return cls(
            **loaded.digests,
            layer_ids=tuple(shape.layer_ids),
            experts=shape.experts,
            top_k=shape.top_k,
            runtime=runtime,
        )


class ObservationReader:
    """Reads observations of one identity, and remembers them to refuse what contradicts an earlier one.

    Args:
        identity: what they must have been made with.
        opener: path → plaintext bytes; `Vault.open` for encrypted records.
    """

    def __init__(self, identity: Identity, *, opener: Callable[[Path], bytes] = Path.read_bytes):
        self._identity, self._opener = identity, opener
        self._owners: dict[str, tuple[str, Path]] = {}
        self._names: dict[tuple[str, int, str], Path] = {}
        self._counters: dict[tuple[str, int], list[tuple[int, int, str]]] = defaultdict(list)

    def read(self, path: str | Path) -> Observation:
        """One observation.

        Raises:
            RecordError, GeometryError: as `from_bytes`; counters that overlap another sequence's.
            IdentityError: another model, tokenizer, template or runtime.
            OwnershipError: a thread of another owner, or a name that was used before.
            Whatever the opener raises.
        """
        path = Path(path)
        observation = from_bytes(self._opener(path), file=path)
        header = observation.header
        self._check_identity(header, path)
        self._check_ownership(header, path)
        self._check_counter(header, int(observation.counter[0]), int(observation.counter[-1]), path)
        self._owners[header.thread] = (header.owner, path)
        self._names[header.thread, header.generation, header.sequence] = path
        return observation

    def _check_identity(self, header: Header, path: Path) -> None:
        for name, expected in asdict(self._identity).items():
            got = getattr(header, name)
            if got == expected or (name == "runtime" and expected is None):
                continue
            if name in ("layer_ids", "experts", "top_k"):
                raise GeometryError("made with another geometry", file=path, field=name, got=got, expected=expected)
            raise IdentityError(f"made with another {name}", file=path, field=name, got=got, expected=expected)

    def _check_ownership(self, header: Header, path: Path) -> None:
        owner, seen = self._owners.get(header.thread, (header.owner, path))
        if owner != header.owner:
            raise OwnershipError(
                "thread of another owner",
                file=path,
                field="owner",
                got=header.owner,
                expected=f"{owner}, as in {seen}",
            )
        name = (header.thread, header.generation, header.sequence)
        if name in self._names:
            raise OwnershipError(
                "generation reused",
                file=path,
                field="generation",
                got=f"sequence {header.sequence} of generation {header.generation} again",
                expected=f"once; it is in {self._names[name]}",
            )

    def _check_counter(self, header: Header, first: int, last: int, path: Path) -> None:
        spans = self._counters[header.thread, header.generation]
        place = bisect_left(spans, (first, last, ""))
        for other_first, other_last, other in spans[max(0, place - 1) : place + 1]:
            if first <= other_last and other_first <= last:
                raise RecordError(
                    "counter regression",
                    file=path,
                    field="counter",
                    got=f"{first} … {last}",
                    expected=f"nothing of {other_first} … {other_last}, which {other} has",
                )
        insort(spans, (first, last, str(path)))
