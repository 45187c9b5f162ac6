"""The verbs and their exit codes: 0 done, 1 fail, 2 refused, 3 the request was not accepted."""

import json
import subprocess
import sys

import lab_world
import pytest

from moelab.__main__ import main
from moelab.flywheel.gates import Verdict
from moelab.lab import record
from moelab.lab.record import NotebookRecord, RunRecord


@pytest.fixture
def world(tmp_path, monkeypatch):
    return lab_world.enter(lab_world.make(tmp_path), monkeypatch)


def write_run(world, *statuses, name="a-run"):
    folder = world.root / "reports" / name
    folder.mkdir(parents=True)
    verdicts = [
        Verdict(gate=gate, model="softmax", status=status, question="q?", reason="" if status == "pass" else "because")
        for gate, status in enumerate(statuses)
    ]
    finished = "2026-11-30T00:00:00+00:00"
    found = RunRecord(schema_version=1, run=name, profile="tiny", finished=finished, notebooks=[], verdicts=verdicts)
    record.write(folder, found)
    return folder


@pytest.mark.parametrize(
    ("statuses", "arguments", "code"),
    [
        (["pass", "pass"], [], 0),
        (["pass", "fail"], [], 1),
        (["pass", "refused"], [], 2),
        (["refused", "fail"], [], 1),
        (["pass", "fail"], ["--require", "0"], 0),
        (["pass", "fail"], ["--require", "0,1"], 1),
        (["pass"], ["--require", "0,3"], 2),
        ([], [], 2),
    ],
)
def test_gates_exit_codes(world, capsys, statuses, arguments, code):
    write_run(world, *statuses)
    assert main(["gates", *arguments]) == code
    assert {0: "pass", 1: "fail", 2: "refused"}[code] in capsys.readouterr().out


def test_gates_without_a_run_is_refused_and_latest_is_taken(world, capsys):
    assert main(["gates"]) == 2
    assert "no run yet" in capsys.readouterr().err
    old, new = write_run(world, "fail", name="old"), write_run(world, "pass", name="new")
    import os

    os.utime(old / "verdicts.json", (1, 1))
    assert main(["gates"]) == 0
    assert main(["gates", "--run", str(old)]) == 1
    assert "gate 0 ceiling" in capsys.readouterr().out
    assert new.is_dir()


def test_broken_record_and_bad_requests_exit_3(world, capsys):
    folder = write_run(world, "pass")
    (folder / "verdicts.json").write_text("{")
    assert main(["gates"]) == 3
    for arguments in (
        ["gates", "--require", "9"],
        ["gates", "--require", "x"],
        ["frobnicate"],
        ["run", "--profil", "tiny"],
    ):
        with pytest.raises(SystemExit) as exit:
            main(arguments)
        assert exit.value.code == 3, arguments
    assert main(["run", "--profile", "huge"]) == 3
    assert "ParameterError: unknown profile" in capsys.readouterr().err


def test_schema_is_printed_and_versioned(capsys):
    assert main(["gates", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$defs"]["Verdict"]["additionalProperties"] is False
    assert set(schema["$defs"]["RunRecord"]["required"]) >= {"schema_version", "verdicts", "notebooks"}


def test_run_passes_its_arguments_on(world, monkeypatch):
    seen = {}
    import moelab.lab.run as running

    failed = NotebookRecord(name="20_first", status="failed", seconds=1.0, digest="d", cell="code cell 1", error="E")
    result = RunRecord(schema_version=1, run="r", profile="tiny", finished="", notebooks=[failed], verdicts=[])

    def run(profile, models, threads, only, **kwargs):
        seen.update(profile=profile, models=models, threads=threads, only=only, **kwargs)
        return result

    monkeypatch.setattr(running, "run", run)
    arguments = (
        "run --profile reference --model a --model b --threads t.jsonl --only 20,21 --seed 3 --workers 1 --name x"
    )
    assert main(arguments.split()) == 1
    assert seen == {
        "profile": "reference", "models": ["a", "b"], "threads": "t.jsonl", "only": ["20", "21"], "seed": 3,
        "workers": 1, "name": "x",
    }  # fmt: skip


def test_report_renders_again_and_says_what_failed(world, capsys):
    import nbformat

    folder = write_run(world, "pass")
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Twenty")]), folder / "20.ipynb")
    entry = NotebookRecord(
        name="20_first", status="failed", seconds=1.0, digest="d", cell="code cell 1", error="E: why"
    )
    found = record.read(folder)
    record.write(folder, RunRecord(**{**{f: getattr(found, f) for f in found.__struct_fields__}, "notebooks": [entry]}))
    assert main(["report"]) == 0
    assert "E: why" in (folder / "20.html").read_text()
    index = (folder / "index.html").read_text()
    assert 'href="20.html"' in index and "Twenty" in index and "E: why" in index and "✓ pass" in index


def test_module_runs_as_a_program():
    done = subprocess.run([sys.executable, "-m", "moelab", "--help"], capture_output=True, text=True, check=True)
    for verb in ("run", "gates", "report", "doctor", "pack", "forget"):
        assert verb in done.stdout


# ---------------------------------------------------------------- forget

LINE = (
    '{"source":"moelab","license":"MIT","owner":"o-001","thread":"o-001-t1","i":%d,"role":"%s","lang":"en",'
    '"ts":"2026-03-14T09:2%d:00Z","domain":"prose","text":"Words."}\n'
)


def test_forget_destroys_key_records_and_the_reports_that_show_the_thread(world, monkeypatch, capsys):
    from moelab.flywheel.vault import Vault, record_name
    from moelab.threads import read

    monkeypatch.setenv("MOELAB_ARTIFACTS", str(world.root / "artifacts"))
    threads = world.root / "mine.jsonl"
    threads.write_text(LINE % (0, "user", 0) + LINE % (1, "assistant", 1))
    (thread,) = read(threads)
    record = world.root / "artifacts" / "observations" / "x" / record_name(thread.uid, "0")
    Vault().write(record, b"token ids")
    showing, other = write_run(world, "pass", name="showing"), write_run(world, "pass", name="other")
    (showing / "20.html").write_text("a plot of o-001-t1")

    assert main(["forget", "o-001-t1", "--threads", str(threads)]) == 0
    said = capsys.readouterr().out
    assert "key destroyed: age1" in said and "does not open" in said and "removed: showing" in said
    assert not record.exists() and not showing.exists() and other.is_dir()
    assert main(["forget", thread.uid, "--threads", str(threads)]) == 0  # again: nothing left to do


def test_forget_refuses_a_name_that_is_no_thread(world, monkeypatch, capsys):
    monkeypatch.setenv("MOELAB_ARTIFACTS", str(world.root / "artifacts"))
    (world.root / "mine.jsonl").write_text(LINE % (0, "user", 0) + LINE % (1, "assistant", 1))
    assert main(["forget", "../keys", "--threads", str(world.root / "mine.jsonl")]) == 3
    assert "no such thread; field: thread; got: '../keys'" in capsys.readouterr().err
