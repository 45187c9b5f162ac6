"""What a notebook declares is read from its source, and refused when papermill would get it wrong."""

import lab_world
import pytest

from moelab.errors import ParameterError
from moelab.lab import notebooks, refresh


@pytest.fixture
def world(tmp_path, monkeypatch):
    return lab_world.enter(lab_world.make(tmp_path), monkeypatch)


def test_reads_parameters_and_options(world):
    found = notebooks.declared(world.notebooks / "20_first.ipynb")
    assert found.number == "20"
    assert found.options.__name__ == "FirstOptions"
    assert found.parameters["tokens"] == 8 and found.parameters["models"] == ["softmax", "sigmoid"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('out = "/" + profile', "derived in the parameters cell; .*field: out"),
        ("tokens += 1", "holds more than assignments"),
        ("import os", "holds more than assignments"),
        ("a = b = 3", "holds more than assignments"),
        ("learning_rate = 0.1", "parameters cell and FirstOptions differ"),
    ],
)
def test_refuses_what_papermill_would_accept(world, extra, message):
    world.edit("20_first.ipynb", 1, lab_world.FIRST[1].source + "\n" + extra)
    with pytest.raises(ParameterError, match=message):
        notebooks.declared(world.notebooks / "20_first.ipynb")


def test_annotated_and_equals_holding_defaults_are_known(world):
    # papermill's own inspection calls both unknown, although it injects them
    source = (
        lab_world.FIRST[1]
        .source.replace("tokens = 8", "tokens: int = 8")
        .replace('"artifacts/threads"', '"threads=all"')
    )
    world.edit("20_first.ipynb", 1, source)
    assert notebooks.declared(world.notebooks / "20_first.ipynb").parameters["threads"] == "threads=all"


def test_tag_must_sit_on_the_first_code_cell(world):
    world.edit("20_first.ipynb", 1, "pass", tags=["raises-exception"])
    with pytest.raises(ParameterError, match="must be one, and the first code cell.*got: \\[\\], expected: \\[0\\]"):
        notebooks.declared(world.notebooks / "20_first.ipynb")


def test_tag_on_another_cell_is_not_enough(world):
    # papermill would inject after the second cell, and what the first assigned would already be used
    world.edit("20_first.ipynb", 2, lab_world.FIRST[2].source, tags=["parameters"])
    with pytest.raises(ParameterError, match="got: \\[0, 1\\]"):
        notebooks.declared(world.notebooks / "20_first.ipynb")
    world.edit("20_first.ipynb", 1, lab_world.FIRST[1].source, tags=["keep_output"])
    with pytest.raises(ParameterError, match="got: \\[1\\]"):
        notebooks.declared(world.notebooks / "20_first.ipynb")


@pytest.mark.parametrize(
    "imports",
    [
        "import lab_world_options\noptions = lab_world_options.FirstOptions.from_params(globals())",
        "import lab_world_options as o\noptions = o.FirstOptions.from_params(globals())",
        "from lab_world_options import FirstOptions as F\noptions = F.from_params(globals())",
    ],
)
def test_options_resolve_through_any_import(world, imports):
    world.edit("20_first.ipynb", 2, imports)
    assert notebooks.declared(world.notebooks / "20_first.ipynb").options.__name__ == "FirstOptions"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "builds its options once"),
        ("from pathlib import Path\nPath.from_params(globals())", "no Options class; .*got: 'pathlib.Path'"),
        ("import lab_world_options as o\no.Nothing.from_params(globals())", "no Options class"),
    ],
)
def test_refuses_a_notebook_that_builds_no_options(world, source, message):
    world.edit("20_first.ipynb", 2, source)
    with pytest.raises(ParameterError, match=message):
        notebooks.declared(world.notebooks / "20_first.ipynb")


def test_what_is_no_notebook_is_said_before_anything_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(refresh, "execute", lambda *_: pytest.fail("it was executed"))
    (tmp_path / "text.ipynb").write_text("no")
    for name, words in (("none.ipynb", "MissingArtifactError: no such notebook"), ("text.ipynb", "not a notebook")):
        assert refresh.main([str(tmp_path / name)]) == 3
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        refresh.main(["--help"])
    assert ended.value.code == 0 and "NOTEBOOK" in capsys.readouterr().out
