"""A gate as plain arrays: enough to apply it to another layer's state, without mlx.

Modules differ in what they store for a norm (the weight, or the weight less one), so a norm is read by what it does.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import UnsupportedModelError
from .blocks import Block, host

__all__ = ["GateWeights", "Norm", "gate_weights"]


@dataclass(frozen=True)
class GateWeights:
    """A gate as plain arrays, enough to apply it early: `weight f32[E,H]`, `logit_bias f32[E]` (added to the
    logits), `bias f32[E]` (added to the scores for the choice), `expert_scale f32[E]` (multiplies weights),
    `norm` (the norm in front of the block), `input_norm` (one that the gate applies itself)."""

    weight: np.ndarray
    bias: np.ndarray | None
    logit_bias: np.ndarray | None
    expert_scale: np.ndarray | None
    norm: Norm | None
    input_norm: Norm | None

    def logits(self, block_input: np.ndarray) -> np.ndarray:
        """`f64[..., E]` for block input `[..., H]`."""
        if self.input_norm is not None:
            block_input = self.input_norm(block_input)
        out = block_input.astype(np.float64) @ self.weight.T.astype(np.float64)
        return out if self.logit_bias is None else out + self.logit_bias


@dataclass(frozen=True)
class Norm:
    """RMS or layer norm as plain arrays: `(x - mean if centred) / sqrt(mean square + epsilon) * weight + shift`."""

    weight: np.ndarray
    shift: np.ndarray
    epsilon: float
    centred: bool

    def __call__(self, x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        if self.centred:
            x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * self.weight + self.shift

    @classmethod
    def of(cls, module: nn.Module, width: int) -> Norm:
        """Read a norm by what it does, since modules differ in what they store (weight, or weight - 1).

        Raises:
            UnsupportedModelError: it is neither an RMS norm nor a layer norm.
        """
        run = lambda x: host(module(mx.array(x, mx.float32)[None]))[0].astype(np.float64)  # noqa: E731
        epsilon = float(module.eps)
        signs = np.where(np.arange(width) % 2, -1.0, 1.0)  # mean 0, mean square 1 (even width)
        up, down, unit = run(signs), run(-signs), np.sqrt(1 + epsilon)
        probe = np.random.default_rng(0).normal(1.0, 2.0, width).astype(np.float32)
        for centred in (False, True):
            norm = cls((up - down) / 2 * signs * unit, (up + down) / 2, epsilon, centred)
            if np.allclose(norm(probe), run(probe), rtol=1e-3, atol=1e-3):
                return norm
        raise UnsupportedModelError("not an RMS or layer norm", got=type(module).__name__)


def gate_weights(block: Block) -> GateWeights:
    """Of one MoE block. Raises UnsupportedModelError if what normalises its input is no norm that we know."""
    weight, scale = block.weight(), block.input_scale()
    zero = np.zeros(weight.shape[1], np.float32)
    return GateWeights(
        weight=weight,
        bias=block.bias(),
        logit_bias=block.logit_bias(),
        expert_scale=block.expert_scale(),
        norm=None if block.norm is None else Norm.of(block.norm, weight.shape[1]),
        input_norm=None if scale is None else Norm(host(scale), zero, block.gate.eps, False),
    )
