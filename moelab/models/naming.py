"""How a model is named: which one, and in how much memory it is to be run.

    softmax                          an embedded model, resident
    path/to/checkpoint               a checkpoint or pack folder, resident (a pack cannot be)
    owner/name@8GiB                  the same model streamed: the whole process stays within 8 GiB

The budget is part of the name because it is a property of one model on one machine: a name goes through every
stage of the flywheel unchanged, so its observations, replay and features all run in the same memory, and a table
can show a model beside its streamed self.
"""

from __future__ import annotations

import re

from ..errors import ParameterError

__all__ = ["split_budget"]

UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}
_BUDGET = re.compile(r"(?P<model>.+)@(?P<count>[1-9]\d*)(?P<unit>MiB|GiB)")


def split_budget(name: str) -> tuple[str, int | None]:
    """The model itself, and its memory budget in bytes; None = resident.

    Raises:
        ParameterError: something that looks like a budget and is none, such as `@8GB` or `@0MiB`.
    """
    if found := _BUDGET.fullmatch(name):
        return found["model"], int(found["count"]) * UNITS[found["unit"]]
    if re.search(r"@\s*\d*\s*[kKmMgG]?i?[bB]?$", name):
        raise ParameterError("not a memory budget", field="models", got=name, expected="NAME@600MiB or NAME@8GiB")
    return name, None
