"""How well a route is known, how early, and for how many bytes: heads beside everything simpler, on the same rows.

A ranking of experts is known some layers before its layer's turn. Counted in decoder layers of N,

    half layer           0.5     the layer's own gate on the state in front of its attention
    1 layer              1       the layer's own gate on the state of the layer before
    1 token              N       what the same layer did, or its own gate said, at the token before
    1 token + 1 layer    N + 1   what the layer before knew at the token before: a prerouter's head

A lead is worth what can be read in it, so it is also given as time: a layer's share of a decoded token's compute.

Two kinds of bytes: those of the predictor's weights, and those that K candidates a layer make it read, net of a cache
of a stated size over the native routes. Of these some are for experts that are then used and were not in the cache: the
share of all misses that is so covered is the *miss recall*, the only recall that a predictor earns by.

Shapes: T tokens, L MoE layers, E experts, K experts a token, H width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..artifacts import Artifact
from ..flywheel.batches import BatchShape
from ..flywheel.controls import PreviousToken
from ..flywheel.cooccurrence import CoOccurrence
from ..flywheel.dataset import Dataset
from ..flywheel.estimates import Estimate, clustered_mean, paired_difference
from ..flywheel.evaluation import HeldOut
from ..flywheel.examples import ARMS, early_gate, regenerate
from ..flywheel.head_examples import HORIZON, consumers, head_rows, on_layers
from ..flywheel.head_recipe import tier_of
from ..flywheel.head_training import FILES
from ..flywheel.metrics import ranks
from ..flywheel.observations import Records
from ..prerouter import TorchHeads, read_heads

if TYPE_CHECKING:
    from ..models import LoadedModel

__all__ = ["HEADS", "agreement", "lead_layers"]

HEADS = {form: f"heads, {form}" for form in FILES}
SET = "validation"
BYTES = 4
"""Of a number in a co-occurrence table."""


@dataclass(frozen=True, eq=False)
class Ranking:
    """Scores `f32[T, L, E]` of all held-out rows, known a horizon ahead. nbytes: of what gives them."""

    name: str
    horizon: str
    scores: np.ndarray
    nbytes: int


def lead_layers(horizon: str, layers: int) -> float:
    """Decoder layers between a prediction and its layer's turn."""
    return {"half layer": 0.5, "1 layer": 1.0, "1 token": float(layers), HORIZON: layers + 1.0}[horizon]


def agreement(
    loaded: LoadedModel,
    records: Records,
    dataset: Dataset,
    heads: Artifact,
    *,
    shape: BatchShape,
    cache_fraction: float,
    token_s: float,
) -> dict[str, Any]:
    """Figures on the decoded rows of validation owners, over the layers that a head predicts.

    Args:
        heads: artefact of kind `prerouter`. shape: of feature batches. cache_fraction: of all expert bytes.
        token_s: compute of a decoded token.

    Returns:
        `rows`, one a ranking; `layers`, one a ranking and layer; `less`, full heads less every other, paired.
    """
    held = HeldOut.of(dataset, [SET], cache_fraction=cache_fraction)
    wiring = tier_of(loaded, 1).wiring
    kept, counted = consumers(wiring), held.counted[SET]
    cluster, routes = held.cluster[counted], held.routes
    depth, rows, layers, right = len(loaded.model.layers), [], [], {}
    for ranking in _rankings(loaded, records, dataset, held, heads, shape):
        found = ranks(ranking.scores, routes.ids)[counted][:, kept]
        hit = found < routes.top_k
        right[ranking.name] = hit
        lead = lead_layers(ranking.horizon, depth)
        rows.append(
            {
                "ranking": ranking.name, "horizon": ranking.horizon, "lead_layers": lead,
                "lead_s": token_s * lead / depth, "nbytes": ranking.nbytes,
                **{name: value.plain() for name, value in _summary(found, hit, cluster).items()},
                **{name: value.plain() for name, value in _early(ranking.scores, held, kept).items()},
            }
        )  # fmt: skip
        for index, layer in enumerate(np.flatnonzero(kept)):
            part = {"ranking": ranking.name, "layer": int(routes.layer_ids[layer])}
            found_here, hit_here = found[:, [index]], hit[:, [index]]
            layers.append(
                part | {name: value.plain() for name, value in _summary(found_here, hit_here, cluster).items()}
            )
    full = HEADS["full"]
    less = [
        {"ranking": name, "recall": paired_difference(right[full], hit, cluster).plain()}
        for name, hit in right.items()
        if name != full
    ]
    return {"cache_bytes": held.cache_bytes, "token_s": token_s, "rows": rows, "layers": layers, "less": less}


