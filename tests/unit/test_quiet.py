"""While times are taken the other processes of a run stand still, and afterwards they go on, whatever happened."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from moelab import models, quiet

WORK = """
import sys, time
from pathlib import Path
for number in range(10**6):
    Path(sys.argv[1]).write_text(str(number))
    time.sleep(0.002)
"""
TAKE_TIMES = """
import sys, time
from moelab import quiet
with quiet.timing():
    print("quiet", flush=True)
    sys.stdin.readline()
"""


def start(code, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.fixture
def own_root(tmp_path, monkeypatch):
    """A lock of its own, so that tests do not wait for each other's."""
    monkeypatch.setenv("MOELAB_ROOT", str(tmp_path))


@pytest.fixture
def worker(tmp_path):
    """Another process of this run, that counts; yields a function that tells whether it does."""
    count = tmp_path / "count"
    with start(WORK, str(count)) as process:
        while not count.is_file():
            time.sleep(0.01)

        def works(within=10.0):
            before, until = count.read_text(), time.monotonic() + within
            while time.monotonic() < until:
                time.sleep(0.02)
                if count.read_text() not in ("", before):  # it may be caught between emptying and writing
                    return True
            return False

        yield works
        process.kill()


def taking_times(**environment):
    process = start(TAKE_TIMES, **environment)
    assert process.stdout.readline() == "quiet\n"
    return process


def end(process):
    process.communicate("\n", timeout=30)
    assert process.returncode == 0


def test_others_stand_still_and_go_on(own_root, worker):
    assert worker()
    with taking_times(**{quiet.RUN: str(os.getpid())}) as process:
        assert not worker(within=0.5)
        end(process)
    assert worker()


def test_others_go_on_when_the_process_that_takes_times_is_killed(own_root, worker):
    with taking_times(**{quiet.RUN: str(os.getpid())}) as process:
        assert not worker(within=0.5)
        process.kill()
        assert worker()


def test_others_go_on_when_the_watchman_is_killed(own_root, worker):
    with taking_times(**{quiet.RUN: str(os.getpid())}) as process:
        assert not worker(within=0.5)
        (watchman,) = psutil.Process(process.pid).children()
        watchman.kill()
        end(process)
    assert worker()


def test_others_go_on_after_an_error(own_root, worker):
    with start(TAKE_TIMES + "    sys.exit(3)", **{quiet.RUN: str(os.getpid())}) as process:
        assert process.stdout.readline() == "quiet\n" and not worker(within=0.5)
        process.communicate("\n", timeout=30)
    assert process.returncode == 3 and worker()


def test_nobody_is_touched_outside_of_a_run(own_root, worker, monkeypatch):
    monkeypatch.delenv(quiet.RUN, raising=False)
    with taking_times() as process:
        assert worker()
        end(process)


def test_one_at_a_time_even_of_different_runs(own_root):
    with taking_times() as first:
        second = start(TAKE_TIMES)
        time.sleep(1.0)
        assert second.poll() is None
        end(first)
        with second:
            assert second.stdout.readline() == "quiet\n"
            end(second)


def test_neither_ancestors_nor_children_are_others():
    with start(WORK, os.devnull) as child:
        assert child.pid not in {process.pid for process in quiet.others(os.getppid())}
        assert not {process.pid for process in quiet.others(os.getpid())}
        child.kill()


def run_of_this_process():
    return os.environ[quiet.RUN]


def test_workers_belong_to_the_run_of_the_process_that_started_them(monkeypatch):
    monkeypatch.delenv(quiet.RUN, raising=False)
    assert models.run_workers(run_of_this_process, [{}]) == [str(os.getpid())]
    monkeypatch.setenv(quiet.RUN, "7")
    assert models.run_workers(run_of_this_process, [{}]) == ["7"]
