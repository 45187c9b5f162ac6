"""Grouped dispatch through real MLPs against the obvious loop over tokens."""

import math

import pytest
import torch

from moelab.policies import (
    AdaptiveTop1Top2Selection,
    AlwaysOnAnchorCombination,
    AnchoredTop1Selection,
    DynamicKSelection,
    PositiveEvidenceCombination,
    ScoreSoftmaxCombination,
    SparseDispatcher,
)
from moelab.policies.bench import GatedMlp

H, N, TOKENS = 32, 16, 512
IDS = tuple(f"a:{number}" for number in range(N))


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    anchor, experts = GatedMlp(H, 64), [GatedMlp(H, 64) for _ in range(N)]
    hidden, scores = torch.randn(2, TOKENS // 2, H), torch.randn(2, TOKENS // 2, N) - 0.7
    return anchor, experts, hidden, scores, torch.rand(2, TOKENS // 2, N) < 0.8


def loop(x, scores, available, k_max, threshold, weigh, anchor, experts, always_on):
    """One token: the ranking written out, then its own weighted sum."""
    ranked = sorted((-score, number) for number, score in enumerate(scores.tolist()) if score > 0)
    kept = [number for minus, number in ranked[:k_max] if -minus > threshold(len(scores), ranked, number)]
    kept = [number for number in kept if available[number]]
    if not kept:
        return anchor(x)
    powers = [weigh(scores[number].item()) for number in kept]
    weights = [power / sum(powers) for power in powers]
    if always_on:
        return anchor(x) + sum(w * (experts[n](x) - anchor(x)) for w, n in zip(weights, kept, strict=True))
    return sum(w * experts[n](x) for w, n in zip(weights, kept, strict=True))


@pytest.mark.parametrize("always_on", [False, True], ids=["mix", "always_on"])
@pytest.mark.parametrize(
    ("selection", "k_max", "threshold"),
    [
        (AnchoredTop1Selection(), 1, lambda *_: 0),
        (AdaptiveTop1Top2Selection(0.5), 2, lambda _, ranked, number: 0 if number == ranked[0][1] else 0.5),
        (DynamicKSelection(5, 0.25), 5, lambda *_: 0.25),
    ],
    ids=["top1", "adaptive", "dynamic_k"],
)
@pytest.mark.parametrize(
    ("combination", "weigh"),
    [(ScoreSoftmaxCombination(), math.exp), (PositiveEvidenceCombination(), float)],
    ids=["softmax", "positive"],
)
@torch.no_grad()
def test_grouped_dispatch_equals_the_loop(layer, selection, k_max, threshold, combination, weigh, always_on):
    anchor, experts, hidden, scores, availability = layer
    dispatcher = SparseDispatcher(
        selection, combination=AlwaysOnAnchorCombination(combination) if always_on else combination
    )
    result = dispatcher.dispatch(
        hidden,
        expert_scores=scores,
        expert_ids=IDS,
        anchor_mlp=anchor,
        experts=experts,
        expert_availability=availability,
    )
    assert set(result.capacity.route_arity.flatten().tolist()) == set(range(k_max + 1))
    rows = zip(*(part.flatten(0, 1) for part in (hidden, scores, availability)), strict=True)
    expected = [loop(*row, k_max, threshold, weigh, anchor, experts, always_on) for row in rows]
    # One row or many takes another matrix kernel: float32 sums of 64 terms of order 1 in another order.
    torch.testing.assert_close(result.output.flatten(0, 1), torch.stack(expected), atol=3e-6, rtol=1e-5)


@torch.no_grad()
def test_tokens_of_the_anchor_are_the_anchors_on_those_rows_bit_by_bit(layer):
    anchor, experts, hidden, scores, availability = layer
    result = SparseDispatcher().dispatch(
        hidden, expert_scores=scores, expert_ids=IDS, anchor_mlp=anchor, experts=experts
    )
    mask = result.capacity.effective_routes.anchor_mask
    assert mask.any() and torch.equal(result.output[mask], anchor(hidden[mask]))
    dense = SparseDispatcher(combination=AlwaysOnAnchorCombination()).dispatch(
        hidden, expert_scores=scores, expert_ids=IDS, anchor_mlp=anchor, experts=experts
    )
    assert torch.equal(dense.output[mask], anchor(hidden)[mask])