def _rankings(loaded, records, dataset: Dataset, held: HeldOut, heads: Artifact, shape) -> Iterator[Ranking]:
    routes, before = held.routes, held.routes.previous_row()
    train = dataset.routes.select(dataset.rows("train"))
    features = _features(loaded, records, dataset, held, shape)
    moe, table = features["moe_input"], routes.layers * routes.experts**2 * BYTES
    for name, arm in (("half layer", "half layer"), ("1 layer", "1 layer")):
        scores = early_gate(loaded, features[ARMS[arm].feature], ARMS[arm])
        yield Ranking(f"own gate, {name} early", ARMS[arm].horizon, scores, 0)
    yield _control(CoOccurrence(layers_back=1), train, routes, table)
    yield _control(PreviousToken(), train, routes, 0)
    yield _control(CoOccurrence(tokens_back=1), train, routes, table)
    earlier = moe[np.maximum(before, 0)]
    own = np.stack([loaded.early_gate_scores(earlier[:, n], n, False) for n in range(routes.layers)], axis=1)
    yield Ranking("own gate, 1 token early", "1 token", _none(own, before), 0)
    yield _control(CoOccurrence(tokens_back=1, layers_back=1), train, routes, table)
    last = early_gate(loaded, earlier, ARMS["1 layer"])
    yield Ranking("own gate, 1 token + 1 layer early", HORIZON, _none(last, before), 0)
    wiring = tier_of(loaded, 1).wiring
    told = head_rows(moe, routes, wiring, np.ones(routes.tokens, bool))
    for form, file in FILES.items():
        logits = TorchHeads.of(read_heads(heads.file(file))).scores(told.features)
        low = float(logits.min()) - 1.0
        scores = on_layers(logits, wiring, told, routes.tokens, fill=low)
        yield Ranking(HEADS[form], HORIZON, scores, heads.file(file).stat().st_size)


def _control(control: Any, train: Any, routes: Any, nbytes: int) -> Ranking:
    return Ranking(control.name, control.horizon, control.fit(train).scores(routes), nbytes)


def _none(scores: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Nothing is known of a text's first token."""
    return np.where((before >= 0)[:, None, None], scores, np.float32(0))


def _features(loaded, records: Records, dataset: Dataset, held: HeldOut, shape) -> dict[str, np.ndarray]:
    """Of the held-out rows alone, row for row: only their texts are run again."""
    texts = np.unique(held.routes.thread)
    part = replace(held.routes, thread=np.searchsorted(texts, held.routes.thread).astype(np.int32))
    table, sets = [dataset.table[i] for i in texts], dataset.set_of_row[held.rows]
    some = replace(dataset, routes=part, table=table, set_of_row=sets)
    return regenerate(loaded, some, records, ("pre_attention", "moe_input"), shape)


def _summary(found: np.ndarray, hit: np.ndarray, cluster: np.ndarray) -> dict[str, Estimate]:
    """Of ranks `[T, L, K]`. `top1`: the native first choice comes first; `rank`: its mean place, from 1."""
    return {
        "recall": clustered_mean(hit, cluster),
        "exact": clustered_mean(hit.all(-1), cluster),
        "top1": clustered_mean(found[..., 0] == 0, cluster),
        "rank": clustered_mean(found[..., 0] + 1, cluster),
    }


def _early(scores: np.ndarray, held: HeldOut, kept: np.ndarray) -> dict[str, Estimate]:
    """K candidates a layer, net of the cache: bytes read ahead and not used a token, and misses covered."""
    counted, routes = held.counted[SET], held.routes
    ids = routes.ids[counted][:, kept].astype(np.int64)
    first = np.argsort(-scores[counted][:, kept], axis=-1, kind="stable")[..., : routes.top_k]
    resident = np.unpackbits(held.resident[counted][:, kept], axis=-1, count=routes.experts).astype(bool)
    absent = ~np.take_along_axis(resident, first, -1)
    same = first[..., :, None] == ids[..., None, :]
    nbytes, cluster = routes.expert_bytes[kept][None, :, None], held.cluster[counted]
    return {
        "read": clustered_mean((absent * nbytes).sum((1, 2)), cluster),
        "wasted": clustered_mean((absent * ~same.any(-1) * nbytes).sum((1, 2)), cluster),
        "covered": clustered_mean(same.any(-2), cluster, weights=~np.take_along_axis(resident, ids, -1)),
    }
