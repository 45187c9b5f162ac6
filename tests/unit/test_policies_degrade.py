"""A native route with experts missing, against a slow oracle that goes token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.errors import PolicyError
from moelab.policies import degrade

quick = settings(deadline=None, max_examples=60, derandomize=True)


def oracle(ids, weights, available, mass):
    """One token: lists in, list of (expert, weight) out."""
    kept = [(e, w) for e, w in zip(ids, weights, strict=True) if available[e]]
    if mass == "promote" and 0 < len(kept) < len(ids) and sum(w for _, w in kept) > 0:
        grow = math.fsum(weights) / math.fsum(w for _, w in kept)
        kept = [(e, w * grow) for e, w in kept]
    return kept


@st.composite
def routes(draw):
    experts, tokens = draw(st.integers(1, 6)), draw(st.integers(0, 4))
    k = draw(st.integers(1, experts))
    ids = [draw(st.permutations(range(experts)))[:k] for _ in range(tokens)]
    weights = [[draw(st.integers(0, 8)) / 8 for _ in range(k)] for _ in range(tokens)]
    rows = draw(st.booleans())
    flat = [[draw(st.booleans()) for _ in range(experts)] for _ in range(tokens if rows else 1)]
    available = torch.tensor(flat, dtype=torch.bool).view(-1, experts)
    return (
        torch.tensor(ids, dtype=torch.int32).view(tokens, k),
        torch.tensor(weights, dtype=torch.float32).view(tokens, k),
        available if rows else available[0],
    )


@pytest.mark.parametrize("mass", ["keep", "promote"])
@quick
@given(given_routes=routes())
def test_against_the_oracle(mass, given_routes):
    ids, weights, available = given_routes
    found = degrade(ids, weights, available, mass=mass)
    assert found.ids.dtype == torch.int64 and found.weights.dtype == weights.dtype
    for token in range(len(ids)):
        here = available if available.ndim == 1 else available[token]
        expected = oracle(ids[token].tolist(), weights[token].tolist(), here.tolist(), mass)
        count = len(expected)
        assert found.mask[token].tolist() == [True] * count + [False] * (ids.shape[1] - count)
        assert found.ids[token, :count].tolist() == [e for e, _ in expected]
        # float32 rounds the grown weight once
        assert found.weights[token, :count].tolist() == pytest.approx([w for _, w in expected], rel=1e-6)
        assert not found.weights[token, count:].any() and not found.ids[token, count:].any()
        assert found.missing[token] == ids.shape[1] - count
        lost = weights[token].sum().item() - math.fsum(w for _, w in expected) if count < ids.shape[1] else 0.0
        # eighths are exact; a grown weight is rounded to float32 once
        assert found.lost[token].item() == pytest.approx(lost, abs=1e-6)
        assert bool(found.anchor_mask[token]) == (count == 0)


def test_nothing_missing_changes_no_bit():
    ids, weights = torch.tensor([[3, 1, 2]]), torch.tensor([[0.1, 0.3, 0.7]])
    for mass in ("keep", "promote"):
        found = degrade(ids, weights, torch.ones(4, dtype=torch.bool), mass=mass)
        assert torch.equal(found.ids, ids) and torch.equal(found.weights, weights)
        assert found.lost.tolist() == [0.0]


def test_a_lone_survivor_gets_the_whole_weight_when_promoted():
    available = torch.tensor([False, True, False])
    ids, weights = torch.tensor([[0, 1]]), torch.tensor([[0.75, 0.25]])
    assert degrade(ids, weights, available, mass="promote").weights.tolist() == [[1.0, 0.0]]
    assert degrade(ids, weights, available).weights.tolist() == [[0.25, 0.0]]


GOOD = {
    "ids": torch.tensor([[0, 1]]),
    "weights": torch.tensor([[0.5, 0.5]]),
    "expert_availability": torch.ones(3, dtype=torch.bool),
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ids", torch.tensor([[0, 3]])),
        ("ids", torch.tensor([[-1, 1]])),
        ("ids", torch.tensor([[1, 1]])),
        ("ids", torch.tensor([[0.0, 1.0]])),
        ("ids", torch.tensor([[0, 1, 2]])),
        ("weights", torch.tensor([[0.5, math.nan]])),
        ("weights", torch.tensor([[0.5, -0.5]])),
        ("weights", torch.tensor([0.5, 0.5])),
        ("weights", [[0.5, 0.5]]),
        ("expert_availability", torch.ones(3)),
        ("expert_availability", torch.ones(2, 3, dtype=torch.bool)),
        ("expert_availability", [True, True, True]),
        ("mass", "drop"),
    ],
)
def test_bad_input_is_named(field, value):
    with pytest.raises(PolicyError) as error:
        degrade(**{**GOOD, field: value})
    assert error.value.field == field and error.value.expected is not None
