"""Capacity takes away what is unavailable, and nothing else."""

import pytest
import torch

from moelab.errors import PolicyError
from moelab.policies import (
    AnchoredTop1Selection,
    AnchorVetoTop2Selection,
    DynamicKSelection,
    HierarchicalSelection,
    OverflowToAnchorCapacity,
    PromoteSurvivorsCapacity,
)

IDS = ("a:0", "a:1", "b:0")
SCORES = torch.tensor([[[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [-1.0, -1.0, -1.0]]])


def test_overflow_goes_to_the_anchor_and_never_to_the_runner_up():
    decision = AnchoredTop1Selection()(SCORES, expert_ids=IDS)
    result = OverflowToAnchorCapacity()(decision, expert_availability=torch.tensor([False, True, True]))
    assert result.effective_routes.selected_indices.tolist() == [[0, 3, 0]]
    assert result.effective_routes.selected_scores.tolist() == [[0.0, 3.0, 0.0]]
    assert result.decision is decision


def test_a_pair_becomes_its_survivor_and_never_a_third_expert():
    decision = AnchorVetoTop2Selection()(SCORES, expert_ids=IDS)
    keep = PromoteSurvivorsCapacity()
    assert keep(decision, expert_availability=torch.tensor([True, True, True])).route_arity.tolist() == [[2, 2, 0]]
    first_lost = keep(decision, expert_availability=torch.tensor([False, True, True])).effective_routes
    assert first_lost.selected_indices.tolist() == [[[2, 0], [3, 2], [0, 0]]]
    assert first_lost.selected_scores.tolist() == [[[2.0, 0.0], [3.0, 2.0], [0.0, 0.0]]]
    only_third = keep(decision, expert_availability=torch.tensor([False, False, True])).effective_routes
    assert only_third.selected_indices.tolist() == [[[0, 0], [3, 0], [0, 0]]]


def test_availability_may_differ_by_token():
    decision = DynamicKSelection(3)(SCORES, expert_ids=IDS)
    availability = torch.tensor([[[True, False, True], [False, False, False], [True, True, True]]])
    routes = PromoteSurvivorsCapacity()(decision, expert_availability=availability).effective_routes
    assert routes.selected_indices.tolist() == [[[1, 3, 0], [0, 0, 0], [0, 0, 0]]]
    assert routes.route_arity.tolist() == [[2, 0, 0]] and routes.anchor_mask.tolist() == [[False, True, True]]


def test_no_availability_means_that_all_are():
    decision = AnchorVetoTop2Selection()(SCORES, expert_ids=IDS)
    assert PromoteSurvivorsCapacity()(decision, expert_availability=None).effective_routes is decision


@pytest.mark.parametrize("token", [0, 1, 2])
def test_a_token_that_loses_nothing_keeps_its_decision(token):
    available = torch.tensor([[True, True, False], [False, True, True], [False, False, False]])[token]
    for policy, capacity in (
        (AnchoredTop1Selection(), OverflowToAnchorCapacity()),
        (DynamicKSelection(3, 1.5), PromoteSurvivorsCapacity()),  # a slot at least is empty
    ):
        decision = policy(SCORES[:, token : token + 1], expert_ids=IDS)
        assert capacity(decision, expert_availability=available).effective_routes is decision
        assert capacity(decision, expert_availability=available[None, None]).effective_routes is decision


def test_what_else_a_decision_knows_is_kept():
    decision = HierarchicalSelection((2, 1))(SCORES, expert_ids=IDS)
    routes = PromoteSurvivorsCapacity()(decision, expert_availability=torch.tensor([False] * 3)).effective_routes
    assert routes.package_indices.tolist() == [[1, 2, 0]] and routes.anchor_mask.all()


@pytest.mark.parametrize(
    ("availability", "got"),
    [
        (torch.ones(2, dtype=torch.bool), [2]),
        (torch.ones(3, 3, dtype=torch.bool), [3, 3]),
        (torch.ones(1, 2, 3, dtype=torch.bool), [1, 2, 3]),
        (torch.ones(1, 3, 4, dtype=torch.bool), [1, 3, 4]),
        (torch.ones(3), "float32"),
        (torch.ones(3, dtype=torch.int64), "int64"),
        ([True, True, True], "list"),
    ],
)
def test_bad_availability_is_refused(availability, got):
    decision = AnchorVetoTop2Selection()(SCORES, expert_ids=IDS)
    with pytest.raises(PolicyError, match="expert_availability") as error:
        PromoteSurvivorsCapacity()(decision, expert_availability=availability)
    assert (error.value.field, error.value.got) == ("expert_availability", got)
    assert error.value.expected is not None


def test_a_capacity_needs_a_decision():
    with pytest.raises(PolicyError) as error:
        PromoteSurvivorsCapacity()(SCORES, expert_availability=None)
    assert (error.value.field, error.value.got) == ("decision", "Tensor")
