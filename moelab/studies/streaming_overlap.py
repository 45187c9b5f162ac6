"""How much of its reading a token can hide: the engine on a throttled store, arms by turns, simulated beside measured.

Reading early reads no fewer bytes. It can at most put a token's reads under its computing, so a token of compute C and
reads D takes max(C, D) instead of C + D: the *bound*, with the bytes of `off`. (Predictions also protect residents from
eviction: an arm that so reads fewer bytes than `off` may beat it, and its share exceed 1.) What an arm wins is its
*share of the possible*, (T_off - T) / (T_off - T_bound). The arms all have a perfect oracle, so they differ in one
thing: when a prediction is issued. `in_forward` issues inside the pass, one or two layers ahead; at the end of a pass
`async_boundary` issues for the whole next pass and goes on, `step_boundary` also waits until all of it has been read.

The embedded models' experts are tiny, so the store is slowed to a declared disk on which the misses of a token take
½, 1 or 2 times its compute. Each arm has an engine, and so a cache, of its own; arms take turns, each after a first
answer that does not count. The same routes then go through the simulator, with the compute measured here.

Times are seconds, sizes bytes. `full` is the engine with every expert resident: the compute-only arm.
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
from ..models.runtime import synchronisation_s
from ..routes import DECODED
from ..streaming import (
    Cache,
    EngineOptions,
    Issuer,
    Oracle,
    Passes,
    Scheduler,
    Simulation,
    StreamingEngine,
    VirtualDevice,
    policy,
    share_of_possible,
    simulate,
)
from .streaming_answer import Recorder, Run, answer

__all__ = ["ARMS", "PAGE_ARMS", "Rig", "overlap"]

ARMS: dict[str, tuple[str, int | None] | None] = {
    "off": None,
    "in_forward, 1 layer ahead": ("in_forward", 1),
    "in_forward, 2 layers ahead": ("in_forward", 2),
    "in_forward, 4 layers ahead": ("in_forward", 4),
    "async_boundary": ("async_boundary", None),
    "step_boundary": ("step_boundary", None),
}
"""Issue point and visits ahead of the oracle; None = one whole pass."""
PAGE_ARMS = tuple(arm for arm in ARMS if not arm.startswith("in_forward, 4"))
"""What notebook 80 has time for."""
OWN_CORES = "auto"
"""On two cores computing and reading have one each, with and without prediction: what differs is what an arm does, and
not which threads the system lets run."""
EVERYTHING = 1 << 60
"""A budget that no model exceeds: a cache never has more slots than experts."""


@dataclass(frozen=True, eq=False)
class Rig:
    """What every arm shares: the recorded answer, compute-only times, and the shape of cache and queue.

    Attributes:
        passes: of the whole answer, its prompt included; `decoded` of its decoded passes alone.
        layer_s: `[L]`, compute-only seconds of each layer; `token_s` of a token. Layers have the shares that medians
            over tokens give them: a token that the machine slowed would move them.
        inflight: bytes of reads in progress at most.
    """

    want: list[int]
    passes: Passes
    decoded: Passes
    layer_s: np.ndarray
    token_s: float
    sync_s: float
    budget: int
    policy: str
    readers: int
    inflight: int
    slot_bytes: tuple[int, ...]
    read_bytes: tuple[int, ...]
    precision: str

    def options(self, *, budget: int | None = None, device: VirtualDevice | None = None) -> EngineOptions:
        return EngineOptions(
            cache_bytes=budget or self.budget, policy=self.policy, device=device, threads=self.readers,
            max_inflight_bytes=self.inflight, precision=self.precision, cores=OWN_CORES,
        )  # fmt: skip

    def issuer(self, engine: StreamingEngine, arm: str) -> Issuer | None:
        if ARMS[arm] is None:
            return None
        point, lead = ARMS[arm]
        oracle = Oracle(self.decoded, lead=lead or self.passes.layers)
        return Issuer(engine, oracle, compute_s=self.layer_s, issue=point)

    def simulated(self, arm: str, bytes_per_s: float, token_s: float, wake_s: float) -> Simulation:
        """The same answer through the simulator; a token computes for `token_s`, threads wake `wake_s` late."""
        scale = token_s / self.token_s
        layers = np.maximum(self.layer_s * scale - self.sync_s, 0)
        rest = max(token_s - float(layers.sum()) - self.sync_s * len(layers), 0.0)
        predicted = {}
        if ARMS[arm] is not None:
            point, lead = ARMS[arm]
            predicted = {"predictor": Oracle(self.passes, lead=lead or self.passes.layers), "issue": point}
        cache = Cache(
            layers=self.passes.layers, experts=self.passes.experts, slot_bytes=self.slot_bytes, budget=self.budget,
            policy=policy(self.policy), top_k=self.passes.top_k,
        )  # fmt: skip
        return simulate(
            self.passes, nbytes=self.read_bytes, cache=cache, scheduler=Scheduler(max_inflight_bytes=self.inflight),
            device=VirtualDevice(latency_s=0.0, bytes_per_s=bytes_per_s), compute_s=layers, sync_s=self.sync_s,
            boundary_s=rest, threads=self.readers, asking_reads=True, wake_s=wake_s, **predicted,
        )  # fmt: skip


def overlap(
    path: Path,
    prompt: Sequence[int],
    *,
    tokens: int,
    repeats: int,
    ratios: Sequence[float],
    cycles: float,
    policy_name: str,
    readers: int,
    precision: str,
    arms: Sequence[str] = PAGE_ARMS,
) -> dict[str, Any]:
    """Every arm at every ratio of read to compute time, measured and simulated.

    Args:
        path: a pack, or a checkpoint in place.
        tokens: of an answer, the first of which is not timed.
        repeats: answers of each arm that count.
        cycles: cache budget in token cycles.
        arms: of `ARMS`, "off" first.

    Returns:
        `rows` (one an arm and ratio), `picture` (one token of two arms), and what they rest on.

    Raises:
        ContractError: an arm gave other tokens than the compute-only one.
    """
    rig = _recorded(path, prompt, tokens, repeats, cycles, policy_name, readers, precision)
    devices = {arm: VirtualDevice(latency_s=0.0, bytes_per_s=1e15) for arm in arms}
    rows, pictures = [], {}
    with ExitStack() as stack:
        engines = {
            arm: stack.enter_context(StreamingEngine.load(path, rig.options(device=devices[arm]))) for arm in arms
        }
        full = stack.enter_context(StreamingEngine.load(path, rig.options(budget=EVERYTHING)))

        def run(arm: str) -> Run:
            got = answer(engines[arm], prompt, tokens, rig.issuer(engines[arm], arm))
            if got.tokens != rig.want:
                raise ContractError("prefetch changed the answer", field=arm, got=got.tokens, expected=rig.want)
            return got

        warm = {arm: run(arm) for arm in arms}
        answer(full, prompt, tokens)
        for ratio in ratios:
            bytes_per_s = warm["off"].nbytes / (ratio * rig.token_s)
            for device in devices.values():
                device.reset()
                device.bytes_per_s = bytes_per_s
            runs: dict[str, list[Run]] = {arm: [] for arm in ("full", *arms)}
            for turn in range(repeats):
                order = list(runs)[:: -1 if turn % 2 else 1]
                for arm in order:
                    runs[arm].append(answer(full, prompt, tokens) if arm == "full" else run(arm))
            wake_s = {arm: engine.store.overslept_s for arm, engine in engines.items()}
            rows += _rows(rig, runs, ratio, bytes_per_s, wake_s)
            pictures[ratio] = _picture(runs)
    return {
        "rows": rows,
        "picture": pictures[min(ratios, key=lambda ratio: abs(np.log(ratio)))],
        "compute_s": rig.token_s,
        "cores_apart": full.memory.cores is not None,
        "layer_s": rig.layer_s.tolist(),
        "sync_s": rig.sync_s,
        "budget": rig.budget,
        "cycles": cycles,
        "tokens": tokens - 1,
        "repeats": repeats,
    }


def _recorded(path, prompt, tokens, repeats, cycles, name, readers, precision) -> Rig:
    """Record the answer with every expert resident, and time its compute."""
    with StreamingEngine.load(
        path, EngineOptions(cache_bytes=EVERYTHING, precision=precision, cores=OWN_CORES)
    ) as engine:
        recorder = Recorder(engine.forward)
        engine.forward.listeners.append(recorder)
        want = answer(engine, prompt, tokens).tokens
        engine.forward.listeners.remove(recorder)
        timed = [answer(engine, prompt, tokens) for _ in range(max(repeats, 2))]
        layer_s = np.median(np.concatenate([run.timeline["compute"] for run in timed]), axis=0)
        token_s = statistics.median(run.seconds for run in timed)
        inside = statistics.median(_inside(run.timeline) for run in timed)
        ids, phase = recorder.routes()
        layouts, experts = engine.store.layouts, engine.store.experts
        return Rig(
            want=want,
            passes=Passes.of(ids, phase=phase, experts=experts, order="sorted"),
            decoded=Passes.of(ids[phase == DECODED], experts=experts, order="sorted"),
            layer_s=layer_s * (inside * token_s / layer_s.sum()),
            token_s=token_s,
            sync_s=synchronisation_s(),
            budget=int(cycles * ids.shape[-1] * sum(layout.slot_bytes for layout in layouts)),
            policy=name,
            readers=readers,
            inflight=2 * readers * max(layout.slot_bytes for layout in layouts),
            slot_bytes=tuple(layout.slot_bytes for layout in layouts),
            read_bytes=tuple(layout.record_bytes for layout in layouts),
            precision=precision,
        )


def _inside(timeline: Mapping[str, np.ndarray]) -> float:
    """Share of a token's time that lies within its layers; the rest is embedding, head and sampling."""
    within = timeline["consume"][:-1, -1] - timeline["issue"][:-1, 0]
    return float(np.median(within / np.diff(timeline["issue"][:, 0])))


