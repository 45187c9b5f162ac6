"""Predictions from one token to the next: heads are asked, routes are kept until their token comes, bytes are moved.

    pass t     layer N's route is known -> features of N -> head N -> route of N+1 at t+1, its experts asked for
    boundary   all predictions of pass t committed at once; previous top-K rolled, once
    pass t+1   layer N+1's turn: its prediction is consumed (see `modes`)

A prediction is never consumed in the pass that made it, and one that was not replaced is never consumed twice. Prefill
runs the heads on its last two positions when it ends, so the first decoded token has its predictions. A prompt of one
token has nothing before it: its pass is native (`Source.START`), and its head sees no previous token (zeros).

`in_forward` runs a layer's head inside the pass, right after the layer's route is known. Where the route came from the
gate, its input has been computed by then, and the head's answer is read at once. A predicted route needs no
synchronisation, so its layer's input may still be lazy: the head is set going (`async_eval`) and its answer is read
when the next layer's turn comes. The other issue points run all heads in one batched call between two passes. What is
surely no route, but advice, is worked out on the host (`advice`).

One sequence at a time. `reset` belongs to a new request; the cache, its counts and what lies in slots survive it.

Source: edge0, "Cross-token dispatch".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..errors import ContractError, GeometryError
from ..models.families import Selection
from ..models.native import select
from ..routes import DECODED
from .advice import Advice
from .calls import Features, HeadCalls
from .fills import CacheFill, Protection, SlotFill
from .heads import Head, HeadBank
from .hooks import BlockParts
from .modes import Prediction, source_of, true_weights, weigh
from .spec import Wiring
from .supply import Source, Supply

if TYPE_CHECKING:
    from ..streaming.engine.engine import StreamingEngine

__all__ = ["CrossTokenStager", "LingPrerouterStager", "PrerouterStager"]


class PrerouterStager:
    """What both families share. A `Listener` of the engine's passes; layers are MoE layers, 0..L-1, throughout.

    Args:
        wiring: owners and consumers. heads: all owners' heads; a mapping that is no bank is run one head at a time.
        parts: of each MoE layer's block.
        teacher: heads are told the native gate's experts, whatever was executed.
        biased: heads foretell what the gate computes, so that its correction bias has to be added for the choice;
            otherwise they foretell the choice.
        calibration: owner (decoder layer) → (scale, offset) of the probability that an expert is used.
        extra: candidates beyond K, for `advise`.
        protect: predictions protect from eviction and earn `pin_bonus`.

    Attributes:
        mode, threshold: see `modes`; change them between requests only, and call `reset`.
        predictions: consumer → its route in the next pass.
        logits, logits_before: owner → head's logits of the last pass, and of the pass before it.
        supply: see `supply`.
    """

    def __init__(
        self,
        engine: StreamingEngine,
        wiring: Wiring,
        heads: HeadBank | Mapping[int, Head],
        parts: list[BlockParts],
        fill: SlotFill | CacheFill,
        *,
        mode: str,
        issue: str,
        threshold: float = 0.5,
        teacher: bool = False,
        biased: bool = False,
        calibration: Mapping[int, tuple[float, float]] | None = None,
        extra: int = 0,
        protect: bool = True,
    ):
        self.engine, self.wiring, self.heads, self.parts, self.fill = engine, wiring, heads, parts, fill
        self.mode, self.issue, self.threshold = mode, issue, threshold
        self.teacher, self.biased, self.extra, self.protect = teacher, biased, extra, protect
        self.family, self.calibration = engine.loaded.family, calibration
        self.consumer_of = dict(zip(wiring.owner_index, wiring.consumer_index, strict=True))
        names = dict(zip(wiring.owner_index, wiring.owners, strict=True))
        biases = {o: parts[c].bias for o, c in self.consumer_of.items()} if biased else {}
        self._calls = HeadCalls(heads, names, calibration)
        self._advice = Advice(heads, names, calibration, self.family, biases, extra=extra)
        self.supply, self.protection = Supply(len(parts), wiring.consumer_index), Protection(engine)
        self._dropped = [0] * len(parts)
        self.reset()

    # ------------------------------------------------------------------ hooks of the families

    def _features(self, owner: int, ids: np.ndarray, x: mx.array) -> Features:
        """Of the last position of a turn: `ids [T, K]` that the layer executed, and its input `x [1, T, H]`."""
        hidden = x[:, -1:]
        if self.teacher and self.supply.source(owner) == Source.PREDICTION:
            current = select(self.family, self.parts[owner].logits(hidden), self.parts[owner].bias).ids
        else:
            current = mx.array(ids[None, -1:])
        before = mx.array(ids[None, -2:-1]) if len(ids) > 1 else self._last.get(owner)
        return Features(hidden, current, before)

    def _select(self, consumers: list[int], logits: mx.array, count: int) -> Selection:
        """The `count` experts that the family chooses for `logits [n, 1, 1, E]`, row i of `consumers[i]`; in mlx.

        With `biased` the consumer's correction bias is added to the scores for the choice, never to the weights.
        """
        biases = [self.parts[consumer].bias if self.biased else None for consumer in consumers]
        bias = None if biases[0] is None else mx.stack(biases).reshape(len(biases), 1, 1, -1)
        return select(replace(self.family, top_k=count), logits, bias)

    def _store(self, consumer: int, prediction: Prediction) -> None:
        """Keep a prediction until its token comes."""
        raise NotImplementedError

    # ------------------------------------------------------------------ a consumer's turn

    def route(self, layer: int, x: mx.array) -> tuple[np.ndarray, mx.array] | None:
        """Ids `u32[1, 1, K]` and weights `f32[1, 1, K]` that take the place of the gate's; None: the gate decides.

        Raises:
            ContractError: there is no prediction for this layer, and the request has a past. GeometryError: more
                than one token in a decoded pass.
        """
        forward = self.engine.forward
        if self.mode == "off" or forward.phase != DECODED:
            return None
        self._enter(forward.step)
        if x.shape[:-1] != (1, 1):
            raise GeometryError("one token a decoded pass", field="x", got=x.shape, expected="[1, 1, H]")
        prediction = self.predictions.get(layer)
        if prediction is None:
            if self._last:
                raise ContractError(
                    "no prediction for a layer that a head predicts", field="MoE layer", got=layer,
                    expected="one, from the token before",
                )  # fmt: skip
            self.supply.name(layer, Source.START)
            return None
        source = source_of(self.mode, prediction, self.threshold)
        self.supply.name(layer, source)
        if source != Source.PREDICTION:
            return None
        ids = np.array(prediction.ids, np.uint32)[None, None]
        if self.mode == "replace_true_weights":
            return ids, true_weights(self.family, self.parts[layer].logits(x), mx.array(ids))
        if prediction.weights is not None:
            return ids, prediction.weights
        return ids, weigh(self.family, prediction.logits, mx.array(ids))

    # ------------------------------------------------------------------ passes

    def routed(self, *, step: int, layer: int, ids: np.ndarray, x: mx.array, now: float) -> None:
        """A layer's route is known: gather what its head needs, and in the pass run it."""
        if self.mode == "off":
            self._decoded = self.engine.forward.phase == DECODED
            return
        self._enter(step)
        self._answer(now, after=layer)
        if layer in self.consumer_of:
            x = x[None] if x.ndim == 2 else x  # some blocks flatten what they are given
            if x.shape[0] != 1:
                raise GeometryError("one sequence at a time", field="x", got=x.shape, expected="[1, T, H]")
            features = self._features(layer, ids.reshape(-1, ids.shape[-1]), x)
            self._now[layer] = features.current
            if self.issue != "in_forward" or self.engine.forward.phase != DECODED:
                self._captured[layer] = features
            elif self.supply.source(layer) == Source.PREDICTION:
                self._ask([layer], features)
            elif not self._advised(layer, features, now, after=layer):
                self._ask([layer], features)
                self._answer(now, after=layer)
        if layer in self._named:
            self.protection.give(layer, self._named.pop(layer))

    def ended(self, *, step: int) -> None:
        """The boundary: what is left of the heads' work, and the commit."""
        if self.mode == "off":
            if self._decoded:
                self.supply.plain()
            return
        now = self.engine.memory.clock()
        self._answer(now, after=None)
        if self._captured:
            self._run_all(now)
            self._answer(now, after=None)
        for layer, ids in self._named.items():
            self.protection.give(layer, ids)
        self._named.clear()
        self.predictions, self._next = self._next, {}
        self.logits_before, self.logits, self._new_logits = self.logits, self._new_logits, {}
        self._last, self._now = self._now, {}
        if self.issue == "step_boundary":
            self.fill.drain()
        if self._decoded:
            self.supply.end(self._dropped_now())

    def reset(self) -> None:
        """A new request: nothing of the old one is left but what lies in cache and slots."""
        self._step, self._decoded = -1, False
        self.predictions: dict[int, Prediction] = {}
        self.logits: dict[int, mx.array] = {}
        self.logits_before: dict[int, mx.array] = {}
        self._last: dict[int, mx.array] = {}  # owner -> top-K of the last token
        self._forget_pass()
        self.protection.reset()
        self.supply.reset()

    def _enter(self, step: int) -> None:
        """The first sign of a pass. What an aborted one left is not used."""
        if step == self._step:
            return
        self._step, self._decoded = step, self.engine.forward.phase == DECODED
        self._forget_pass()
        self.supply.begin()
        if self._decoded:
            self.fill.begin()
        self._dropped_now()

    def _forget_pass(self) -> None:
        self._next: dict[int, Prediction] = {}
        self._new_logits: dict[int, mx.array] = {}
        self._now: dict[int, mx.array] = {}
        self._captured: dict[int, Features] = {}
        self._named: dict[int, tuple[int, ...]] = {}  # consumer -> experts to protect once its turn is over
        self._calls.drop()

    # ------------------------------------------------------------------ heads

    def _run_all(self, now: float) -> None:
        """Every captured layer's head; those asked in mlx in one call, where they are all of a bank."""
        captured, self._captured = sorted(self._captured.items()), {}
        captured = {o: features for o, features in captured if not self._advised(o, features, now, after=None)}
        if isinstance(self.heads, HeadBank) and len(captured) == len(self.heads):
            self._ask(list(captured), Features.stack(list(captured.values())))
            return
        for owner, features in captured.items():
            self._ask([owner], features)
            self._answer(self.engine.memory.clock(), after=None)

    def _ask(self, owners: list[int], features: Features) -> None:
        count = self.family.top_k + (self.extra if self.mode == "advise" else 0)
        self._calls.ask(
            owners, features, lambda logits: self._select([self.consumer_of[o] for o in owners], logits, count)
        )

    def _advised(self, owner: int, features: Features, now: float, *, after: int | None) -> bool:
        """Work out on the host what is surely no route. False: the head has to be asked."""
        prediction = self._advice(owner, features, self.mode, self.threshold)
        if prediction is not None:
            self._told(owner, prediction, now, after=after)
        return prediction is not None

    def _answer(self, now: float, *, after: int | None) -> None:
        """Read what the heads last asked say."""
        for owner, prediction in self._calls.answer(self.family.top_k):
            self._told(owner, prediction, now, after=after)

    def _told(self, owner: int, prediction: Prediction, now: float, *, after: int | None) -> None:
        """Keep what a head says, and ask for its experts. `after`: as in `fills`."""
        consumer = self.consumer_of[owner]
        self._new_logits[owner] = prediction.logits
        self._store(consumer, prediction)
        self.fill.ask(consumer, prediction, now=now, after=after)
        if self.protect:
            self._named[consumer] = prediction.ids + prediction.extra

    # ------------------------------------------------------------------ bytes

    def _dropped_now(self) -> dict[int, int]:
        """Layer → pairs that it dropped since the last call."""
        staged = [getattr(switch, "staged", None) for switch in self.engine.switches]
        counts = [0 if slots is None else slots.counters.dropped for slots in staged]
        before, self._dropped = self._dropped, counts
        return {layer: count - before[layer] for layer, count in enumerate(counts)}


class CrossTokenStager(PrerouterStager):
    """For families that choose by softmax: a prediction is kept as ids and weights."""

    def _store(self, consumer, prediction):
        self._next[consumer] = prediction


class LingPrerouterStager(PrerouterStager):
    """For families that choose by sigmoid within groups: logits are kept, and the consumer's own rule weighs them."""

    def _store(self, consumer, prediction):
        self._next[consumer] = replace(prediction, weights=None)
