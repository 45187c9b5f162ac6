"""What cells of several notebooks' tables are made of: units, an estimate's three columns, the words for a claim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KB, MB = 1e3, 1e6
"""Bytes of a kilobyte and of a megabyte."""
MS = 1e3
"""Milliseconds of a second."""
HOLDS = {True: "holds", False: "does not hold", None: "no evidence"}
"""Whether a claim holds, in words."""


def estimate(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns `value`, `se`, `n` of `tables.Estimates`; without a second cluster an error of 0."""
    return {"value": float(row["value"]), "se": float(row["se"] or 0.0), "n": int(row["n"])}
