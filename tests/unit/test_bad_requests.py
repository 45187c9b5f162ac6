"""Requests that cannot be met are refused before anything runs, in words, and with the exit code for it."""

import pytest

from moelab.__main__ import NOT_ACCEPTED, main


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
