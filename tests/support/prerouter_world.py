"""Streamed models with random prerouter heads, and the same cross-token routing written down plainly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import mlx.core as mx
import numpy as np

from moelab import models
from moelab.models import tiny
from moelab.models.native import select
from moelab.prerouter import HeadBank, PrerouterHead
from moelab.prerouter.spec import PrerouterSpec
from moelab.streaming import EngineOptions, LayerOptions, StreamingEngine
from moelab.streaming.layer.install import slots_beside, with_top_k
from moelab.streaming.store.skeleton import skeleton
from moelab.streaming.store.store import open_store

SLOTS = {"staged": True, "staged_n": 4, "staged_trigger": 4, "staged_sync": False}
IN_PLACE = {**SLOTS, "staged_sync": True, "incr_stack": True, "incr_writeback": True, "warm_willneed": True}
KINDS = {"softmax": "SOFTMAX_TOPK", "sigmoid": "SIGMOID_GROUP"}


def heads(wiring, *, experts, width, hidden=16, seed=0, dtype=mx.float16) -> HeadBank:
    """Random heads whose routes change with the token."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return mx.array((2 * rng.normal(size=shape) / math.sqrt(shape[-1])).astype(np.float32)).astype(dtype)

    features = width + 2 * experts
    return HeadBank(
        {
            owner: PrerouterHead(draw(hidden, features), draw(experts, hidden), draw(experts, features))
            for owner in wiring.owners
        }
    )


def engine(model, *, layer=None, cycles=2.0, **options) -> StreamingEngine:
    """A streamed model whose cache holds the experts of `cycles` tokens; slots come on top."""
    frame = skeleton(model)
    layer = None if layer is None else LayerOptions(**layer)
    with open_store(frame.path) as store:
        cycle = frame.blocks[0].family.top_k * sum(layout.slot_bytes for layout in store.layouts)
        size = int(cycles * cycle) + slots_beside(layer, store)
    return StreamingEngine.load(
        frame.path, EngineOptions(cache_bytes=size, layer=layer, below_cycle=cycles < 1, reader="buffered", **options)
    )


class Each(dict):
    """Heads that are asked one by one, wherever they are asked: every issue point then gives the same bits."""

    def head(self, owner):
        return self[owner]


def each(bank) -> Each:
    return Each({owner: bank.head(owner) for owner in bank.owners})


class Engines:
    """Engines that many tests share: loading one takes longer than what is done with it."""

    def __init__(self):
        self._open = {}

    def __call__(self, model, *, layer=SLOTS, cycles=1.0, **options) -> StreamingEngine:
        key = str(model), str(layer), cycles, str(options)
        if key not in self._open:
            self._open[key] = engine(model, layer=layer, cycles=cycles, **options)
        return self._open[key]

    def close(self) -> None:
        for streamed in self._open.values():
            streamed.close()


def spec_for(streamed, **fields) -> PrerouterSpec:
    """A head in every MoE layer but the last."""
    ids = streamed.loaded.geometry.layer_ids
    kind = streamed.loaded.family.kind
    own = {"kind": kind, "start_layer": ids[1], "hidden": 16, "patch_call": kind == "SOFTMAX_TOPK"}
    return PrerouterSpec(**{**own, **fields})


def heads_for(streamed, spec, **options) -> HeadBank:
    loaded = streamed.loaded
    wiring = spec.wiring(loaded.geometry.layer_ids, len(loaded.model.layers))
    return heads(wiring, experts=loaded.geometry.experts, width=loaded.geometry.hidden, **options)


def tokens(streamed, prompt, count, *, along=None, **kwargs) -> list[tuple[int, np.ndarray]]:
    """Greedy, or along given tokens; with log-probabilities either way."""
    if along is not None:
        given = iter(along)
        kwargs["sampler"] = lambda logprobs: mx.array([next(given)])
    steps = streamed.stream_tokens(prompt, max_tokens=count, **kwargs)
    return [(token, np.array(logprobs)) for token, logprobs in steps]


def same(got, want) -> None:
    """The same tokens with the same bits."""
    assert [token for token, _ in got] == [token for token, _ in want]
    for (_, left), (_, right) in zip(got, want, strict=True):
        np.testing.assert_array_equal(left, right)


def tiny_model(family, folder, **changes):
    tiny.save(family, folder, seed=1, **changes)
    return folder


@lru_cache(maxsize=3)
def resident(model, top_k=None):
    loaded = models.load(model)
    if top_k is not None:
        frame = replace(skeleton(model), network=loaded.model, blocks=loaded.blocks)
        loaded = replace(loaded, blocks=with_top_k(frame, top_k).blocks)
    return loaded


