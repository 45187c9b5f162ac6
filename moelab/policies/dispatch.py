"""Dispatch: run each specialist once, on exactly the tokens that may run it, and put them back.

    scores -> selection -> capacity -> grouped execution -> combination -> output in token order

Slots are sorted by candidate (stable, so a specialist sees its tokens in order), every specialist
runs once on its rows, and each token then gathers the outputs of its own slots. Capacity is applied
before anything runs, so an unavailable specialist has no rows. A token with one specialist takes
its output as it is, with weight exactly 1; a token with none takes the anchor's; the combination
sees only tokens with two or more, all tokens of one arity at a time.

In the shape descriptions, `B` is the batch, `T` the tokens, `H` the hidden width, `N` the
specialists, `S` the slots of a token, `R` the tokens of the batch (`B * T`) and `A` the active
slots of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moelab.errors import PolicyError
from moelab.policies._validate import check_ids, check_scores, check_tensor
from moelab.policies.capacity import Capacity, PromoteSurvivorsCapacity
from moelab.policies.combination import Combination, ScoreSoftmaxCombination, weight_dtype
from moelab.policies.decisions import CapacityResult, Decision
from moelab.policies.selection import AdaptiveTop1Top2Selection, Selection

# An MLP on rows: `[rows, H]` and token-aligned arguments to `[rows, H]` of the same dtype.
Mlp = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class DispatchResult:
    """What a layer computed and by which routes.

    output: `[B, T, H]` in the order of the tokens.
    capacity: the decision before and after availability; all that telemetry needs.
    mixture_weights: `[B, T, S]` the weight of each active slot, 0 in the others.
    """

    output: Tensor
    capacity: CapacityResult
    mixture_weights: Tensor


@dataclass(frozen=True)
class SparseDispatcher:
    """A selection, a capacity and a combination policy, ready to run a layer."""

    selection: Selection = field(default_factory=AdaptiveTop1Top2Selection)
    capacity: Capacity = field(default_factory=PromoteSurvivorsCapacity)
    combination: Combination = field(default_factory=ScoreSoftmaxCombination)

    def dispatch(
        self,
        hidden_states: Tensor,
        *,
        expert_scores: Tensor,
        expert_ids: Sequence[str],
        anchor_mlp: Mlp,
        experts: Sequence[Mlp],
        expert_availability: Tensor | None = None,
        package_scores: Tensor | None = None,
        mixture_features: Tensor | None = None,
        token_args: Mapping[str, Tensor] | None = None,
    ) -> DispatchResult:
        """Route and run every token of a layer.

        hidden_states: `[B, T, H]` the input of the layer's MLP.
        expert_scores: `[B, T, N]` finite calibrated scores.
        expert_ids: `[N]` distinct names in append order.
        anchor_mlp: the dense path; it gets rows, or the whole `[B, T, H]` when it answers every token.
        experts: `[N]` complete specialists, in the order of `expert_ids`.
        expert_availability: bool `[N]` or `[B, T, N]`; None when all are available.
        package_scores: `[B, T, P]`, for a hierarchical selection with given evidence.
        mixture_features: `[B, T, F]`, for a combination with a learned head.
        token_args: further tensors `[B, T, ...]`; anchor and specialists get the rows of their own
            tokens, by name.
        Raises `PolicyError` for any other argument, or an MLP whose output does not fit.
        """
        check_tensor("hidden_states", hidden_states, ("B", "T", "H"))
        batch, tokens, _ = hidden_states.shape
        check_tensor("expert_scores", expert_scores, (batch, tokens, len(check_ids(expert_ids))))
        check_scores(expert_scores, expert_ids, name="expert_scores")
        given = {} if package_scores is None else {"package_scores": package_scores}
        decision = self.selection(expert_scores, expert_ids=expert_ids, **given)
        return self.execute(
            self.capacity(decision, expert_availability=expert_availability),
            hidden_states,
            anchor_mlp=anchor_mlp,
            experts=experts,
            mixture_features=mixture_features,
            token_args=token_args,
        )

    def execute(
        self,
        capacity: CapacityResult,
        hidden_states: Tensor,
        *,
        anchor_mlp: Mlp,
        experts: Sequence[Mlp],
        mixture_features: Tensor | None = None,
        token_args: Mapping[str, Tensor] | None = None,
    ) -> DispatchResult:
        """Run routes that were decided before; the arguments are those of `dispatch`."""
        routes = capacity.effective_routes
        inputs = self.check_inputs(routes, hidden_states, experts, mixture_features, token_args)
        weights = zero_weights(routes)
        # Without a specialist anywhere, or with an anchor that answers every token, the anchor gets
        # the states as the dense model would give them: the result is the dense model's, bit by bit.
        idle = not bool(routes.slot_mask.any())
        if idle or "anchor_output" in self.combination.needs:
            output = check_output(anchor_mlp(hidden_states, **(token_args or {})), hidden_states, "anchor_mlp")
            if idle:
                return DispatchResult(output, capacity, weights)
            dense = output.flatten(0, 1)
            output = dense.clone()
        else:
            dense, output = None, torch.empty_like(inputs.hidden)
            rows = routes.anchor_mask.flatten().nonzero().squeeze(-1)
            if len(rows):
                output[rows] = inputs.run(anchor_mlp, rows, "anchor_mlp")
        expert_outputs, position = run_experts(inputs, routes, experts)
        slot_scores, slot_weights = routes.slot_scores.flatten(0, 1), weights.flatten(0, 1)
        arity = routes.route_arity.flatten()
        for active in range(1, position.shape[1] + 1):
            rows = (arity == active).nonzero().squeeze(-1)
            if not len(rows):
                continue
            if active == 1 and dense is None:
                output[rows] = expert_outputs[position[rows, 0]]
                slot_weights[rows, 0] = 1
                continue
            mixture = self.combination(
                expert_outputs[position[rows, :active]],
                selected_scores=slot_scores[rows, :active],
                **inputs.combination_args(self.combination, rows, dense),
            )
            output[rows] = mixture.output
            slot_weights[rows, :active] = mixture.weights
        return DispatchResult(output.view_as(hidden_states), capacity, slot_weights.view_as(weights))

    def check_inputs(self, routes, hidden_states, experts, mixture_features, token_args) -> _Inputs:
        """Refuse inputs that do not fit the routes; flatten batch and tokens into rows."""
        check_tensor("hidden_states", hidden_states, (*routes.route_arity.shape, "H"))
        if len(experts) != len(routes.expert_ids):
            expected = f"{len(routes.expert_ids)} experts"
            raise PolicyError("experts do not match expert_ids", field="experts", got=len(experts), expected=expected)
        shape = tuple(hidden_states.shape[:2])
        for name, value in (token_args or {}).items():
            if not isinstance(value, Tensor) or tuple(value.shape[:2]) != shape:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                expected = f"a tensor [{shape[0]}, {shape[1]}, ...]"
                raise PolicyError(
                    "a token argument is not aligned", field=f"token_args[{name!r}]", got=got, expected=expected
                )
        if mixture_features is not None:
            check_tensor("mixture_features", mixture_features, (*shape, "F"))
        if (mixture_features is not None) != ("features" in self.combination.needs):
            expected = "none" if mixture_features is not None else "[B, T, F]"
            got = None if mixture_features is None else list(mixture_features.shape)
            combination = type(self.combination).__name__
            raise PolicyError(
                f"mixture_features do not fit {combination}", field="mixture_features", got=got, expected=expected
            )
        args = {name: value.flatten(0, 1) for name, value in (token_args or {}).items()}
        features = None if mixture_features is None else mixture_features.flatten(0, 1)
        return _Inputs(hidden_states.flatten(0, 1), args, features)


@dataclass(frozen=True, eq=False)
class _Inputs:
    """The tokens of a batch as rows.

    hidden: `[R, H]`.
    token_args: by name, `[R, ...]`.
    features: `[R, F]` or None.
    """

    hidden: Tensor
    token_args: dict[str, Tensor]
    features: Tensor | None

    def run(self, mlp: Mlp, rows: Tensor, name: str) -> Tensor:
        """`[rows, H]` of an MLP on some rows."""
        hidden = self.hidden[rows]
        args = {key: value[rows] for key, value in self.token_args.items()}
        return check_output(mlp(hidden, **args), hidden, name)

    def combination_args(self, combination: Combination, rows: Tensor, dense: Tensor | None) -> dict[str, Tensor]:
        """What the combination needs beside outputs and scores, for some rows."""
        sources = {"features": self.features, "anchor_output": dense}
        return {name: sources[name][rows] for name in combination.needs}


def zero_weights(routes: Decision) -> Tensor:
    """`[B, T, S]` weights of a batch that has run nothing yet."""
    return torch.zeros_like(routes.slot_scores, dtype=weight_dtype(routes.slot_scores), requires_grad=False)


def group_slots(routes: Decision) -> tuple[Tensor, list[int]]:
    """Sort the active slots of a batch by candidate, keeping token order within a candidate.

    Returns `[A]` positions among the `R * S` slots, and `[N]` how many belong to each specialist.
    """
    slots = routes.slot_indices.flatten()
    counts = torch.bincount(slots, minlength=len(routes.expert_ids) + 1).tolist()
    return slots.sort(stable=True).indices[counts[0] :], counts[1:]


def run_experts(inputs: _Inputs, routes: Decision, experts: Sequence[Mlp]) -> tuple[Tensor, Tensor]:
    """Run every specialist that has tokens, once.

    Returns `[A, H]` outputs grouped by specialist, and `[R, S]` where each slot's output is; the
    positions of inactive slots mean nothing.
    """
    grouped, counts = group_slots(routes)
    slots = routes.slot_indices.shape[-1]
    outputs = [
        inputs.run(expert, rows, f"experts[{name!r}]")
        for expert, name, rows in zip(experts, routes.expert_ids, (grouped // slots).split(counts), strict=True)
        if len(rows)
    ]
    position = torch.zeros_like(routes.slot_indices).flatten()
    position[grouped] = torch.arange(len(grouped), device=position.device)
    return torch.cat(outputs), position.view(-1, slots)


def check_output(output: Tensor, hidden: Tensor, name: str) -> Tensor:
    """Refuse an MLP's output that does not have the shape and dtype of its input."""
    return check_tensor(name, output, tuple(hidden.shape), dtypes=(hidden.dtype,))
