"""Gate 0 on a foreign trace: pass, nothing to win, and refused are three answers with three exit codes."""

import numpy as np
import pytest

from moelab import disk, disk_profile
from moelab.__main__ import main
from moelab.lab import trace

LAYERS, EXPERTS, TOP_K = 4, 16, 2


def write(path, *, tokens=60, decoded=True, expert_bytes=1 << 20, fixed=False, threads=2):
    """A route_trace whose experts are random, or always the same two."""
    rng = np.random.default_rng(0)
    lines = ["# route_trace v1", f"# model=m n_layer={LAYERS} n_expert={EXPERTS} n_expert_used={TOP_K}"]
    lines += [f"# layer={layer} expert_bytes={expert_bytes} dense_bytes=1" for layer in range(LAYERS)]
    lines.append("turn,phase,step,layer,slot,expert,weight,residency,expert_bytes")
    for turn in range(threads):
        for step in range(tokens):
            for layer in range(LAYERS):
                chosen = range(TOP_K) if fixed else rng.permutation(EXPERTS)[:TOP_K]
                lines += [
                    f"{turn},{int(decoded)},{step},{layer},{slot},{expert},0.5,0,{expert_bytes}"
                    for slot, expert in enumerate(chosen)
                ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def quick_disk(monkeypatch):
    profile = disk_profile.declared(latency_s=1e-4, bytes_per_s=1e9, note="test")
    monkeypatch.setattr(disk, "measure", lambda *_, **__: profile)


def doctor(path, **kwargs):
    said = []
    return trace.doctor(path, say=said.append, **kwargs), "\n".join(said)


def test_random_routing_on_a_slow_disk_has_something_to_win(tmp_path, quick_disk):
    # 8 reads of 1 MiB at 1 GB/s, a quarter cached: about 6 ms of reading beside 6 ms of computing
    code, said = doctor(write(tmp_path / "t.csv"), compute_ms=6.0, cache=0.25)
    assert code == 0 and "gate 0 pass" in said
    for words in (
        "120 decoded of 120 tokens, 2 threads",
        "4 layers x 16 experts, top 2",
        "8.0 MiB",
        "this disk (declared)",
    ):
        assert words in said, words
    assert "0.2" in said.split("hit rate")[1].splitlines()[2]  # a quarter of random experts is there


def test_nothing_to_win_where_everything_is_cached(tmp_path, quick_disk):
    code, said = doctor(write(tmp_path / "t.csv", fixed=True), compute_ms=6.0, cache=0.5)
    assert code == 1 and "gate 0 fail" in said and "nothing to win" in said


def test_prefill_alone_is_no_evidence(tmp_path):
    code, said = doctor(write(tmp_path / "t.csv", decoded=False))
    assert code == 2 and "refused" in said and "no decoded token" in said


def test_without_compute_time_a_published_ratio_is_judged_and_named(tmp_path):
    code, said = doctor(write(tmp_path / "t.csv", threads=1))
    assert code == 0 and "the ratio of MER, Qwen3-Coder-30B" in said
    assert "one thread has no spread" in said and "±" not in said


def test_budget_below_one_token_is_said(tmp_path):
    _, said = doctor(write(tmp_path / "t.csv"))  # a token uses an eighth of all experts
    assert "10%    less than one token uses (12%)" in said


def test_command_line(tmp_path, quick_disk, capsys):
    path = write(tmp_path / "t.csv")
    assert main(["doctor", "--routes", str(path), "--compute-ms", "6", "--cache", "0.25"]) == 0
    assert "gate 0 pass" in capsys.readouterr().out
    assert main(["doctor", "--routes", str(path), "--cache", "1.5"]) == 3
    assert "out of range; field: cache; got: 1.5" in capsys.readouterr().err
    assert main(["doctor", "--routes", str(path), "--compute-ms", "0"]) == 3
    (tmp_path / "other.csv").write_text("a,b\n")
    assert main(["doctor", "--routes", str(tmp_path / "other.csv")]) == 3
    assert "unknown trace format" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "words"), [
    (["--cache", "2"], "only a trace is judged by this; field: --cache; got: 2.0, expected: with --routes"),
    (["--compute-ms", "6"], "field: --compute-ms; got: 6.0"),
    (["--expert-bytes", "6"], "field: --expert-bytes; got: 6"),
    (["--routes", "t.csv", "--model", "softmax"], "without a model; field: --model; got: 'softmax'"),
    (["--routes", "t.csv", "--expert-bytes", "0"], "field: expert_bytes; got: 0, expected: >= 1"),
    (["--routes", "t.csv", "--compute-ms", "inf"], "field: compute_ms; got: inf"),
])  # fmt: skip
def test_an_option_that_would_do_nothing_is_refused(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv")
    monkeypatch.setattr("moelab.lab.doctor.machine", lambda *_: pytest.fail("it was measured"))
    assert main(["doctor", *arguments]) == 3
    assert words in capsys.readouterr().err
