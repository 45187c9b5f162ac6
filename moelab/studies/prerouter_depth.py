"""What a prerouter buys, without a clock: heads' recorded predictions through the simulator, at any depth.

The answers are real and so are the predictions: what the heads said at each token is looked up, not modelled. The
embedded models have eight MoE layers; *deeper* ones are made of them by laying several answers side by side, so that
layers 0-7 are one text's routes, 8-15 another's. Every layer then has a real layer's locality and a real head's hits.
The first layer of each further answer has no head below it; its predictions are made up with the hits of the layer
behind it: as many of its true experts, at the same places and with the same confidence, among wrong ones.

A prompt is one pass here, of a token's compute, under which its predictions would be read for nothing: so the first
token of a text has none, whenever they are issued. (In the engine it has.)

A token computes for one second and its layers take equal parts; heads cost nothing here. The device is as slow as a
study wants it: `ratio` is the time of the reads of a token without predictions, through the same cache.

Units: seconds are shares of a token's compute, bytes shares of an expert.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import ContractError
from ..routes import DECODED, PREFILLED
from ..streaming import Cache, Passes, Prefetcher, Scheduler, Simulation, VirtualDevice, policy, simulate
from ..streaming.schedule.oracle import Candidate
from ..streaming.schedule.prefetch import ISSUE

__all__ = ["Answer", "Bench", "gains", "side_by_side", "uses"]

Told = Mapping[tuple[int, int], Sequence[Candidate]]
PIN = {"hot_per_layer": 4, "decay": 0.75, "update_interval": 4}
"""Hot pins of the study of `pin_bonus`: half of the slots of a layer at a cache of two token cycles."""
POLICIES: dict[str, tuple[str, Mapping[str, float]]] = {
    "recent-lfu": ("recent-lfu", {}),
    "lru": ("lru", {}),
    "hot-pin, no bonus": ("hot-pin", {"pin_bonus": 0.0, **PIN}),
    "hot-pin, bonus 2": ("hot-pin", {"pin_bonus": 2.0, **PIN}),
}
"""Of the study of protection: its name for a policy, and which that is."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A text as the resident model goes through it.

    Attributes:
        prompt, text: tokens prefilled, and fed one by one.
        said: the model's greedy choice after each token of `text`.
        ids: `i64[T, L, K]`, T = prompt and text, and what of the text is known beyond.
        told: (pass, owner) → candidates of the owner's consumer in the next pass, the surest first; pass 0 is the
            prompt, owners are MoE layers.
    """

    prompt: list[int]
    text: list[int]
    said: list[int]
    ids: np.ndarray
    told: Mapping[tuple[int, int], Sequence[Candidate]]

    @property
    def phase(self) -> np.ndarray:
        """`u8[T]`."""
        return np.repeat(np.array([PREFILLED, DECODED], np.uint8), [len(self.prompt), len(self.text)])

    def first(self, tokens: int) -> Answer:
        """Its beginning: the prompt, and `tokens` of the text. The routes of the rest are still known."""
        return replace(self, text=self.text[:tokens], said=self.said[:tokens])


def side_by_side(answers: Sequence[Answer], experts: int, *, seed: int = 0) -> Answer:
    """One answer of `len(answers)` times the layers (see the module text).

    Raises:
        ContractError: answers of different lengths.
    """
    if len({(len(a.prompt), len(a.text)) for a in answers}) != 1:
        lengths = [(len(a.prompt), len(a.text)) for a in answers]
        raise ContractError("answers of different lengths", field="answers", got=lengths, expected="one length")
    first, draw = answers[0], random.Random(f"{seed}")
    layers, told = first.ids.shape[1], {}
    for number, answer in enumerate(answers):
        base = number * layers
        for (step, owner), candidates in answer.told.items():
            told[step, base + owner] = [(base + layer, expert, p) for layer, expert, p in candidates]
            coming = len(answer.prompt) + step
            if owner == 0 and number and coming < len(answer.ids):
                model = [(expert in answer.ids[coming, 1], p) for _, expert, p in candidates]
                told[step, base - 1] = _like(model, answer.ids[coming, 0].tolist(), base, experts, draw)
    return Answer(first.prompt, first.text, first.said, np.concatenate([a.ids for a in answers], axis=1), told)


def _like(model: list[tuple[bool, float]], truth: list[int], layer: int, experts: int, draw: random.Random):
    """Candidates of `layer` with the hits and confidences of others: `model` says of each whether it was right."""
    right = draw.sample(truth, sum(hit for hit, _ in model))
    wrong = draw.sample(sorted(set(range(experts)) - set(truth)), len(model) - len(right))
    return [(layer, (right if hit else wrong).pop(), p) for hit, p in model]


@dataclass(frozen=True, eq=False)
class Bench:
    """Answers one after the other through one cache, as often as a study wants.

    Attributes:
        readers: threads beside the asking one.
    """

    answers: Sequence[Answer]
    experts: int
    readers: int = 2

    @cached_property
    def passes(self) -> Passes:
        ids = np.concatenate([a.ids[: len(a.phase)] for a in self.answers])
        thread = np.repeat(np.arange(len(self.answers)), [len(a.phase) for a in self.answers])
        phase = np.concatenate([a.phase for a in self.answers])
        return Passes.of(ids, experts=self.experts, thread=thread, phase=phase, order="sorted")

    @cached_property
    def told(self) -> Told:
        """By pass of `passes`."""
        first = np.cumsum([0, *(1 + len(a.text) for a in self.answers)]).tolist()
        return {(at + s, layer): c for at, a in zip(first, self.answers, strict=False)
                for (s, layer), c in a.told.items() if s}  # fmt: skip

    def heads(self, step: int, layer: int) -> Sequence[Candidate]:
        """What heads said: a predictor."""
        return self.told.get((step, layer), ())[: self.passes.top_k]

    def perfect(self, step: int, layer: int) -> Sequence[Candidate]:
        """What heads should have said, where there are heads."""
        passes, to = self.passes, layer + 1
        ends = step + 1 == len(passes) or passes.thread[step + 1] != passes.thread[step]
        if ends or to == passes.layers or not passes.decoded[step]:
            return ()
        return [(to, key - to * self.experts, 1.0) for key in passes.keys[step + 1][to]]

    def run(
        self, cycles: float, policy_name: str, bytes_per_s: float, *, who: str | None = None, issue: str = "in_forward",
        threshold: float = 0.0, reads: bool = True, protect: bool = True, asking_reads: bool = True,
    ) -> Simulation:  # fmt: skip
        """Decode once.

        Args:
            cycles: slots, in experts of one token. policy_name: of `POLICIES` or `eviction.POLICIES`.
            who: "heads", "perfect", or None.
            reads, protect: what a prediction may do. asking_reads: as in `simulate`.
        """
        layers, K = self.passes.layers, self.passes.top_k
        name, options = POLICIES.get(policy_name, (policy_name, {}))
        cache = Cache(
            layers=layers, experts=self.experts, slot_bytes=[1] * layers, budget=int(cycles * layers * K), top_k=K,
            policy=policy(name, **options), below_cycle=cycles < 1,
        )  # fmt: skip
        scheduler, predicted = Scheduler(max_inflight_bytes=2 * self.readers), {}
        if who is not None:
            prefetcher = Prefetcher(
                cache, scheduler, nbytes=[1] * layers, byte_budget=1 << 62 if reads else 0, threshold=threshold,
                protect=protect,
            )  # fmt: skip
            predicted = {"predictor": getattr(self, who), "issue": issue, "tokens_ahead": 1, "prefetcher": prefetcher}
        return simulate(
            self.passes, nbytes=[1] * layers, cache=cache, scheduler=scheduler,
            device=VirtualDevice(latency_s=0.0, bytes_per_s=bytes_per_s), compute_s=1 / layers, threads=self.readers,
            asking_reads=asking_reads, **predicted,
        )  # fmt: skip

    def off_bytes(self, cycles: float, policy_name: str) -> float:
        """Bytes a token without predictions, whatever the device."""
        return self.run(cycles, policy_name, 1.0, asking_reads=False).bytes_per_token

    def off(self, cycles: float, policy_name: str, ratio: float) -> tuple[Simulation, float]:
        """The run without predictions whose reads take `ratio` of a token's compute, and the device's rate."""
        rate = max(self.off_bytes(cycles, policy_name), 1e-9) / ratio
        return self.run(cycles, policy_name, rate), rate


def gains(
    bench: Bench,
    cells: Sequence[tuple[float, float]],
    *,
    policy_name: str,
    thresholds: Sequence[float],
    perfect: bool = True,
) -> list[dict[str, Any]]:
    """One row a cell `(cycles, ratio)`, predictor, issue point and threshold; `perfect` heads have no threshold."""
    rows, predictors = [], {"heads": thresholds} | ({"perfect": [0.0]} if perfect else {})
    for cycles, ratio in cells:
        off, rate = bench.off(cycles, policy_name, ratio)
        cell = {"layers": bench.passes.layers, "cycles": cycles, "ratio": ratio, "policy": policy_name}
        rows.append(cell | {"who": "off", "issue": None, "threshold": None} | _figures(off, off))
        for who, asked in predictors.items():
            for issue in ISSUE:
                for threshold in asked:
                    on = bench.run(cycles, policy_name, rate, who=who, issue=issue, threshold=threshold)
                    sure = None if who == "perfect" else threshold
                    rows.append(cell | {"who": who, "issue": issue, "threshold": sure} | _figures(off, on))
    return rows


def uses(bench: Bench, cycles: float, ratio: float, *, threshold: float) -> list[dict[str, Any]]:
    """What a prediction does to bytes and hits when it may protect, read, or both, under each policy of `POLICIES`.

    Protection alone names all that heads say: it costs nothing. With reads it names what is read.
    """
    rows = []
    for name in POLICIES:
        off, rate = bench.off(cycles, name, ratio)
        rows.append({"policy": name, "use": "nothing"} | _figures(off, off))
        for use, allowed in {
            "protect": {"reads": False},
            "read": {"protect": False, "threshold": threshold},
            "read and protect": {"threshold": threshold},
        }.items():
            on = bench.run(cycles, name, rate, who="heads", **allowed)
            rows.append({"policy": name, "use": use} | _figures(off, on))
    return rows


def _figures(off: Simulation, on: Simulation) -> dict[str, Any]:
    tokens = off.tokens
    possible = off.seconds - off.bound_s
    figures = {
        "tokens": tokens,
        "seconds": on.seconds / tokens,
        "bound": off.bound_s / tokens,
        "speedup": off.seconds / on.seconds,
        "share": None if on is off or possible <= 0 else (off.seconds - on.seconds) / possible,
        "exposed": on.exposed_s / tokens,
        "nbytes": on.bytes_per_token,
        "bytes_ratio": on.bytes_per_token / off.bytes_per_token if off.bytes_per_token else None,
        "hits": on.timely_recall,
        "useful": None if on is off or not on.prefetch_bytes.any() else on.useful_ratio,
    }
    return figures
