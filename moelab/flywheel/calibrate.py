"""Scores into probabilities: one slope and one offset a layer, fitted in closed loop.

A ranking says nothing about how sure it is. For each layer this fits

    P(expert e is selected | score s) = sigmoid(scale_l * s + bias_l)

by maximum likelihood over all rows and experts (Platt scaling; `1 / scale` is the temperature). The scale
is positive, so no ranking changes. Newton's method on two numbers needs about ten passes, draws nothing
and has no learning rate. Fit it on training-side rows only: calibrated on the rows it is judged on, any
predictor looks calibrated.

Source: J. Platt, "Probabilistic outputs for support vector machines", 1999.
"""

from __future__ import annotations

import numpy as np

from ..errors import GeometryError, RecordError

RIDGE = 1e-3
"""Pseudo-observations pulling the slope to zero: keeps perfectly separated scores finite, else unnoticeable."""
MIN_SLOPE = 1e-3
"""Least slope per standard deviation of the scores, for layers whose scores say nothing or rank backwards."""


def calibrate(scores: np.ndarray, ids: np.ndarray, *, candidates: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Slope and offset of every layer: `(scale f32[L], bias f32[L])`, scale > 0.

    scores: float [T, L, E]. ids: integer [T, L, K], the experts selected.
    candidates: fit only the best-scored `candidates` of each row, where those are what is acted on.

    Raises:
        GeometryError: shapes that do not belong together.
        RecordError: no rows, or a score that is not finite.
    """
    T, L, E = scores.shape
    if ids.shape[:2] != (T, L) or not 0 < ids.shape[2] < E:
        raise GeometryError("ids of another shape", field="ids", got=ids.shape, expected=f"({T}, {L}, K < {E})")
    if T == 0 or not np.isfinite(scores).all():
        raise RecordError("nothing to calibrate on", field="scores", got=scores.shape, expected="finite rows")
    scale, bias = np.empty(L), np.empty(L)
    for layer in range(L):  # one layer at a time bounds the float64 copies at T * E
        x = scores[:, layer].astype(np.float64)
        y = np.zeros_like(x)
        np.put_along_axis(y, ids[:, layer].astype(np.int64), 1.0, axis=-1)
        if candidates is not None:
            best = np.argsort(-x, axis=-1, kind="stable")[:, :candidates]
            x, y = np.take_along_axis(x, best, -1), np.take_along_axis(y, best, -1)
        scale[layer], bias[layer] = _platt(x.ravel(), y.ravel())
    return scale.astype(np.float32), bias.astype(np.float32)


def _platt(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope and offset of one layer, on standardised scores so that RIDGE and MIN_SLOPE have one meaning."""
    centre, spread = x.mean(), x.std() or 1.0
    x = (x - centre) / spread
    slope, offset = _newton(x, y, slope=None)
    if slope < MIN_SLOPE:
        slope, offset = _newton(x, y, slope=MIN_SLOPE)
    return slope / spread, offset - slope * centre / spread


def _newton(x: np.ndarray, y: np.ndarray, *, slope: float | None) -> tuple[float, float]:
    """Minimise the log loss of sigmoid(slope * x + offset); with a given slope, over the offset alone."""
    rate = (y.sum() + 0.5) / (y.size + 1.0)
    start = np.array([slope or 0.0, np.log(rate / (1.0 - rate))])
    theta = start.copy()

    def objective(theta: np.ndarray) -> float:
        z = theta[0] * x + theta[1]
        return float((np.logaddexp(0.0, z) - y * z).sum() + RIDGE / 2 * ((theta - start) ** 2).sum())

    value = objective(theta)
    for _ in range(100):
        p = 1.0 / (1.0 + np.exp(-np.clip(theta[0] * x + theta[1], -700, 700)))
        w = p * (1.0 - p)
        gradient = np.array([(p - y) @ x, (p - y).sum()]) + RIDGE * (theta - start)
        hessian = np.array([[w @ x**2, w @ x], [w @ x, w.sum()]]) + RIDGE * np.eye(2)
        if slope is not None:
            gradient[0], hessian[0, 1], hessian[1, 0] = 0.0, 0.0, 0.0
        step = np.linalg.solve(hessian, gradient)
        while (lower := objective(theta - step)) > value and np.abs(step).max() > 1e-9:
            step /= 2.0
        if lower > value or np.abs(step).max() <= 1e-9:
            break
        theta, value = theta - step, lower
    return float(theta[0]), float(theta[1])
