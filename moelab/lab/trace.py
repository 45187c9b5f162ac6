"""Gate 0 on a trace of one's own: is there anything to win on my traffic, my disk and my memory budget?

It needs routes and nothing else: no model, no predictor, no replay. Bytes of an expert and the compute time of
a token are facts of the recorded system; where they are not given, the question is answered at the ratios of
published systems, and the answer says so.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from .. import artifacts, disk
from ..errors import ParameterError
from ..flywheel import bounds, ceiling
from ..flywheel.foresight import Lookahead, Opt
from ..flywheel.gates import FAIL, PASS, Verdict, gate0
from ..flywheel.residency import Visits
from ..flywheel.systems import SYSTEMS
from ..routes import DECODED, PREFILLED, Routes, read_trace
from ..streaming.cache.eviction import Lru
from .report import show

EXIT = {PASS: 0, FAIL: 1}
REFUSED_EXIT = 2


def doctor(
    path: str | Path,
    *,
    expert_bytes: int | None = None,
    compute_ms: float | None = None,
    cache: float | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Print Gate 0 on a trace; exit code 0 pass, 1 nothing to win, 2 refused (no decoded tokens).

    Args:
        expert_bytes: of one expert, where the trace does not say.
        compute_ms: of a decoded token with every expert resident; with it, this machine's disk is judged.
        cache: share of all expert bytes that fits in memory; by default that of the judged published system.
    """
    if compute_ms is not None and not 0 < compute_ms < math.inf:
        raise ParameterError("out of range", field="compute_ms", got=compute_ms, expected="above 0, finite")
    if expert_bytes is not None and expert_bytes < 1:
        raise ParameterError("out of range", field="expert_bytes", got=expert_bytes, expected=">= 1")
    if cache is not None and not 0 < cache <= 1:
        raise ParameterError("out of range", field="cache", got=cache, expected="above 0, at most 1")
    routes = read_trace(path)
    counted = routes.phase == DECODED
    known = routes.expert_bytes is not None or expert_bytes is not None
    sizes = routes.expert_bytes if routes.expert_bytes is not None else np.full(routes.layers, expert_bytes or 1)
    sizes = np.asarray(sizes, np.int64)
    for line in describe(Path(path).name, routes, counted, sizes if known else None):
        say(line)
    if not counted.any():
        say("gate 0 refused: the trace has no decoded token, and prefill is no evidence about decode")
        return REFUSED_EXIT
    if compute_ms is not None and not known:
        raise ParameterError("bytes unknown", field="expert_bytes", got=None, expected="bytes of one expert")
    study = Study(routes, counted, sizes)
    for line in study.hits():
        say(line)
    for line in study.systems():
        say(line)
    verdict = study.judge(Path(path).name, cache, compute_ms, say)
    say(f"gate 0 {verdict.status}: {verdict.question} {verdict.reason}".rstrip())
    return EXIT[verdict.status]


def describe(name: str, routes: Routes, counted: np.ndarray, sizes: np.ndarray | None) -> list[str]:
    threads = len(np.unique(routes.thread[counted]))
    lines = [
        f"trace       {name}: {int(counted.sum()):,} decoded of {routes.tokens:,} tokens, {threads} threads, "
        f"{routes.layers} layers x {routes.experts} experts, top {routes.top_k}"
    ]
    if threads < 2:
        lines.append("            one thread has no spread between threads, so nothing below has a standard error")
    if sizes is None:
        return [
            *lines,
            "bytes       of an expert unknown: shares of bytes below are shares of experts (--expert-bytes)",
        ]
    token, total = bounds.token_bytes(sizes, routes.top_k), int(routes.experts * sizes.sum())
    return [*lines, f"bytes       {token / 2**20:,.1f} MiB of experts a token, {total / 2**30:,.2f} GiB in all"]