def _rows(
    rig: Rig, runs: Mapping[str, list[Run]], ratio: float, bytes_per_s: float, wake_s: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Medians over repeats with their least and greatest, shares of the possible pair by pair, and the simulation."""
    computes = [run.seconds for run in runs["full"]]
    compute = statistics.median(computes)
    off = rig.simulated("off", bytes_per_s, compute, wake_s["off"])
    device = off.device_floor_s[off.decoded][1:]
    bounds = [float(np.maximum(c, device).mean()) for c in computes]
    rows = []
    for arm in [name for name in runs if name != "full"]:
        times = [run.seconds for run in runs[arm]]
        shares = [
            (a.seconds - t) / (a.seconds - bound)
            for a, t, bound in zip(runs["off"], times, bounds, strict=True)
            if a.seconds > bound
        ]
        on = off if arm == "off" else rig.simulated(arm, bytes_per_s, compute, wake_s[arm])
        simulated = float(on.pass_s[on.decoded][1:].mean())
        seconds = statistics.median(times)
        rows.append(
            {
                "arm": arm, "ratio": ratio, "n": len(times), "bytes_per_s": bytes_per_s,
                "seconds": seconds, "least": min(times), "greatest": max(times),
                "exposed": statistics.median(run.exposed for run in runs[arm]),
                "nbytes": statistics.median(run.nbytes for run in runs[arm]),
                "compute": compute, "io": float(device.mean()), "bound": statistics.median(bounds),
                "share": None if arm == "off" or not shares else statistics.median(shares),
                "share_least": None if arm == "off" or not shares else min(shares),
                "share_greatest": None if arm == "off" or not shares else max(shares),
                "simulated": simulated, "difference": simulated / seconds - 1,
                "simulated_exposed": on.exposed_s / on.tokens, "simulated_nbytes": on.bytes_per_token,
                "simulated_bound": off.bound_s / off.tokens,
                "simulated_share": None if arm == "off" else _number(share_of_possible(off, on)),
            }
        )  # fmt: skip
    return rows


def _picture(runs: Mapping[str, list[Run]]) -> list[dict[str, Any]]:
    """One token, of median length without prediction: when each layer knew, had and had used its experts, in seconds
    from when the first layer knew."""
    took = [run.timeline["consume"][:, -1] - run.timeline["issue"][:, 0] for run in runs["off"][-1:]][0]
    token, rows = int(np.argsort(took)[len(took) // 2]), []
    for arm in list(runs)[1:3]:
        columns = runs[arm][-1].timeline
        start = columns["issue"][token, 0]
        rows += [
            {"arm": arm, "layer": layer, "missing": int(columns["missing"][token, layer])}
            | {name: float(columns[name][token, layer] - start) for name in ("issue", "ready", "consume")}
            for layer in range(columns["issue"].shape[1])
        ]
    return rows


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
