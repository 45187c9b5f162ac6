"""The run: refused before a kernel starts, resumed by digest, and exact about which cell failed."""

import json
import threading
import time

import lab_world
import nbformat
import pytest

from moelab.errors import MissingArtifactError, ParameterError, RecordError
from moelab.flywheel.gates import Verdict
from moelab.lab import plan as planning
from moelab.lab import record
from moelab.lab import run as running
from moelab.lab.plan import Node, ancestors


@pytest.fixture
def world(tmp_path, monkeypatch):
    return lab_world.enter(lab_world.make(tmp_path), monkeypatch)


@pytest.fixture
def no_kernels(monkeypatch):
    def execute(*_, **__):
        raise AssertionError("a kernel was started")

    monkeypatch.setattr(running, "execute", execute)


def run(**kwargs):
    said = []
    result = running.run("tiny", dag=lab_world.DAG, say=said.append, **kwargs)
    return result, "\n".join(said)


# ---------------------------------------------------------------- before any kernel


@pytest.mark.parametrize(
    ("number", "yaml", "message"),
    [
        ("21", "recal: 0.5", "unknown parameter.*recal"),
        ("21", "recall: 1e-4", "wrong type.*1e-4"),
        ("21", "recall: 2.0", "out of range"),
        ("20", "tokens: 8.0", "wrong type"),
        ("20", "tokens: yes", "wrong type"),
        ("20", "tokens: '8'", "wrong type"),
    ],
)
def test_parameters_are_refused_before_any_kernel(world, no_kernels, number, yaml, message):
    world.params(number, yaml + "\n")
    with pytest.raises(ParameterError, match=message):
        run()
    assert not (world.root / "reports").exists()


def test_upstream_parameters_are_checked_too(world, no_kernels):
    world.params("20", "tokens: no\n")
    with pytest.raises(ParameterError, match="wrong type"):
        run(only=["21"])


def test_unknown_names_are_refused(world, no_kernels):
    with pytest.raises(ParameterError, match="unknown profile.*'huge'"):
        running.run("huge", dag=lab_world.DAG)
    with pytest.raises(ParameterError, match="unknown notebook.*got: '33'"):
        run(only=["33"])
    with pytest.raises(MissingArtifactError, match="no such notebook"):
        running.run("tiny", dag=(*lab_world.DAG, Node("99_absent")))
    with pytest.raises(MissingArtifactError, match="no such threads"):
        run(threads="nowhere.jsonl")


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", "/elsewhere"])
def test_a_report_does_not_leave_its_folder(world, no_kernels, name):
    with pytest.raises(ParameterError, match="a report is a folder in reports/; field: name"):
        run(name=name)


# ---------------------------------------------------------------- digests


def digests(**overrides):
    planning._content.cache_clear()
    return {job.node.number: job.digest for job in planning.plan("tiny", overrides, dag=lab_world.DAG)}


def test_digest_follows_everything_a_result_depends_on(world):
    before = digests()
    assert digests() == before
    world.params("21", "recall: 0.5\n")
    assert digests()["20"] == before["20"] and digests()["21"] != before["21"]
    world.params("21", "recall: 0.75\n")
    world.params("20", "tokens: 9\n")
    assert digests()["20"] != before["20"] and digests()["21"] != before["21"]  # downstream moves along
    world.params("20", "tokens: 8\n")
    assert digests() == before
    (world.root / "artifacts" / "models" / "softmax" / "config.json").write_text('{"a": 1}')
    changed = digests()
    assert changed["20"] != before["20"]
    (world.root / "artifacts" / "threads" / "a.jsonl").write_text("{}\n{}\n")
    assert digests()["20"] != changed["20"]
    assert digests(seed=1)["20"] != digests()["20"]


def test_digest_ignores_outputs(world):
    before = digests()
    path = world.notebooks / "20_first.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", text="seen")]
    notebook.cells[2].execution_count = 7
    nbformat.write(notebook, path)
    assert digests() == before


def test_ancestors_are_transitive():
    dag = (Node("20_a"), Node("21_b", after=("20",)), Node("30_c", after=("21",)))
    assert ancestors("30", dag) == {"20", "21"}


def test_default_graph_runs_left_to_right():
    order = [node.number for node in planning.DAG]
    for node in planning.DAG:
        assert all(order.index(number) < order.index(node.number) for number in node.after)
    assert {node.gate for node in planning.DAG} >= {0, 1, 2, 3}
    assert not next(node for node in planning.DAG if node.number == "01").default


