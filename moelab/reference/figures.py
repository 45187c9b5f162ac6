"""How far is a stand-in from a real model? The same figures on any model's routes.

Routes only, so that a recorded trace of a model of 30 billion parameters and a model of 20 million are held
side by side:

* *previous-token overlap*: share of a token's experts that the token before used in the same layer;
* *frequency*: recall of the K experts most used so far in the thread, or, fitted on other text, of the K most
  used there;
* *adjacent layer*: recall of a table "expert j in the layer before → expert e here", at 1, 2 and 4 times K;
* *domain distance*: total variation ½ Σ|p-q| between two domains' shares of expert use in a layer;
* *load*: choices of the busiest expert ÷ mean, and the share of the busiest eighth of the experts.

A trace of one prompt offers no other text to fit on, so tables grow along the thread ("online"): each row is
scored from the rows before it. Stand-ins are scored the same way, on threads of the same length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import GeometryError
from ..flywheel.controls import Control, DecayedHistory, Popularity
from ..flywheel.cooccurrence import CoOccurrence
from ..flywheel.estimates import clustered_mean
from ..flywheel.metrics import MULTIPLES, rank_blocks
from ..routes import Routes


@dataclass(frozen=True)
class Figure:
    """A figure over all layers: value, smallest and largest layer, standard error clustered by thread, n slots."""

    value: float
    low: float
    high: float
    se: float | None
    n: int

    def plain(self) -> dict[str, Any]:
        round_ = {name: round(getattr(self, name), 4) for name in ("value", "low", "high")}
        return {**round_, "se": None if self.se is None else round(self.se, 4), "n": self.n}


@dataclass(frozen=True)
class RouteFigures:
    """What `route_figures` computes; recalls have one `Figure` for each of 1×, 2× and 4× K candidates."""

    overlap: Figure
    frequency: tuple[Figure, ...]
    adjacent: tuple[Figure, ...]
    load: dict[str, float]
    """`busiest` and `hottest_eighth` within one thread's scored rows, mean over threads and layers."""

    def plain(self) -> dict[str, Any]:
        recalls = {name: getattr(self, name) for name in ("frequency", "adjacent")}
        return {
            "overlap": self.overlap.plain(),
            **{
                name: {f"{m}x": figure.plain() for m, figure in zip(MULTIPLES, figures, strict=True)}
                for name, figures in recalls.items()
            },
            "thread_load": self.load,
        }


def route_figures(routes: Routes, scored: np.ndarray, *, fitted_on: Routes | None = None) -> RouteFigures:
    """Figures over the rows where `scored bool[T]`.

    `fitted_on` None: tables and frequencies grow along each thread. Otherwise they are fitted on those routes
    and stand still. The adjacent layer is asked of every layer but the first, which has none before it.

    Raises:
        GeometryError: `scored` is not one value a row, or names no row.
    """
    if scored.shape != (routes.tokens,) or not scored.any():
        raise GeometryError("rows to score", field="scored", got=scored.shape, expected=(routes.tokens,))
    nothing = routes.select(np.zeros(routes.tokens, bool))
    train = nothing if fitted_on is None else fitted_on
    frequency = DecayedHistory(decay=1.0) if fitted_on is None else Popularity()
    table = CoOccurrence(layers_back=1, online=fitted_on is None)
    return RouteFigures(
        overlap(routes, scored),
        _recalls(frequency, train, routes, scored, slice(None)),
        _recalls(table, train, routes, scored, slice(1, None)),
        _thread_load(routes.select(scored)),
    )


def overlap(routes: Routes, scored: np.ndarray) -> Figure:
    """Share of experts that the previous token of the thread used in the same layer; rows without one left out."""
    row = routes.previous_row()
    # An absent slot only ever equals another absent slot, and those are not counted.
    hit = (routes.ids[..., :, None] == routes.ids[row][..., None, :]).any(-1)
    return _figure(hit, routes, routes.present() & (scored & (row >= 0))[:, None, None])


def _recalls(control: Control, train: Routes, routes: Routes, scored: np.ndarray, layers: slice) -> tuple[Figure, ...]:
    ranks = rank_blocks(control.fit(train).iter_scores(routes), routes.ids, mask=routes.mask)
    counted = routes.present() & scored[:, None, None]
    return tuple(
        _figure((ranks < m * routes.top_k)[:, layers], routes, counted[:, layers]) for m in MULTIPLES
    )  # fmt: skip


def _figure(hit: np.ndarray, routes: Routes, counted: np.ndarray) -> Figure:
    whole = clustered_mean(hit, routes.thread, weights=counted)
    layers = (hit & counted).sum((0, 2)) / np.maximum(counted.sum((0, 2)), 1)
    return Figure(whole.value, float(layers.min()), float(layers.max()), whole.se, whole.n)


def _thread_load(routes: Routes) -> dict[str, float]:
    loads = [load_balance(use_counts(routes.select(routes.thread == thread))) for thread in np.unique(routes.thread)]
    return {name: round(float(np.mean([load[name] for load in loads])), 4) for name in loads[0]}


def use_counts(routes: Routes) -> np.ndarray:
    """`i64[L,E]`: how often each expert was chosen."""
    present = routes.present()
    return np.stack(
        [
            np.bincount(routes.ids[:, layer][present[:, layer]], minlength=routes.experts)
            for layer in range(routes.layers)
        ]
    )


def load_balance(counts: np.ndarray) -> dict[str, list[float]]:
    """From counts `[L,E]`, by layer: `busiest` ÷ mean, and `hottest_eighth`, the share of the E/8 busiest."""
    descending = -np.sort(-counts, axis=-1)
    eighth = descending[:, : max(1, counts.shape[1] // 8)].sum(-1)
    return {
        "busiest": (descending[:, 0] / counts.mean(-1)).round(3).tolist(),
        "hottest_eighth": (eighth / counts.sum(-1)).round(3).tolist(),
    }


def domain_distance(counts: Mapping[str, np.ndarray]) -> dict[tuple[str, str], np.ndarray]:
    """Total variation `f64[L]`, 0 to 1, of every pair of domains, from counts `[L,E]` of each."""
    share = {name: value / value.sum(-1, keepdims=True) for name, value in counts.items()}
    names = sorted(share)
    return {
        (a, b): 0.5 * np.abs(share[a] - share[b]).sum(-1) for i, a in enumerate(names) for b in names[i + 1 :]
    }  # fmt: skip
