"""Public names of a package that are imported on first use: a room is light until something in it is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def exports(
    package: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package; `homes`: module in it → the names that it has."""
    owner = {name: home for home, names in homes.items() for name in names}
    everything = sorted(owner)

    def get(name: str) -> Any:
        if name not in owner:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{owner[name]}", package), name)

    return get, lambda: everything, everything
