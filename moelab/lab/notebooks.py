"""What a notebook declares, read without running it.

A notebook of this project has one cell tagged `parameters`, its first code cell, that assigns literals
and derives nothing: papermill injects its values *after* that cell, so anything derived there would keep
the old default. The next code builds the notebook's `Options` with `SomeOptions.from_params(globals())`.
Both are read from the source here, so a run can be refused before the first kernel starts.
"""

from __future__ import annotations

import ast
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArtifactError, MissingArtifactError, ParameterError
from ..params import Options

PARAMETERS_TAG = "parameters"
CHECKED_TAG = "nbval-check-output"
"""Cells whose output is committed and compared: verdicts and small deterministic tables."""


@dataclass(frozen=True)
class Declared:
    """A notebook's name, its parameters with their defaults, and the Options class it builds from them."""

    path: Path
    parameters: dict[str, Any]
    options: type[Options]

    @property
    def number(self) -> str:
        return self.path.name[:2]


def load(path: str | Path):
    """The notebook as an nbformat 4 node.

    Raises:
        MissingArtifactError: no such file. ArtifactError: it is no notebook.
    """
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except OSError as error:
        raise MissingArtifactError("no such notebook", file=path, got=error.strerror, expected="a notebook") from None
    except (nbformat.reader.NotJSONError, UnicodeDecodeError) as error:
        raise ArtifactError("not a notebook", file=path, got=str(error)[:80], expected="JSON of nbformat 4") from None


def tags(cell) -> list[str]:
    return list(cell.metadata.get("tags", []))


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def declared(path: str | Path) -> Declared:
    """Parameters and Options class of a notebook.

    Raises:
        ParameterError: not exactly one parameters cell, or not the first code cell; something derived in
            it; no or several `from_params` calls; or parameters and Options fields that differ.
    """
    path = Path(path)
    cells = code_cells(load(path))
    tagged = [index for index, cell in enumerate(cells) if PARAMETERS_TAG in tags(cell)]
    if tagged != [0]:
        raise ParameterError(
            "the parameters cell must be one, and the first code cell", file=path, got=tagged, expected=[0]
        )
    parameters = _literals(cells[0].source, path)
    options = _options_class([cell.source for cell in cells[1:]], path)
    if set(parameters) != set(options.names()):
        raise ParameterError(
            f"parameters cell and {options.__name__} differ",
            file=path,
            got=sorted(parameters),
            expected=sorted(options.names()),
        )
    return Declared(path, parameters, options)


def _literals(source: str, path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case _:
                raise ParameterError(
                    "the parameters cell holds more than assignments",
                    file=path,
                    got=ast.unparse(statement),
                    expected="name = literal",
                )
        try:
            values[name] = ast.literal_eval(value)
        except ValueError:
            raise ParameterError(
                "derived in the parameters cell",
                file=path,
                field=name,
                got=ast.unparse(value),
                expected="a literal",
                fix="derive it in a later cell: papermill injects after this one",
            ) from None
    return values


def _options_class(sources: list[str], path: Path) -> type[Options]:
    """Resolve the one `X.from_params(...)` call through the notebook's own imports."""
    names: dict[str, str] = {}
    calls: list[str] = []
    for source in sources:
        for node in ast.walk(ast.parse(_python_only(source))):
            match node:
                case ast.Import(names=aliases):
                    names |= {
                        a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in aliases
                    }
                case ast.ImportFrom(module=str(module), names=aliases):
                    names |= {a.asname or a.name: f"{module}.{a.name}" for a in aliases}
                case ast.Call(func=ast.Attribute(value=owner, attr="from_params")):
                    calls.append(ast.unparse(owner))
    if len(calls) != 1:
        raise ParameterError(
            "a notebook builds its options once", file=path, got=calls, expected="one X.from_params(globals())"
        )
    first, *rest = calls[0].split(".")
    dotted = ".".join([names.get(first, first), *rest])
    found = _locate(dotted)
    if not (isinstance(found, type) and issubclass(found, Options)):
        raise ParameterError("from_params of something that is no Options class", file=path, got=dotted)
    return found


def _locate(dotted: str) -> Any:
    """The object that a dotted name means: the longest importable prefix, then attributes."""
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        name = ".".join(parts[:size])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise  # a dependency of that module is missing: that is another fault
            continue
        for attribute in parts[size:]:
            found = getattr(found, attribute, None)
        return found
    return None


def _python_only(source: str) -> str:
    """Drop IPython's magics and shell lines, which `ast` cannot read."""
    return "\n".join(line for line in source.splitlines() if not line.lstrip().startswith(("%", "!")))
