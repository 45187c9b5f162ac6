r"""Scores whose zero means "no better than the anchor", fitted outside the policies.

A native router's scores are always positive, so against an anchor at 0 every specialist would win. What a
policy needs is the evidence that running specialist k on token t helps, the *utility*

    u_{tk} = L(a_t) - L(a_t + d_{tk})

for a loss L, the anchor's output a and the specialist's correction d. Utility is known on recorded tokens
alone; a score must come from what the router says before anything runs. For each specialist its mean utility
is regressed on the native weight w of that specialist and on whether the router chose it (c, 0 or 1):

    s_k = b_0 + b_1 w + b_2 w^2 + b_3 c + b_4 c w

w² is there because a correction's own energy grows with the square of its weight. Least squares gives the
conditional mean, so s > 0 says that the specialist helps *on average* at this weight, which is what a policy
pays for. A specialist that the training tokens hardly used, or a noisy utility such as the next-token loss,
says little by itself: its coefficients are shrunk (`ridge`) to those of all specialists together. Fit on
training owners; check the zero on others (`by_score`).

In the shape descriptions, `T` is the tokens, `N` the specialists and `F` the five terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from moelab.errors import ContractError, GeometryError
from moelab.policies._validate import check_finite, check_tensor

TERMS = ("1", "w", "w^2", "c", "c w")


@dataclass(frozen=True, eq=False)
class ScoreCalibration:
    """Native weights to calibrated scores.

    coefficients: `[N, F]` f64, in the order of `TERMS`.
    unit: what utility was divided by, so that scores are shares of it.
    tokens: how many it was fitted on.
    """

    coefficients: Tensor
    unit: float
    tokens: int

    def __call__(self, weights: Tensor, chosen: Tensor) -> Tensor:
        """`[T, N]` f32 scores, in shares of `unit`.

        weights: `[T, N]` floats; chosen: bool `[T, N]`.
        """
        check_tensor("weights", weights, ("T", len(self.coefficients)))
        return torch.einsum("tnf,nf->tn", terms(weights, chosen), self.coefficients).float()


def terms(weights: Tensor, chosen: Tensor) -> Tensor:
    """`[T, N, F]` f64."""
    check_tensor("weights", weights, ("T", "N"))
    check_tensor("chosen", chosen, tuple(weights.shape), dtypes=(torch.bool,))
    w, c = weights.double(), chosen.double()
    return torch.stack((torch.ones_like(w), w, w * w, c, c * w), dim=-1)


def fit_calibration(
    utility: Tensor, weights: Tensor, chosen: Tensor, *, unit: float = 1.0, ridge: float = 1e-3
) -> ScoreCalibration:
    """Least squares for each specialist, shrunk to the fit of all of them together.

    utility, weights: `[T, N]` floats; chosen: bool `[T, N]`.
    unit: scores are utility divided by this.
    ridge: strength of the shrinking, in tokens of the mean square of each term as a share of T.
    Raises `PolicyError` for tensors that do not fit or are not finite, `ContractError` for a unit or ridge
    that is not positive or no tokens.
    """
    for name, value in (("unit", unit), ("ridge", ridge)):
        if not 0 < value < float("inf"):
            raise ContractError("must be positive", field=name, got=value, expected="> 0")
    x = terms(weights, chosen)
    check_tensor("utility", utility, tuple(weights.shape))
    for name, value in (("utility", utility), ("weights", weights)):
        check_finite(name, value)
    if not len(x):
        raise ContractError("nothing to fit on", field="utility", got=0, expected="at least one token")
    y = utility.double() / unit
    normal = torch.einsum("tnf,tng->nfg", x, x)
    scale = torch.diag(x.square().mean((0, 1)).clamp_min(torch.finfo(torch.float64).tiny ** 0.5))
    right = torch.einsum("tnf,tn->nf", x, y)
    together = torch.linalg.solve(normal.sum(0) + 1e-9 * x.shape[1] * len(x) * scale, right.sum(0))
    own = torch.linalg.solve(normal + ridge * len(x) * scale, right - normal @ together)
    return ScoreCalibration(together + own, unit, len(x))


def by_score(scores: np.ndarray, *, bins: int = 12) -> np.ndarray:
    """`int[...]` bin of each score: bins of equal count below zero and above it, so that none straddles zero.

    Scores <= 0 get the first bins, those > 0 the last; each side has bins in proportion, at least one if it
    has any score. Raises `GeometryError` for fewer than two bins.
    """
    if bins < 2:
        raise GeometryError("one bin cannot keep the sides apart", field="bins", got=bins, expected=">= 2")
    flat = np.asarray(scores, np.float64).ravel()
    positive = flat > 0
    below = int(np.clip(round(bins * float((~positive).mean() if len(flat) else 0)), 1, bins - 1))
    out = np.zeros(len(flat), np.int64)
    for side, count, first in ((~positive, below, 0), (positive, bins - below, below)):
        size = int(side.sum())
        if size:
            order = np.argsort(np.argsort(flat[side], kind="stable"), kind="stable")
            out[side] = first + order * count // size
    return out.reshape(np.shape(scores))
