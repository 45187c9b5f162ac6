"""Content-addressed folders: built once, resumed after a kill, refused when touched."""

import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from moelab import artifacts
from moelab.artifacts import MANIFEST, build, open_artifact
from moelab.errors import ArtifactError, MissingArtifactError

INPUTS, PARAMS = {"snapshot": "a" * 64}, {"rank": 8, "rates": [0.5, 1.0]}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MOELAB_ARTIFACTS", str(tmp_path / "artifacts"))
    return tmp_path / "artifacts"


def two_files(folder: Path) -> dict:
    artifacts.write_json(folder / "table.json", {"rows": 3})
    artifacts.write_bytes(folder / "part" / "0.bin", b"payload")
    return {"rows": 3, "shares": (0.25, 0.75)}


def made(**changes):
    return build("study", **{"inputs": INPUTS, "params": PARAMS, "make": two_files, **changes})


def in_another_process(code: str, home: Path, stdout: int = subprocess.DEVNULL) -> subprocess.Popen:
    code = "import os, pathlib, signal, sys, time\nfrom moelab import artifacts\n" + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "MOELAB_ARTIFACTS": str(home)},
        cwd=Path(artifacts.__file__).parents[1],
        stdout=stdout,
        text=True,
    )


# ---------------------------------------------------------------- building


def test_second_build_is_a_no_op(home):
    def never(folder):
        raise AssertionError("built twice")

    first = made()
    before = {p: p.stat().st_mtime_ns for p in home.rglob("*")}
    second = made(make=never)
    assert second == first
    assert {p: p.stat().st_mtime_ns for p in home.rglob("*")} == before
    assert first.counts == {"rows": 3, "shares": [0.25, 0.75]}
    assert first.file("part/0.bin").read_bytes() == b"payload"
    assert sorted(first.manifest.files) == ["part/0.bin", "table.json"]


def test_other_inputs_params_or_kind_are_another_artefact():
    paths = {made().path, made(inputs={"snapshot": "b" * 64}).path, made(params={**PARAMS, "rank": 9}).path}
    paths.add(build("other", inputs=INPUTS, params=PARAMS, make=two_files).path)
    assert len(paths) == 4


def test_content_depends_on_what_was_made_alone():
    assert made().content == made(params={"rank": 9}).content
    assert made(params={"rank": 10}, make=lambda folder: {"content": "c" * 64}).content == "c" * 64
    assert "content" not in made(params={"rank": 10}).counts


def test_manifest_knows_no_clock_and_no_place(home, tmp_path, monkeypatch):
    here = made()
    for path in here.path.rglob("*"):
        os.utime(path, (1e9, 1e9))
    monkeypatch.setenv("MOELAB_ARTIFACTS", str(tmp_path / "elsewhere"))
    monkeypatch.setattr("time.time", lambda: 0.0)
    there = made()
    assert there.path != here.path
    assert (there.path / MANIFEST).read_bytes() == (here.path / MANIFEST).read_bytes()


def test_killed_maker_resumes_where_it_was(home):
    killed = in_another_process(
        f"""
        def make(folder):
            artifacts.write_bytes(folder / "0.bin", b"first")
            (folder / ".1.bin.half").write_bytes(b"sec")
            os.kill(os.getpid(), signal.SIGKILL)
        artifacts.build("study", inputs={INPUTS!r}, params={PARAMS!r}, make=make)
        """,
        home,
    )
    assert killed.wait(60) == -signal.SIGKILL
    assert [p.name for p in home.rglob("0.bin")] == ["0.bin"]
    assert not list(home.rglob(MANIFEST))
    found = []

    def make(folder):
        found.extend(sorted(p.name for p in folder.iterdir()))
        artifacts.write_bytes(folder / "1.bin", b"second")
        return {}

    artifact = made(make=make)
    assert found == [".1.bin.half", "0.bin"]
    assert sorted(p.name for p in artifact.path.iterdir()) == ["0.bin", "1.bin", MANIFEST]


