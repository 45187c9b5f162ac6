"""What a prediction is used for: one switch with five positions.

    off                   nothing: the plain engine
    advise                the native router decides; the prediction moves bytes
    replace               the prediction is the route: its experts, with its weights
    replace_true_weights  its experts, with the weights that the native gate gives to them, renormalised
    gated                 replace where the prediction is sure enough, otherwise native and exact

The confidence of a predicted route is the mean over its experts of the calibrated probability that each is used:
the share of the set that is expected to be right. `gated` compares it with a threshold, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..errors import ParameterError, UnsupportedModelError
from ..models.families import RoutingFamily
from ..models.native import weigh
from .supply import Source

__all__ = ["MODES", "Prediction", "REPLACING", "check_mode", "source_of", "true_weights", "weigh"]

DEFAULT_MODE, DEFAULT_THRESHOLD = "gated", 0.55
"""Of all that was tried (reports/committed/prerouter_modes.json), what replaces most while its loss over the native
model stays below 0.02 nats a token, two standard errors included, on both embedded models: -0.008 ± 0.005 and +0.004 ±
0.004, where `replace` costs +0.260 ± 0.049 and +0.183 ± 0.037. It replaces 9 and 13 % of routes; the others are native,
and their predictions move bytes."""
MODES = ("off", "advise", "replace", "replace_true_weights", "gated")
REPLACING = ("replace", "replace_true_weights", "gated")


@dataclass(frozen=True, eq=False)
class Prediction:
    """A layer's route at the next token, as a head foretells it.

    Attributes:
        ids: K experts, the likeliest first; `extra`: candidates beyond K, for `advise` alone.
        scores: selection score of each of `ids + extra`.
        probabilities: calibrated, of each of `ids + extra`; None without a calibration.
        weights: `f32[1, 1, K]` of `ids`, or None where the consumer weighs the logits itself.
        logits: `f32[1, 1, E]`.
    """

    ids: tuple[int, ...]
    extra: tuple[int, ...]
    scores: Sequence[float]
    probabilities: Sequence[float] | None
    weights: mx.array | None
    logits: mx.array

    @property
    def confidence(self) -> float | None:
        """Expected share of `ids` that is right."""
        if self.probabilities is None:
            return None
        return float(sum(self.probabilities[: len(self.ids)]) / len(self.ids))


def check_mode(mode: str, *, threshold: float, calibrated: bool) -> None:
    """Raises ParameterError: no such mode or threshold, or `gated` on heads that are not calibrated."""
    if mode not in MODES:
        raise ParameterError("no such mode", field="mode", got=mode, expected=MODES)
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise ParameterError("not a probability", field="threshold", got=threshold, expected="in [0, 1]")
    if mode == "gated" and not calibrated:
        raise ParameterError(
            "confidence of these heads is not calibrated", field="mode", got=mode, expected="heads with a calibration",
            fix="calibration={owner: (scale, offset)}, or another mode",
        )  # fmt: skip


def source_of(mode: str, prediction: Prediction, threshold: float) -> Source:
    """Where the consumer's route comes from. `mode` is not "off"."""
    if mode == "advise":
        return Source.ADVISED
    if mode == "gated" and prediction.confidence < threshold:
        return Source.DECLINED
    return Source.PREDICTION


def true_weights(family: RoutingFamily, logits: mx.array, ids: mx.array) -> mx.array:
    """Weights `f32[..., K]` that the native gate's `logits [..., E]` give to `ids`, renormalised in any case.

    A family that does not normalise gives its K weights a sum below `scale`, which depends on the choice of K; a set
    that the gate did not choose is given the whole of it.
    """
    return weigh(replace(family, normalise=family.normalise or family.weight == "score"), logits, ids)


def check_family(family: RoutingFamily) -> None:
    """Raises UnsupportedModelError: weights of given experts are not known for this family."""
    if family.weight not in ("score", "softmax") or family.expert_scaled:
        raise UnsupportedModelError(
            "a prediction cannot take the place of this gate", field="family", got=str(family),
            expected="weights of the experts' own scores, or a softmax over the logits of the chosen",
        )  # fmt: skip
