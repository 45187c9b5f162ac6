"""Strict parameters: what a notebook may be given, checked before anything runs.

Every notebook has one frozen dataclass derived from `Options`, declared in the module whose function it
calls. papermill itself accepts any name and any type (an unknown name exits 0, YAML's `1e-4` is text),
so the names, types, ranges and choices are checked here: by the runner before a kernel starts, and by
the notebook's first cell after the parameters.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from . import artifacts
from .errors import ParameterError

Of = TypeVar("Of", bound=Callable[..., Any])

PROFILES = ("tiny", "reference")
BARE_WORD = "YAML reads a bare on, off, yes or no as a boolean: quote it"


def param(default: Any, help: str, *, min: Any = None, max: Any = None, choices: tuple | None = None) -> Any:
    """A dataclass field with its help text and its allowed range."""
    metadata = {"help": help, "min": min, "max": max, "choices": choices}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def known_names(of: Of) -> Of:
    """Decorator of a function or a dataclass of options: an unknown keyword is a ParameterError that lists the known.

    On a class method it goes below `classmethod`.
    """
    call = of.__init__ if isinstance(of, type) else of
    names = sorted(name for name in inspect.signature(call).parameters if name not in ("self", "cls"))

    @functools.wraps(call)
    def checked(*args: Any, **values: Any) -> Any:
        for name in values:
            if name not in names:
                raise ParameterError(f"{of.__name__} has no such option", field=name, got=values[name], expected=names)
        return call(*args, **values)

    if not isinstance(of, type):
        return checked
    of.__init__ = checked
    return of


@dataclass(frozen=True, kw_only=True)
class Options:
    """Parameters that every notebook of the flywheel shares.

    Raises:
        ParameterError: from any constructor, naming the field, what was got and what was expected.
    """

    notebook: ClassVar[str] = ""

    profile: str = param("tiny", "size of the study", choices=PROFILES)
    models: list[str] = param(
        ["softmax", "sigmoid"], "names under artifacts/models, paths or repo ids; with @8GiB behind, run in that memory"
    )
    threads: str = param("artifacts/threads", "threads file or folder, relative to the repository root")
    seed: int = param(0, "seed of everything random", min=0)

    def __post_init__(self):
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _checked(f"{type(self).__name__}.{field.name}", field, hints[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, value)

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
                fix = None if isinstance(name, str) else BARE_WORD
                raise ParameterError(
                    "unknown parameter",
                    file=file,
                    field=str(name),
                    got=values[name],
                    expected=sorted(cls.names()),
                    fix=fix,
                )
        try:
            return cls(**values)
        except ParameterError as error:
            raise ParameterError(
                error.problem, file=file, field=error.field, got=error.got, expected=error.expected, fix=error.fix
            ) from None

    @classmethod
    def from_profile(cls, profile: str, **overrides: Any) -> Self:
        """The parameters of `notebooks/params/<profile>/<notebook>.yaml`, with overrides."""
        if profile not in PROFILES:
            raise ParameterError("unknown profile", field="profile", got=profile, expected=PROFILES)
        file = artifacts.root() / "notebooks" / "params" / profile / f"{cls.notebook}.yaml"
        values = {"profile": profile, **read_params(file)}
        if values["profile"] != profile:
            raise ParameterError(
                "file of another profile", file=file, field="profile", got=values["profile"], expected=profile
            )
        return cls.from_mapping({**values, **overrides}, file=file)

    def upstream(self, other: type[Options]) -> Any:
        """Options of an upstream notebook: same profile, models, threads and seed."""
        return other.from_profile(self.profile, models=self.models, threads=self.threads, seed=self.seed)

    def own(self) -> dict[str, Any]:
        """The fields that belong to this notebook alone: what goes into its artefacts' identity."""
        shared = {field.name for field in dataclasses.fields(Options)} - {"seed"}
        return {name: getattr(self, name) for name in self.names() if name not in shared}


def read_params(file: str | Path) -> dict[Any, Any]:
    """The mapping in a YAML file of parameters; an empty file is an empty mapping.

    Raises:
        ParameterError: no such file, not YAML, not a mapping, or a name given twice (YAML keeps the last).
    """
    import yaml

    try:
        text = Path(file).read_text(encoding="utf-8")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except FileNotFoundError:
        raise ParameterError("no parameters for this notebook in this profile", file=file) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParameterError("not valid YAML", file=file, got=str(error), expected="name: value lines") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ParameterError("not a mapping", file=file, got=values, expected="name: value lines")
    names = [key.value for key, _ in node.value]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ParameterError("parameter given twice", file=file, field=twice[0])
    return values


def _checked(where: str, field: dataclasses.Field, hint: Any, value: Any) -> Any:
    """The value, checked; floats as floats (1 and 1.0 are one parameter, not two digests), lists copied."""
    if not _matches(hint, value):
        raise ParameterError("wrong type", field=where, got=value, expected=_spell(hint), fix=_hint(hint, value))
    if isinstance(value, list) and not value:
        raise ParameterError("empty list", field=where, got=value, expected="at least one item")
    low, high, choices = (field.metadata.get(key) for key in ("min", "max", "choices"))
    for item in value if isinstance(value, list) else [value]:
        if item is None:
            continue
        if (low is not None and item < low) or (high is not None and item > high):
            bounds = [f"at least {low}"] * (low is not None) + [f"at most {high}"] * (high is not None)
            raise ParameterError("out of range", field=where, got=item, expected=", ".join(bounds))
        if choices is not None and item not in choices:
            raise ParameterError("unknown choice", field=where, got=item, expected=choices)
    plain = _plain(hint, value)
    if isinstance(plain, list) and (twice := [item for place, item in enumerate(plain) if item in plain[:place]]):
        raise ParameterError("given twice", field=where, got=twice[0], expected="each item once")
    return plain


def _matches(hint: Any, value: Any) -> bool:
    """Exact types: a boolean is no integer, 1.0 is none either, and a float is finite."""
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        return type(value) is list and all(_matches(item, v) for v in value)
    if _is_union(hint):
        return any(_matches(arg, value) for arg in typing.get_args(hint))
    if hint is float:  # an integer is a fine float
        return type(value) in (int, float) and math.isfinite(value)
    if hint not in (bool, int, str, types.NoneType):
        raise TypeError(f"a parameter cannot have the type {hint}")
    return type(value) is hint


def _plain(hint: Any, value: Any) -> Any:
    if _is_union(hint):
        hint = next(arg for arg in typing.get_args(hint) if _matches(arg, value))
    if isinstance(value, list):
        return [_plain(*typing.get_args(hint), item) for item in value]
    return float(value) if hint is float else value


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _spell(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _hint(hint: Any, value: Any) -> str | None:
    """What a reader of YAML most likely meant."""
    if isinstance(value, bool) and _matches(hint, "on"):
        return BARE_WORD
    if isinstance(value, float) and value.is_integer() and _matches(hint, int(value)):
        return f"write {int(value)}"
    if isinstance(value, str) and _is_number(value) and (_matches(hint, 1) or _matches(hint, 1.5)):
        return "this is text: YAML reads a number like 1e-4 as text, write 1.0e-4 and no quotes"
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
