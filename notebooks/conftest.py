"""What nbval compares of a checked cell.

Verdicts are compared field by field: words, counts and thresholds exactly; floats to half a percent, since
a predictor trained on another processor differs in the last bits and a recall then by a token or two.
Rendered HTML also shows measured times, so it is left out; the same figures stand in the compared part.
"""

from __future__ import annotations

import math
from typing import Any

from nbval.plugin import IPyNbCell, IPyNbFile

from moelab.lab.report import VERDICT_MIME

RELATIVE, ABSOLUTE = 5e-3, 1e-4


class Tolerant(dict):
    """A reference that equals what is close to it. As a dict subclass its comparison is asked first."""

    def __eq__(self, other: object) -> bool:
        return same(dict(self), other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


def same(reference: Any, tested: Any) -> bool:
    if isinstance(reference, dict) and isinstance(tested, dict):
        return set(reference) == set(tested) and all(same(reference[key], tested[key]) for key in reference)
    if type(reference) is float and type(tested) in (float, int) or type(tested) is float and type(reference) is int:
        return math.isclose(reference, tested, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    return type(reference) is type(tested) and reference == tested


def pytest_collectstart(collector):
    if isinstance(collector, IPyNbFile):
        collector.skip_compare += ("text/html",)


def pytest_itemcollected(item):
    if isinstance(item, IPyNbCell):
        for output in item.cell.outputs:
            if VERDICT_MIME in output.get("data", {}):
                # Not by `output.data[...] =`, which would make a plain notebook node of it again.
                dict.__setitem__(output.data, VERDICT_MIME, Tolerant(output.data[VERDICT_MIME]))