def test_killed_just_before_the_rename_builds_again(monkeypatch):
    replace = os.replace

    def kill(source, target):
        if Path(source).is_dir():
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", kill)
    with pytest.raises(KeyboardInterrupt):
        made()
    monkeypatch.setattr(os, "replace", replace)
    assert MANIFEST not in made().manifest.files


def test_maker_may_not_write_the_manifest():
    with pytest.raises(ArtifactError, match="ours to write; file: .*manifest.json"):
        made(make=lambda folder: artifacts.write_json(folder / MANIFEST, {}) or {})
    assert made().counts["rows"] == 3


def test_scratch_survives_a_failure_but_not_the_seal():
    def fail(folder):
        (folder / ".state").write_bytes(b"1")
        (folder / ".work").mkdir()
        (folder / ".work" / "x").write_bytes(b"2")
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError):
        made(make=fail)
    staged = list(artifacts.artifacts_dir().rglob("*.partial/.state"))
    assert [p.read_bytes() for p in staged] == [b"1"]
    artifact = made()
    assert not [p for p in artifact.path.rglob("*") if p.name.startswith(".")]


@pytest.mark.parametrize("bad", [{"rate": float("nan")}, {1: "one"}, {"x": {"y": [{}, {2: 0}]}}])
def test_identity_json_cannot_carry_is_refused(bad):
    with pytest.raises(ArtifactError):
        made(params=bad)
    with pytest.raises(ArtifactError):
        made(make=lambda folder: bad)


# ---------------------------------------------------------------- refusing


def altered(path):
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def truncated(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [altered, truncated])
@pytest.mark.parametrize("name", ["part/0.bin", "table.json"])
def test_altered_file_is_refused_by_name(damage, name):
    artifact = made()
    damage(artifact.path / name)
    for reopen in (made, lambda: open_artifact(artifact.path)):
        with pytest.raises(ArtifactError) as caught:
            reopen()
        got = artifacts.digest_file(artifact.path / name)
        assert str(caught.value) == (
            f"file altered; file: {artifact.path / name}; field: sha256; got: {got!r}, "
            f"expected: {artifact.manifest.files[name]}; fix: delete the folder to build it again"
        )
        assert not isinstance(caught.value, MissingArtifactError)


def test_added_file_is_refused_by_name():
    artifact = made()
    (artifact.path / "part" / "1.bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match="file added or removed; file: .*part/1.bin; field: files"):
        made()


def test_removed_file_is_refused_and_not_taken_for_absent():
    artifact = made()
    (artifact.path / "table.json").unlink()
    with pytest.raises(ArtifactError, match="file added or removed; file: .*table.json") as caught:
        made()
    assert not isinstance(caught.value, MissingArtifactError)


def test_folder_without_manifest_is_refused_and_kept():
    artifact = made()
    (artifact.path / MANIFEST).unlink()
    with pytest.raises(ArtifactError, match="unreadable manifest; file: .*manifest.json"):
        made()
    assert (artifact.path / "table.json").is_file()


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("counts", {"rows": 4}, "manifest altered"),
        ("content", "0" * 64, "manifest altered"),
        ("files", {}, "manifest altered"),
        ("seal", "0" * 64, "manifest altered"),
        ("schema_version", 2, "unknown version; file: .*; field: schema_version; got: 2, expected: 1"),
        ("unheard_of", 1, "unreadable manifest; .*unheard_of"),
        ("kind", 7, "unreadable manifest"),
    ],
)
def test_edited_manifest_is_refused(field, value, problem):
    path = made().path / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_bytes()), field: value}))
    with pytest.raises(ArtifactError, match=problem):
        made()


def test_truncated_manifest_is_refused():
    path = made().path / MANIFEST
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArtifactError, match="unreadable manifest"):
        open_artifact(path.parent)


