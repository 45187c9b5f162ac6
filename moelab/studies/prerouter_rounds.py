"""The measured part of the prerouter's gain: arms by turns on one text after another, at one cache size at a time.

Every arm has an engine, and so a cache, of its own, and goes through a first text that does not count. Then each text
is one round, in which every arm and the compute-only engine (`full`) take a turn; the order is reversed every other
round. Figures are paired within a round.

Times are seconds, sizes bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ContractError
from ..streaming import EngineOptions, StreamingEngine, VirtualDevice
from .prerouter_arms import ARMS, REROUTED, UNSLOWED, Between, Turn, feed, install
from .prerouter_depth import Answer, Bench

__all__ = ["EVERYTHING", "Rounds", "head_cost", "rows_of"]

EVERYTHING = 1 << 60
"""A budget that no model exceeds."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rounds:
    """What all caches share.

    Attributes:
        full: the engine that holds every expert.
        answers: the first of them does not count.
        cycle_bytes: of one token's experts; `expert_bytes` of a read.
        layer_s: `[L]`, compute-only seconds; `token_s` of a token.
        options: of every engine.
    """

    full: StreamingEngine
    path: Path
    weights: Path
    answers: Sequence[Answer]
    cycle_bytes: int
    expert_bytes: int
    layer_s: Sequence[float]
    token_s: float
    threshold: float
    options: Mapping[str, Any]

    def at(self, cycles: float, ratios: Sequence[float | None]) -> list[list[dict[str, Any]]]:
        """Rows of each ratio of reads to compute; None = the disk as it is.

        Raises:
            ContractError: an arm that keeps its own router said other tokens than the compute-only engine.
        """
        bench = Bench(self.answers, self.full.store.experts, self.options["threads"])
        nbytes = self.expert_bytes * bench.off_bytes(cycles, self.options["policy"])
        found = []
        with ExitStack() as stack:
            arms = {name: self._arm(stack, name, cycles) for name in ARMS}
            for name, arm in arms.items():
                _turn(name, arm, self.answers[0])
            for ratio in ratios:
                rate = None if ratio is None else nbytes / (ratio * self.token_s)
                turns: dict[str, list[Turn]] = {name: [] for name in ("full", *ARMS)}
                for number, answer in enumerate(self.answers[1:]):
                    for name in list(turns)[:: -1 if number % 2 else 1]:
                        turns[name].append(_turn(name, arms.get(name, (self.full, None)), answer, rate))
                found.append(rows_of(turns, self.expert_bytes, rate))
        return found

    def _arm(self, stack: ExitStack, name: str, cycles: float) -> tuple[StreamingEngine, Between | None]:
        device = VirtualDevice(latency_s=0.0, bytes_per_s=UNSLOWED)
        budget = int(cycles * self.cycle_bytes)
        options = EngineOptions(cache_bytes=budget, below_cycle=cycles < 1, device=device, **self.options)
        engine = stack.enter_context(StreamingEngine.load(self.path, options))
        if ARMS[name] is None:
            return engine, None
        prerouter, between = install(
            engine, self.weights, *ARMS[name], threshold=self.threshold, layer_s=self.layer_s
        )  # fmt: skip
        stack.enter_context(prerouter)
        return engine, between


def _turn(
    name: str, arm: tuple[StreamingEngine, Between | None], answer: Answer, bytes_per_s: float | None = None
) -> Turn:
    engine, between = arm
    if between is not None:
        between.begins(answer)
    turn = feed(engine, answer.prompt, answer.text, bytes_per_s=bytes_per_s)
    if not name.startswith(REROUTED) and turn.said != answer.said:
        raise ContractError("predictions changed the answer", field=name, got=turn.said, expected=answer.said)
    return turn


def rows_of(turns: Mapping[str, Sequence[Turn]], expert_bytes: int, rate: float | None) -> list[dict[str, Any]]:
    """One row an arm: medians over texts with least and greatest, and every text's figure; paired ones within a round.

    `io` are the reads of `off` on the declared device, on an undeclared one what it waited for them; `bound` is the
    longer of compute and `io`, token by token. `share` leaves out a round in which nothing was to be won.
    """
    computes = [turn.seconds for turn in turns["full"]]
    reads = [turn.waited if rate is None else turn.missing * expert_bytes / rate for turn in turns["off"]]
    bounds = [float(np.maximum(c, w).mean()) for c, w in zip(computes, reads, strict=True)]
    rows = []
    for name in ARMS:
        rounds = list(zip(turns["off"], turns[name], bounds, strict=True))
        won = [(off.seconds - on.seconds) / (off.seconds - b) for off, on, b in rounds if off.seconds > 1.001 * b]
        row = {"arm": name, "n": len(rounds), "compute": statistics.median(computes)}
        row |= {"io": float(np.concatenate(reads).mean()), "bound": statistics.median(bounds)}
        for figure, values in {
            "seconds": [on.seconds for _, on, _ in rounds],
            "exposed": [on.exposed for _, on, _ in rounds],
            "nbytes": [on.nbytes for _, on, _ in rounds],
            "speedup": [off.seconds / on.seconds for off, on, _ in rounds],
            "bytes_ratio": [on.nbytes / off.nbytes for off, on, _ in rounds if off.nbytes],
            "share": [] if name == "off" else won,
        }.items():
            row |= _spread(figure, values)
        rows.append(row | {"exposed_each": [on.exposed for _, on, _ in rounds],
                           "nbytes_each": [on.nbytes for _, on, _ in rounds]})  # fmt: skip
    return rows


def head_cost(
    full: StreamingEngine, weights: Path, answers: Sequence[Answer], layer_s: Sequence[float]
) -> list[dict[str, Any]]:
    """Seconds a token that heads take where every expert is resident, text by text against no heads."""
    rows, plain = [], [feed(full, a.prompt, a.text).seconds for a in answers]
    for issue in ("in_forward", "async_boundary"):
        with install(full, weights, "heads", issue, threshold=0.0, layer_s=layer_s)[0]:
            took = [feed(full, a.prompt, a.text).seconds for a in answers]
        extra = [b - a for a, b in zip(plain, took, strict=True)]
        rows.append({"issue": issue, "n": len(extra), "token": statistics.median(plain)} | _spread("extra", extra))
    return rows


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    """Median, least and greatest; None of no values."""
    if not values:
        return dict.fromkeys((name, f"{name}_least", f"{name}_greatest"))
    return {name: statistics.median(values), f"{name}_least": min(values), f"{name}_greatest": max(values)}
