"""From a snapshot to arrays a predictor can learn from: features regenerated, gates applied early.

Features are not stored by default: whole activations of a million tokens are a terabyte, and pushing the
tokens through the frozen model again costs less than reading them back (notebook 21 prints both). They
are regenerated in batches of the same shape every time, so they are the same numbers every time.

An *arm* says what is known and when. With shift 1, target layer `l` is predicted from layer `l-1`; the
first layer then has no source, and no arm is scored on it.

| arm | horizon | feature | shift |
|---|---|---|---|
| `half layer` | half layer | residual stream entering the layer itself | 0 |
| `1 layer` | 1 layer | input of the previous layer's experts | 1 |
| `1 layer, pre-attention` | 1 layer | residual stream entering the previous layer | 1 |

Source: AFN-021, "What feature should the sidecar see?".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import ContractError, ParameterError
from .batches import BatchShape, replay
from .dataset import Dataset
from .lesson import Examples
from .observations import Records

if TYPE_CHECKING:
    from ..models import LoadedModel


@dataclass(frozen=True)
class Arm:
    """What a predictor is told, and how long before its layer."""

    name: str
    horizon: str
    feature: str
    shift: int

    @property
    def raw(self) -> bool:
        """Whether the feature is a residual stream, which the target's own norm must be applied to first."""
        return self.feature == "pre_attention"


ARMS = {
    arm.name: arm
    for arm in (
        Arm("half layer", "half layer", "pre_attention", 0),
        Arm("1 layer", "1 layer", "moe_input", 1),
        Arm("1 layer, pre-attention", "1 layer", "pre_attention", 1),
    )
}


def arms(names: Sequence[str]) -> list[Arm]:
    """Arms by name. Raises ParameterError on an unknown one."""
    if unknown := [name for name in names if name not in ARMS]:
        raise ParameterError("unknown arm", field="arms", got=unknown, expected=sorted(ARMS))
    return [ARMS[name] for name in names]


def regenerate(
    loaded: LoadedModel, dataset: Dataset, records: Records, features: Sequence[str], shape: BatchShape
) -> dict[str, np.ndarray]:
    """Features of every row of the dataset: name → `f32[T,L,H]`, row for row with `dataset.routes`.

    Raises:
        ContractError: a row has no token to regenerate it from.
    """
    observed = [o.token_ids for o in records.open(dataset.table, loaded, purpose="train")]
    geometry, routes = loaded.geometry, dataset.routes
    out = {name: np.empty((routes.tokens, geometry.layers, geometry.hidden), np.float32) for name in features}
    first = np.searchsorted(routes.thread, np.arange(len(observed)))
    last = np.searchsorted(routes.thread, np.arange(len(observed)), side="right")
    for index, record in replay(loaded, observed, shape, features=features):
        position = routes.position[first[index] : last[index]]
        if len(position) and position[-1] >= len(observed[index]):
            raise ContractError(
                "row beyond the recorded tokens", field="position", got=int(position[-1]), expected=len(observed[index])
            )
        for name in features:
            out[name][first[index] : last[index]] = record.features[name][position]
    return out


def early_gate(loaded: LoadedModel, feature: np.ndarray, arm: Arm, *, batch: int = 4096) -> np.ndarray:
    """Every layer's own gate applied to what the arm knows: selection scores `f32[T,L,E]`, zeros where nothing is."""
    tokens, layers, _ = feature.shape
    out = np.zeros((tokens, layers, loaded.geometry.experts), np.float32)
    for layer in range(arm.shift, layers):
        for start in range(0, tokens, batch):
            rows = slice(start, start + batch)
            out[rows, layer] = loaded.early_gate_scores(feature[rows, layer - arm.shift], layer, arm.raw)
    return out


def logit_scale(loaded: LoadedModel, scores: np.ndarray) -> np.ndarray:
    """Selection scores on the scale of logits, order kept: where a predictor starts from.

    A softmax probability becomes its logarithm, which is the logit up to a constant a row. A sigmoid score,
    whose slope is at most 1/4, is multiplied by 4. Other scores are logits already.
    """
    if loaded.family.score == "softmax":
        return np.log(np.maximum(scores, 1e-9))
    return 4 * scores if loaded.family.score == "sigmoid" else scores


def shifted(feature: np.ndarray, shift: int) -> np.ndarray:
    """Row `l` of the result is what layer `l` is told: the feature of layer `l - shift`, zeros before the first."""
    if shift == 0:
        return feature
    out = np.zeros_like(feature)
    out[:, shift:] = feature[:, :-shift]
    return out


def known_layers(arm: Arm, layers: int) -> np.ndarray:
    """`bool[L]`: layers that the arm can say anything about."""
    return np.arange(layers) >= arm.shift


def contextual_layers(arm: Arm, layer_ids: Sequence[int]) -> np.ndarray:
    """`bool[L]`: layers whose feature has seen more than its own token.

    The residual stream that enters the model's very first layer is the token's embedding. One and the same
    vector then has different routes in different contexts, and no predictor can learn those by heart.
    """
    known = known_layers(arm, len(layer_ids))
    sources = np.array([layer_ids[max(0, layer - arm.shift)] for layer in range(len(layer_ids))])
    return known & (sources > 0) if arm.raw else known


def examples(
    dataset: Dataset, features: dict[str, np.ndarray], gate: np.ndarray, arm: Arm, rows: np.ndarray
) -> Examples:
    """Training rows of an arm."""
    return Examples(shifted(features[arm.feature], arm.shift)[rows], dataset.routes.ids[rows], gate[rows])
