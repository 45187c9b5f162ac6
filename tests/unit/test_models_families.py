"""Routing arithmetic on its own: steps, masks, ties, orders, and what is refused."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_oracle import route

from moelab.errors import GeometryError, ParameterError, UnsupportedModelError
from moelab.models import RoutingFamily
from moelab.models.families import margin, rank

SOFTMAX = RoutingFamily(top_k=3, normalise=True)
GROUPS = RoutingFamily(top_k=3, score="sigmoid", normalise=True, scale=2.5, groups=4, kept_groups=2)


def test_kinds_are_the_fields_words():
    assert SOFTMAX.kind == RoutingFamily.SOFTMAX_TOPK == "SOFTMAX_TOPK"
    assert GROUPS.kind == RoutingFamily.SIGMOID_GROUP == "SIGMOID_GROUP"
    assert RoutingFamily(top_k=1, score="logit", weight="softmax").kind == RoutingFamily.SOFTMAX_TOPK
    assert RoutingFamily(top_k=1, score="sqrtsoftplus").kind == "SQRTSOFTPLUS"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.sampled_from([0.0, -math.inf]), st.booleans())
def test_select_agrees_with_loops(seed, grouped, mask, negative):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(5, 16)).astype(np.float32)
    bias = rng.uniform(-2.0 if negative else 0.0, 0.1, 16).astype(np.float32)
    family = RoutingFamily(
        top_k=3, score="sigmoid", groups=4 if grouped else 1, kept_groups=2 if grouped else 1, dropped=mask
    )
    rule = {"score": "sigmoid", **({"groups": 4, "kept": 2, "mask": mask} if grouped else {})}
    picked = family.select(logits, bias)
    masked, _, between = family.selection(logits, bias)
    for t in range(5):
        ids, lead, group_lead = route(rule, logits[t], bias, 3)
        assert picked.ids[t].tolist() == ids
        assert margin(picked.ids[t], masked[t]) == pytest.approx(lead, abs=1e-9)
        if grouped:
            assert between[t] == pytest.approx(group_lead, abs=1e-9)
        np.testing.assert_allclose(picked.weights[t], 1 / (1 + np.exp(-logits[t, ids].astype(float))), rtol=1e-6)


def test_bias_moves_the_choice_and_never_the_weights():
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    family = RoutingFamily(top_k=1, score="sigmoid")
    chosen = family.select(logits, np.array([0, 0, 0, 1], np.float32))
    assert chosen.ids.tolist() == [[3]]
    assert chosen.weights[0, 0] == pytest.approx(1 / (1 + math.e))


def test_weights_follow_every_step():
    logits = np.array([[1.0, 3.0, 2.0, 0.0]], np.float32)
    ids = np.array([[1, 2]])
    soft = np.exp([3.0, 2.0]) / np.exp([1.0, 3.0, 2.0, 0.0]).sum()
    for family, expected in (
        (RoutingFamily(top_k=2), soft),
        (RoutingFamily(top_k=2, normalise=True), soft / soft.sum()),
        (RoutingFamily(top_k=2, normalise=True, epsilon=1.0, scale=3.0), 3 * soft / (soft.sum() + 1)),
        (RoutingFamily(top_k=2, score="logit", weight="softmax"), soft / soft.sum()),
        (RoutingFamily(top_k=2, score="logit", weight="sigmoid"), 1 / (1 + np.exp([-3.0, -2.0]))),
        (RoutingFamily(top_k=2, score="sqrtsoftplus"), np.sqrt(np.log1p(np.exp([3.0, 2.0])))),
        (RoutingFamily(top_k=2, score="sigmoid", temperature=2.0), 1 / (1 + np.exp([-1.5, -1.0]))),
        (RoutingFamily(top_k=2, score="sigmoid", softcap=2.0), 1 / (1 + np.exp(-2 * np.tanh([1.5, 1.0])))),
    ):
        np.testing.assert_allclose(family.weights(logits, ids)[0], expected, rtol=1e-6)
        native = family.select(mx.array(logits))
        assert np.array(native.ids).tolist() == [[1, 2]]
        np.testing.assert_allclose(np.array(native.weights)[0], expected, rtol=1e-5)


def test_sparsemixer_weighs_each_pick_among_what_is_left_near_the_best():
    family = RoutingFamily(top_k=2, score="logit", weight="sparsemixer", keeps="argmax", jitter=0.1)
    # Second pick 4.0: band 2 x 0.1 x 4 = 0.8 holds 3.5 but not 3.0; the first pick is out.
    weights = family.weights(np.array([[5.0, 4.0, 3.5, 3.0]], np.float32), np.array([[0, 1]]))
    # First pick 5.0: band 1.0 holds 4.0 itself (5 - 4 = 1 is not more than 1).
    first = math.exp(5) / (math.exp(5) + math.exp(4))
    second = math.exp(4) / (math.exp(4) + math.exp(3.5))
    np.testing.assert_allclose(weights[0], [first, second], rtol=1e-6)
    with pytest.raises(UnsupportedModelError, match="sparsemixer"):
        family.select(mx.zeros((1, 4)))


def test_expert_scale_is_asked_for_exactly_where_it_belongs():
    logits, ids, scale = np.zeros((1, 4), np.float32), np.array([[2, 0]]), np.array([1, 2, 3, 4], np.float32)
    learned = RoutingFamily(top_k=2, score="logit", weight="softmax", expert_scaled=True)
    np.testing.assert_allclose(learned.weights(logits, ids, scale), [[1.5, 0.5]])
    with pytest.raises(ParameterError, match="expert_scale"):
        learned.weights(logits, ids)
    with pytest.raises(ParameterError, match="expert_scale"):
        learned.select(mx.array(logits))
    with pytest.raises(ParameterError, match="expert_scale"):
        SOFTMAX.weights(logits, ids, scale)


@pytest.mark.parametrize(("keeps", "kept"), [("first", None), ("last", None)])
def test_ties_are_cut_as_argpartition_cuts_them(keeps, kept):
    family = RoutingFamily(top_k=2, keeps=keeps)
    logits = mx.zeros((1, 40))
    scores = mx.softmax(logits, axis=-1)
    if keeps == "first":
        kept = np.array(mx.argpartition(-scores, kth=1, axis=-1)[..., :2])
    else:
        kept = np.array(mx.argpartition(scores, kth=-2, axis=-1)[..., -2:])
    assert np.array(family.select(logits).ids).tolist() == [sorted(kept[0].tolist())]


def test_the_two_forms_differ_on_ties():
    """Otherwise the tests on ties would prove nothing."""
    first, last = (
        set(np.array(RoutingFamily(top_k=2, keeps=k).select(mx.zeros((40,))).ids).tolist()) for k in ("first", "last")
    )
    assert first != last


def test_rank_orders_a_set_and_never_changes_it():
    scores = np.array([[0.2, 0.9, 0.9, 0.95, 0.5]])
    ids = np.array([[2, 1, 3]], np.uint16)
    assert np.take_along_axis(ids, rank(ids, scores), -1).tolist() == [[3, 1, 2]]


def test_margin_may_be_infinite_when_no_expert_is_left_outside():
    family = RoutingFamily(top_k=4, score="sigmoid", groups=2, kept_groups=1, dropped=-math.inf)
    logits = np.arange(8, dtype=np.float32)[None]
    masked, _, _ = family.selection(logits)
    assert margin(np.array([[4, 5, 6, 7]]), masked).tolist() == [math.inf]


def test_bad_families_are_refused():
    with pytest.raises(ParameterError, match="score"):
        RoutingFamily(top_k=1, score="relu")
    with pytest.raises(GeometryError, match="kept_groups"):
        RoutingFamily(top_k=1, groups=2, kept_groups=3)
    with pytest.raises(GeometryError, match="fill the groups"):
        RoutingFamily(top_k=1, groups=3, kept_groups=1).select(np.zeros((1, 16), np.float32))
