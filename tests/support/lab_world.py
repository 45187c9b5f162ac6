"""A small checkout of its own: two notebooks, their parameters, a model folder and threads.

The notebooks are real: `20_first` makes a figure and a number, `21_second` follows it and publishes a
verdict of gate 1 for each model. Their Options live in a module that the kernels import.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from moelab import artifacts
from moelab.lab import plan as planning
from moelab.lab.plan import Node

OPTIONS = """
from dataclasses import dataclass
from typing import ClassVar
from moelab.params import Options, param

@dataclass(frozen=True, kw_only=True)
class FirstOptions(Options):
    notebook: ClassVar[str] = "20"
    tokens: int = param(8, "how many", min=1)
    rate: float = param(0.5, "a rate", min=0, max=1)

@dataclass(frozen=True, kw_only=True)
class SecondOptions(Options):
    notebook: ClassVar[str] = "21"
    recall: float = param(0.75, "what gate 1 will see", min=0, max=1)
"""

SHARED = 'profile = "tiny"\nmodels = ["softmax", "sigmoid"]\nthreads = "artifacts/threads"\nseed = 0\n'

FIRST = [
    new_markdown_cell(
        "# First\nThe break-even is $U_B < K \\cdot \\tau(B)$, and\n\n$$\\frac{a_1}{b^2} = \\sum_{i=0}^{n} x_i$$"
    ),
    new_code_cell(SHARED + "tokens = 8\nrate = 0.5", metadata={"tags": ["parameters"]}),
    new_code_cell("from lab_world_options import FirstOptions\noptions = FirstOptions.from_params(globals())"),
    new_markdown_cell("A plot of the tokens."),
    new_code_cell(
        "import pandas as pd\nfrom moelab.lab import plots\n"
        'frame = pd.DataFrame({"token": range(options.tokens), "recall": [options.rate] * options.tokens})\n'
        'plots.lines(frame, x="token", y="recall", title="Recall", alt="A flat line of recall over tokens")'
    ),
]

SECOND = [
    new_markdown_cell("# Second"),
    new_code_cell(SHARED + "recall = 0.75", metadata={"tags": ["parameters"]}),
    new_code_cell("from lab_world_options import SecondOptions\noptions = SecondOptions.from_params(globals())"),
    new_markdown_cell("The verdict."),
    new_code_cell(
        "from moelab.flywheel.gates import Verdict\nfrom moelab.lab import report\n"
        "report.publish([Verdict(gate=1, model=m, status='pass', question='Is replay exact?',\n"
        "    figures={'recall': options.recall}, measured={'tok_s': 123.4}, standard_errors={'recall': .01},\n"
        "    n={'recall': 100}, thresholds={'recall': .5}, inputs={'routes': 'ab12'}, runtime={'blas': 'reference'})\n"
        "    for m in options.models])",
        metadata={"tags": ["nbval-check-output"]},
    ),
]

DAG = (Node("20_first"), Node("21_second", after=("20",), gate=1))


def write_notebook(path: Path, cells: list) -> None:
    notebook = new_notebook(
        cells=[nbformat.from_dict(dict(cell)) for cell in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)


@dataclass
class World:
    root: Path

    @property
    def notebooks(self) -> Path:
        return self.root / "notebooks"

    def edit(self, name: str, cell: int, source: str, **metadata) -> None:
        """Replace the source of one cell."""
        path = self.notebooks / name
        notebook = nbformat.read(path, as_version=4)
        notebook.cells[cell].source = source
        notebook.cells[cell].metadata.update(metadata)
        nbformat.write(notebook, path)

    def params(self, number: str, text: str, profile: str = "tiny") -> None:
        (self.notebooks / "params" / profile / f"{number}.yaml").write_text(text)


def make(root: Path) -> World:
    world = World(root)
    write_notebook(world.notebooks / "20_first.ipynb", FIRST)
    write_notebook(world.notebooks / "21_second.ipynb", SECOND)
    for profile in ("tiny", "reference"):
        (world.notebooks / "params" / profile).mkdir(parents=True)
        world.params("20", "tokens: 8\n", profile)
        world.params("21", "recall: 0.75\n", profile)
    (root / "lab_world_options.py").write_text(OPTIONS)
    (root / "pyproject.toml").write_text("")
    (root / "artifacts" / "threads").mkdir(parents=True)
    (root / "artifacts" / "threads" / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    for model in ("softmax", "sigmoid"):
        (root / "artifacts" / "models" / model).mkdir(parents=True)
        (root / "artifacts" / "models" / model / "config.json").write_text("{}")
    return world


def enter(world: World, patch: pytest.MonkeyPatch) -> World:
    """Point this process and the kernels it starts at the world."""
    patch.setenv("MOELAB_ROOT", str(world.root))
    patch.setenv("PYTHONPATH", os.pathsep.join([str(world.root), os.environ.get("PYTHONPATH", "")]))
    patch.syspath_prepend(str(world.root))
    patch.setattr(artifacts, "root", lambda: world.root)
    planning._content.cache_clear()
    return world
