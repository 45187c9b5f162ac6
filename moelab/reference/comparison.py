"""Is it the same model on both sides? Torch against mlx, logits and routes, from one exported checkpoint.

The two libraries add in different orders, so logits agree to float32 rounding (`TOLERANCE`) and no
better. A route is a decision on such numbers: it is the same unless two experts are closer than the rounding.
The sets must therefore be equal row by row, and every row where they are not is counted and shown with
its margin; none is excused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import IdentityError

TOLERANCE = 1e-4
"""Largest difference of a logit, float32. Eight layers of 200-term sums leave about 1e-5; a wrong norm epsilon,
rotary base or mask leaves 1e-2 or more."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """What two implementations of one checkpoint did with the same tokens.

    Attributes:
        difference: largest |Δ logit|.
        spread: largest |logit|, what the difference is to be read against.
        weight_difference: largest |Δ| of a mixture weight, over rows that chose the same set.
        rows: routes compared: tokens × MoE layers.
        differing: rows whose sets of experts differ.
        least_margin: smallest distance of the last chosen expert from the next one, over all rows.
    """

    difference: float
    spread: float
    weight_difference: float
    rows: int
    differing: int
    least_margin: float

    @property
    def passed(self) -> bool:
        return self.difference <= TOLERANCE and self.differing == 0

    def require(self) -> Comparison:
        """Self, if the two agree.

        Raises:
            IdentityError: a logit or a route differs.
        """
        if not self.passed:
            raise IdentityError(
                "torch and mlx do not compute the same model",
                field="logits, routes",
                got=f"max |Δ logit| {self.difference:.2e}, {self.differing} of {self.rows} routes differ",
                expected=f"at most {TOLERANCE:g}, and none",
            )
        return self


def compare(folder: str | Path, tokens: np.ndarray) -> Comparison:
    """Run `tokens [B,T]` through the checkpoint in torch and in mlx, both float32, without a cache."""
    import torch

    from .checkpoint import load_torch
    from .routers import RouterTap

    network = load_torch(folder)
    with torch.no_grad(), RouterTap(network) as tap:
        logits = network(input_ids=torch.from_numpy(np.asarray(tokens, np.int64)), use_cache=False).logits.numpy()
    shape = (*np.shape(tokens), len(tap.ids), -1)
    ids, weights = (
        torch.stack(part, 1).numpy().reshape(shape) for part in (tap.ids, [w.detach() for w in tap.weights])
    )
    order = np.argsort(ids, -1)
    return _difference(
        logits, np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1), *_mlx(folder, tokens)
    )


def _mlx(folder: str | Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits, ids sorted by number, weights, margins."""
    import mlx.core as mx

    from ..models import load

    loaded = load(folder)
    with loaded.tap() as tap:
        logits = loaded.model(mx.array(np.asarray(tokens, np.int32)))
        mx.eval(logits, *tap.pending())
        record = tap.take()
    order = np.argsort(record.ids, -1)
    ids, weights = (np.take_along_axis(array, order, -1) for array in (record.ids, record.weights))
    return np.array(logits), ids.astype(np.int64), weights, record.margin


def _difference(logits, ids, weights, other_logits, other_ids, other_weights, margin) -> Comparison:
    same = (ids == other_ids).all(-1)
    return Comparison(
        difference=float(np.abs(logits - other_logits).max()),
        spread=float(np.abs(logits).max()),
        weight_difference=float(np.abs(weights - other_weights)[same].max(initial=0.0)),
        rows=same.size,
        differing=int((~same).sum()),
        least_margin=float(margin.min()),
    )
