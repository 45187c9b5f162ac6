"""Times that are figures: taken one at a time, while everything else of the same run stands still.

Two kernels with two workers each share two cores, and would time each other. A section under `timing()` waits for its
turn, stops the other processes of its run, and lets them go on at the end. The run is whatever has put its process
number into `MOELAB_RUN`: `moelab run`, or else the process that started workers (`models.run_workers`), as a kernel
under JupyterLab does. Without one only the turn is taken: nobody else's processes are touched.

Who was stopped must go on, whatever happens. At the end of the section this process sees to it; should it die before, a
watchman does, a process of its own that waits for the other end of a pipe to close.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from . import artifacts

__all__ = ["RUN", "others", "timing", "turn"]

RUN = "MOELAB_RUN"
"""Environment variable: process number of the run that a process belongs to."""
WATCHMAN = 'while read -r pid; do stopped="$stopped $pid"; done; kill -CONT $stopped 2>/dev/null; true'


@contextmanager
def timing() -> Iterator[None]:
    """A section whose times are figures. Not to be nested; nothing within may wait for another process of the run."""
    with turn(), _stopped():
        yield


@contextmanager
def turn() -> Iterator[None]:
    """Nobody takes times meanwhile: whoever is about to start a process waits for that."""
    from filelock import FileLock

    folder = artifacts.artifacts_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".timing.lock"):
        yield


def others(run: int) -> list:
    """Processes of a run that are neither this one, nor above it, nor begun by it: parents before their children."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        me = psutil.Process()
        mine = {me.pid, *(p.pid for p in me.parents()), *(p.pid for p in me.children(recursive=True))}
        return [p for p in psutil.Process(run).children(recursive=True) if p.pid not in mine]
    return []


@contextmanager
def _stopped() -> Iterator[None]:
    """The others stand still meanwhile. The watchman hears of each before that one is stopped."""
    if RUN not in os.environ:
        yield
        return
    import psutil

    with subprocess.Popen(["sh", "-c", WATCHMAN], stdin=subprocess.PIPE, start_new_session=True) as watchman:
        stopped: dict[int, psutil.Process] = {}
        try:
            # A process that was just being started is found at the next look.
            while found := [p for p in others(int(os.environ[RUN])) if p.pid not in stopped]:
                for process in found:
                    watchman.stdin.write(f"{process.pid}\n".encode())
                    watchman.stdin.flush()
                    stopped[process.pid] = process
                    with suppress(psutil.NoSuchProcess):
                        process.suspend()
            yield
        finally:
            for process in stopped.values():
                with suppress(psutil.NoSuchProcess):
                    process.resume()
