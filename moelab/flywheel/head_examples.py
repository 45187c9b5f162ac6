"""From a snapshot to rows that prerouter heads learn from: what layer N knew at token t, what layer N+1 did at t+1.

A row belongs to a *target*: token t+1 of a thread. Its features are those of the token before, and it has the executed
experts of the token before that one, or none. Where a thread's first token is the target there is nothing to predict
from, and there is no row.

Which experts count as executed is a question of its own. Teacher-forced, as here by default, they are the native
router's, which is what heads meet at decode when they only advise. Where a prediction replaces the route, the executed
experts are the heads' own earlier output; `executed` then gives them.

Shapes: T tokens, L MoE layers, n heads, K experts a token, H width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import GeometryError
from ..prerouter import Wiring
from ..prerouter.torch_form import NONE, told
from ..routes import Routes
from .train import Examples

HORIZON = "1 token + 1 layer"

Executed = Callable[[Routes], np.ndarray]
"""Routes → ids `[T, L, K]` of the experts that each layer executed."""


def native(routes: Routes) -> np.ndarray:
    """Teacher forcing: what the native router chose."""
    return routes.ids


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows in the order of their targets. `features f32[R, n, H + 2K]` (`told`), `target i64[R]` row of the routes."""

    features: np.ndarray
    target: np.ndarray

    def examples(self, routes: Routes, wiring: Wiring) -> Examples:
        """With the labels: layer N+1's native experts at the target, in rank order."""
        return Examples(self.features, routes.ids[self.target][:, wiring.consumer_index])


def head_rows(
    hidden: np.ndarray, routes: Routes, wiring: Wiring, targets: np.ndarray, *, executed: Executed = native
) -> HeadRows:
    """Rows of the targets `bool[T]` that have a token before them.

    `hidden f32[T, L, H]`: input of each layer's experts.

    Raises:
        GeometryError: arrays or layers that do not belong to the routes.
    """
    if hidden.shape[:2] != routes.ids.shape[:2] or targets.shape != routes.ids.shape[:1]:
        got = (hidden.shape, targets.shape)
        raise GeometryError("rows do not line up", field="hidden, targets", got=got, expected=routes.ids.shape[:2])
    if wiring.layer_ids != tuple(routes.layer_ids):
        raise GeometryError(
            "heads of other layers", field="layer_ids", got=wiring.layer_ids, expected=tuple(routes.layer_ids)
        )
    before = routes.previous_row()
    target = np.flatnonzero(targets & (before >= 0))
    source = before[target]
    ids = executed(routes).astype(np.int32)
    if ids.shape != routes.ids.shape:
        raise GeometryError(
            "executed experts of other rows", field="executed", got=ids.shape, expected=routes.ids.shape
        )
    owners = np.array(wiring.owner_index)
    earlier = before[source]
    previous = np.where((earlier >= 0)[:, None, None], ids[earlier][:, owners], NONE)
    return HeadRows(told(hidden[source][:, owners], ids[source][:, owners], previous), target)


def on_layers(scores: np.ndarray, wiring: Wiring, rows: HeadRows, tokens: int, *, fill: float) -> np.ndarray:
    """Scores of heads `[R, n, E]` where they apply: `f32[tokens, L, E]`, at target and consumer, `fill` elsewhere."""
    out = np.full((tokens, len(wiring.layer_ids), scores.shape[-1]), fill, np.float32)
    out[rows.target[:, None], np.array(wiring.consumer_index)] = scores
    return out


def consumers(wiring: Wiring) -> np.ndarray:
    """`bool[L]`: layers that a head predicts."""
    return np.isin(np.arange(len(wiring.layer_ids)), wiring.consumer_index)