def test_folder_of_another_identity_is_refused():
    one, other = made(), made(params={"rank": 9})
    shutil.rmtree(other.path)
    shutil.copytree(one.path, other.path)
    assert open_artifact(other.path).manifest == one.manifest  # whole in itself, but not what was asked for
    with pytest.raises(ArtifactError, match="another identity; .*field: digest"):
        made(params={"rank": 9})


def test_missing_is_another_error_than_altered(tmp_path):
    with pytest.raises(MissingArtifactError, match="no artefact here; file: .*nowhere"):
        open_artifact(tmp_path / "nowhere")
    with pytest.raises(MissingArtifactError, match="not part of this artefact; .*field: absent.bin"):
        made().file("absent.bin")


# ---------------------------------------------------------------- locks


def test_two_processes_build_once(home):
    code = f"""
    def make(folder):
        with open(os.environ["MOELAB_ARTIFACTS"] + "/log", "a") as log:
            log.write("made\\n")
        time.sleep(0.3)
        return {{}}
    artifacts.build("study", inputs={INPUTS!r}, params={PARAMS!r}, make=make)
    """
    home.mkdir()
    workers = [in_another_process(code, home) for _ in range(2)]
    assert [worker.wait(60) for worker in workers] == [0, 0]
    assert (home / "log").read_text() == "made\n"


@pytest.fixture
def holder(home):
    """Another process that holds the lock of our artefact for ever."""
    process = in_another_process(
        f"""
        def make(folder):
            print("held", flush=True)
            time.sleep(600)
        artifacts.build("study", inputs={INPUTS!r}, params={PARAMS!r}, make=make)
        """,
        home,
        stdout=subprocess.PIPE,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_lock_of_a_killed_holder_is_free(holder, monkeypatch):
    monkeypatch.setattr(artifacts, "LOCK_TIMEOUT_S", 5.0)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert made().counts["rows"] == 3


def test_waiting_says_on_whom_and_ends(holder, monkeypatch, caplog):
    monkeypatch.setattr(artifacts, "LOCK_TIMEOUT_S", 0.2)
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING, "moelab.artifacts"),
        pytest.raises(ArtifactError, match=f"still building this; .*got: 'process {holder.pid} on .*within 0.2 s"),
    ):
        made()
    assert time.monotonic() - began < 20  # seconds, on a machine with other things to do
    assert f"waiting for process {holder.pid} on" in caplog.text


@pytest.mark.parametrize("said", ["process 999999999 on another-host", "process 1 on another-host", "", "\x00\xff"])
def test_what_a_lock_file_says_is_not_trusted(home, said, monkeypatch):
    """Left by a holder on another host, dead or alive, or by another program: nobody holds the kernel's lock."""
    monkeypatch.setattr(artifacts, "LOCK_TIMEOUT_S", 0.2)
    key = artifacts.identity("study", INPUTS, PARAMS)
    (home / "study").mkdir(parents=True)
    (home / "study" / f".{key[:16]}.lock").write_text(said, encoding="latin-1")
    assert made().counts["rows"] == 3


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_file_system_without_locks_is_refused_with_the_way_out(code, monkeypatch):
    made(params={"rank": 9})

    def no_lock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    with pytest.raises(ArtifactError, match="no locks; .*fix: set MOELAB_ARTIFACTS to a folder on a local disk"):
        made()
    assert made(params={"rank": 9}).counts["rows"] == 3  # what is built already needs no lock


# ---------------------------------------------------------------- places


def test_root_is_the_checkout_from_anywhere(tmp_path, monkeypatch):
    here = Path(artifacts.__file__).parents[1]
    monkeypatch.delenv("MOELAB_ROOT", raising=False)
    for place in (here / "notebooks", tmp_path):
        monkeypatch.chdir(place)
        assert artifacts.root() == here
    monkeypatch.setenv("MOELAB_ROOT", str(tmp_path))
    assert artifacts.root() == tmp_path
    monkeypatch.delenv("MOELAB_ARTIFACTS")
    assert artifacts.artifacts_dir() == tmp_path / "artifacts"