# ---------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One real run of the small world, shared and left unchanged by the tests below it."""
    with pytest.MonkeyPatch.context() as patch:
        world = lab_world.enter(lab_world.make(tmp_path_factory.mktemp("world")), patch)
        result, said = run()
        yield world, result, said


def test_run_writes_pages_index_and_record(finished):
    world, result, said = finished
    folder = world.root / "reports" / "tiny"
    assert [entry.status for entry in result.notebooks] == ["done", "done"]
    assert {path.name for path in folder.iterdir()} >= {"20.html", "21.html", "index.html", "verdicts.json"}
    value = json.loads((folder / "verdicts.json").read_text())
    assert value["schema_version"] == 1
    (sigmoid, softmax) = value["verdicts"]
    assert (sigmoid["model"], softmax["model"]) == ("sigmoid", "softmax")
    assert softmax["status"] == "pass" and softmax["figures"] == {"recall": 0.75}
    assert softmax["standard_errors"] == {"recall": 0.01} and softmax["n"] == {"recall": 100}
    assert softmax["inputs"] == {"routes": "ab12"} and softmax["runtime"] == {"blas": "reference"}
    assert record.read(folder) == result
    assert "gate 1 replay correctness" in said and "2/2" in said


def test_second_run_starts_no_kernel(finished, no_kernels):
    _, first, _ = finished
    second, said = run()
    assert second.notebooks == first.notebooks
    assert said.count("unchanged since it last ran") == 2


def test_another_digest_or_an_unfinished_run_counts_for_nothing(finished, tmp_path):
    world, result, _ = finished
    executed, digest = world.root / "reports" / "tiny" / "20.ipynb", result.notebooks[0].digest
    assert running.previous(executed, digest) == result.notebooks[0]
    assert running.previous(executed, digest[::-1]) is None
    assert running.previous(tmp_path / "20.ipynb", digest) is None
    notebook = nbformat.read(executed, as_version=4)
    notebook.metadata[running.METADATA_KEY]["status"] = "failed"
    nbformat.write(notebook, tmp_path / "20.ipynb")
    assert running.previous(tmp_path / "20.ipynb", digest) is None


def test_missing_page_is_rendered_without_a_kernel(finished, no_kernels):
    world, _, _ = finished
    page = world.root / "reports" / "tiny" / "20.html"
    page.unlink()
    run()
    assert page.is_file()


def test_only_keeps_what_is_still_true(finished, no_kernels):
    result, _ = run(only=["21"])
    assert [entry.name for entry in result.notebooks] == ["20_first", "21_second"]
    assert len(result.verdicts) == 2