class Plain:
    """The oracle: a resident model, every block called by hand, two dictionaries for what goes from token to token."""

    def __init__(self, model, bank, spec, *, mode="replace", threshold=0.5, calibration=None, biased=False, top_k=None):
        self.loaded = resident(model, top_k)
        self.bank, self.mode, self.threshold, self.calibration = bank, mode, threshold, calibration
        self.family = self.loaded.family
        owners = spec.wiring(self.loaded.geometry.layer_ids, len(self.loaded.model.layers)).owners
        self.blocks = {block.layer_id: block for block in self.loaded.blocks}
        self.owners, self.routes, self.executed = owners, {}, {}
        self.biased, self.teacher = biased, spec.feature_topk == "teacher"

    def __enter__(self):
        oracle = self
        self.classes = {}
        for layer_id, block in self.blocks.items():
            module, native = block.switch_owner, type(block.switch_owner).__call__
            self.classes[layer_id] = type(module)

            def call(self, x, layer_id=layer_id, native=native):
                return oracle.turn(layer_id, self, x, native)

            module.__class__ = type("Plain", (type(module),), {"__call__": call, "__module__": type(module).__module__})
        return self

    def __exit__(self, *details):
        for layer_id, block in self.blocks.items():
            block.switch_owner.__class__ = self.classes[layer_id]

    def turn(self, layer_id, module, x, original):
        block = self.blocks[layer_id]
        matrix = block.matrix
        gate = matrix(x) if callable(matrix) and "weight" in matrix and matrix is not block.gate else None
        if gate is None:
            gate = x @ matrix["weight"].T
        bias = None if block.bias_owner is None else getattr(block.bias_owner, block.bias_name)
        native = ids = select(self.family, gate, bias).ids
        out = None
        if self.decoding and (route := self.routes.get(layer_id)) is not None:
            logits, chosen, sure = route
            if self.mode != "gated" or sure >= self.threshold:
                ids, weights = chosen
                if self.mode == "replace_true_weights":
                    scores = mx.softmax(gate, -1, precise=True) if self.family.score == "softmax" else mx.sigmoid(gate)
                    weights = mx.take_along_axis(scores, ids, -1)
                    weights = weights / (weights.sum(-1, keepdims=True) + self.family.epsilon) * self.family.scale
                out = (block.switch(x, ids) * weights[..., None]).sum(-2)
                if getattr(module, "shared_experts", None) is not None:
                    out = out + module.shared_experts(x)
                if getattr(module, "shared_expert", None) is not None:
                    out = out + mx.sigmoid(module.shared_expert_gate(x)) * module.shared_expert(x)
        self.seen[layer_id] = (x, native if self.teacher else ids)
        return original(module, x) if out is None else out

    def run(self, ids, cache, decoding):
        self.decoding, self.seen = decoding, {}
        logits = self.loaded.model(mx.array(ids)[None], cache=cache)[:, -1]
        mx.eval(logits, self.seen)
        for owner in self.owners:
            x, ids = self.seen[owner]
            before = ids[:, -2:-1] if ids.shape[1] > 1 else self.executed.get(owner)
            out = self.bank.head(owner)(x[:, -1:], ids[:, -1:], before)
            self.executed[owner] = ids[:, -1:]
            consumer = self.blocks[owner + 1]
            bias = getattr(consumer.bias_owner, consumer.bias_name) if self.biased and consumer.bias_owner else None
            chosen = select(self.family, out, bias)
            sure = 1.0
            if self.calibration is not None:
                scale, offset = self.calibration[owner]
                sure = mx.sigmoid(scale * mx.take_along_axis(out, chosen.ids, -1) + offset).mean().item()
            mx.eval(chosen.ids, chosen.weights)
            self.routes[owner + 1] = out, (chosen.ids, chosen.weights), sure
        return logits

    def tokens(self, prompt, count, along=None) -> Iterator[tuple[int, np.ndarray]]:
        cache = self.loaded.make_cache()
        self.routes, self.executed = {}, {}
        if len(prompt) > 1:
            self.run(prompt[:-1], cache, False)
        token = prompt[-1]
        for step in range(count):
            logits = self.run([token], cache, True)
            logprobs = logits - mx.logsumexp(logits, keepdims=True)
            token = mx.argmax(logprobs, -1).item() if along is None else along[step]
            yield token, np.array(logprobs[0])
