"""The default graph at the tiny profile, as `moelab run` runs it: every notebook, every page, then nothing to do."""

import pytest
from page_checks import check, pages

from moelab.lab import run as running
from moelab.lab.plan import DAG


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    return folder, running.run("tiny", into=folder, say=lambda _: None)


def test_every_notebook_ends_and_gates_0_to_3_are_decided(report):
    _, record = report
    assert [(entry.name, entry.cell, entry.error) for entry in record.failures()] == []
    assert [entry.name for entry in record.notebooks] == sorted(node.name for node in DAG if node.default)
    decided = {(verdict.gate, verdict.model): verdict.status for verdict in record.verdicts}
    for gate in range(4):
        for model in ("softmax", "sigmoid"):
            assert (gate, model) in decided


def test_every_page_opens_offline(report, page):
    folder, record = report
    assert len(pages(folder)) == len(record.notebooks) + 1
    for path in pages(folder):
        check(page, path)


def test_a_second_run_is_a_no_op(report, monkeypatch):
    folder, first = report

    def execute(*_, **__):
        raise AssertionError("a kernel was started")

    monkeypatch.setattr(running, "execute", execute)
    second = running.run("tiny", into=folder, say=lambda _: None)
    assert second.notebooks == first.notebooks and second.verdicts == first.verdicts
