"""A disk as arithmetic: when does a read that is asked for now begin, and when are its bytes there?

`VirtualDevice` is one clock for everybody who reads. Every read waits `latency_s`, side by side with the
others, then all share one link of `bytes_per_s`, in the order in which they were booked. With d reads of s
bytes in flight that gives the rate of `disk_profile.declared`, min(bandwidth, d·s / (latency + s/bandwidth)).
It knows no real time: `book(now, nbytes)` is a sum and a maximum. The simulator books on a simulated clock,
and `Throttle` books on the real one and waits until the answer, so that a study's disk and its simulation
follow the same rule to the last bit. (A sleep in every thread would give N threads N times the bandwidth.)

Time during which a device works is the *union* of its reads' intervals: the sum would grow with the queue.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from ...errors import ContractError

__all__ = ["Throttle", "VirtualDevice"]

_PR_SET_TIMERSLACK = 29  # linux/prctl.h; nanoseconds


class VirtualDevice:
    """One device. Not thread-safe: one owner at a time (`Throttle` has the lock).

    Args:
        latency_s: wait of every read, >= 0.
        bytes_per_s: what all reads share, > 0.
        lanes: reads that the device works on at once, >= 1; a further one begins when the oldest of these is
            done. None = as many as are asked for.

    Attributes:
        reads, nbytes: booked since `reset`.
        busy_s: union of the reads' intervals [start, done].

    Raises:
        ContractError: figures out of these ranges.
    """

    def __init__(self, *, latency_s: float, bytes_per_s: float, lanes: int | None = None):
        for field, value, ok, expected in (
            ("latency_s", latency_s, math.isfinite(latency_s) and latency_s >= 0, "finite, >= 0"),
            ("bytes_per_s", bytes_per_s, bytes_per_s > 0, "> 0"),
            ("lanes", lanes, lanes is None or lanes >= 1, ">= 1, or None"),
        ):
            if not ok:
                raise ContractError("no such device", field=field, got=value, expected=expected)
        self.latency_s, self.bytes_per_s, self.lanes = latency_s, bytes_per_s, lanes
        self.reset()

    @classmethod
    def of_rates(cls, single: float, deep: float, *, size: int) -> VirtualDevice:
        """The device that gives reads of `size` bytes these rates: one at a time, and many in flight.

        What was seen with many is taken for the bandwidth, also where a deeper queue would have given more. A disk that
        is no faster with many in flight has no latency to hide. In between, a real disk may differ from `rate`.
        """
        return cls(latency_s=max(0.0, size / single - size / deep), bytes_per_s=deep)

    def rate(self, size: float, depth: float) -> float:
        """Bytes a second of reads of `size` bytes with `depth` in flight, in the long run."""
        depth = depth if self.lanes is None else min(depth, self.lanes)
        one = self.latency_s + size / self.bytes_per_s
        return min(self.bytes_per_s, depth * size / one) if one else math.inf

    def least_seconds(self, reads: np.ndarray, sizes: np.ndarray, depth: int) -> np.ndarray:
        """Least time for `reads [..., L]` reads of `sizes [L]` bytes with `depth` in flight at most: `[...]`.

        The link carries the bytes, and each of `depth` places is taken for the latency and the bytes of its reads.
        """
        depth = depth if self.lanes is None else min(depth, self.lanes)
        link = sizes / self.bytes_per_s
        return np.maximum((reads * link).sum(-1), (reads * (self.latency_s + link)).sum(-1) / depth)

    def reset(self) -> None:
        """An idle device at time -inf, with nothing counted."""
        self.reads, self.nbytes, self.busy_s = 0, 0, 0.0
        self._link = self._busy_until = -math.inf
        self._done: deque[float] = deque(maxlen=self.lanes or 1)

    def book(self, now: float, nbytes: int) -> tuple[float, float]:
        """Ask for `nbytes` at `now`: the time at which the device takes the read up, and at which it is done.

        Reads are served in the order in which they are booked.
        """
        start = now
        if self.lanes is not None and len(self._done) == self.lanes:
            start = max(now, self._done[0])
        done = max(start + self.latency_s, self._link) + nbytes / self.bytes_per_s
        self._link = done
        self._done.append(done)
        self.busy_s += max(0.0, done - max(start, self._busy_until))
        self._busy_until = max(done, self._busy_until)
        self.reads += 1
        self.nbytes += nbytes
        return start, done

    def idle_copy(self) -> VirtualDevice:
        """Another device of the same figures."""
        return VirtualDevice(latency_s=self.latency_s, bytes_per_s=self.bytes_per_s, lanes=self.lanes)

    def busy_by(self, now: float) -> float:
        """Seconds that the device has worked until `now`, which is not before the start of any booked read."""
        return self.busy_s - max(0.0, self._busy_until - now)


class Throttle:
    """A virtual device in real time, shared by all threads: how a store with a faster disk keeps to it.

    A read is booked before its bytes are fetched, so the true read runs inside its virtual time; only where the
    true disk is slower than the declared one does the wait come too late (`late` counts those).

        with throttle.read(nbytes):
            ...  # fetch the bytes
        # here the virtual device is done

    Args:
        device: shared virtual device; book it through one throttle only.
        spin_s: of each wait, the last part that is not slept. It yields the interpreter at each turn, but not the
            core, which the model may need: so it is short, and timers are made as fine as the system allows.

    Attributes:
        reads, late: reads so far, and those that the true disk finished too late.
        virtual_s: of each read, seconds from its booking to its virtual end, in the order of booking.
        overslept_s: of all reads, seconds from the virtual end to when the reading thread really went on.
    """

    def __init__(self, device: VirtualDevice, *, spin_s: float = 25e-6, clock: Callable[[], float] = time.perf_counter):
        self.device, self.spin_s = device, spin_s
        self.reads, self.late, self.overslept_s = 0, 0, 0.0
        self.virtual_s: list[float] = []
        self._clock, self._lock = clock, threading.Lock()

    @contextmanager
    def read(self, nbytes: int) -> Iterator[None]:
        """Book a read now; leaving the block waits until the device is done with it. A failed block does not wait."""
        with self._lock:  # the clock is read inside, so that bookings are in the order of time
            now = self._clock()
            _, done = self.device.book(now, nbytes)
            self.virtual_s.append(done - now)
        yield
        late = self._clock() > done
        self.wait(done)
        with self._lock:
            self.reads += 1
            self.late += late
            self.overslept_s += self._clock() - done

    def wait(self, until: float) -> None:
        """Sleep to shortly before `until`, then spin. Both release the interpreter's lock."""
        _fine_timers()
        while (left := until - self._clock()) > 0:
            time.sleep(max(0.0, left - self.spin_s))


_timers = threading.local()


def _fine_timers() -> None:
    """Let this thread's sleeps end on time: Linux rounds them up by 50 microseconds unless a thread asks not to."""
    if not getattr(_timers, "fine", False):
        _timers.fine = True
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
