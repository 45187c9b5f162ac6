r"""The experts of a mixture-of-experts layer, seen as specialists beside an anchor.

A layer computes $y = a(x) + \sum_{k \in R} w_k d_k(x)$: the router chose the set R and its weights w. Which
anchor, and hence which correction, depends on the model:

    shared   the layer has a shared expert: that is $a$, and $d_k = E_k$, the expert's own output
    dense    it has none: $a$ is a linear map fitted to the routed output (about as large as one expert), and
             $d_k = E_k - a$. The weights of a full route sum to 1, so it gives the model's own output again
    zero     it has none and nothing stands in: $a = 0$, $d_k = E_k$. Every expert then beats the anchor

Weights of experts that were not chosen are those that they would have at the same normalisation, so
corrections are defined for every expert, and the model's own layer is the always-on anchor plus the
corrections of R with unit weights.

In the shape descriptions, `T` is the tokens, `H` the hidden width, `I` the experts' inner width, `N` the
experts and `K` the experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from moelab.errors import UnsupportedModelError
from moelab.policies import (
    AlwaysOnAnchorCombination,
    CapacityResult,
    Combination,
    DispatchResult,
    SparseDispatcher,
    UnitWeights,
)

if TYPE_CHECKING:
    from moelab.models import LoadedModel

SHARED = ("shared_experts", "shared_expert")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
CORRECTIONS = AlwaysOnAnchorCombination(UnitWeights(), "delta")
"""How the model itself combines: the anchor answers every token, and corrections are added whole."""
CHUNK = 2048


@dataclass(frozen=True, eq=False)
class NativeTokens:
    """What a layer's router did with some tokens.

    x: `[T, H]` input of the layer. ids: `[T, K]` i64 chosen experts by rank.
    weights: `[T, N]` f32 weight of every expert, chosen or not. chosen: bool `[T, N]`.
    anchor: `[T, H]` output of the anchor. output: `[T, H]` of the whole layer, as the model has it.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    chosen: Tensor
    anchor: Tensor
    output: Tensor

    def rows(self, rows: Any) -> NativeTokens:
        """Some of the tokens."""
        return NativeTokens(**{name: value[rows] for name, value in vars(self).items()})

    @property
    def residual(self) -> Tensor:
        """`[T, H]` what the router's choice adds to the anchor."""
        return self.output - self.anchor


