"""Strict parameters: what a notebook may be given, checked before anything runs.

Every notebook has one frozen dataclass derived from `Options`, declared in the module whose function it
calls. papermill itself accepts any name and any type (an unknown name exits 0, YAML's `1e-4` is text),
so the names, types, ranges and choices are checked here: by the runner before a kernel starts, and by
the notebook's first cell after the parameters.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from . import artifacts
from .errors import ParameterError

PROFILES = ("tiny", "reference")


def param(default: Any, help: str, *, min: Any = None, max: Any = None, choices: tuple | None = None) -> Any:
    """A dataclass field with its help text and its allowed range."""
    metadata = {"help": help, "min": min, "max": max, "choices": choices}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Parameters that every notebook of the flywheel shares.

    Raises:
        ParameterError: from any constructor, naming the field, what was got and what was expected.
    """

    notebook: ClassVar[str] = ""

    profile: str = param("tiny", "size of the study", choices=PROFILES)
    models: list[str] = param(["softmax", "sigmoid"], "models: names under artifacts/models, paths or repo ids")
    threads: str = param("artifacts/threads", "threads file or folder, relative to the repository root")
    seed: int = param(0, "seed of everything random", min=0)

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            _check(type(self).__name__, field, hints[field.name], getattr(self, field.name))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    @classmethod
    def from_params(cls, values: Mapping[str, Any]) -> Self:
        """From a notebook's `globals()`: takes the fields it knows, requires all of them."""
        if missing := [name for name in cls.names() if name not in values]:
            raise ParameterError(
                "the parameters cell lacks a parameter", field=missing[0], got=None, expected=sorted(cls.names())
            )
        return cls(**{name: values[name] for name in cls.names()})

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, file: Any = None) -> Self:
        """From a YAML file or command line: an unknown name is refused, an absent one takes its default."""
        for name in values:
            if name not in cls.names():
                raise ParameterError(
                    "unknown parameter", file=file, field=str(name), got=values[name], expected=sorted(cls.names())
                )
        return cls(**values)

    @classmethod
    def from_profile(cls, profile: str, **overrides: Any) -> Self:
        """The parameters of `notebooks/params/<profile>/<notebook>.yaml`, with overrides."""
        import yaml

        if profile not in PROFILES:
            raise ParameterError("unknown profile", field="profile", got=profile, expected=PROFILES)
        file = artifacts.root() / "notebooks" / "params" / profile / f"{cls.notebook}.yaml"
        try:
            values = yaml.safe_load(file.read_text()) or {}
        except FileNotFoundError:
            raise ParameterError("no parameters for this notebook in this profile", file=file) from None
        return cls.from_mapping({**values, "profile": profile, **overrides}, file=file)

    def upstream(self, other: type[Options]) -> Any:
        """Options of an upstream notebook: same profile, models, threads and seed."""
        return other.from_profile(self.profile, models=self.models, threads=self.threads, seed=self.seed)

    def own(self) -> dict[str, Any]:
        """The fields that belong to this notebook alone: what goes into its artefacts' identity."""
        shared = {field.name for field in dataclasses.fields(Options)} - {"seed"}
        return {name: getattr(self, name) for name in self.names() if name not in shared}


def _check(owner: str, field: dataclasses.Field, hint: Any, value: Any) -> None:
    where = f"{owner}.{field.name}"
    if not _matches(hint, value):
        fix = None
        if isinstance(value, str) and _is_number(value):
            fix = "YAML reads a number like 1e-4 as text: write 1.0e-4"
        raise ParameterError("wrong type", field=where, got=value, expected=_spell(hint), fix=fix)
    low, high, choices = (field.metadata.get(key) for key in ("min", "max", "choices"))
    for item in value if isinstance(value, list) else [value]:
        if item is None:
            continue
        if low is not None and item < low or high is not None and item > high:
            raise ParameterError("out of range", field=where, got=item, expected=f"between {low} and {high}")
        if choices is not None and item not in choices:
            raise ParameterError("unknown choice", field=where, got=item, expected=choices)
    if isinstance(value, list) and not value:
        raise ParameterError("empty list", field=where, got=value, expected="at least one item")


def _matches(hint: Any, value: Any) -> bool:
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        return isinstance(value, list) and all(_matches(item, v) for v in value)
    if args := typing.get_args(hint):
        return any(_matches(arg, value) for arg in args)
    if hint is type(None):
        return value is None
    if hint is float:  # an integer is a fine float; a boolean is not
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is hint


def _spell(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
