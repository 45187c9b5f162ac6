"""Heads in mlx: the fast forms against the formula as written."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.errors import GeometryError, ParameterError
from moelab.prerouter import HeadBank, PrerouterHead, SharedHead, multi_hot
from moelab.prerouter.heads import gelu

ROUNDING = 2e-6
"""Float32 sums of up to 320 terms of size about 1, added in another order; mlx's erf is good to 4e-7."""


def draw(rng, *shape, dtype=np.float16):
    return (rng.normal(size=shape) / math.sqrt(shape[-1])).astype(dtype)


def full(rng, H, E, D, dtype=np.float16):
    F = H + 2 * E
    return [draw(rng, D, F, dtype=dtype), draw(rng, E, D, dtype=dtype), draw(rng, E, F, dtype=dtype)]


def made(parts, **options):
    return PrerouterHead(*(mx.array(p) for p in parts), **options)


def shared_heads(rng, n, H, E, R):
    trunk = mx.array(draw(rng, R, H + 2 * E))
    return {4 + i: SharedHead(trunk, *(mx.array(draw(rng, *shape)) for shape in ((R,), (E, R)))) for i in range(n)}


def inputs(rng, E, K, H, *lead):
    ids = np.stack([rng.permutation(E)[:K] for _ in range(2 * math.prod(lead))]).reshape(2, *lead, K)
    return mx.array(rng.normal(size=(*lead, H)).astype(np.float32)), mx.array(ids[0]), mx.array(ids[1])


def oracle(parts, hidden, current, previous, experts):
    """The formula in float64, one row at a time, erf from the math library."""
    fc1, fc2, linear = (np.asarray(p, np.float64) for p in parts)
    f = np.concatenate([hidden, np.zeros(2 * experts)]).astype(np.float64)
    for place, ids in ((0, current), (experts, previous)):
        for e in ids if ids is not None else ():
            f[len(hidden) + place + int(e)] += 1
    bent = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in fc1 @ f])
    return linear @ f + fc2 @ bent


def test_gelu_is_the_exact_one():
    x = np.linspace(-6, 6, 997, dtype=np.float32)
    exact = np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.astype(np.float64)])
    assert np.abs(np.array(gelu(mx.array(x))) - exact).max() < 2e-6  # |x|/2 times the error of erf, 4e-7
    tanh = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert np.abs(tanh - exact).max() > 1e-4  # so the bound tells the two forms apart


