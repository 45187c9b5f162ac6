"""Dispatch: run each specialist once, on exactly the tokens that may run it, and put them back.

    scores -> selection -> capacity -> grouped execution -> combination -> output in token order

Slots are sorted by candidate (stable, so a specialist sees its tokens in order), every specialist
runs once on its rows, and each token then gathers the outputs of its own slots. Capacity is applied
before anything runs, so an unavailable specialist has no rows. A token with one specialist takes
its output as it is, with weight exactly 1; a token with none takes the anchor's, bit-equal to the
anchor run on those rows; the combination sees only tokens with two or more, all tokens of one arity
at a time. A single token, as in decode, runs what it was given, with nothing to sort or gather.

In the shape descriptions, `B` is the batch, `T` the tokens, `H` the hidden width, `N` the
specialists, `S` the slots of a token, `R` the tokens of the batch (`B * T`) and `A` the active
slots of the batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moelab.policies._validate import check_kind, check_scores, check_tensor
from moelab.policies.capacity import Capacity, PromoteSurvivorsCapacity
from moelab.policies.combination import Combination, ScoreSoftmaxCombination, weight_dtype
from moelab.policies.decisions import CapacityResult, Decision
from moelab.policies.rows import Mlp, Rows, check_callable, check_output
from moelab.policies.selection import AdaptiveTop1Top2Selection, Selection

AT_ONCE = 512
"""Tokens whose outputs are combined at a time: few enough that these stay in the caches."""


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

    def __post_init__(self):
        for name, kind in (("selection", Selection), ("capacity", Capacity), ("combination", Combination)):
            check_kind(name, getattr(self, name), kind)

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
        capacity = self.route(
            expert_scores,
            tokens=hidden_states.shape[:2],
            expert_ids=expert_ids,
            expert_availability=expert_availability,
            package_scores=package_scores,
        )
        return self.execute(
            capacity,
            hidden_states,
            anchor_mlp=anchor_mlp,
            experts=experts,
            mixture_features=mixture_features,
            token_args=token_args,
        )

    def route(
        self,
        expert_scores: Tensor,
        *,
        tokens: tuple[int | str, int | str] = ("B", "T"),
        expert_ids: Sequence[str],
        expert_availability: Tensor | None = None,
        package_scores: Tensor | None = None,
    ) -> CapacityResult:
        """Decide what runs and run nothing: selection, then capacity. `execute` takes the result.

        tokens: (B, T) that the scores must have; the other arguments are those of `dispatch`.
        """
        ids, row = check_scores(expert_scores, expert_ids, name="expert_scores", tokens=tokens)
        decision = self.selection.select(expert_scores, ids, row=row, package_scores=package_scores)
        return self.capacity(decision, expert_availability=expert_availability)

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
        # Without a specialist anywhere, or with an anchor that answers every token, the anchor gets
        # the states as the dense model would give them: the result is the dense model's, bit by bit.
        one, dense = routes.plain, None
        idle = not (routes.slot_mask.any() if one is None else any(one.candidates))
        if idle or "anchor_output" in self.combination.needs:
            check_callable("anchor_mlp", anchor_mlp)
            answer = check_output("anchor_mlp", anchor_mlp(hidden_states, **token_args), hidden_states)
            if idle:
                return DispatchResult(answer, capacity, zero_weights(routes))
            dense = answer.flatten(0, 1)
        if one is None:
            output, weights = self._run_rows(routes, rows, anchor_mlp, experts, dense)
        else:
            output, weights = self._run_one(routes, rows, experts, dense)
        return DispatchResult(output.view_as(hidden_states), capacity, weights)

    def _run_rows(
        self, routes: Decision, rows: Rows, anchor_mlp: Mlp, experts: Sequence[Mlp], dense: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`[R, H]` output and `[B, T, S]` weights; dense: `[R, H]` of an anchor that has answered every token."""
        output = torch.empty_like(rows.hidden)
        expert_outputs, position = run_experts(rows, routes, experts)
        # A copy: autograd refuses a second write through a view of what was given no gradient.
        slot_scores, slot_weights = routes.slot_scores.flatten(0, 1), zero_weights(routes).flatten(0, 1).clone()
        for arity, every in enumerate(rows_by_arity(routes)):
            if not len(every):
                continue
            if arity == 0:
                output[every] = rows.run(anchor_mlp, every, "anchor_mlp") if dense is None else dense[every]
                continue
            for some in every.split(AT_ONCE):
                ranked = expert_outputs.index_select(0, position[some, :arity].flatten()).unflatten(0, (-1, arity))
                if arity == 1 and dense is None:
                    output[some] = ranked.squeeze(1)
                    slot_weights[some, 0] = 1
                    continue
                mixture = self.combination(
                    ranked,
                    selected_scores=slot_scores[some, :arity],
                    **rows.combination_args(self.combination, some, dense),
                )
                output[some] = mixture.output
                slot_weights[some, :arity] = mixture.weights
        return output, slot_weights.view_as(routes.slot_scores)

    def _run_one(
        self, routes: Decision, rows: Rows, experts: Sequence[Mlp], dense: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The same for a token that was decided in plain numbers and runs a specialist."""
        one = routes.plain
        slots, chosen = len(one.candidates), [candidate - 1 for candidate in one.candidates if candidate]
        outputs = [rows.run(experts[k], None, f"experts[{routes.expert_ids[k]!r}]") for k in chosen]
        arity = len(outputs)
        if arity == 1 and dense is None:
            weights = [1.0] + [0.0] * (slots - 1)
            return outputs[0], torch.tensor([[weights]], dtype=weight_dtype(one.dtype), device=one.device)
        mixture = self.combination(
            torch.stack(outputs, 1),
            selected_scores=routes.slot_scores.flatten(0, 1)[:, :arity],
            **rows.combination_args(self.combination, None, dense),
        )
        return mixture.output, torch.nn.functional.pad(mixture.weights, (0, slots - arity)).view(1, 1, slots)


def rows_by_arity(routes: Decision) -> list[Tensor]:
    """Which of the R rows run 0, 1, ... S specialists, in token order."""
    arity = routes.route_arity.flatten()
    return [(arity == active).nonzero().squeeze(-1) for active in range(routes.slot_indices.shape[-1] + 1)]


def zero_weights(routes: Decision) -> Tensor:
    """`[B, T, S]` weights of a batch that has run nothing yet."""
    return torch.zeros_like(routes.slot_scores, dtype=weight_dtype(routes.slot_scores.dtype), requires_grad=False)


def group_slots(routes: Decision) -> tuple[Tensor, list[int]]:
    """Sort the active slots of a batch by candidate, keeping token order within a candidate.

    Returns `[A]` positions among the `R * S` slots, and `[N]` how many belong to each specialist.
    """
    slots = routes.slot_indices.flatten()
    counts = torch.bincount(slots, minlength=len(routes.expert_ids) + 1).tolist()
    return slots.sort(stable=True).indices[counts[0] :], counts[1:]


def run_experts(rows: Rows, routes: Decision, experts: Sequence[Mlp]) -> tuple[Tensor, Tensor]:
    """Run every specialist that has tokens, once.

    Returns `[A, H]` outputs grouped by specialist, and `[R, S]` where each slot's output is; the
    positions of inactive slots mean nothing.
    """
    grouped, counts = group_slots(routes)
    slots = routes.slot_indices.shape[-1]
    outputs = [
        rows.run(expert, some, f"experts[{name!r}]")
        for expert, name, some in zip(experts, routes.expert_ids, (grouped // slots).split(counts), strict=True)
        if len(some)
    ]
    position = torch.zeros_like(routes.slot_indices).flatten()
    position[grouped] = torch.arange(len(grouped), device=position.device)
    return torch.cat(outputs), position.view(-1, slots)
