"""The arms of the routing study: who decides, and how what runs is combined.

Calibrated policies see scores whose zero is the anchor. Native arms run the router's own first k experts with
their own weights, k = 0 (the anchor alone) to K (the layer as trained): the same arity without calibration, and
the opponent to beat at equal bytes. Corrections are added whole (`unit`), as the model was trained to do; a few
arms mix complete outputs instead, with weights that sum to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ContractError
from ..policies import (
    AdaptiveTop1Top2Selection,
    AnchoredTop1Selection,
    AnchorVetoTop2Selection,
    CapacityResult,
    Combination,
    CompatibilityIndex,
    CompatibilityTop2Selection,
    DynamicKSelection,
    EqualCombination,
    HierarchicalSelection,
    PositiveEvidenceCombination,
    ScoreSoftmaxCombination,
    Selection,
    TopKDecision,
    fit_mixture_head,
)
from ..specialists.native import CORRECTIONS, NativeLayer, NativeTokens

ANCHOR, NATIVE = "anchor only", "native top-{}"


@dataclass(frozen=True)
class Arm:
    """A way to route the layer. selection: None for a native arm, which runs the router's first `native` experts.

    mixing: how outputs are combined, in words. loss: whether the model is run on for it.
    """

    name: str
    selection: Selection | None
    native: int = 0
    combination: Combination = CORRECTIONS
    mixing: str = "unit"
    loss: bool = True

    def decide(self, tokens: NativeTokens, scores: Tensor, expert_ids: tuple[str, ...]) -> CapacityResult:
        """Routes of `[1, T]`; scores: `[T, N]` calibrated."""
        if self.selection is not None:
            decision = self.selection(scores[None], expert_ids=expert_ids)
        else:
            # An anchor-only decision keeps one slot, empty.
            ids = tokens.ids[:, : max(1, self.native)]
            ran = (ids + 1) * (self.native > 0)
            decision = TopKDecision(ran[None], (tokens.weights.gather(1, ids) * (ran > 0))[None], expert_ids)
        return CapacityResult(decision, decision)


def arms(
    expert_ids: tuple[str, ...],
    *,
    top_k: int,
    groups: Sequence[int],
    mixture_threshold: float,
    dynamic_thresholds: Sequence[float],
    head: Combination | None = None,
) -> list[Arm]:
    """Every arm, the layer as trained first and the anchor alone last.

    groups: `[N]` the package of each expert, in runs, for the hierarchical and the compatible pair.
    head: a mixture head fitted on training owners, if there is one.
    Raises `ContractError` when groups are not runs.
    """
    sizes = [list(groups).count(g) for g in dict.fromkeys(groups)]
    if list(groups) != sorted(groups):
        raise ContractError("packages must lie in runs", field="groups", got=list(groups), expected="ascending")
    adaptive = AdaptiveTop1Top2Selection(mixture_threshold)
    veto = AnchorVetoTop2Selection()
    native = [Arm(NATIVE.format(k), None, k) for k in range(top_k, 0, -1)]
    return [
        *(arm for arm in native if arm.native in (top_k, 2, 1)),
        Arm("anchored top-1", AnchoredTop1Selection()),
        Arm("anchor-veto top-2", veto),
        *(
            Arm(f"anchor-veto top-2, {name}", veto, combination=mixture, mixing=name, loss=False)
            for name, mixture in {
                "score softmax": ScoreSoftmaxCombination(),
                "equal": EqualCombination(),
                "positive evidence": PositiveEvidenceCombination(),
                "learned": head,
            }.items()
            if mixture is not None
        ),
        Arm(f"adaptive top-1/2 > {mixture_threshold:g}", adaptive),
        Arm("hierarchical top-2", HierarchicalSelection(tuple(sizes), veto)),
        Arm(
            "compatible top-2",
            CompatibilityTop2Selection(CompatibilityIndex.from_groups(expert_ids, tuple(groups))),
        ),
        *(Arm(f"dynamic-{top_k} > {t:g}", DynamicKSelection(top_k, t)) for t in dynamic_thresholds),
        Arm(ANCHOR, None, 0),
    ]  # fmt: skip


def fit_head(layer: NativeLayer, tokens: NativeTokens, scores: Tensor, *, most: int = 4096) -> Combination | None:
    """A mixture head for the pairs of the veto, told their two scores; None where the veto approves no pair."""
    decision = AnchorVetoTop2Selection()(scores[None], expert_ids=layer.expert_ids)
    pairs = decision.expert_pair_mask[0].nonzero().squeeze(-1)[:most]
    if not len(pairs):
        return None
    part, experts = tokens.rows(pairs), decision.slot_indices[0, pairs] - 1
    outputs, unit = layer.complete_outputs(part, experts), float(part.output.square().mean().sqrt())
    return fit_mixture_head(decision.slot_scores[0, pairs], outputs / unit, part.output / unit)


def executed(routes: CapacityResult) -> tuple[Tensor, Tensor]:
    """`[T, 1, S]` experts that run and where there are any, as a cache's visits take them."""
    effective = routes.effective_routes
    mask = effective.slot_mask[0].unsqueeze(1)
    return (effective.slot_indices[0].unsqueeze(1) - 1).where(mask, torch.zeros((), dtype=torch.int64)), mask
