"""nbval notices when one figure of a committed verdict is altered, in every notebook that publishes one."""

import json
import os
import shutil
import subprocess
import sys

import lab_world
import nbformat
import pytest
from repository import ROOT

from moelab.lab import notebooks, refresh
from moelab.lab.report import VERDICT_MIME


def verdicts(notebook):
    return [
        output.data[VERDICT_MIME]
        for cell in notebooks.code_cells(notebook)
        for output in cell.outputs
        if VERDICT_MIME in output.get("data", {})
    ]


WITH_VERDICT = [path for path in sorted((ROOT / "notebooks").glob("*.ipynb")) if verdicts(notebooks.load(path))]


def alter(path, name=None):
    """Change one figure by two percent (a count by one); returns its name."""
    notebook = notebooks.load(path)
    figures = next(payload["figures"] for payload in verdicts(notebook) if payload["figures"])
    name = name or next(iter(figures))
    value = figures[name]
    figures[name] = (
        value + 1 if isinstance(value, int) else value * 1.02 + 1e-3 if isinstance(value, float) else f"{value}?"
    )
    nbformat.write(notebook, path)
    return name


def nbval(folder, **environment):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax", "--nbval-current-env"]
    return subprocess.run(
        [*command, "--color=no", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("path", WITH_VERDICT, ids=lambda path: path.stem)
def test_an_altered_figure_is_noticed(path, tmp_path):
    shutil.copy(path, tmp_path)
    shutil.copy(ROOT / "notebooks" / "conftest.py", tmp_path)
    name = alter(tmp_path / path.name)
    done = nbval(tmp_path, MOELAB_ROOT=str(ROOT))
    assert done.returncode == 1, done.stdout[-2000:]
    assert "1 failed" in done.stdout and f"mismatch '{VERDICT_MIME}'" in done.stdout, done.stdout[-2000:]
    assert name in done.stdout


# ---------------------------------------------------------------- the mechanism, on a notebook of our own


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The small world with its checked outputs refreshed, and the comparison of the real notebooks."""
    with pytest.MonkeyPatch.context() as patch:
        made = lab_world.enter(lab_world.make(tmp_path_factory.mktemp("world")), patch)
        for path in sorted(made.notebooks.glob("*.ipynb")):
            refresh.refresh(path)
        shutil.copy(ROOT / "notebooks" / "conftest.py", made.notebooks)
        yield made


def test_refreshed_notebooks_pass_and_keep_verdicts_only(world):
    first, second = (notebooks.load(path) for path in sorted(world.notebooks.glob("*.ipynb")))
    assert not any(cell.outputs or cell.execution_count for cell in notebooks.code_cells(first))
    assert len(verdicts(second)) == 2
    text = json.dumps([cell.outputs for cell in notebooks.code_cells(second)])
    assert "0.75" in text
    assert "123.4" not in text and "ab12" not in text  # what was measured, and digests, stay out
    done = nbval(world.notebooks)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "6 passed" in done.stdout


def test_the_last_bits_of_another_processor_pass(world, tmp_path):
    """Through nbval itself: the comparison must reach what it compares."""
    for name in ("conftest.py", *(path.name for path in world.notebooks.glob("*.ipynb"))):
        shutil.copy(world.notebooks / name, tmp_path)
    path = max(tmp_path.glob("*.ipynb"))
    kept = path.read_text()
    for stored, code in (("0.7502", 0), ("0.77", 1)):
        notebook = json.loads(kept)
        for cell in notebook["cells"]:
            if cell.get("outputs"):
                cell["outputs"] = json.loads(json.dumps(cell["outputs"]).replace("0.75", stored))
        assert stored in json.dumps(notebook)
        path.write_text(json.dumps(notebook))
        done = nbval(tmp_path)
        assert done.returncode == code, done.stdout[-2000:]


def test_refreshing_again_changes_nothing(world):
    path = world.notebooks / "21_second.ipynb"
    before = path.read_bytes()
    refresh.refresh(path)
    assert path.read_bytes() == before


def test_what_the_comparison_lets_pass_and_what_not():
    import importlib.util

    spec = importlib.util.spec_from_file_location("comparison", ROOT / "notebooks" / "conftest.py")
    comparison = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(comparison)
    reference = comparison.Tolerant(
        {"status": "pass", "n": {"tokens": 100}, "figures": {"recall": 0.75, "control": "gate"}}
    )

    def tested(**figures):
        return {"status": "pass", "n": {"tokens": 100}, "figures": {"recall": 0.75, "control": "gate", **figures}}

    assert reference == tested()
    assert (reference != tested()) is False
    assert reference == tested(recall=0.7502)  # another processor's last bits
    assert reference != tested(recall=0.76) and reference != tested(control="random")
    assert reference != tested(more=1) and reference != tested(recall=None)
    assert reference != {**tested(), "n": {"tokens": 101}}
    assert reference != {**tested(), "status": "fail"}
    assert tested(recall=0.76) != reference  # whichever side nbval puts first
    assert comparison.Tolerant({"n": 1}) != {"n": True}
