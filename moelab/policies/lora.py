r"""Parameter-space merging: mix the specialists' weights, then run one MLP.

A LoRA specialist is a low-rank update $\Delta W_i = \alpha_i U_i D_i$ of some of the anchor's
projections. Instead of mixing outputs, merge the updates and run the anchor once with
$W + \sum_i w_i \Delta W_i$. The two differ, since an MLP is not linear; they agree for a single
specialist of weight 1 and for identical specialists.

Every token has its own weights, so no merged matrix is ever built. For a token $x$ a projection
gives

    (W + sum_i w_i alpha_i U_i D_i) x  =  W x + sum_i w_i alpha_i U_i (D_i x)

which is the anchor's projection, once, plus a thin correction for each active specialist.

In the shape descriptions, `R` is the tokens that run a specialist, `S` the slots of a token and `r`
the rank of an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moelab.errors import PolicyError
from moelab.policies._validate import check_number, check_tensor
from moelab.policies.combination import Combination
from moelab.policies.decisions import CapacityResult
from moelab.policies.dispatch import DispatchResult, SparseDispatcher, rows_by_arity, zero_weights
from moelab.policies.rows import Rows, check_output


@dataclass(frozen=True, eq=False)
class LoRAUpdate:
    """One projection's low-rank update, `scale * up @ down`.

    down: `[r, in]`.
    up: `[out, r]`.
    scale: often written alpha / r.
    """

    down: Tensor
    up: Tensor
    scale: float = 1.0

    def __post_init__(self):
        check_tensor("down", self.down, ("r", "in"))
        check_tensor("up", self.up, ("out", self.down.shape[0]), dtypes=(self.down.dtype,))
        if not math.isfinite(check_number("scale", self.scale, least=-math.inf)):
            raise PolicyError("scale is not finite", field="scale", got=self.scale, expected="a finite number")

    def __call__(self, inputs: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        return inputs @ self.down.T @ self.up.T * self.scale


@dataclass(frozen=True, eq=False)
class LoRASpecialist:
    """The updates of one specialist, by the name of the anchor's `nn.Linear` that each belongs to."""

    updates: Mapping[str, LoRAUpdate]


@dataclass(frozen=True)
class LoRAMergeDispatcher(SparseDispatcher):
    """A dispatcher whose combination weighs the specialists' parameters, not their outputs.

    `experts` are `LoRASpecialist`s and `anchor_mlp` is the module that they update. Tokens without a
    specialist run the plain anchor.
    """

    def __post_init__(self):
        super().__post_init__()
        if "anchor_output" in self.combination.needs:
            got = type(self.combination).__name__
            raise PolicyError(
                "combination mixes outputs", field="combination", got=got, expected="a weighting of the scores"
            )

    def execute(
        self,
        capacity: CapacityResult,
        hidden_states: Tensor,
        *,
        anchor_mlp: nn.Module,
        experts: Sequence[LoRASpecialist],
        mixture_features: Tensor | None = None,
        token_args: Mapping[str, Tensor] | None = None,
    ) -> DispatchResult:
        token_args = token_args or {}
        routes = capacity.effective_routes
        rows = Rows.of(
            routes,
            hidden_states,
            experts=experts,
            combination=self.combination,
            mixture_features=mixture_features,
            token_args=token_args,
        )
        check_specialists(anchor_mlp, experts, routes.expert_ids)
        weights = zero_weights(routes)
        if not bool(routes.slot_mask.any()):
            answer = check_output("anchor_mlp", anchor_mlp(hidden_states, **token_args), hidden_states)
            return DispatchResult(answer, capacity, weights)
        slot_scores, slot_weights = routes.slot_scores.flatten(0, 1), weights.flatten(0, 1)
        idle, *busy = rows_by_arity(routes)
        for arity, some in enumerate(busy, start=1):
            if len(some):
                needed = rows.combination_args(self.combination, some, None)
                slot_weights[some, :arity] = weigh(self.combination, slot_scores[some, :arity], **needed)
        output = torch.empty_like(rows.hidden)
        if len(idle):
            output[idle] = rows.run(anchor_mlp, idle, "anchor_mlp")
        some = torch.cat(busy)
        with merged(anchor_mlp, experts, routes.slot_indices.flatten(0, 1)[some], slot_weights[some]):
            output[some] = rows.run(anchor_mlp, some, "anchor_mlp")
        return DispatchResult(output.view_as(hidden_states), capacity, slot_weights.view_as(weights))


def weigh(combination: Combination, selected_scores: Tensor, **needed: Tensor) -> Tensor:
    """`[P, K]` weights; exactly 1 for a token's only specialist."""
    if selected_scores.shape[1] == 1:
        return torch.ones_like(selected_scores, requires_grad=False)
    return combination.weigh(selected_scores, **needed)


@contextmanager
def merged(
    anchor: nn.Module, specialists: Sequence[LoRASpecialist], indices: Tensor, weights: Tensor
) -> Iterator[None]:
    """Inside, `anchor` run on these rows behaves as if each row's updates were merged into it.

    The anchor's parameters are not touched.

    indices: `[R, S]` candidates, 0 in inactive slots.
    weights: `[R, S]`.
    """
    hooks = []
    try:
        for name, layer in anchor.named_modules():
            updates = {
                candidate: specialist.updates[name]
                for candidate, specialist in enumerate(specialists, start=1)
                if name in specialist.updates
            }
            if updates:
                hook = partial(_add_updates, updates=updates, indices=indices, weights=weights)
                hooks.append(layer.register_forward_hook(hook))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _add_updates(layer, inputs, output, *, updates: dict[int, LoRAUpdate], indices: Tensor, weights: Tensor) -> Tensor:
    """The projection of every row with that row's updates added."""
    total = output.to(weights.dtype)
    for candidate, update in updates.items():
        rows, slot = (indices == candidate).nonzero(as_tuple=True)
        if len(rows):
            total = total.index_add(0, rows, weights[rows, slot].unsqueeze(-1) * update(inputs[0][rows]))
    return total.to(output.dtype)


def check_specialists(anchor: nn.Module, specialists: Sequence[LoRASpecialist], expert_ids: Sequence[str]) -> None:
    """Refuse updates of a projection that the anchor lacks, or of another shape or dtype."""
    layers = {name: layer for name, layer in anchor.named_modules() if isinstance(layer, nn.Linear)}
    for specialist, expert_id in zip(specialists, expert_ids, strict=True):
        if not isinstance(specialist, LoRASpecialist):
            got = type(specialist).__name__
            raise PolicyError(
                "a specialist is not a LoRA", field=f"experts[{expert_id!r}]", got=got, expected="LoRASpecialist"
            )
        for name, update in specialist.updates.items():
            field = f"experts[{expert_id!r}].updates[{name!r}]"
            if name not in layers:
                expected = " or ".join(map(repr, layers))
                raise PolicyError("the anchor has no such projection", field=field, got=name, expected=expected)
            weight = layers[name].weight
            check_tensor(f"{field}.down", update.down, ("r", weight.shape[1]), dtypes=(weight.dtype,))
            check_tensor(f"{field}.up", update.up, (weight.shape[0], "r"), dtypes=(weight.dtype,))