class Study:
    """The routes of one trace as a cache sees them, and what is asked of them."""

    def __init__(self, routes: Routes, counted: np.ndarray, sizes: np.ndarray):
        self.routes, self.counted, self.sizes = routes, counted, sizes
        self.visits = Visits.of(
            routes.ids, routes.experts, routes.thread, prefilled=routes.phase == PREFILLED, mask=routes.mask
        )
        self.total = int(routes.experts * sizes.sum())
        self.options = ceiling.CeilingOptions()

    def hits(self) -> list[str]:
        """Hit rate of LRU, of a short look-ahead and of OPT, by share of the experts in memory."""
        lines = [
            "hit rate    share of experts in memory: least recently used, 8 tokens of look-ahead, perfect eviction"
        ]
        least = bounds.token_bytes(self.sizes, self.routes.top_k)
        for share in self.options.budgets:
            budget = int(share * self.total)
            if budget < least:
                lines.append(f"{share:>8.0%}    less than one token uses ({least / self.total:.0%})")
                continue
            curves = [self._curve(policy, budget) for policy in (Lru(), Lookahead(tokens=8), Opt())]
            lines.append(f"{share:>8.0%}    " + ", ".join(_estimate(hit) for hit in curves))
        return lines

    def _curve(self, policy, budget: int):
        return bounds.hit_curve(
            self.visits,
            self.sizes,
            budgets=[budget],
            policy=policy,
            clusters=self.routes.thread,
            counted=self.counted,
        ).hits[0]

    def systems(self) -> list[str]:
        """Bounds at the read-to-compute ratios of published systems."""
        lines = [
            "at the ratio of a published system: I/O share of a token, most that prefetch can give, precision needed"
        ]
        for system in SYSTEMS.values():
            found = self._at(system.cache_fraction, system.read_to_compute)
            lines.append(f"   {system.name}, {system.cache_fraction:.0%} in memory: {_bound(found)}")
        return lines

    def _at(self, share: float, ratio: float) -> bounds.Ceiling:
        return ceiling.at_ratio(
            self.routes, self.visits, self.counted, int(share * self.total), ratio, self.options.lead
        )

    def judge(self, name: str, cache: float | None, compute_ms: float | None, say) -> Verdict:
        """Gate 0 at this machine's disk where compute time is known, else at a published system's ratio."""
        system = SYSTEMS[self.options.system]
        share = cache or system.cache_fraction
        if compute_ms is None:
            say(f"judged at   the ratio of {system.name}, {share:.0%} in memory (--compute-ms judges your own)")
            found, measured = self._at(share, system.read_to_compute), {}
        else:
            folder = artifacts.artifacts_dir()
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                profile = disk.measure(scratch, seconds=0.2, repeats=3)
            found = bounds.ceiling(
                self.visits,
                self.sizes,
                top_k=self.routes.top_k,
                budget=int(share * self.total),
                compute_s=compute_ms / 1e3,
                read_s=profile.miss_table(self.sizes, self.routes.top_k),
                lead=self.options.lead,
                clusters=self.routes.thread,
                counted=self.counted,
            )
            measured = {"io_ms": found.io_s.value * 1e3, "compute_ms": compute_ms, "disk": profile.method}
            say(f"judged at   this disk ({profile.method}), {share:.0%} in memory, {compute_ms:g} ms compute a token")
            say(f"            {_bound(found)}; the disk alone allows {show(found.roofline)} tok/s")
        return gate0(
            model=name,
            speedup_bound=found.overlap.speedup,
            precision_needed=found.precision_needed,
            smallest_speedup=self.options.smallest_speedup,
            figures={"io_share": found.overlap.io_share, "hit_rate": found.hits.value, "cache_fraction": share},
            measured=measured,
            n={"tokens": int(self.counted.sum())},
        )


def _estimate(hit) -> str:
    return f"{hit.value:.3f}" + (f" ± {hit.se:.3f}" if hit.se is not None else "")


def _bound(found: bounds.Ceiling) -> str:
    need = found.precision_needed
    words = f"{need:.2f}" if need <= 1 else "more than there is"
    return f"{found.overlap.io_share:.0%}, {found.overlap.speedup:.2f}x, {words}"
