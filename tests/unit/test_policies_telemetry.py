"""Figures about routes, on a batch small enough to count by hand."""

import pytest
import torch

from moelab.errors import PolicyError
from moelab.policies import DynamicKSelection, PromoteSurvivorsCapacity, measure

IDS = ("a:0", "a:1", "b:0", "b:1")
SCORES = torch.tensor([[[3.0, 2.0, 1.0, -1.0], [0.5, -1.0, -1.0, -1.0], [-1.0, -1.0, -1.0, -1.0]]])


def measured(availability):
    decision = DynamicKSelection(3)(SCORES.clone().requires_grad_(), expert_ids=IDS)
    return measure(PromoteSurvivorsCapacity()(decision, expert_availability=availability))


def test_figures_with_everything_available():
    figures = measured(None)
    assert figures.expert_load.tolist() == [2, 1, 1, 0]
    assert figures.expert_overflow.tolist() == [0, 0, 0, 0]
    assert figures.arity_histogram.tolist() == figures.requested_arity_histogram.tolist() == [1, 1, 0, 1]
    assert figures.regret.tolist() == [[0.0, 0.0, 0.0]] and not figures.regret.requires_grad


def test_figures_after_overflow():
    figures = measured(torch.tensor([False, True, True, True]))
    assert figures.expert_load.tolist() == [0, 1, 1, 0]
    assert figures.expert_overflow.tolist() == [2, 0, 0, 0]
    assert figures.arity_histogram.tolist() == [2, 0, 1, 0]
    assert figures.requested_arity_histogram.tolist() == [1, 1, 0, 1]
    assert figures.regret.tolist() == [[3.0, 0.5, 0.0]]


def test_figures_of_nothing():
    decision = DynamicKSelection(3)(SCORES[:, :0], expert_ids=IDS)
    figures = measure(PromoteSurvivorsCapacity()(decision, expert_availability=None))
    assert figures.expert_load.tolist() == [0, 0, 0, 0] and figures.arity_histogram.tolist() == [0, 0, 0, 0]
    assert figures.regret.shape == (1, 0)


def test_only_a_capacity_result_is_measured():
    for wrong in (None, DynamicKSelection(3)(SCORES, expert_ids=IDS)):
        with pytest.raises(PolicyError) as error:
            measure(wrong)
        assert (error.value.field, error.value.got) == ("capacity", type(wrong).__name__)
