"""A snapshot opened for use: the replayed rows, and the set that each of them is in.

What fits or judges a predictor reads its rows here and nowhere else. A row in no window of the snapshot is in no set:
it repeats text of a better protected set, is a prompt that is there already, or belongs to an edge sequence of Gate 1.
It is still among the rows, since what is made of a row is made of the prefix before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import artifacts
from ..artifacts import Artifact
from ..errors import OwnershipError
from ..routes import DECODED, Routes
from .replay import read_routes
from .split import SETS

WINDOWS = "windows.safetensors"
"""Of a snapshot: its index ranges into the rows of the routes that it was made of."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A snapshot opened for use.

    Attributes:
        routes: all replayable rows, full prefixes included.
        table: one entry a sequence; `routes.thread` indexes it.
        set_of_row: `i8[T]`, index into `SETS`, -1 for rows in no window.
        artifact: the snapshot; its `content` is what a predictor is bound to.
        exact: whether replayed labels come from an identity that passed Gate 1.
    """

    routes: Routes
    table: list[dict[str, Any]]
    set_of_row: np.ndarray
    artifact: Artifact
    exact: bool

    def rows(self, name: str, *, decoded: bool = False) -> np.ndarray:
        """`bool[T]`: rows of a set; with `decoded`, only those that a real decode labelled."""
        mask = self.set_of_row == SETS.index(name)
        return mask & (self.routes.phase == DECODED) if decoded else mask

    def of_thread(self, field: str) -> np.ndarray:
        """`[T]` a table field for every row (owner, domain, language, …)."""
        return np.array([str(entry[field]) for entry in self.table])[self.routes.thread]


def open_dataset(snapshot: Artifact, routes: Artifact) -> Dataset:
    """Rows, sets and table of a snapshot.

    Raises:
        OwnershipError: the routes are not those that the snapshot was made of.
    """
    if snapshot.manifest.inputs["routes"] != routes.content:
        raise OwnershipError(
            "routes of another snapshot",
            file=routes.path,
            field="content",
            got=routes.content,
            expected=snapshot.manifest.inputs["routes"],
        )
    rows, table = read_routes(routes)
    windows, _ = artifacts.read_tensors(snapshot.file(WINDOWS))
    set_of_row = np.full(rows.tokens, -1, np.int8)
    for start, stop, name in zip(windows["start"], windows["stop"], windows["set"], strict=True):
        set_of_row[start:stop] = name
    return Dataset(rows, table, set_of_row, snapshot, bool(routes.manifest.params["exact"]))
