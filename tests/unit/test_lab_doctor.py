"""The doctor measures in a process a BLAS, says what is wrong, and its exit code agrees."""

import pytest

from moelab import pages
from moelab.disk_profile import declared
from moelab.errors import IdentityError, MissingArtifactError
from moelab.lab import doctor

FOUND = {
    "identity": {"blas": "openblas 0.3.21", "blas_threads": 1, "precision": "float32", "device": "cpu"},
    "prefill_tok_s": 1234.5,
    "decode_tok_s": 119.0,
    "sync_us": 14.0,
    "right": True,
    "self_test": "self-test: 3 known answers right, kernel error 1e-06",
}


@pytest.fixture
def linux(monkeypatch):
    """Two identities, no kernel and no disk touched; returns what each worker call will find."""
    import moelab.disk
    import moelab.models

    answers = {"reference": dict(FOUND, prefill_tok_s=177.0), "openblas": FOUND}
    asked = []

    def run_workers(fn, kwargs_list, *, blas, workers):
        assert fn is doctor.speed and workers == 1
        asked.append((blas, kwargs_list[0]["model"]))
        if isinstance(answers[blas], Exception):
            raise answers[blas]
        return [answers[blas]]

    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    monkeypatch.setattr(moelab.models, "run_workers", run_workers, raising=False)
    monkeypatch.setattr(moelab.models, "find_openblas", lambda: "libopenblas.so", raising=False)
    profile = declared(latency_s=1e-4, bytes_per_s=1e9, sizes=(262144,), depths=(1, 4), note="test")
    monkeypatch.setattr(moelab.disk, "measure", lambda *_, **__: profile)
    answers["asked"] = asked
    return answers


def report(model="softmax"):
    said = []
    return doctor.machine(model, say=said.append), "\n".join(said)


def test_prints_both_identities_with_speed_selftest_and_disk(linux):
    code, text = report("mine")
    assert code == 0 and linux["asked"] == [("reference", "mine"), ("openblas", "mine")]
    for words in (
        "prefill 177 tok/s",
        "prefill 1,234 tok/s",
        "sync 14 us",
        "3 known answers right",
        "256 KiB",
        "torch",
    ):
        assert words in text, words


def test_wrong_answers_exit_1(linux):
    linux["openblas"] = dict(FOUND, right=False, self_test="WRONG: routes differ")
    code, text = report()
    assert code == 1 and "WRONG: routes differ" in text and "prefill 177" in text


def test_an_identity_that_cannot_run_is_said_and_the_other_still_measured(linux):
    linux["reference"] = MissingArtifactError("no such model", file="x")
    code, text = report()
    assert code == 1 and "no such model" in text and "prefill 1,234" in text


def test_absent_openblas_is_said(linux, monkeypatch):
    import moelab.models

    monkeypatch.setattr(moelab.models, "find_openblas", lambda: None, raising=False)
    code, text = report()
    assert code == 0 and "OpenBLAS    not found" in text and [blas for blas, _ in linux["asked"]] == ["reference"]


@pytest.mark.parametrize(
    ("setting", "words"), [("always", "slots of experts use"), ("madvise", "slots of experts use"), ("never", "half")]
)
def test_huge_pages_are_said(linux, monkeypatch, setting, words):
    monkeypatch.setattr(pages, "setting", lambda: setting)
    (line,) = (line for line in report()[1].splitlines() if line.startswith("huge pages"))
    assert line.split()[2].startswith(setting) and words in line


def test_a_system_without_huge_pages_has_no_such_line(linux, monkeypatch):
    monkeypatch.setattr(pages, "setting", lambda: None)
    assert "huge pages" not in report()[1]


def test_speed_of_a_real_tiny_model(tmp_path, monkeypatch):
    from moelab.models import tiny

    tiny.save("qwen3_moe", tmp_path)
    found = doctor.speed(str(tmp_path))
    assert found["prefill_tok_s"] > 0 and found["decode_tok_s"] > 0 and found["sync_us"] > 0
    assert found["right"] and "no known answers shipped" in found["self_test"]
    assert found["identity"]["precision"] == "float32"

    def wrong(_):
        raise IdentityError("expert products are wrong on this machine")

    monkeypatch.setattr("moelab.models.known_answers.self_test", wrong)
    monkeypatch.setattr("moelab.models.self_test", wrong, raising=False)
    found = doctor.speed(str(tmp_path))
    assert not found["right"] and "expert products are wrong" in found["self_test"]


def test_real_disk_lines(tmp_path):
    lines = doctor.disk(tmp_path / "artifacts")
    assert "reads in flight" in lines[0] and len(lines) >= 4
    assert not list((tmp_path / "artifacts").iterdir())  # the probe file is gone