def test_models_and_threads_reach_the_notebooks(world):
    (world.root / "mine.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    result, _ = run(models=["sigmoid"], threads=str(world.root / "mine.jsonl"), only=["21"])
    assert [verdict.model for verdict in result.verdicts] == ["sigmoid"]
    executed = nbformat.read(world.root / "reports" / "tiny" / "21.ipynb", as_version=4)
    assert 'threads = "mine.jsonl"' in "".join(cell.source for cell in executed.cells)


def test_progress_says_which_cells_are_at_work():
    said = []
    progress = running.Progress(2, said.append)
    assert not progress.live  # only a terminal is rewritten
    progress.cell("20_first", 3, 9)
    progress.show()
    assert said == []  # not sooner than its interval
    progress.shown -= progress.interval
    progress.show()
    progress.end(
        record.NotebookRecord(name="20_first", status="failed", seconds=61.0, digest="d", cell="c 3", error="E")
    )
    progress.shown -= progress.interval
    progress.show()
    assert [line.split("] ")[1] for line in said] == ["20_first cell 3 of 9", "1/2 20_first failed in 61 s: c 3 E"]


def test_what_most_others_wait_for_goes_first(tmp_path, monkeypatch):
    after = {"20": (), "80": ("20",), "83": ("20",), "21": ("20",), "30": ("21",), "42": ("30",)}
    dag = tuple(Node(f"{number}_n", after=numbers) for number, numbers in after.items())
    jobs, order = [planning.Job(node, tmp_path, None, "d") for node in dag], []

    def execute(job, *_):
        order.append(job.node.number)
        return record.NotebookRecord(name=job.node.name, status="done", seconds=0.0, digest="d")

    monkeypatch.setattr(running, "_execute_one", execute)
    found = running._execute_all(jobs, tmp_path, 1, lambda _: None, dag)
    assert order == ["20", "21", "30", "80", "83", "42"]
    assert [entry.name[:2] for entry in found] == list(after)


# ---------------------------------------------------------------- failures


def fail_with(world, source):
    world.edit("20_first.ipynb", 4, source)
    result, said = run()
    return result, said, (world.root / "reports" / "tiny" / "20.html").read_text()


def test_failing_cell_is_named_rendered_and_blocks_what_follows(world):
    result, said, page = fail_with(world, "x = 1\nraise ValueError('no expert 64')")
    first, second = result.notebooks
    assert (first.status, second.status) == ("failed", "blocked")
    assert first.cell == "code cell 3 ('x = 1')" and first.error == "ValueError: no expert 64"
    assert second.error == "needs 20"
    assert "code cell 3" in said and "no expert 64" in said
    assert "This notebook did not finish" in page and "no expert 64" in page
    assert result.verdicts == []
    assert not (world.root / "reports" / "tiny" / "21.html").exists()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("raise SystemExit(0)", "SystemExit: 0 (a notebook must run to its last cell)"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "DeadKernelError: the kernel died"),
    ],
)
def test_ends_that_papermill_lets_pass(world, source, error):
    result, _, page = fail_with(world, source)
    assert result.notebooks[0].status == "failed"
    assert result.notebooks[0].error.startswith(error)
    assert result.notebooks[0].cell.startswith("code cell 3")
    assert error.split(":")[0] in page


def test_failed_notebook_runs_again(world):
    fail_with(world, "raise ValueError")
    world.edit("20_first.ipynb", 4, "print('mended')")
    result, _ = run()
    assert [entry.status for entry in result.notebooks] == ["done", "done"]


def test_gate_notebook_must_publish_a_verdict_for_each_model(world):
    source = lab_world.SECOND[4].source.replace("for m in options.models", "for m in options.models[:1]")
    world.edit("21_second.ipynb", 4, source)
    result, _ = run()
    assert result.notebooks[1].status == "failed"
    assert result.notebooks[1].error == "published no verdict of gate 1 for ['sigmoid']"


def test_interrupt_ends_the_kernels(world, monkeypatch):
    world.edit("20_first.ipynb", 4, "import time\ntime.sleep(300)")
    reached = threading.Event()
    monkeypatch.setattr(running.Progress, "cell", lambda self, name, k, n: k == 5 and reached.set())

    def wait(*_, **__):
        assert reached.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "wait", wait)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run()
    assert time.monotonic() - started < 200  # a kernel that was not ended sleeps on for 300 s


# ---------------------------------------------------------------- the record


def verdict(gate=1, model="softmax", status="pass", **kwargs):
    return Verdict(
        gate=gate, model=model, status=status, question="q?", reason="" if status == "pass" else "r", **kwargs
    )


def test_decide_keeps_three_words_apart():
    good, bad, absent = verdict(1), verdict(2, status="fail"), verdict(3, status="refused")
    assert record.decide([good])[0] == "pass"
    assert record.decide([good, bad, absent])[0] == "fail"
    assert record.decide([good, absent])[0] == "refused"
    assert record.decide([good], [1, 2])[0] == "refused"  # no verdict is missing evidence
    assert record.decide([good, bad], [1])[0] == "pass"
    assert record.decide([good, verdict(2, "sigmoid")], [1])[1] == [(1, "sigmoid", "refused"), (1, "softmax", "pass")]
    assert record.decide([])[0] == "refused"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "unknown version.*got: 2, expected: 1"),
        ({"extra": 1}, "unknown field `extra`"),
        ({"profile": 3}, r"Expected `str`.*\$\.profile"),
        ({"verdicts": [{"gate": 1}]}, r"missing required field.*\$\.verdicts\[0\]"),
    ],
)
def test_record_is_strict(finished, tmp_path, change, message):
    world, _, _ = finished
    value = json.loads((world.root / "reports" / "tiny" / "verdicts.json").read_text())
    (tmp_path / "verdicts.json").write_text(json.dumps({**value, **change}))
    with pytest.raises(RecordError, match=message):
        record.read(tmp_path)
