"""What a training is given: rows, and a recipe. Plain numpy, so that judging controls needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..artifacts import digest_tensors
from ..errors import GeometryError


@dataclass(frozen=True)
class Examples:
    """Training rows in memory. `gate_scores` is None for a predictor that does not use them.

    features: f32|f16 [T, L, H], row l belongs to target layer l.
    ids: integer [T, L, K], native experts in rank order.
    gate_scores: f32 [T, L, E] | None.
    """

    features: np.ndarray
    ids: np.ndarray
    gate_scores: np.ndarray | None = None

    def __post_init__(self):
        T, L = self.ids.shape[:2]
        for name in ("features", "gate_scores"):
            value = getattr(self, name)
            if value is not None and value.shape[:2] != (T, L):
                raise GeometryError("rows do not line up", field=name, got=value.shape[:2], expected=(T, L))

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, index: np.ndarray | slice) -> Examples:
        gate = None if self.gate_scores is None else self.gate_scores[index]
        return Examples(self.features[index], self.ids[index], gate)

    def digest(self) -> str:
        """Digest of the very arrays that are trained on."""
        arrays = {"features": self.features, "ids": self.ids, "gate_scores": self.gate_scores}
        return digest_tensors({name: value for name, value in arrays.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. `deadline` [L] weighs the rank term of layers; None weighs them equally."""

    epochs: int = 6
    batch: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    over: float = 0.05
    calibration: float = 1.0
    seed: int = 0
    deadline: tuple[float, ...] | None = None

    def __post_init__(self):
        if min(self.epochs, self.batch) < 1:
            got = (self.epochs, self.batch)
            raise GeometryError("nothing would be trained", field="epochs, batch", got=got, expected=">= 1")