@dataclass(frozen=True, eq=False)
class NativeLayer:
    """One layer's experts as float32 tensors: `gate`, `up` `[N, I, H]`, `down` `[N, H, I]`.

    shared: `[T, H]` to `[T, H]`, the shared expert; None without one.
    dense: `[H + 1, H]` a fitted linear anchor, bias last; None when the anchor is shared or zero.
    block: the layer's place in the model.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    block: Any
    shared: Callable[[Tensor], Tensor] | None
    dense: Tensor | None = None

    @classmethod
    def of(cls, loaded: LoadedModel, layer: int) -> NativeLayer:
        """MoE layer number `layer` (0..L-1).

        Raises `UnsupportedModelError` when the result is not what the model's own layer computes: experts that
        are no plain gated MLPs, a gated shared expert, weights that depend on the chosen set otherwise.
        """
        import mlx.core as mx

        block = loaded.blocks[layer]
        projections = [getattr(block.switch, name, None) for name in PROJECTIONS]
        if any(p is None or "scales" in p or "bias" in p for p in projections) or block.family.expert_scaled:
            got = type(block.switch).__name__
            raise UnsupportedModelError(
                "not plain gated experts", field=f"layer {layer}", got=got, expected=PROJECTIONS
            )
        module = next((block.switch_owner[n] for n in SHARED if n in block.switch_owner), None)
        run = None if module is None else lambda x: as_torch(module(mx.array(x.numpy())))
        found = cls(*(as_torch(p["weight"].astype(mx.float32)) for p in projections), block, run)
        probe = torch.randn(16, found.hidden, generator=torch.Generator().manual_seed(0))
        ids = as_numpy(_choice(block, probe))
        own = as_torch(block.switch_owner(mx.array(probe.numpy())[None])[0])
        made = found.tokens(probe, ids).output
        # Both are float32 sums of a few hundred products in another order.
        if not torch.allclose(own, made, rtol=1e-3, atol=1e-4 * float(own.abs().max())):
            got = float((own - made).abs().max())
            raise UnsupportedModelError(
                "the layer computes something else", field=f"layer {layer}", got=got, expected=0
            )
        return found

    @property
    def experts(self) -> int:
        return len(self.gate)

    @property
    def hidden(self) -> int:
        return self.gate.shape[-1]

    @property
    def expert_ids(self) -> tuple[str, ...]:
        """Names of the specialists: the experts' numbers, in order."""
        return tuple(str(k) for k in range(self.experts))

    @property
    def anchor_kind(self) -> str:
        if self.shared is not None:
            return "shared"
        return "zero" if self.dense is None else "dense"

    def with_dense_anchor(self, tokens: NativeTokens, *, ridge: float = 1e-2) -> NativeLayer:
        """This layer with a linear anchor, fitted by least squares to the routed output of some tokens."""
        x = _with_one(tokens.x).double()
        normal = x.T @ x
        normal += ridge * normal.diagonal().mean() * torch.eye(len(normal), dtype=torch.float64)
        return replace(self, dense=torch.linalg.solve(normal, x.T @ tokens.output.double()).float())

    def anchor(self, x: Tensor) -> Tensor:
        """`[T, H]` output of the anchor."""
        if self.shared is not None:
            return self.shared(x)
        return torch.zeros_like(x) if self.dense is None else _with_one(x) @ self.dense

    def expert(self, k: int, x: Tensor) -> Tensor:
        """`[T, H]` the expert's own output, without its weight."""
        return (silu(x @ self.gate[k].T) * (x @ self.up[k].T)) @ self.down[k].T

    def tokens(self, x: Tensor, ids: np.ndarray) -> NativeTokens:
        """Tokens from their input `f32[T, H]` and the experts that the model chose, `[T, K]`."""
        chosen_ids = torch.from_numpy(np.asarray(ids).astype(np.int64))
        family, logits = self.block.family, self.block.logits(x.numpy())
        weights = torch.from_numpy(all_weights(family, logits, chosen_ids.numpy()))
        chosen = torch.zeros_like(weights, dtype=torch.bool).scatter(1, chosen_ids, True)
        routed = torch.zeros_like(x)
        for k in range(self.experts):
            rows = chosen[:, k].nonzero().squeeze(-1)
            routed[rows] += weights[rows, k, None] * self.expert(k, x[rows])
        base = self.shared(x) if self.shared is not None else 0.0
        return NativeTokens(x, chosen_ids, weights, chosen, self.anchor(x), routed + base)

    def correction(self, k: int, x: Tensor, weights: Tensor, anchor: Tensor) -> Tensor:
        """`[T, H]` what specialist k adds to the anchor; weights: `[T, N]`."""
        own = self.expert(k, x)
        return weights[:, k, None] * (own - anchor if self.dense is not None else own)

    def specialists(self, *, complete: bool = False) -> list[Callable[..., Tensor]]:
        """`[N]` callables for the dispatcher, corrections or (complete) whole outputs, with token arguments
        `weights` `[T, N]` and `anchor` `[T, H]`."""

        def make(k: int) -> Callable[..., Tensor]:
            def run(x: Tensor, *, weights: Tensor, anchor: Tensor) -> Tensor:
                found = self.correction(k, x, weights, anchor)
                return anchor + found if complete else found

            return run

        return [make(k) for k in range(self.experts)]

    def run(
        self, tokens: NativeTokens, routes: CapacityResult, combination: Combination = CORRECTIONS
    ) -> DispatchResult:
        """Run decided routes `[1, T, ...]` over the layer; the output is `[1, T, H]`.

        A learned mixture head is told the scores of what it mixes.
        """
        return SparseDispatcher(combination=combination).execute(
            routes,
            tokens.x[None],
            anchor_mlp=lambda x, *, weights, anchor: anchor,
            experts=self.specialists(complete=combination is not CORRECTIONS),
            mixture_features=routes.effective_routes.slot_scores if "features" in combination.needs else None,
            token_args={"weights": tokens.weights[None], "anchor": tokens.anchor[None]},
        )

    def complete_outputs(self, tokens: NativeTokens, experts: Tensor) -> Tensor:
        """`[T, S, H]` whole outputs of the specialists `[T, S]`, one beside another: what a mixture mixes."""
        out = tokens.anchor[:, None].repeat(1, experts.shape[1], 1)
        for k in range(self.experts):
            rows, slots = (experts == k).nonzero(as_tuple=True)
            part = tokens.rows(rows)
            out[rows, slots] += self.correction(k, part.x, part.weights, part.anchor)
        return out

    def error_utility(self, tokens: NativeTokens) -> Tensor:
        """`[T, N]` how much of the squared output error of the anchor alone each specialist takes away.

        ||r||² - ||r - d||² = 2 <r, d> - ||d||² with r the residual of the anchor and d the correction.
        """
        out = torch.empty_like(tokens.weights)
        for start in range(0, len(out), CHUNK):
            part = tokens.rows(slice(start, start + CHUNK))
            for k in range(self.experts):
                d = self.correction(k, part.x, part.weights, part.anchor)
                out[start : start + CHUNK, k] = (d * (2 * part.residual - d)).sum(-1)
        return out


def all_weights(family: Any, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """`f32[T, N]` the weight of every expert at the normalisation of the chosen `ids[T, K]`."""
    if family.weight == "sparsemixer":
        raise UnsupportedModelError("weights depend on the order of choice", field="weight", got=family.weight)
    logits = np.asarray(logits, np.float64)
    raw = {
        "score": lambda: family.scores(logits),
        "softmax": lambda: np.exp(logits - logits.max(-1, keepdims=True)),
        "sigmoid": lambda: 0.5 * (1.0 + np.tanh(0.5 * logits)),
    }[family.weight]()
    first = ids[:, :1]
    return (raw * family.weights(logits, ids)[:, :1] / np.take_along_axis(raw, first, -1)).astype(np.float32)


def as_numpy(array: Any) -> np.ndarray:
    """An mlx array as numpy."""
    return np.array(array)


def as_torch(array: Any) -> Tensor:
    """An mlx array as a torch tensor of its own."""
    return torch.from_numpy(np.array(array))


def _choice(block: Any, x: Tensor) -> Any:
    """The experts that the model's own gate chooses for `[T, H]`, by rank."""
    return block.family.select(block.logits(x.numpy()), block.bias()).ids.astype(np.int64)


def _with_one(x: Tensor) -> Tensor:
    return torch.cat((x, torch.ones_like(x[:, :1])), dim=-1)
