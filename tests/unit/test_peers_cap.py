"""The memory cap: enforced by the kernel, or refused with a reason; and what is still in memory before a run."""

import subprocess
import sys

import pytest

from moelab.lab.peers import cap, cold
from moelab.lab.peers.cap import MemoryCap, Refusal, enforced, open_cap

MIB = 1 << 20


@pytest.fixture
def first(tmp_path, monkeypatch):
    """A tree that looks like version 1 of the controller, with no kernel behind it."""
    monkeypatch.setattr(cap, "_outer_limit", lambda groups, version: None)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712")
    return tmp_path


@pytest.fixture
def second(tmp_path, monkeypatch):
    monkeypatch.setattr(cap, "_outer_limit", lambda groups, version: None)
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids")
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory")
    return tmp_path


def reason(outcome):
    assert isinstance(outcome, Refusal)
    return outcome.reason


def test_a_group_has_the_limit_on_memory_and_on_swap(first):
    made = open_cap(100 * MIB, groups=first)
    assert (made.version, made.limit_bytes) == (1, 100 * MIB)
    assert (made.folder / "memory.limit_in_bytes").read_text() == str(100 * MIB)
    assert (made.folder / "memory.memsw.limit_in_bytes").read_text() == str(100 * MIB)


def test_version_two_closes_swap_altogether(second):
    made = open_cap(100 * MIB, groups=second)
    assert (made.version, (made.folder / "memory.max").read_text()) == (2, str(100 * MIB))
    assert (made.folder / "memory.swap.max").read_text() == "0"


def test_the_program_is_inside_before_it_begins(first):
    made = open_cap(100 * MIB, groups=first)
    done = subprocess.run(made.command(["sh", "-c", "echo $$ $1", "sh", "a b"]), capture_output=True, text=True)
    entered = (made.folder / "cgroup.procs").read_text().strip()
    assert done.stdout.split(maxsplit=1) == [entered, "a b\n"]


def test_a_group_that_cannot_be_entered_runs_nothing(first, tmp_path):
    gone = MemoryCap(tmp_path / "gone", MIB, 1)
    done = subprocess.run(gone.command(["echo", "ran"]), capture_output=True, text=True)
    assert done.returncode == 125 and not done.stdout


def test_counters_of_both_versions(first, second):
    for version, kills, peak in (
        (1, "memory.oom_control", "memory.max_usage_in_bytes"),
        (2, "memory.events", "memory.peak"),
    ):
        made = MemoryCap(first, MIB, version)
        assert made.peak_bytes is None
        (first / kills).write_text("low 0\noom_kill_disable 0\noom_kill 3\n")
        (first / peak).write_text("77\n")
        assert (made.kills, made.peak_bytes) == (3, 77)


def test_no_controller_is_refused(tmp_path):
    assert "no memory controller" in reason(open_cap(MIB, groups=tmp_path))


def test_another_system_is_refused(first, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "darwin" in reason(open_cap(MIB, groups=first))


def test_no_rights_is_refused(first, monkeypatch):
    def forbidden(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(first), "mkdir", forbidden)
    assert reason(open_cap(MIB, groups=first)) == "no control group can be made: Permission denied"


def test_a_controller_that_is_not_handed_down_is_refused(second):
    (second / "cgroup.subtree_control").unlink()
    (second / "cgroup.subtree_control").mkdir()  # cannot be written, as for a process that is not root
    assert "not handed down" in reason(open_cap(MIB, groups=second))


def test_a_limit_that_the_kernel_changes_is_refused(first, monkeypatch):
    monkeypatch.setattr(cap, "_number", lambda path: 7)
    assert "keeps a limit of 7" in reason(open_cap(MIB, groups=first))


def test_swap_that_stays_open_is_refused(first, monkeypatch):
    write = cap._write
    monkeypatch.setattr(cap, "_swap_bytes", lambda: MIB)
    monkeypatch.setattr(cap, "_write", lambda path, text: "No" if "memsw" in path.name else write(path, text))
    assert "swap" in reason(open_cap(MIB, groups=first))


def test_an_outer_limit_is_never_escaped(first, monkeypatch):
    monkeypatch.setattr(cap, "_outer_limit", lambda groups, version: MIB)
    assert "less than the cap" in reason(open_cap(2 * MIB, groups=first))
    assert isinstance(open_cap(MIB, groups=first), MemoryCap)


def test_a_cap_that_kills_nobody_is_none(first):
    assert "lived" in reason(enforced(groups=first))


def test_this_machine_enforces_it_or_says_why_not():
    if isinstance(outcome := enforced(), Refusal):
        assert outcome.reason
        return
    with open_cap(64 * MIB) as made:
        argv = made.command([sys.executable, "-S", "-c", f"bytearray({100 * MIB})"])
        assert subprocess.run(argv, capture_output=True).returncode in (-9, 137)
        assert made.kills == 1 and made.peak_bytes <= made.limit_bytes
    assert not made.folder.exists()


def test_what_is_in_memory_is_seen(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(256)) * 4096 * 4)
    cold.drop([file])
    before = cold.cached_share([file])
    if before is None:  # no mincore here: the comparison is refused for that
        return
    file.read_bytes()
    assert cold.cached_share([file]) == 1.0
    cold.drop([file])
    assert cold.cached_share([file]) == before


def test_peak_memory_is_of_this_program_alone():
    """`ru_maxrss` of a child starts at its parent's: a large parent would be charged to every arm."""
    program = "from moelab.lab.peers.cold import peak_rss; print(peak_rss())"
    ballast = bytearray(200 * MIB)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert len(ballast) and (done.stdout.strip() == "None" or int(done.stdout) < 150 * MIB)
