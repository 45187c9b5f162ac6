"""Which layer predicts which: the tiers of the source document, and every way of getting it wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.errors import GeometryError, ParameterError
from moelab.prerouter import TIERS, PrerouterSpec, edge0_8b, edge0_35b, scaled


def test_the_35b_tier_is_the_table():
    tier = edge0_35b()
    wiring = tier.wiring
    assert len(wiring) == 33 and wiring.owners == tuple(range(6, 39)) and wiring.consumers == tuple(range(7, 40))
    assert wiring.gated == tuple(range(7))
    assert (tier.spec.kind, tier.spec.start_layer, tier.spec.hidden, tier.spec.dtype) == (
        "SOFTMAX_TOPK",
        7,
        512,
        "fp16",
    )
    assert tier.spec.feature_topk == "executed" and tier.spec.patch_call and tier.top_k == 4
    # default owners are the same ones: range(start_layer - 1, n_layers - 1)
    assert PrerouterSpec(start_layer=7).wiring(tier.layer_ids, tier.layers).owners == wiring.owners
    assert tier.feature_width == 2560 and 2 * tier.head_parameters == 4_194_304
    assert 0 < tier.weights_bytes - 33 * 2 * tier.head_parameters < 20_000  # the rest is the header


def test_the_8b_tier_is_the_table():
    tier = edge0_8b()
    wiring = tier.wiring
    assert len(wiring) == 16 and wiring.owners == tuple(range(7, 23)) and wiring.consumers == tuple(range(8, 24))
    assert wiring.gated == tuple(range(1, 8)) and tier.spec.gate_layers == (7,)
    assert tier.spec.kind == "SIGMOID_GROUP" and not tier.spec.patch_call and tier.top_k == 8
    assert (tier.groups, tier.kept_groups, tier.scale) == (8, 4, 2.5)
    assert tier.feature_width == 1792 and 2 * tier.head_parameters == 2_424_832
    assert tier.weights_bytes - 16 * 2 * tier.head_parameters == 4_992
    # MoE layer 0 is decoder layer 1, since decoder layer 0 is dense
    assert wiring.owner_index[0] == 6 and wiring.consumer_index[0] == 7


def test_a_flagged_layer_without_a_head_is_an_error_unless_listed():
    spec = PrerouterSpec(kind="SIGMOID_GROUP", start_layer=7, owners=tuple(range(7, 23)))
    with pytest.raises(GeometryError, match="no head predicts it") as caught:
        spec.wiring(range(1, 24), 24)
    assert caught.value.got == [7] and "owner 6" in caught.value.expected and "gate_layers" in caught.value.expected


@pytest.mark.parametrize("gate_layers", [(8,), (3,), (7, 40)])
def test_gate_layers_list_only_what_nothing_predicts(gate_layers):
    spec = PrerouterSpec(start_layer=7, owners=tuple(range(7, 23)), gate_layers=gate_layers)
    with pytest.raises(GeometryError):
        spec.wiring(range(24), 24)


@pytest.mark.parametrize(
    "owners, layer_ids, problem",
    [
        ((0, 1), range(1, 4), "owner is no MoE layer"),
        ((2, 3), range(4), "consumer is no MoE layer"),
        ((1,), (0, 1, 3), "consumer is no MoE layer"),
        ((), range(4), "no layer has a head"),
    ],
)
def test_owners_and_consumers_are_moe_layers(owners, layer_ids, problem):
    with pytest.raises(GeometryError, match=problem):
        PrerouterSpec(start_layer=1, owners=owners).wiring(layer_ids)


def test_a_prediction_that_nobody_reads_is_refused():
    with pytest.raises(GeometryError, match="in front of start_layer") as caught:
        PrerouterSpec(start_layer=4, owners=(2, 3, 4)).wiring(range(6))
    assert caught.value.got == [2]


def test_start_layer_beyond_the_model():
    with pytest.raises(GeometryError, match="no layer has a head"):
        PrerouterSpec(start_layer=9).wiring(range(8))


@pytest.mark.parametrize(
    "field, value",
    [
        ("kind", "TOPK"),
        ("dtype", "int8"),
        ("feature_topk", "student"),
        ("start_layer", 0),
        ("start_layer", 2.0),
        ("start_layer", True),
        ("hidden", 0),
        ("patch_call", 1),
        ("owners", (3, 2)),
        ("owners", (2, 2)),
        ("owners", (-1, 0)),
        ("owners", 6),
        ("gate_layers", ("7",)),
    ],
)
def test_a_field_that_is_none_is_refused_by_name(field, value):
    with pytest.raises(ParameterError) as caught:
        PrerouterSpec(**{field: value})
    assert caught.value.field == field


@given(st.integers(2, 40), st.integers(0, 3), st.data())
def test_consumers_are_exactly_one_behind_their_owners(layers, dense, data):
    layer_ids = tuple(range(dense, dense + layers))
    start = data.draw(st.integers(dense + 1, layer_ids[-1]))
    wiring = PrerouterSpec(start_layer=start).wiring(layer_ids, layer_ids[-1] + 1)
    assert [c - o for o, c in zip(wiring.owners, wiring.consumers, strict=True)] == [1] * len(wiring)
    assert [c - o for o, c in zip(wiring.owner_index, wiring.consumer_index, strict=True)] == [1] * len(wiring)
    assert set(wiring.gated) | set(wiring.consumers) == set(layer_ids)
    assert not set(wiring.gated) & set(wiring.consumers)
    assert min(wiring.consumers) == start and max(wiring.consumers) == layer_ids[-1]


def test_a_scaled_tier_has_a_head_in_every_layer_but_the_last():
    shape = dict(layer_ids=range(8), experts=64, top_k=4, width=192)
    tier = scaled("softmax", kind="SOFTMAX_TOPK", **shape)
    assert tier.wiring.owners == tuple(range(7)) and tier.wiring.gated == (0,)
    assert tier.spec.hidden == 512 and tier.feature_width == 320 and tier.spec.patch_call
    other = scaled("sigmoid", kind="SIGMOID_GROUP", groups=8, kept_groups=4, scale=2.5, **shape)
    assert not other.spec.patch_call and other.groups == 8
    with pytest.raises(GeometryError, match="consecutive"):
        scaled("holes", kind="SOFTMAX_TOPK", layer_ids=(1, 3), experts=8, top_k=2, width=8)


def test_every_tier_is_consistent():
    for name, make in TIERS.items():
        tier = make()
        assert tier.name == name and tier.wiring.owners == tier.spec.owners
