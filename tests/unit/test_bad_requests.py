"""Requests that cannot be met are refused before anything runs, in words, and with the exit code for it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from moelab import artifacts
from moelab.__main__ import NOT_ACCEPTED, main
from moelab.errors import ParameterError
from moelab.lab.notebooks import declared
from moelab.lab.plan import DAG, plan
from moelab.studies import prerouter_study


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["forget", "e"], "no such thread; field: thread; got: 'e'"),
        (["forget", "nosuch"], "no such thread; field: thread; got: 'nosuch'"),
        (["run", "--workers", "0"], "field: workers; got: 0, expected: >= 1"),
        (["run", "--model", "nosuch"], "no such model; file: nosuch"),
        (["run", "--model", "/no/such"], "no such model; file: /no/such"),
    ],
)
def test_refused(arguments, words, capsys):
    assert main(arguments) == NOT_ACCEPTED
    assert words in capsys.readouterr().err


def test_a_broken_thread_line_is_refused_before_a_kernel_starts(tmp_path, capsys):
    broken = tmp_path / "t.jsonl"
    broken.write_text('{"messages": [{"role": "user", "content": 3}]}\n')
    assert main(["run", "--threads", str(broken)]) == NOT_ACCEPTED
    assert "t.jsonl:1" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["missing", "folder", "binary"])
def test_what_is_no_trace_is_a_typed_refusal(kind, tmp_path, capsys):
    path = tmp_path / "trace.csv"
    if kind == "folder":
        path.mkdir()
    if kind == "binary":
        path.write_bytes(b"\xff\xfe\x00\x81")
    assert main(["doctor", "--routes", str(path)]) == NOT_ACCEPTED
    error = capsys.readouterr().err
    assert "RecordError: a trace" in error and str(path) in error and "expected:" in error


@pytest.mark.parametrize(
    ("number", "given", "words"),
    [
        ("80", {"memory_share": 1.5}, "StreamingOptions.memory_share; got: 1.5, expected: at least 0.01, at most 1.0"),
        ("80", {"budgets": [0.5, 0.25, 0.5]}, "StreamingOptions.budgets; got: 0.5, expected: each item once"),
        ("81", {"thresholds": [0.5, 0.4, 0.5]}, "PrerouterOptions.thresholds; got: 0.5, expected: each item once"),
        ("81", {"gain_ratios": [1, 1.0]}, "PrerouterOptions.gain_ratios; got: 1.0, expected: each item once"),
        ("84", {"top_k": 9, "experts": 8}, "PeersOptions.top_k; got: 9, expected: at most 8 = experts"),
        ("84", {"heads": 3, "kv_heads": 2}, "PeersOptions.heads; got: 3, expected: a multiple of 2 = kv_heads"),
    ],
)
def test_parameters_that_no_run_could_use_are_refused_before_a_kernel_starts(number, given, words):
    (path,) = (artifacts.root() / "notebooks").glob(f"{number}_*.ipynb")
    with pytest.raises(ParameterError) as caught:
        declared(path).options.from_profile("tiny", **given)
    assert f"field: {words}" in str(caught.value)


@pytest.mark.parametrize("number", [node.number for node in DAG])
def test_a_model_is_named_once_in_every_notebook(number):
    with pytest.raises(ParameterError, match="given twice; .*models; got: 'softmax', expected: each item once"):
        plan("tiny", {"models": ["softmax", "softmax"]}, only=[number])


def test_more_experts_a_token_than_a_model_has_are_refused_before_anything_is_run_on_it(monkeypatch):
    model = SimpleNamespace(geometry=SimpleNamespace(experts=64))
    monkeypatch.setattr(prerouter_study, "opened", lambda name: _held(model))
    options = prerouter_study.PrerouterOptions(top_ks=[2, 100])
    with pytest.raises(ParameterError, match="field: top_ks; got: 100, expected: at most 64, the experts of softmax"):
        prerouter_study.modes_model("softmax", options, before=None, heads=None, judged_as=None)


@contextmanager
def _held(model):
    yield model
