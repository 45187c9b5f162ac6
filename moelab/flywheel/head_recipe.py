"""How prerouter heads are trained: widths, rates, the controls they meet, and the scale of their logits.

The two forms were chosen on the temporal holdout of the reference models; reports/LOG.md has what was tried.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import models
from ..models.families import RoutingFamily
from ..prerouter import Tier, scaled
from .controls import Control, DecayedHistory, Popularity, PreviousToken, Random
from .cooccurrence import CoOccurrence
from .lesson import Recipe
from .metrics import ranks

SCALES = tuple(2.0 ** (-k / 2) for k in range(13))
"""Tried for each layer: 1 to 1/64."""


@dataclass(frozen=True, kw_only=True)
class HeadRecipe:
    """Widths of both forms (`hidden` D, `rank` R) and how each is trained; see `lesson.Recipe`."""

    hidden: int = 512
    rank: int = 192
    epochs: int = 8
    batch: int = 256
    learning_rate: float = 3e-3
    weight_decay: float = 1.0
    shared_epochs: int = 12
    shared_batch: int = 128
    shared_learning_rate: float = 1e-2
    shared_weight_decay: float = 0.5
    over: float = 0.05
    calibration: float = 1.0
    overfit_tokens: int = 128
    overfit_epochs: int = 150
    overfit_recall: float = 0.99

    def of(self, form: str, seed: int) -> Recipe:
        shared = form == "shared"
        return Recipe(
            epochs=self.shared_epochs if shared else self.epochs,
            batch=self.shared_batch if shared else self.batch,
            learning_rate=self.shared_learning_rate if shared else self.learning_rate,
            weight_decay=self.shared_weight_decay if shared else self.weight_decay,
            over=self.over,
            calibration=self.calibration,
            seed=seed,
        )


def head_controls(seed: int) -> list[Control]:
    """What heads are held against: everything of their horizon, and of a token's lead, which knows more."""
    return [
        Random(seed=seed),
        Popularity(),
        PreviousToken(),
        DecayedHistory(),
        CoOccurrence(tokens_back=1),
        CoOccurrence(tokens_back=1, layers_back=1),
    ]


def tier_of(loaded: models.LoadedModel, hidden: int) -> Tier:
    """The tier of a model that has none of its own."""
    shape, family = loaded.geometry, loaded.family
    return scaled(
        loaded.name,
        kind=family.kind,
        layer_ids=shape.layer_ids,
        experts=shape.experts,
        top_k=shape.top_k,
        width=shape.hidden,
        hidden=hidden,
        model_type=loaded.config["model_type"],
        groups=family.groups,
        kept_groups=family.kept_groups,
        scale=family.scale,
    )


def weight_scale(family: RoutingFamily, logits: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The scale of each head's logits, of `SCALES`, at which `family.weights` comes nearest the native ones: `f64[n]`.

    `logits [T, n, E]`; native `ids`, `weights [T, n, K]`; nearest by the mean absolute difference.
    """
    off = [np.abs(family.weights(scale * logits, ids) - weights).mean((0, 2)) for scale in SCALES]
    return np.array(SCALES)[np.argmin(off, axis=0)]


def recalled(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`bool[T, n, K]`: whether each used expert is among the first K by score."""
    return ranks(scores, ids) < ids.shape[-1]
