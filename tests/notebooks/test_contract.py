"""The contract of a notebook: a story that calls the package, with nothing in it worth testing by itself."""

import ast
import dataclasses

import pytest
from repository import ROOT

from moelab.lab import notebooks
from moelab.lab.plan import DAG
from moelab.params import PROFILES, read_params

FOLDER = ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
TAGS = {"parameters", "nbval-check-output"}
"""Nothing else is needed: errors are shown with try/except, figures are never compared, inputs are folded anyway."""

each = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def test_every_notebook_of_the_graph_is_here_and_no_other():
    assert [path.stem for path in PATHS] == sorted(node.name for node in DAG)


@each
def test_parameters_come_first_and_derive_nothing(path):
    notebooks.declared(path)  # raises what papermill would let pass


@each
def test_parameters_are_the_tiny_profile(path):
    found = notebooks.declared(path)
    defaults = dataclasses.asdict(found.options(**found.parameters))
    assert defaults == dataclasses.asdict(found.options.from_profile("tiny"))
    assert found.options.notebook == found.number


@each
@pytest.mark.parametrize("profile", PROFILES)
def test_parameter_file_names_known_parameters_only(path, profile):
    found = notebooks.declared(path)
    file = FOLDER / "params" / profile / f"{found.number}.yaml"
    assert set(read_params(file)) <= set(found.parameters)
    found.options.from_profile(profile)  # types and ranges


def test_no_parameter_file_without_a_notebook():
    numbers = {path.name[:2] for path in PATHS}
    for profile in PROFILES:
        assert {file.stem for file in (FOLDER / "params" / profile).iterdir()} == numbers


@each
def test_metadata_names_a_kernel_and_no_machine(path):
    notebook = notebooks.load(path)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert "version" not in notebook.metadata.get("language_info", {})
    for cell in notebook.cells:
        assert set(cell.metadata) <= {"tags"}
        assert set(notebooks.tags(cell)) <= TAGS
        assert "tags" not in cell.metadata or cell.metadata.tags, "an empty tag list"


@each
def test_cells_are_short_and_explained(path):
    cells = notebooks.load(path).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith("# ")
    assert len(cells) - len(code) >= len(code) / 2
    for cell in code:
        assert len(cell.source.splitlines()) <= 25, cell.source[:80]


@each
def test_no_logic_worth_testing(path):
    for cell in notebooks.code_cells(notebooks.load(path)):
        for node in ast.walk(ast.parse(cell.source)):  # also refuses magics and shell lines
            assert not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.While), cell.source
            # a relative path would mean another file in each of papermill, nbval and JupyterLab
            assert not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("open", "os.chdir")), cell.source


@each
def test_outputs_are_those_of_checked_cells_only(path):
    for cell in notebooks.code_cells(notebooks.load(path)):
        checked = notebooks.CHECKED_TAG in notebooks.tags(cell)
        # nbval compares no cell without an execution count, and refuses outputs without one
        assert bool(cell.outputs) == checked == (cell.execution_count is not None), cell.source[:80]
        for output in cell.outputs:
            assert "image/png" not in output.get("data", {}), cell.source[:80]


@each
def test_gate_notebooks_keep_a_compared_verdict_for_each_model(path):
    from moelab.lab.report import VERDICT_MIME

    gate = next(node.gate for node in DAG if node.name == path.stem)
    payloads = [
        output.data[VERDICT_MIME]
        for cell in notebooks.code_cells(notebooks.load(path))
        for output in cell.outputs
        if VERDICT_MIME in output.get("data", {})
    ]
    if gate is not None:
        models = notebooks.declared(path).parameters["models"]
        assert {payload["model"] for payload in payloads if payload["gate"] == gate} == set(models)
        assert all(payload["figures"] for payload in payloads if payload["status"] != "refused")
