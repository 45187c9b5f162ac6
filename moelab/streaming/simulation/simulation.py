"""What a simulated decode did, and how far from the possible it was.

A figure alone says little: a run may hide all of its reads and be slower than one that hid nothing. So each
stands beside its bounds.

* *Timely recall*: of the experts that were selected, those resident when their router named them. The `off` run's
  is its hit rate.
* *Timely miss recall*: the same among those that the cache did not hold of itself: what a predictor earns.
* *Hidden fraction*: 1 - exposed wait / device time, with device time the union of the reads' intervals.
* *Bound*: what overlap permits. The reads of a pass lie under the compute of one pass, and nobody can foresee the
  first visit of all:

      T_bound = w + Σ_t max(C_t, D_t),   D = max(Σ bytes / bandwidth, Σ reads · (latency + size / bandwidth) / threads)

  with C_t a pass's compute and synchronisations, D_t the least device time for what demand alone reads in it, and
  w the wait of the first visit. A prediction that looks further ahead can borrow time from passes that read
  little; what no prediction can beat, whatever it knows, is the *floor* max(C + w, r + D) over all passes
  together (r the time until the first ids are known).
* *Share of the possible*: (T_off - T) / (T_off - T_bound); negative when prefetch loses.

Both are of a run without prediction. What can be read under a prompt before the first decoded pass is not in them: for
many short answers they are a little too strict.

Shapes: P passes, L MoE layers. Times are seconds, sizes bytes. Only decoded passes count in the summaries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ContractError

__all__ = ["Simulation", "share_of_possible"]


@dataclass(frozen=True, eq=False)
class Simulation:
    """Result of `simulate`.

    Attributes:
        issue: `f64[P,L]`, when the first read for this visit was issued; nan where it needed none.
        route: `f64[P,L]`, when its ids were known: the deadline of every read for it.
        ready: `f64[P,L]`, when its experts were all resident; the time of the last read, or `route` without any.
        consume: `f64[P,L]`, when those of its experts that had been missing began to be computed; `route` without any.
        exposed: `f64[P,L]`, time in which nothing was computed, waiting for reads.
        behind: `f64[P,L]`, how much longer the misses took than on a device without speculative reads.
        used, hits, timely, late: `i64[P,L]`, experts selected; resident at `route`; of these, resident only because
            they were prefetched; not resident, but already being prefetched.
        demand_bytes, prefetch_bytes: `i64[P,L]`, bytes of reads that began in this visit.
        evicted: `i64[P,L]`, residents that prefetches displaced in this visit.
        start, end: `f64[P]`, of each pass; `end` includes waiting at a synchronous boundary.
        compute_s: `f64[P]`, compute and synchronisations.
        boundary_wait: `f64[P]`, waiting at its end.
        busy_s: `f64[P]`, device time within the pass.
        device_floor_s: `f64[P]`, least device time for what was read in it (the module text's D).
        decoded: `bool[P]`.
        useful_bytes, late_bytes, wasted_bytes: of prefetches: used; used, but demanded before they had come (also
            useful); never used.
        counters: the cache's and the scheduler's own, as they stood at the end.
    """

    issue: np.ndarray
    route: np.ndarray
    ready: np.ndarray
    consume: np.ndarray
    exposed: np.ndarray
    behind: np.ndarray
    used: np.ndarray
    hits: np.ndarray
    timely: np.ndarray
    late: np.ndarray
    demand_bytes: np.ndarray
    prefetch_bytes: np.ndarray
    evicted: np.ndarray
    start: np.ndarray
    end: np.ndarray
    compute_s: np.ndarray
    boundary_wait: np.ndarray
    busy_s: np.ndarray
    device_floor_s: np.ndarray
    decoded: np.ndarray
    useful_bytes: int
    late_bytes: int
    wasted_bytes: int
    counters: dict[str, Any]

    def _sum(self, array: np.ndarray) -> float:
        return array[self.decoded].sum().item()

    @property
    def tokens(self) -> int:
        return int(self.decoded.sum())

    @property
    def pass_s(self) -> np.ndarray:
        """`f64[P]`, seconds of each pass."""
        return self.end - self.start

    @property
    def seconds(self) -> float:
        """Of all decoded passes."""
        return self._sum(self.pass_s)

    @property
    def seconds_per_token(self) -> float:
        return self.seconds / self.tokens if self.tokens else math.nan

    @property
    def exposed_s(self) -> float:
        """Time in which nothing was computed because of reads."""
        return self._sum(self.exposed) + self._sum(self.boundary_wait)

    @property
    def hidden_fraction(self) -> float:
        """1 - exposed wait / device time; nan where nothing was read."""
        busy = self._sum(self.busy_s)
        return 1 - self.exposed_s / busy if busy > 0 else math.nan

    @property
    def timely_recall(self) -> float:
        return _share(self._sum(self.hits), self._sum(self.used))

    @property
    def timely_miss_recall(self) -> float:
        earned = self._sum(self.timely)
        return _share(earned, earned + self._sum(self.used) - self._sum(self.hits))

    @property
    def useful_ratio(self) -> float:
        """Prefetched bytes that were used, of those read; whole run."""
        return _share(self.useful_bytes, int(self.prefetch_bytes.sum()))

    @property
    def bytes_per_token(self) -> float:
        """Physical expert bytes per decoded token."""
        return _share(self._sum(self.demand_bytes) + self._sum(self.prefetch_bytes), self.tokens)

    @property
    def bound_s(self) -> float:
        """T_bound of the module text, for all decoded passes. Of a run without prediction."""
        return self._first()[0] + self._sum(np.maximum(self.compute_s, self.device_floor_s))

    @property
    def floor_s(self) -> float:
        """Seconds below which no prediction comes with these reads."""
        first, known = self._first()
        return max(self._sum(self.compute_s) + first, known + self._sum(self.device_floor_s))

    def _first(self) -> tuple[float, float]:
        """Wait of the very first visit and the time to its ids; nothing where a prompt came before."""
        if not self.decoded[0]:
            return 0.0, 0.0
        return float(self.exposed[0, 0]), float(self.route[0, 0] - self.start[0])

    def summary(self) -> dict[str, float]:
        """The figures above by name, and mean bytes and events a decoded token."""
        tokens = max(self.tokens, 1)
        return {
            "tokens": self.tokens,
            "seconds_per_token": self.seconds_per_token,
            "tokens_per_s": _share(self.tokens, self.seconds),
            "compute_s": self._sum(self.compute_s) / tokens,
            "busy_s": self._sum(self.busy_s) / tokens,
            "exposed_s": self.exposed_s / tokens,
            "hidden_fraction": self.hidden_fraction,
            "timely_recall": self.timely_recall,
            "timely_miss_recall": self.timely_miss_recall,
            "demand_bytes": self._sum(self.demand_bytes) / tokens,
            "prefetch_bytes": self._sum(self.prefetch_bytes) / tokens,
            "useful_ratio": self.useful_ratio,
            "evicted_by_prefetch": self._sum(self.evicted) / tokens,
            "behind_s": self._sum(self.behind) / tokens,
        }


def share_of_possible(off: Simulation, on: Simulation) -> float:
    """(T_off - T) / (T_off - T_bound): 1 is perfect, negative slower than no prediction; nan with nothing to win.

    Raises:
        ContractError: the runs are not of the same passes, or `off` has prefetched.
    """
    if not np.array_equal(off.used, on.used) or not np.array_equal(off.decoded, on.decoded):
        raise ContractError("runs of other passes", field="used", got=on.used.shape, expected=off.used.shape)
    if off.prefetch_bytes.any():
        raise ContractError(
            "the run compared with has prefetched",
            field="prefetch_bytes",
            got=int(off.prefetch_bytes.sum()),
            expected=0,
        )
    possible = off.seconds - off.bound_s
    return (off.seconds - on.seconds) / possible if possible > 1e-9 * off.seconds else math.nan


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
