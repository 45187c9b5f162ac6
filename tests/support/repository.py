"""The repository as its own tests see it: the files that git would publish, and the rooms of the package."""

from __future__ import annotations

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "moelab"


@cache
def published() -> tuple[Path, ...]:
    """Tracked files and new ones that git does not ignore, without those deleted in the working tree."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return tuple(sorted(ROOT / name for name in set(names) if name and (ROOT / name).is_file()))


def texts(*, data: bool = False) -> list[tuple[str, str]]:
    """`(path, text)` of published text files; committed models and threads only with `data`."""
    found = []
    for path in published():
        name = path.relative_to(ROOT).as_posix()
        if not data and name.startswith("artifacts/"):
            continue
        try:
            found.append((name, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return found


def modules() -> list[Path]:
    return [path for path in published() if path.suffix == ".py" and path.is_relative_to(PACKAGE)]


def room(path: Path) -> str:
    """The first part of a module's place in the package: `flywheel`, `routes`, …"""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> list[tuple[str, int]]:
    """Absolute dotted names imported anywhere in a module, lazily or not, with their line."""
    package = ("moelab", *path.relative_to(PACKAGE).parent.parts)
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import x` may name a module: both readings count
            found += [(stem, node.lineno), *((f"{stem}.{alias.name}", node.lineno) for alias in node.names)]
    return found
