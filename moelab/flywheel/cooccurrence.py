"""Co-occurrence tables: the strongest controls that look at routes alone.

How often did expert e follow expert j, one token later in the same layer, or one layer later in the
same token? Counting that on training threads and adding up the rows of the experts just used gives
`Σ_j P(e | j) / K`. On real traces the adjacent-layer table recalls half of the experts at 1×K where
the previous token recalls 38 %.

Two ways to add up. `conditional` (default) adds probabilities P(e | j), so that a rarely used j says
as much as a common one; `counts` adds raw counts, the form in which such tables are usually
published, and is about 5 points weaker one layer ahead.

`online=True` goes on counting while it scores: each row is scored from the rows before it in the same
thread that the horizon allows, on top of what was fitted. It needs no training at all.
"""

from __future__ import annotations

import numpy as np

from ..errors import ContractError
from ..routes import Routes
from .controls import Control, _thread_starts, used
from .metrics import rank_blocks

__all__ = ["CombinedCoOccurrence", "CoOccurrence"]

_NAMES = {
    (1, 0): ("previous-token co-occurrence", "1 token"),
    (0, 1): ("adjacent-layer co-occurrence", "1 layer"),
    (1, 1): ("previous-token adjacent-layer co-occurrence", "1 token + 1 layer"),
}


