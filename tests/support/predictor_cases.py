"""Small predictors and examples that several tests share."""

import numpy as np

from moelab.flywheel.predictors import PredictorIdentity
from moelab.flywheel.train import Examples


def identity(**changes) -> PredictorIdentity:
    fields = {
        "model": "m" * 64,
        "layers": 3,
        "experts": 16,
        "top_k": 4,
        "width": 12,
        "horizon": "half layer",
        "feature": "pre_attention",
        "shift": 0,
        "snapshot": "s" * 64,
    }
    return PredictorIdentity(**{**fields, **changes})


def examples(own: PredictorIdentity, tokens: int, *, noise: float = 1.0, seed: int = 0) -> Examples:
    """Routes of a random linear teacher on unit-scale features; the gate is the teacher plus noise."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((tokens, own.layers, own.width)).astype(np.float32)
    teacher = rng.standard_normal((own.layers, own.experts, own.width)).astype(np.float32)
    true = np.einsum("tlh,leh->tle", x / np.sqrt((x**2).mean(-1, keepdims=True)), teacher)
    gate = true + noise * rng.standard_normal(true.shape)
    return Examples(x, np.argsort(-true, axis=-1)[..., : own.top_k].astype(np.uint16), gate.astype(np.float32))


def recall(scores: np.ndarray, ids: np.ndarray) -> float:
    """Share of native experts among the K best-scored, ties by lowest id."""
    top = np.argsort(-scores, axis=-1, kind="stable")[..., : ids.shape[-1]]
    return float((top[..., :, None] == ids[..., None, :]).any(-1).mean())
