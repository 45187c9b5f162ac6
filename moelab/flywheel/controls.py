"""Training-free predictors: what a learned one has to beat.

Each control ranks the experts of layer l at token t from what is known a stated time ahead, its
*horizon*: routes of earlier tokens ("1 token"), of earlier layers of the same token ("1 layer"), or
both at once ("1 token + 1 layer", the lead of a prerouter). `fit` reads training routes, `scores`
gives `f32[T,L,E]` for routes it has not seen, using only what the horizon allows and never looking
across a thread boundary. A score is a share in [0, 1], so that calibration can be asked of it.

Where a control has nothing to go on (the first token of a thread, the first layer) it falls back to
the fitted popularity; `predictable` says where that is not so, and callers report the count. Fitted
popularity also breaks ties, with the small weight `TIE`: a control that offers more candidates than
it has evidence for should fill up with the likeliest experts, not with the lowest indices. Fitted
on no rows, popularity is zero everywhere and does nothing.

`iter_scores` yields blocks of rows, since [T,L,E] need not fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import ContractError, GeometryError
from ..routes import Routes
from .metrics import rank_blocks

__all__ = [
    "HORIZONS",
    "AdjacentLayer",
    "Control",
    "DecayedHistory",
    "EarlyGate",
    "Popularity",
    "PreviousToken",
    "Random",
    "Recency",
    "used",
]

HORIZONS = ("half layer", "1 layer", "1 token", "1 token + 1 layer")
TIE = 1e-3
"""Weight of the fitted popularity in every other control's score."""
_BLOCK_BYTES = 1 << 24
"""Bytes of scores made at once."""


def used(routes: Routes, rows: slice = slice(None)) -> np.ndarray:
    """`f32[n,L,E]`: 1 where an expert was used, absent slots left out."""
    ids = routes.ids[rows].astype(np.int64)
    out = np.zeros((*ids.shape[:2], routes.experts + 1), np.float32)
    np.put_along_axis(out, np.where(routes.present()[rows], ids, routes.experts), 1, axis=-1)
    return out[..., :-1]


class Control:
    """Base of all controls. Subclasses give `name`, `horizon`, `predictable` and `_blocks`."""

    name: str
    horizon: str
    tie = TIE

    def fit(self, train: Routes) -> Control:
        """Learn from training routes; returns self. Every control learns popularity."""
        self.geometry_ = (train.layer_ids, train.experts)
        total = np.zeros((train.layers, train.experts), np.float64)
        for start, stop in _bounds(train):
            total += used(train, slice(start, stop)).sum(0, dtype=np.float64)
        self.rows_ = train.present().any(-1).sum(0)[:, None]
        self.popularity_ = (total / np.maximum(self.rows_, 1)).astype(np.float32)
        self._fit(train)
        return self

    def predictable(self, routes: Routes) -> np.ndarray:
        """`bool[T,L]`: where there is something to go on; elsewhere scores are the fitted popularity."""
        return np.ones(routes.ids.shape[:2], bool)

    def scores(self, routes: Routes) -> np.ndarray:
        """`f32[T,L,E]`, all rows at once. Prefer `iter_scores` where that is large."""
        out = np.empty((*routes.ids.shape[:2], routes.experts), np.float32)
        for rows, block in self.iter_scores(routes):
            out[rows] = block
        return out

    def iter_scores(self, routes: Routes) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield `(rows, f32[n,L,E])` covering every row once, in order.

        Raises:
            ContractError: not fitted.
            GeometryError: fitted on other layers or another number of experts.
        """
        if not hasattr(self, "popularity_"):
            raise ContractError("a control must be fitted first", field=self.name, got="not fitted", expected="fit()")
        if self.geometry_ != (routes.layer_ids, routes.experts):
            got = (routes.layer_ids, routes.experts)
            raise GeometryError("fitted on another geometry", field=self.name, got=got, expected=self.geometry_)
        known = self.predictable(routes)
        bounds = _bounds(routes)
        for (start, stop), (block, popularity) in zip(bounds, self._blocks(routes, bounds), strict=True):
            block *= 1 - self.tie
            block += self.tie * popularity
            np.copyto(block, popularity, where=~known[start:stop, :, None])
            yield slice(start, stop), block

    def _fit(self, train: Routes) -> None: ...

    def _blocks(self, routes: Routes, bounds: list[tuple[int, int]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the scores of each block, and the popularity that breaks its ties and fills its gaps."""
        raise NotImplementedError