class CoOccurrence(Control):
    """Table of what follows what.

    Args:
        tokens_back, layers_back: where the source expert is: (1, 0) the previous token in the same layer,
            (0, 1) the previous layer at the same token, (1, 1) the previous layer at the previous token.
        weighting: "conditional" or "counts".
        online: go on counting along each thread while scoring.
        prior: in tokens: P(e|j) = count(j,e) / (count(j) + prior), so that a source seen rarely says less.
    """

    def __init__(
        self,
        *,
        tokens_back: int = 0,
        layers_back: int = 0,
        weighting: str = "conditional",
        online: bool = False,
        prior: float = 1.0,
    ):
        if (tokens_back, layers_back) not in _NAMES:
            raise ContractError(
                "no such table", field="tokens_back, layers_back", got=(tokens_back, layers_back), expected=[*_NAMES]
            )
        if weighting not in ("conditional", "counts"):
            raise ContractError(
                "no such weighting", field="weighting", got=weighting, expected="'conditional' or 'counts'"
            )
        if not prior > 0:
            raise ContractError("a prior must be positive", field="prior", got=prior, expected="> 0")
        self.tokens_back, self.layers_back = tokens_back, layers_back
        self.weighting, self.online, self.prior = weighting, online, prior
        self.name, self.horizon = _NAMES[tokens_back, layers_back]

    def predictable(self, routes):
        return self._sources(routes)[1].any(-1)

    def _sources(self, routes: Routes) -> tuple[np.ndarray, np.ndarray]:
        """Source expert of each slot `i64[T,L,K]` (0 where there is none) and `bool[T,L,K]` whether there is."""
        ids, ok = routes.ids.astype(np.int64), routes.present()
        if self.tokens_back:
            row = routes.previous_row()
            ids, ok = ids[row], ok[row] & (row >= 0)[:, None, None]
        if self.layers_back:
            ids, ok = np.roll(ids, 1, axis=1), np.roll(ok, 1, axis=1)
            ok[:, 0] = False
        return np.where(ok, ids, 0), ok

    def _fit(self, train):
        experts = train.experts
        source, ok = self._sources(train)
        target, present = train.ids.astype(np.int64), train.present()
        self.pairs_ = np.zeros((train.layers, experts, experts), np.float32)
        self.seen_ = np.zeros((train.layers, experts), np.float32)
        step = max(1, (1 << 23) // train.top_k**2)
        for layer in range(train.layers):
            for a in range(0, train.tokens, step):
                rows = slice(a, a + step)
                x, y = source[rows, layer], target[rows, layer]
                both = ok[rows, layer, :, None] & present[rows, layer, None, :]
                pair = (x[:, :, None] * experts + y[:, None, :])[both]
                self.pairs_[layer] += np.bincount(pair, minlength=experts**2).reshape(experts, experts)
                self.seen_[layer] += np.bincount(x[ok[rows, layer]], minlength=experts)

    def _blocks(self, routes, bounds):
        source, ok = self._sources(routes)
        share = (ok / np.maximum(ok.sum(-1, keepdims=True), 1)).astype(np.float32)
        yield from (self._online if self.online else self._fitted)(routes, bounds, source, share)

    def _fitted(self, routes, bounds, source, share):
        table = self._table(self.pairs_, self.seen_, self.rows_)
        layer = np.arange(routes.layers)
        for start, stop in bounds:
            out = np.zeros((stop - start, routes.layers, routes.experts), np.float32)
            for k in range(routes.top_k):
                out += share[start:stop, :, k, None] * table[layer, source[start:stop, :, k]]
            yield out, self.popularity_

    def _table(self, pairs, seen, rows):
        """The table, or rows of it, from `pairs[L,*,E]`, `seen[L,*]` and `rows[L,1]` tokens counted."""
        if self.weighting == "counts":
            return pairs / np.maximum(rows, 1).astype(np.float32)[..., None]
        return pairs / (seen[..., None] + np.float32(self.prior))

    def _online(self, routes, bounds, source, share):
        layer = np.arange(routes.layers)[:, None]
        first = np.flatnonzero(_thread_starts(routes))
        first = np.repeat(first, np.diff([*first, routes.tokens]))
        # A whole row is known one token later; one layer and one token ahead, only the row before that is.
        delay = 1 + (self.tokens_back and self.layers_back)
        for start, stop in bounds:
            out = np.empty((stop - start, routes.layers, routes.experts), np.float32)
            popular = np.empty_like(out)
            for i, t in enumerate(range(start, stop)):
                if t == first[t]:
                    pairs, seen = self.pairs_.copy(), self.seen_.copy()
                    total, rows = self.popularity_ * np.maximum(self.rows_, 1), np.maximum(self.rows_, 1).copy()
                elif (s := t - delay) >= first[t]:
                    hot = used(routes, slice(s, s + 1))[0]
                    # The experts of a row are distinct, so no place repeats and plain indexing adds each once.
                    at, k = np.nonzero(share[s])
                    pairs[at, source[s, at, k]] += hot[at]
                    seen[at, source[s, at, k]] += 1
                    total += hot
                    rows += 1
                popular[i] = total / rows
                table = self._table(pairs[layer, source[t]], seen[layer, source[t]], rows)
                out[i] = (share[t][..., None] * table).sum(1)
            yield out, popular


class CombinedCoOccurrence(Control):
    """Previous-token and adjacent-layer tables, mixed by a weight a layer that is fitted.

    The weight of the adjacent layer is chosen from `WEIGHTS` by recall of K experts on the last quarter of
    the training threads (of the rows, if there is one thread), with tables from the rest; then the tables
    are fitted again on everything. Equal weights can be worse than the better table alone.
    """

    name, horizon = "combined co-occurrence", "1 layer"
    WEIGHTS = tuple(i / 10 for i in range(11))

    def __init__(self, *, prior: float = 1.0):
        self.token = CoOccurrence(tokens_back=1, prior=prior)
        self.layer = CoOccurrence(layers_back=1, prior=prior)

    def predictable(self, routes):
        return self.token.predictable(routes) | self.layer.predictable(routes)

    def _fit(self, train):
        threads = np.unique(train.thread)
        if len(threads) > 1:
            held = train.thread >= threads[-max(1, len(threads) // 4)]
        else:
            held = np.arange(train.tokens) >= train.tokens - train.tokens // 4
        rest, held = train.select(~held), train.select(held)
        self._fit_tables(rest)
        recall = np.empty((len(self.WEIGHTS), train.layers))
        for i, weight in enumerate(self.WEIGHTS):
            self.weight_ = np.full((train.layers, 1), weight, np.float32)
            found = rank_blocks(self._mixed(held), held.ids, mask=held.mask)
            right = (found < train.top_k) & held.present()
            recall[i] = right.sum((0, 2)) / np.maximum(held.present().sum((0, 2)), 1)
        self.weight_ = np.array(self.WEIGHTS, np.float32)[recall.argmax(0)][:, None]
        self._fit_tables(train)

    def _fit_tables(self, routes):
        self.token.fit(routes)
        self.layer.fit(routes)

    def _mixed(self, routes):
        tokens, layers = self.token.predictable(routes), self.layer.predictable(routes)
        for (rows, a), (_, b) in zip(self.token.iter_scores(routes), self.layer.iter_scores(routes), strict=True):
            weight = np.where(layers[rows], np.where(tokens[rows], self.weight_[:, 0], 1), 0)[..., None]
            yield rows, ((1 - weight) * a + weight * b).astype(np.float32)

    def _blocks(self, routes, bounds):
        for _, block in self._mixed(routes):
            yield block, self.popularity_
