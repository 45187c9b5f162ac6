"""Streamed switch layers without a model around them: random experts in memory, and the resident layers they equal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from moelab.routes import DECODED, PREFILLED
from moelab.streaming.cache.cache import Cache
from moelab.streaming.cache.eviction import policy
from moelab.streaming.layer.options import LayerOptions
from moelab.streaming.layer.paths import StagedSwitch
from moelab.streaming.layer.prefill import PrefillWindow
from moelab.streaming.memory.forward import Forward
from moelab.streaming.memory.memory import ExpertMemory
from moelab.streaming.schedule.schedule import Scheduler
from moelab.streaming.store.layout import ExpertLayout, TensorSpec

E, DIM, INTER, K = 8, 64, 128, 4
STORED = {mx.float32: "F32", mx.uint32: "U32", mx.uint8: "U8"}
SWITCHES: dict[str, Callable[[], nn.Module]] = {
    "glu": lambda: SwitchGLU(DIM, INTER, E),
    "biases": lambda: SwitchGLU(DIM, INTER, E, bias=True),
    "clamped": lambda: SwitchGLU(DIM, INTER, E, activation=SwigluOAI(), bias=True),
    "mlp": lambda: SwitchMLP(DIM, INTER, E, bias=True),
}
PRECISIONS = {
    "float32": None,
    "affine4": {"group_size": 64, "bits": 4, "mode": "affine"},
    "affine8": {"group_size": 64, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}


def switch(kind: str = "glu", precision: str = "float32", seed: int = 0) -> nn.Module:
    """A random resident switch layer."""
    mx.random.seed(seed)
    made = SWITCHES[kind]()
    for name, value in tree_flatten(made.parameters()):
        if name.endswith(".bias"):  # they start at zero
            made[name.split(".")[0]].bias = 0.1 * mx.random.normal(value.shape)
    if PRECISIONS[precision]:
        nn.quantize(made, **PRECISIONS[precision], class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    mx.eval(made.parameters())
    return made


class ArrayStore:
    """The experts of resident layers as an `ExpertStore` holds them.

    Attributes:
        gate: reads wait while it is clear.
        delay: seconds of a read.
        log: reads that ended, `(layer, expert)`; `most` of them were in progress at the same time.
        fails, error: reads that raise, and what.
    """

    def __init__(self, switches: list[nn.Module]):
        self.layers, self.experts = len(switches), E
        self.parameters = [
            {name: np.array(value) for name, value in tree_flatten(s.parameters()) if value is not None}
            for s in switches
        ]
        self.layouts = tuple(
            ExpertLayout(
                tuple(
                    TensorSpec(name, tuple(value.shape[1:]), STORED[value.dtype], STORED[value.dtype])
                    for name, value in tree_flatten(s.parameters())
                )
            )
            for s in switches
        )
        self.gate = threading.Event()
        self.gate.set()
        self.delay, self.most, self._reading = 0.0, 0, 0
        self.log: list[tuple[int, int]] = []
        self.fails: set[tuple[int, int]] = set()
        self.error: BaseException = OSError(5, "Input/output error")

    def nbytes(self, layer: int) -> int:
        return self.layouts[layer].stored_bytes

    def read_into(self, layer: int, expert: int, out: np.ndarray) -> int:
        self._reading += 1
        self.most = max(self.most, self._reading)
        try:
            assert self.gate.wait(10)
            time.sleep(self.delay)
            return self._read(layer, expert, out)
        finally:
            self._reading -= 1

    def _read(self, layer: int, expert: int, out: np.ndarray) -> int:
        out[:] = 0xFF  # a slot in the middle of a read holds rubbish: NaN in every type
        if (layer, expert) in self.fails:
            raise self.error
        for name, view in self.layouts[layer].arrays(out).items():
            view[:] = self.parameters[layer][name][expert]
        self.log.append((layer, expert))
        return self.nbytes(layer)


class World:
    """`layers` streamed switches over one store, and the resident ones."""

    def __init__(
        self,
        options: LayerOptions,
        *,
        kind: str = "glu",
        precision: str = "float32",
        layers: int = 1,
        cache_slots: int = K,
        policy_name: str = "lru",
        threads: int = 2,
        anchor=None,
    ):
        self.resident = [switch(kind, precision, seed) for seed in range(layers)]
        self.store = ArrayStore(self.resident)
        sizes = [layout.slot_bytes for layout in self.store.layouts]
        own = {}
        if policy_name == "hot-pin":
            own = {
                "hot_per_layer": options.hot_per_layer, "decay": options.hot_decay,
                "update_interval": options.hot_update_interval, "pin_bonus": options.pin_bonus,
            }  # fmt: skip
        self.cache = Cache(
            layers=layers, experts=E, slot_bytes=sizes, budget=cache_slots * sum(sizes), top_k=min(K, cache_slots),
            policy=policy(policy_name, **own),
        )  # fmt: skip
        scheduler = Scheduler(max_inflight_bytes=8 * max(sizes))
        self.memory = ExpertMemory(self.store, self.cache, scheduler, threads=threads)
        try:
            self._install(options, kind, precision, layers, anchor)
        except BaseException:
            self.memory.close()
            raise

    def _install(self, options, kind, precision, layers, anchor) -> None:
        self.forward = Forward(self.memory)
        windowed = options.full_layer_prefill or options.prefill_hot
        self.window = PrefillWindow(self.forward, options) if windowed else None
        self.switches = [
            StagedSwitch(switch(kind, precision, seed), seed, self.forward, options, window=self.window, anchor=anchor)
            for seed in range(layers)
        ]

    def run(self, phase: int, *calls) -> list[np.ndarray]:
        """One pass of `(x, indices)` through layer 0, 1, …; outputs as they were evaluated at the end."""
        self.forward.begin(phase)
        try:
            outs = [layer(x, indices) for layer, (x, indices) in zip(self.switches, calls, strict=True)]
            self.forward.end(*outs)
        except BaseException:
            self.forward.abort()
            raise
        return [np.array(out) for out in outs]

    def decode(self, x, indices, layer: int = 0) -> np.ndarray:
        """One decode pass through one layer."""
        return self._alone(DECODED, x, indices, layer)

    def prefill(self, x, indices, layer: int = 0) -> np.ndarray:
        return self._alone(PREFILLED, x, indices, layer)

    def _alone(self, phase, x, indices, layer):
        self.forward.begin(phase)
        try:
            out = self.switches[layer](x, indices)
            self.forward.end(out)
        except BaseException:
            self.forward.abort()
            raise
        return np.array(out)

    def expected(self, x, indices, layer: int = 0) -> np.ndarray:
        out = self.resident[layer](x, mx.array(indices))
        mx.eval(out)
        return np.array(out)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_) -> None:
        self.store.gate.set()
        self.memory.close()


def inputs(shape: tuple[int, ...], seed: int = 0, width: int = DIM) -> mx.array:
    return mx.array(np.random.default_rng(seed).standard_normal((*shape, width)).astype(np.float32))


def routes(shape: tuple[int, ...], seed: int = 0, k: int = K, among: list[int] | None = None) -> np.ndarray:
    """`u32[*shape, k]`, distinct within a token."""
    rng, pool = np.random.default_rng(seed), list(range(E)) if among is None else among
    rows = [rng.permutation(pool)[:k] for _ in range(int(np.prod(shape)))]
    return np.array(rows, np.uint32).reshape(*shape, k)
