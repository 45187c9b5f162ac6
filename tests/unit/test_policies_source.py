"""The assertions that the routing policies were specified with, as they were written."""

import pytest
import torch

from moelab.policies import (
    AnchoredTop1Selection,
    AnchorVetoTop2Selection,
    OverflowToAnchorCapacity,
    ScoreSoftmaxCombination,
    SparseDispatcher,
)
from moelab.specialists import GatedMlp, SpecialistBank


@pytest.fixture
def router(tmp_path):
    """Names the specialists of a layer in append order."""
    bank = SpecialistBank.create(tmp_path, base_digest="base")
    for name in ("code:0", "math:0"):
        bank.install(name, 1, GatedMlp(4, 8))
    bank.install("other:0", 2, GatedMlp(4, 8))
    return bank


@pytest.fixture
def hidden_states():
    return torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0))


def test_anchored_top1(router):
    # A positive tie, a tie at zero, a winner, a lone positive.
    scores = torch.tensor([[[0.7, 0.7], [0.0, 0.0], [0.2, 0.9], [0.4, -1.0]]])

    decision = AnchoredTop1Selection()(
        scores,
        expert_ids=router.expert_ids_for_layer(1),
    )

    # Candidate zero is anchor; equal positive scores keep append order.
    assert torch.equal(
        decision.selected_indices,
        torch.tensor([[1, 0, 2, 1]]),
    )
    assert decision.expert_ids == ("code:0", "math:0")


def test_anchor_veto_top2_and_score_softmax(router, hidden_states):
    scores = torch.tensor([[[0.7, 0.7], [5.0, 0.0], [0.2, 0.9], [-0.4, -1.0]]])
    ranked_outputs = torch.randn(2, 2, hidden_states.shape[-1], generator=torch.Generator().manual_seed(1))

    decision = AnchorVetoTop2Selection()(
        scores,
        expert_ids=router.expert_ids_for_layer(1),
    )
    mixed = ScoreSoftmaxCombination()(
        ranked_outputs,
        selected_scores=decision.selected_scores[decision.expert_pair_mask],
    )

    assert mixed.output.shape == (2, hidden_states.shape[-1])
    assert torch.allclose(mixed.weights.sum(-1), torch.ones(2))


def test_dispatch_with_availability(hidden_states):
    hidden_states = hidden_states[:, :3]
    scores = torch.ones(1, 3, 2)
    availability = torch.tensor([[[True, True], [False, True], [False, False]]])
    dispatcher = SparseDispatcher(selection=AnchorVetoTop2Selection())

    def anchor(x):
        return x

    def code(x):
        return 2 * x

    def math(x):
        return 3 * x

    result = dispatcher.dispatch(
        hidden_states,
        expert_scores=scores,
        expert_ids=("code:0", "math:0"),
        anchor_mlp=anchor,
        experts=(code, math),
        expert_availability=availability,
    )

    assert torch.equal(result.capacity.route_arity, torch.tensor([[2, 1, 0]]))
    assert torch.equal(result.mixture_weights[0, 1], torch.tensor([1.0, 0.0]))
    assert torch.equal(result.output[0, 2], hidden_states[0, 2])


def test_minimal_usage():
    scores = torch.tensor([[[1.0, 2.0], [3.0, -1.0], [-1.0, -1.0]]])
    expert_ids, availability = ("code:0", "math:0"), torch.tensor([True, False])

    decision = AnchoredTop1Selection()(scores, expert_ids=expert_ids)
    effective = OverflowToAnchorCapacity()(
        decision,
        expert_availability=availability,
    )
    anchor_tokens = effective.effective_routes.anchor_mask

    # The first token's specialist is gone: the anchor, not the runner-up.
    assert anchor_tokens.tolist() == [[True, False, True]]
    assert decision.anchor_mask.tolist() == [[False, False, True]]
