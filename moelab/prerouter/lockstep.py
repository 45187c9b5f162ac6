"""Cross-token routing of many texts at once: what the engine does to one token at a time, as rows of one batch.

A predicted route depends on what its layer's owner saw one token ago, on a state that earlier predictions have already
changed. Tokens and layers therefore follow each other and cannot be computed side by side; texts can, and so can the
ways of using a prediction. A row is one text under one `Arm`; a step takes all rows one token further, each with
an attention cache, a state and predictions of its own. It is the stager's state machine (`prerouter.stager`) without
bytes: everything is resident. In the engine one row's matrices are slow; here a token of a row costs about a twentieth.

A recorded text is followed (`tokens[n, t] >= 0`), or a row goes on by itself with its likeliest token. Tokens that were
prefilled when the text was recorded use the native gate, as a prompt does; their heads are asked all the same.

An arm with `native_history` is replaced for one token at a time: before each step its past is that of the native arm,
attention cache, states and executed experts. It is what a prediction costs where no earlier one has done harm.

Shapes: A arms, n texts, T tokens, L MoE layers, E experts, K experts a token, H width, B = A·n rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from ..errors import ContractError, GeometryError, ParameterError, UnsupportedModelError
from ..models.native import select
from .heads import HeadBank
from .hooks import BlockParts, attach, detach
from .modes import true_weights
from .spec import Wiring
from .steps import OWN, Arm, Steps

if TYPE_CHECKING:
    from ..models import LoadedModel

__all__ = ["Lockstep"]

ROWS = 256
"""At once; more are no faster."""


class Lockstep:
    """A resident model under several arms; the first is the native model.

    Args:
        bank: heads of all owners. calibration: owner (decoder layer) → (scale, offset); needed by `gated`.
        top_k: experts a token of every layer, gate and prediction alike; None = the model's own.

    Raises:
        ParameterError: the first arm is not "off", or `gated` without a calibration.
        UnsupportedModelError: a layer keeps another past than keys and values, which rows could not share.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        bank: HeadBank,
        wiring: Wiring,
        arms: Sequence[Arm],
        *,
        calibration: Mapping[int, tuple[float, float]] | None = None,
        top_k: int | None = None,
    ):
        if not arms or arms[0].mode != "off":
            raise ParameterError(
                "arms are held against the native model", field="arms", got=list(arms)[:1], expected="off"
            )
        if calibration is None and any(arm.mode == "gated" for arm in arms):
            raise ParameterError("confidence of these heads is not calibrated", field="calibration", got=None)
        if others := sorted({type(c).__name__ for c in loaded.make_cache()} - {KVCache.__name__}):
            raise UnsupportedModelError(
                "the past of a row is no list of keys and values", field="cache", got=others, expected=KVCache.__name__
            )
        self.loaded, self.bank, self.wiring, self.arms = loaded, bank, wiring, tuple(arms)
        self.family = dataclasses.replace(loaded.family, top_k=top_k or loaded.family.top_k)
        self.parts = [BlockParts(block) for block in loaded.blocks]
        self.head_of = {layer: i for i, layer in enumerate(wiring.consumer_index)}
        pairs = [calibration[owner] for owner in bank.owners] if calibration else [(1.0, 0.0)] * len(bank)
        self._pairs = mx.array(pairs).reshape(-1, 1, 1, 2)

    def run(self, tokens: np.ndarray, decoded: np.ndarray) -> Steps:
        """Take `tokens i32[n, T]` under every arm.

        Texts go in groups; what all texts of a group have prefilled is taken in one pass, and not noted. `OWN` may
        stand in decoded places only.

        Raises:
            GeometryError: shapes that do not belong together.
            ContractError: a text has no decoded token, or none of its two first tokens, which the first prediction
                needs, is prefilled.
        """
        if tokens.shape != decoded.shape or tokens.ndim != 2:
            raise GeometryError("one phase a token", field="decoded", got=decoded.shape, expected=tokens.shape)
        if not decoded.any(1).all():
            raise ContractError(
                "nothing is decoded of a text", field="decoded", got=decoded.any(1).tolist(), expected=True
            )
        if (tokens[~decoded] < 0).any():
            raise ContractError("the likeliest token in a prompt", field="tokens", got=OWN, expected="a token")
        first = decoded.argmax(1)
        if first.min() < 2:
            raise ContractError(
                "texts begin with a prompt", field="decoded", got=int(first.min()), expected=">= 2 tokens"
            )
        steps = Steps.empty(len(self.arms), tokens, decoded, len(self.parts))
        order = np.argsort(first, kind="stable")
        for some in np.array_split(order, -(-len(order) * len(self.arms) // ROWS)):
            state, end = _State(self, tokens[some], decoded[some]), int(decoded[some].any(0).nonzero()[0][-1]) + 1
            with state.hooked():
                state.prefill(int(first[some].min()))
                for t in range(int(first[some].min()), end):
                    state.step(t)
            for name, value in vars(steps).items():
                place = some if name == "decoded" else (slice(None), some)
                value[place] = getattr(state.out, name)
        return steps


class _State:
    """One run: attention caches, predictions, and what has been noted."""

    def __init__(self, lockstep: Lockstep, tokens: np.ndarray, decoded: np.ndarray):
        self.own, self.tokens, self.decoded = lockstep, tokens.astype(np.int32), decoded
        arms, texts = lockstep.arms, len(tokens)
        self.arms, self.texts, layers = len(arms), texts, len(lockstep.parts)
        self.used = np.array([[_uses(arm, layer, lockstep) for layer in range(layers)] for arm in arms])
        each = np.repeat(np.arange(self.arms), texts)
        self.weighted = mx.array([arm.mode == "replace_true_weights" for arm in arms])[mx.array(each)][:, None, None]
        asked = [arm.threshold if arm.mode == "gated" else -1.0 for arm in arms]
        self.threshold = mx.array(asked)[mx.array(each)]
        native = np.array([arm.native_history for arm in arms])[each]
        rows = np.arange(self.arms * texts)
        self.past = mx.array(np.where(native, rows % texts, rows)) if native.any() else None
        self.cache = [Past(self.past) for _ in lockstep.loaded.model.layers]
        self.predicted: dict[int, tuple[mx.array, ...]] = {}  # consumer -> ids, weights [B,1,K], confidence [B]
        self.before: mx.array | None = None  # [heads,B,1,K] executed at the token before
        self.out = Steps.empty(self.arms, self.tokens, decoded, layers)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Every block asks `turn` for its output."""
        done = []
        try:
            for layer, parts in enumerate(self.own.parts):
                attach(parts.module, lambda x, _, layer=layer: self.turn(layer, x), patch=False)
                done.append(parts.module)
            yield
        finally:
            for module in done:
                detach(module)

    def prefill(self, first: int) -> None:
        """The beginning that all arms share, in one pass of `n` rows; then a row for each arm."""
        self.active, self.seen = None, {}
        logits = self.own.loaded.model(mx.array(self.tokens[:, :first]), cache=self.cache)
        again = lambda a: mx.concatenate([a] * self.arms)  # noqa: E731
        for cache in self.cache:
            cache.keys, cache.values, cache.last = again(cache.keys), again(cache.values), None
        for layer, (x, ids, *_) in self.seen.items():
            self.seen[layer] = again(x), again(ids)
        self.greedy = again(mx.argmax(logits[:, -1], -1))
        owners = self.own.wiring.owner_index
        self.before = mx.stack([self.seen[o][1][:, -2:-1] for o in owners])
        self._predict()
        mx.eval(self.greedy, self.predicted, self._kept())

    def step(self, t: int) -> None:
        """One token further, everywhere."""
        given = mx.array(np.tile(self.tokens[:, t], self.arms))
        fed = mx.where(given >= 0, given, self.greedy)
        self.active, self.seen = self.decoded[:, t], {}
        logits = self.own.loaded.model(fed[:, None], cache=self.cache)[:, -1].astype(mx.float32)
        self.greedy = mx.argmax(logits, -1)
        loss, following = None, self.tokens[:, t + 1] if t + 1 < self.tokens.shape[1] else np.full(self.texts, OWN)
        if (following >= 0).any():
            target = mx.array(np.tile(np.maximum(following, 0), self.arms))[:, None]
            loss = mx.logsumexp(logits, -1) - mx.take_along_axis(logits, target, -1)[:, 0]
        self._predict()
        notes = {layer: (hits, use, drift) for layer, (_, _, hits, use, drift) in self.seen.items()}
        mx.eval(self.greedy, fed, loss, notes, self.predicted, self._kept())
        self._note(t, fed, loss, following, notes)

    def turn(self, layer: int, x: mx.array) -> mx.array:
        """A layer's route and output, of all rows."""
        parts, family = self.own.parts[layer], self.own.family
        logits = parts.logits(x)
        native = select(family, logits, parts.bias)
        ids, weights, hits, use = native.ids, native.weights, None, None
        if self.active is not None and layer in self.predicted:
            named, weighed, sure = self.predicted[layer]
            hits = (named[..., :, None] == native.ids[..., None, :]).sum((1, 2, 3))
            rows = (self.used[:, layer, None] & self.active).reshape(-1)
            use = mx.array(rows) & (sure >= self.threshold)
            weighed = mx.where(self.weighted, true_weights(family, logits, named), weighed)
            chosen = use[:, None, None]
            ids, weights = mx.where(chosen, named, ids), mx.where(chosen, weighed, weights)
        drift = None if self.active is None else self._drift(x)
        self.seen[layer] = x, ids, hits, use, drift
        return parts.output(x, parts.block.switch(x, ids), weights)

    def _kept(self) -> list[mx.array]:
        return [array for cache in self.cache for array in (cache.keys, cache.values)]

    def _drift(self, x: mx.array) -> mx.array:
        state = x.reshape(self.arms, self.texts, -1)
        away = mx.linalg.norm(state - state[:1], axis=-1)
        return away / mx.linalg.norm(state[:1], axis=-1)

    def _predict(self) -> None:
        """Every head on what its owner has seen: the routes of the next token."""
        own, past = self.own, self.past
        seen = [self.seen[owner] for owner in own.wiring.owner_index]
        hidden, current = mx.stack([s[0][:, -1:] for s in seen]), mx.stack([s[1][:, -1:] for s in seen])
        if past is not None:
            hidden, current = hidden[:, past], current[:, past]
        logits = own.bank(hidden, current, self.before)
        self.before = current
        chosen = select(own.family, logits, None)
        picked = mx.take_along_axis(logits, chosen.ids, -1)
        sure = mx.sigmoid(own._pairs[..., :1] * picked + own._pairs[..., 1:]).mean((-2, -1))
        self.predicted = {consumer: (chosen.ids[i], chosen.weights[i], sure[i]) for consumer, i in own.head_of.items()}

    def _note(self, t: int, fed: mx.array, loss: mx.array | None, following: np.ndarray, notes: dict) -> None:
        out, shape = self.out, (self.arms, self.texts)
        out.tokens[:, :, t] = np.array(fed).reshape(shape)
        out.greedy[:, :, t] = np.array(self.greedy).reshape(shape)
        if loss is not None:
            out.loss[:, :, t] = np.where(following >= 0, np.array(loss).reshape(shape), np.nan)
        for layer, (hits, use, drift) in notes.items():
            out.drift[:, :, t, layer] = np.array(drift)
            if hits is not None:
                out.hits[:, :, t, layer] = np.array(hits).reshape(shape)
                out.replaced[:, :, t, layer] = np.array(use).reshape(shape)


class Past(KVCache):
    """An attention cache of many rows, where row i has the past of row `past[i]`; None = its own.

    What the last step wrote is put right together with the next write: a second one would copy the whole cache.
    """

    def __init__(self, past: mx.array | None):
        super().__init__()
        self.past, self.last = past, None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        last, self.last = self.last, None if self.past is None else (keys, values)
        if last is not None:
            self.offset -= 1
            keys, values = (
                mx.concatenate([old[self.past], new], axis=2) for old, new in zip(last, (keys, values), strict=True)
            )
        return super().update_and_fetch(keys, values)


def _uses(arm: Arm, layer: int, lockstep: Lockstep) -> bool:
    chosen = lockstep.head_of if arm.layers is None else arm.layers
    return arm.mode not in ("off", "advise") and layer in lockstep.head_of and layer in chosen