@given(st.integers(0, 2**32 - 1), st.sampled_from([(6, 5, 3, 2), (16, 9, 8, 4), (1, 4, 1, 1)]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_head_is_its_formula(seed, sizes, first_token):
    H, E, D, K = sizes
    rng = np.random.default_rng(seed)
    parts = full(rng, H, E, D)
    hidden, current, previous = inputs(rng, E, K, H, 3)
    got = np.array(made(parts)(hidden, current, None if first_token else previous))
    for t in range(3):
        before = None if first_token else np.array(previous)[t]
        expected = oracle(parts, np.array(hidden)[t], np.array(current)[t], before, E)
        assert np.abs(got[t] - expected).max() < ROUNDING * 5  # features up to 5 standard deviations


def test_column_gather_equals_the_full_product_bit_for_bit_where_no_sum_rounds():
    rng = np.random.default_rng(0)
    H, E, D, K = 24, 10, 8, 4
    parts = [rng.integers(-8, 9, size=shape).astype(np.float16) for shape in ((D, H + 2 * E), (E, D), (E, H + 2 * E))]
    head = made(parts)
    hidden, current, previous = inputs(rng, E, K, H, 7)
    hidden = mx.round(hidden * 4)
    dense = mx.concatenate([hidden, multi_hot(current, E), multi_hot(previous, E)], axis=-1)
    assert (np.array(head(hidden, current, previous)) == np.array(head.dense(dense))).all()


@pytest.mark.parametrize("form", ["full", "shared"])
def test_column_gather_equals_the_full_product(form):
    rng = np.random.default_rng(1)
    H, E, K = 192, 64, 4
    head = made(full(rng, H, E, 48)) if form == "full" else shared_heads(rng, 1, H, E, 24)[4]
    hidden, current, previous = inputs(rng, E, K, H, 50)
    dense = mx.concatenate([hidden, multi_hot(current, E), multi_hot(previous, E)], axis=-1)
    assert np.abs(np.array(head(hidden, current, previous)) - np.array(head.dense(dense))).max() < ROUNDING
    assert head.width == H and head.experts == E


def test_the_shared_form_is_its_formula():
    rng = np.random.default_rng(2)
    H, E, R, K = 10, 7, 5, 3
    trunk, scale, fc2 = draw(rng, R, H + 2 * E), draw(rng, R), draw(rng, E, R)
    head = SharedHead(*(mx.array(a) for a in (trunk, scale, fc2)))
    # the same map as a full head: fc1 = scale * trunk, no linear_init
    wide = [np.asarray(a, np.float64) for a in (trunk, scale, fc2)]
    same = [wide[1][:, None] * wide[0], wide[2], np.zeros((E, H + 2 * E))]
    hidden, current, previous = (a[0] for a in inputs(rng, E, K, H, 1))
    expected = oracle(same, np.array(hidden), np.array(current), np.array(previous), E)
    assert np.abs(np.array(head(hidden, current, previous)) - expected).max() < ROUNDING * 5


@pytest.mark.parametrize("form", ["full", "shared"])
@pytest.mark.parametrize("lead", [(1, 1), (1,), (5,), (2, 3)])
def test_all_heads_in_one_call_are_the_heads_one_by_one_bit_for_bit(form, lead):
    rng = np.random.default_rng(3)
    n, H, E, K = 5, 48, 16, 4
    heads = {4 + i: made(full(rng, H, E, 12)) for i in range(n)} if form == "full" else shared_heads(rng, n, H, E, 6)
    bank = HeadBank(heads)
    hidden, current, previous = inputs(rng, E, K, H, n, *lead)
    for before in (previous, None):
        together = np.array(bank(hidden, current, before))
        assert together.shape == (n, *lead, E)
        for i, owner in enumerate(bank.owners):
            row = None if before is None else before[i]
            assert (np.array(bank.head(owner)(hidden[i], current[i], row)) == together[i]).all()
            assert (np.array(heads[owner](hidden[i], current[i], row)) == together[i]).all()


def test_ids_of_a_narrow_type_have_room_for_the_offset():
    rng = np.random.default_rng(4)
    head = made(full(rng, 8, 200, 4))
    hidden, current, previous = inputs(rng, 200, 6, 8, 4)
    narrow = head(hidden, current.astype(mx.uint8), previous.astype(mx.uint8))
    assert (np.array(narrow) == np.array(head(hidden, current, previous))).all()


def test_the_previous_token_is_not_the_current_one():
    rng = np.random.default_rng(5)
    head = made(full(rng, 8, 12, 4))
    hidden, current, previous = inputs(rng, 12, 3, 8, 1)
    told = [np.array(head(hidden, *ids)) for ids in ((current, previous), (previous, current), (current, None))]
    assert all(np.abs(a - b).max() > 1e-3 for a, b in ((told[0], told[1]), (told[0], told[2])))


def test_stored_precision_computes_in_the_heads_own_type():
    rng = np.random.default_rng(6)
    parts = full(rng, 64, 16, 12)
    hidden, current, previous = inputs(rng, 16, 4, 64, 8)
    wide, narrow = made(parts), made(parts, precision="stored")
    assert narrow.nbytes * 2 == wide.nbytes
    difference = np.abs(np.array(wide(hidden, current, previous)) - np.array(narrow(hidden, current, previous))).max()
    assert 0 < difference < 2e-2  # float16 has 11 bits; sums of about 3
    with pytest.raises(ParameterError):
        made(parts, precision="half")


def test_without_a_linear_part_there_is_none():
    rng = np.random.default_rng(7)
    fc1, fc2, linear = full(rng, 8, 12, 4)
    hidden, current, previous = inputs(rng, 12, 3, 8, 2)
    absent = PrerouterHead(mx.array(fc1), mx.array(fc2), None)
    zeros = made([fc1, fc2, np.zeros_like(linear)])
    assert (np.array(absent(hidden, current, previous)) == np.array(zeros(hidden, current, previous))).all()


def test_heads_of_different_kinds_are_refused_by_the_bank_and_run_one_by_one():
    rng = np.random.default_rng(8)
    shape = (8, 12, 4)
    one = made(full(rng, *shape))
    others = {
        "PrerouterHead": [
            made(full(rng, 8, 12, 5)),  # another width
            made(full(rng, 8, 12, 4, np.float32)),  # another type
            made(full(rng, *shape), precision="stored"),
            made(full(rng, 9, 12, 4)),
        ],
        "SharedHead": [shared_heads(rng, 1, 8, 12, 4)[4]],
    }
    for name, heads in others.items():
        for other in heads:
            with pytest.raises(GeometryError, match="cannot be run together") as caught:
                HeadBank({3: one, 5: other})
            assert caught.value.field == "layer 5" and caught.value.got[0] == name
            hidden, current, previous = inputs(rng, 12, 3, other.width, 2)
            assert np.isfinite(np.array(other(hidden, current, previous))).all()
    with pytest.raises(GeometryError):
        HeadBank({})


def test_a_bank_names_what_does_not_fit():
    rng = np.random.default_rng(9)
    bank = HeadBank({3: made(full(rng, 8, 12, 4)), 4: made(full(rng, 8, 12, 4))})
    hidden, current, previous = inputs(rng, 12, 3, 8, 2)
    with pytest.raises(GeometryError) as caught:
        bank.head(5)
    assert caught.value.field == "owner" and caught.value.expected == [3, 4]
    with pytest.raises(GeometryError, match="one row a head"):
        bank(hidden[:1], current, previous)
    with pytest.raises(GeometryError) as caught:
        bank(hidden, current, previous[0])
    assert caught.value.field == "previous"


@pytest.mark.parametrize("which, shape", [(0, (4, 33)), (1, (12, 5)), (2, (11, 32)), (0, (4, 24))])
def test_a_tensor_of_another_shape_is_named(which, shape):
    parts = full(np.random.default_rng(10), 8, 12, 4)
    parts[which] = np.zeros(shape, np.float16)
    with pytest.raises(GeometryError) as caught:
        made(parts)
    assert caught.value.field in ("fc1", "fc2", "linear_init")


def test_a_tensor_of_another_type_is_named():
    parts = full(np.random.default_rng(11), 8, 12, 4)
    parts[1] = parts[1].astype(np.float32)
    with pytest.raises(GeometryError, match="another type") as caught:
        made(parts)
    assert caught.value.field == "fc2"
