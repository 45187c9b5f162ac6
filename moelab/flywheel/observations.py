"""The observations of one model, as capture left them: an index to choose from, records opened on demand.

This is the one door to captured data. It decrypts, checks identity and authorisation, and keeps the
runtime holdout shut for everything but evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING, Any

from .. import artifacts
from ..artifacts import Artifact
from ..errors import OwnershipError
from .capture import INDEX
from .observe import Observation
from .reader import Identity, ObservationReader
from .vault import Vault, check_authorised

if TYPE_CHECKING:
    from ..models import LoadedModel


@dataclass(frozen=True)
class Records:
    """The observations of one model: `index` entries as capture wrote them, records opened on demand."""

    artifact: Artifact

    @property
    def index(self) -> list[dict[str, Any]]:
        return artifacts.read_json(self.artifact.file(INDEX))

    @property
    def holdout(self) -> frozenset[str]:
        """Payload digests of the runtime holdout."""
        return frozenset(entry["payload"] for entry in self.index if entry["set"] == "runtime")

    def replayable(self) -> list[dict[str, Any]]:
        return [entry for entry in self.index if entry["set"] != "runtime"]

    def open(self, entries: Iterable[dict[str, Any]], loaded: LoadedModel, *, purpose: str) -> Iterator[Observation]:
        """Decrypt and check records, in the order of `entries`.

        Raises:
            OwnershipError: a record of the runtime holdout asked for anything but evaluation, or a use that
                its owner did not authorise.
            RecordError, IdentityError, VaultError: as `ObservationReader` and `Vault`.
        """
        reader, holdout = ObservationReader(Identity.of(loaded), opener=Vault().open), self.holdout
        for entry in entries:
            path = self.artifact.file(entry["file"])
            observation = reader.read(path)
            if purpose != "evaluate" and observation.payload in holdout:
                raise OwnershipError(
                    "the runtime holdout is never replayed",
                    file=path,
                    field="payload",
                    got=purpose,
                    expected="evaluate",
                )
            check_authorised(observation.header, purpose, today=date.today())
            yield observation