def _bounds(routes: Routes) -> list[tuple[int, int]]:
    step = max(1, _BLOCK_BYTES // (4 * max(1, routes.layers * routes.experts)))
    return [(a, min(a + step, routes.tokens)) for a in range(0, routes.tokens, step)]


class Random(Control):
    """Uniform noise from a seed: the floor."""

    name, horizon = "random", "1 token + 1 layer"

    def __init__(self, *, seed: int = 0):
        self.seed = seed

    def _blocks(self, routes, bounds):
        draw = np.random.default_rng(self.seed)  # one stream, drawn in row order: the same in any blocks
        for start, stop in bounds:
            yield draw.random((stop - start, routes.layers, routes.experts), np.float32), self.popularity_


class Popularity(Control):
    """How often training threads used each expert: static, the same for every token."""

    name, horizon = "popularity", "1 token + 1 layer"

    def _blocks(self, routes, bounds):
        for start, stop in bounds:
            yield np.repeat(self.popularity_[None], stop - start, axis=0), self.popularity_


class AdjacentLayer(Control):
    """The previous layer's experts by number: chance, unless expert numbers mean the same in two layers."""

    name, horizon = "adjacent layer", "1 layer"

    def predictable(self, routes):
        known = routes.present().any(-1)
        return np.concatenate([np.zeros_like(known[:, :1]), known[:, :-1]], axis=1)

    def _blocks(self, routes, bounds):
        for start, stop in bounds:
            hot = used(routes, slice(start, stop))
            yield np.concatenate([np.zeros_like(hot[:, :1]), hot[:, :-1]], axis=1), self.popularity_


class _History(Control):
    """State `[L,E]` carried along a thread: `_advance(state, hot, seen)` after each token."""

    horizon = "1 token"

    def predictable(self, routes):
        """Where a token of the same thread came before, at any distance."""
        return np.repeat(~_thread_starts(routes)[:, None], routes.layers, axis=1)

    def _blocks(self, routes, bounds):
        starts = _thread_starts(routes)
        state, age = None, 0
        for start, stop in bounds:
            hot = used(routes, slice(start, stop))
            out = np.empty_like(hot)
            for i in range(stop - start):
                if starts[start + i]:
                    state, age = np.zeros(hot.shape[1:], np.float32), 0
                out[i] = self._share(state, age)
                state = self._advance(state, hot[i])
                age += 1
            yield out, self.popularity_

    def _share(self, state: np.ndarray, age: int) -> np.ndarray:
        raise NotImplementedError

    def _advance(self, state: np.ndarray, hot: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def _thread_starts(routes: Routes) -> np.ndarray:
    return np.diff(routes.thread, prepend=-1) != 0


class PreviousToken(_History):
    """The previous token's experts in the same layer, then those of the token before it."""

    name = "previous token, same layer"

    def _share(self, state, age):
        return state

    def _advance(self, state, hot):
        # 1 for the last token, 1/2 for the one before, nothing older: [state >= 1] is the last one.
        return np.maximum(hot, 0.5 * (state >= 1))


class Recency(_History):
    """Order of last use in the thread, 1 / (1 + tokens since): what an LRU cache bets on."""

    name = "recency (LRU)"

    def _share(self, state, age):
        return state

    def _advance(self, state, hot):
        # state = 1/(1+d), d tokens since the last use: one more token makes it 1/(2+d) = s/(1+s).
        return np.where(hot > 0, np.float32(1), state / (1 + state))


class DecayedHistory(_History):
    """Decayed share of the thread's tokens that used the expert: (1-d)·Σ_i d^i·[used i+1 tokens ago].

    `decay=1` is the running frequency. `decay=None` chooses among `DECAYS`, on the training routes, the one
    with the best recall of K experts.
    """

    DECAYS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)

    def __init__(self, *, decay: float | None = None):
        if decay is not None and not 0 < decay <= 1:
            raise ContractError("no such decay", field="decay", got=decay, expected="in (0, 1]")
        self.decay = self.decay_ = decay
        self.name = "frequency" if decay == 1 else "decayed history"

    def _fit(self, train):
        if self.decay is None:
            self.decay_ = _best(self.DECAYS, lambda d: self._recall(d, train))

    def _recall(self, decay, train):
        self.decay_ = decay
        found = rank_blocks(self.iter_scores(train), train.ids, mask=train.mask)
        return (found < train.top_k)[train.present()].mean()

    def _share(self, state, age):
        return state / max(age, 1) if self.decay_ == 1 else state

    def _advance(self, state, hot):
        return state + hot if self.decay_ == 1 else self.decay_ * state + np.float32(1 - self.decay_) * hot


def _best(choices, score):
    return max(choices, key=score)


class EarlyGate(Control):
    """The target's own gate on an earlier representation; its selection scores are passed in.

    Args:
        given: `f32[T,L,E]` selection scores for the routes that will be scored, made by the model's tap.
        known: `bool[T,L]`, where an earlier representation exists (layer 0 has none one layer ahead).
        horizon: how far ahead that representation is.
    """

    name = "early gate"
    tie = 0.0  # its order is the gate's, to the last expert

    def __init__(self, given: np.ndarray, *, known: np.ndarray | None = None, horizon: str = "1 layer"):
        if horizon not in HORIZONS:
            raise ContractError("no such horizon", field="horizon", got=horizon, expected=HORIZONS)
        self.given, self.known, self.horizon = given, known, horizon

    def predictable(self, routes):
        return super().predictable(routes) if self.known is None else self.known

    def _blocks(self, routes, bounds):
        expected = (*routes.ids.shape[:2], routes.experts)
        if self.given.shape != expected:
            raise GeometryError("gate scores of other routes", field="given", got=self.given.shape, expected=expected)
        for start, stop in bounds:
            yield self.given[start:stop].astype(np.float32), self.popularity_
