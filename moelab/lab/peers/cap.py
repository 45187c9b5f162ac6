"""A memory cap that the kernel enforces, or the reason why there is none.

A comparison of runtimes that stream is about a model *larger than memory*. A budget that a runtime promises to keep
is not memory: page cache, a copy too many and a library's arena all stay outside it. So every arm runs in a memory
control group (version 1 or 2), which counts anonymous memory and page cache together and kills what exceeds it.
Swap is closed as well, since with it the cap would be a slow disk.

Where that cannot be had (no Linux, no rights, no controller) the answer is a `Refusal` with its reason. Nothing
is approximated by ulimits or by watching a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
PROBE_LIMIT = 64 << 20
_ENTER = 'echo $$ > "$1" || exit 125; shift; exec "$@"'


@dataclass(frozen=True)
class Refusal:
    """No cap can be enforced here, and why."""

    reason: str


@dataclass(frozen=True)
class MemoryCap:
    """A control group with a limit. Use as a context manager: leaving it removes the group.

    Attributes:
        folder: of the group; limit_bytes: what it allows; version: of the controller, 1 or 2.
    """

    folder: Path
    limit_bytes: int
    version: int

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` inside: the shell enters the group, then becomes the program."""
        return ["sh", "-c", _ENTER, "sh", str(self.folder / "cgroup.procs"), *argv]

    @property
    def peak_bytes(self) -> int | None:
        """Most that was ever charged, page cache included; None where this kernel does not keep it."""
        return _number(self.folder / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"))

    @property
    def kills(self) -> int:
        """Processes that the kernel ended because of this limit."""
        path = self.folder / ("memory.oom_control" if self.version == 1 else "memory.events")
        words = dict(line.split()[:2] for line in path.read_text().splitlines())
        return int(words.get("oom_kill", 0))

    def close(self) -> None:
        """Remove the group; page cache that is still charged to it is let go first."""
        if self.version == 1:
            _write(self.folder / "memory.force_empty", "0")
        for _ in range(50):
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError:  # the last process has ended but is not reaped yet
                time.sleep(0.02)
            else:
                return

    def __enter__(self) -> MemoryCap:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_cap(limit_bytes: int, *, groups: Path = GROUPS) -> MemoryCap | Refusal:
    """A fresh group with this limit, read back from the kernel, or the reason why there is none.

    An outer group's smaller limit would be escaped by a group of our own, so it refuses too.
    """
    if sys.platform != "linux":
        return Refusal(f"{sys.platform} has no memory control groups")
    version = 1 if (groups / "memory" / "memory.limit_in_bytes").is_file() else 2
    if version == 2 and "memory" not in _words(groups / "cgroup.controllers"):
        return Refusal("no memory controller is mounted")
    if (outer := _outer_limit(groups, version)) is not None and outer < limit_bytes:
        return Refusal(f"this process may use {outer} bytes, less than the cap of {limit_bytes}")
    handed_down = version == 1 or "memory" in _words(groups / "cgroup.subtree_control")
    if not handed_down and (problem := _write(groups / "cgroup.subtree_control", "+memory")):
        return Refusal(f"the memory controller is not handed down: {problem}")
    folder = (groups / "memory" if version == 1 else groups) / f"moelab-{uuid.uuid4().hex[:12]}"
    try:
        folder.mkdir()
    except OSError as error:
        return Refusal(f"no control group can be made: {error.strerror}")
    cap = MemoryCap(folder, limit_bytes, version)
    if problem := _limit(cap):
        cap.close()
        return Refusal(problem)
    return cap


def enforced(*, groups: Path = GROUPS) -> Refusal | None:
    """None if a process that wants more than its cap is really killed here; else why not.

    Proved by doing it: a small group, and a process that touches twice its limit.
    """
    cap = open_cap(PROBE_LIMIT, groups=groups)
    if isinstance(cap, Refusal):
        return cap
    with cap:
        program = f"bytearray({2 * PROBE_LIMIT})"
        done = subprocess.run(cap.command([sys.executable, "-S", "-c", program]), capture_output=True, text=True)
        if done.returncode == 0:
            return Refusal("a process used twice its cap and lived")
        if not cap.kills:
            return Refusal(f"a capped process failed otherwise: {done.stderr.strip()[-200:]}")
    return None


def _limit(cap: MemoryCap) -> str | None:
    """Set the limit on memory and on swap; returns the problem, if any."""
    memory, swap = (
        ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        if cap.version == 1
        else ("memory.max", "memory.swap.max")
    )
    if problem := _write(cap.folder / memory, str(cap.limit_bytes)):
        return f"the limit cannot be set: {problem}"
    page = os.sysconf("SC_PAGE_SIZE")
    if (got := _number(cap.folder / memory)) is None or not cap.limit_bytes - page < got <= cap.limit_bytes:
        return f"the kernel keeps a limit of {got}, not {cap.limit_bytes}"
    if _write(cap.folder / swap, str(cap.limit_bytes) if cap.version == 1 else "0") and _swap_bytes():
        return "swap cannot be closed to the group"
    return None


def _outer_limit(groups: Path, version: int) -> int | None:
    """Smallest limit that already binds this process, None for none."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    wanted = "memory" if version == 1 else ""
    paths = [line.split(":", 2)[2] for line in lines if wanted in line.split(":", 2)[1].split(",")]
    top = groups / "memory" if version == 1 else groups
    name = "memory.limit_in_bytes" if version == 1 else "memory.max"
    found = []
    for path in paths:
        here = top / path.lstrip("/")
        while here != top and here.is_relative_to(top):
            found.append(_number(here / name))
            here = here.parent
    return min((limit for limit in found if limit is not None), default=None)


def _swap_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("SwapTotal:")), 0)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """The number in a control file; None for `max` and for a file that is not there."""
    words = _words(path)
    return int(words[0]) if words and words[0].isdigit() else None


def _write(path: Path, text: str) -> str | None:
    """Write to a control file; returns the problem, if any."""
    try:
        path.write_text(text)
    except OSError as error:
        return error.strerror or str(error)
    return None
