"""Which cores compute, and which read, where there are few.

mlx hands every operation to a thread of its own, a few hundred a token, and each read wakes a reader. On two cores
these three or four threads take each other's place all the time: a hand-over to a sleeping core takes longer than many
an operation, and computing stands still while a reader runs where it ran. *Apart*, passes and mlx's thread have all
cores but the last, and reading threads have that one. (A pass that waits for experts reads too, where it computes.)
Where that leaves a single core to compute on, both threads run there as batch jobs (`SCHED_BATCH`): a hand-over then
waits for the next synchronisation instead of interrupting.

It helps where the cores are this process's own. Two processes that both do it share one core to compute on and leave
the other to their readers, so it is asked for, never assumed. Linux only: elsewhere a thread cannot choose its core.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from ...errors import ContractError, ParameterError

__all__ = ["CORES", "Cores"]

CORES = ("shared", "apart", "auto")
"""As the system likes; apart; apart on exactly two cores, else shared."""


@dataclass(frozen=True)
class Cores:
    """Numbers of cores, as the system counts them. Made by `choose`."""

    compute: frozenset[int]
    reading: frozenset[int]

    @classmethod
    def choose(cls, how: str) -> Self | None:
        """Cores of this process's own, of those that it may use; None = shared.

        Raises:
            ParameterError: "apart" where it cannot be: not on Linux, on one core, or computing on another device.
        """
        usable = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        if mx.default_device() != mx.Device(mx.cpu):
            usable = []
        if how == "shared" or (how == "auto" and len(usable) != 2):
            return None
        if len(usable) < 2:
            raise ParameterError(
                "computing and reading cannot have cores of their own here", field="cores", got=how,
                expected="Linux, mlx on the CPU, and two cores or more", fix="cores='shared', or 'auto'",
            )  # fmt: skip
        return cls(frozenset(usable[:-1]), frozenset(usable[-1:]))

    def read_on(self, thread: threading.Thread) -> None:
        """This thread, which is running, reads from now on. Raises ContractError: its cores were taken away."""
        _pin(thread.native_id, self.reading)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The calling thread computes meanwhile, and so does the mlx thread that its operations go to.

        Raises:
            ContractError: its cores were taken away since they were chosen.
        """
        cores, policy, priority = os.sched_getaffinity(0), os.sched_getscheduler(0), os.sched_getparam(0)
        batch = len(self.compute) == 1 and policy == os.SCHED_OTHER
        try:
            _pin(0, self.compute)
            if batch:
                os.sched_setscheduler(0, os.SCHED_BATCH, priority)
            with mx.stream(self._stream()):
                yield
        finally:
            os.sched_setaffinity(0, cores)
            if batch:
                os.sched_setscheduler(0, policy, priority)

    def _stream(self) -> mx.Stream:
        """One for each Python thread and choice of cores: its mlx thread has the cores of the thread that made it.

        mlx ends no thread before the process does, so every Python thread that ever computes here leaves one.
        """
        streams = _of_thread.__dict__
        if self.compute not in streams:
            streams[self.compute] = mx.new_stream(mx.cpu)
            mx.eval(mx.zeros(1, stream=streams[self.compute]))  # its thread is made by the first evaluation
        return streams[self.compute]


def _pin(thread: int, cores: frozenset[int]) -> None:
    try:
        os.sched_setaffinity(thread, cores)
    except OSError as error:
        raise ContractError(
            "these cores may not be used any more", field="cores", got=str(error), expected=sorted(cores),
            fix="load again, or cores='shared'",
        ) from error  # fmt: skip


_of_thread = threading.local()
