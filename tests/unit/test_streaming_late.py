"""A turn that does not wait: who is late, what stands in, and that late experts are there the next time."""

import mlx.core as mx
import numpy as np
import pytest
from switch_world import DIM, E, K, World, inputs

from moelab.errors import ContractError, GeometryError
from moelab.routes import DECODED
from moelab.specialists.availability import CacheAvailability
from moelab.streaming.layer.options import LayerOptions

X = inputs((1, 1))
HAVE = np.array([[[5, 0, 7, 2]]], np.uint32)
MIXED = np.array([[[5, 1, 7, 3]]], np.uint32)
NONE = np.array([[[6, 1, 4, 3]]], np.uint32)


def world(on_missing, **own):
    made = World(LayerOptions(on_missing=on_missing), cache_slots=E, **own)
    made.prefill(X, mx.array(HAVE))  # waits: the cache now holds these
    return made


def without(made, route, stand_in):
    """What the resident layer gives, with `stand_in` for experts that the cache does not hold."""
    want = made.expected(X, route)
    want[..., ~np.isin(route[0, 0], HAVE), :] = stand_in
    return want


@pytest.mark.parametrize("route, late", [(HAVE, 0), (MIXED, 2), (NONE, 4)])
@pytest.mark.parametrize("on_missing", ["zero", "anchor"])
def test_what_is_not_resident_is_stood_in_for_and_read_for_the_next_token(on_missing, route, late):
    weight = mx.random.normal((DIM, DIM), key=mx.random.key(3))
    with world(on_missing, anchor=lambda x: x @ weight) as made:
        made.store.delay = 0.05
        out = made.decode(X, mx.array(route))
        stand_in = 0.0 if on_missing == "zero" else np.array(X @ weight)[0, 0]
        np.testing.assert_array_equal(out, without(made, route, stand_in))
        assert sum(made.forward.timeline.blocked[1:]) < 0.05, "no read was waited for"
        made.memory.drain()
        np.testing.assert_array_equal(made.decode(X, mx.array(route)), made.expected(X, route))
        counters = made.switches[0].late.counters
        assert (counters.used, counters.dropped) == (2 * K - late, late)
        assert counters.zeroed == (late if on_missing == "zero" else 0) and counters.exact == 0


def test_raise_names_the_late_experts_and_exact_waits():
    with world("raise") as made:
        np.testing.assert_array_equal(made.decode(X, mx.array(HAVE)), made.expected(X, HAVE))
        with pytest.raises(ContractError, match=r"experts are late.*\[1, 3\]"):
            made.decode(X, mx.array(MIXED))
    with world("exact") as made:
        assert made.switches[0].late is None
        np.testing.assert_array_equal(made.decode(X, mx.array(MIXED)), made.expected(X, MIXED))


def test_a_batch_runs_each_late_expert_for_no_token():
    x, route = inputs((3, 1), seed=1), np.concatenate([HAVE, MIXED, NONE])
    with world("zero") as made:
        want = made.expected(x, route)
        want[~np.isin(route, HAVE)] = 0.0
        np.testing.assert_array_equal(made.decode(x, mx.array(route)), want)


@pytest.mark.parametrize("deadline, late", [(1.0, [1, 3]), (2.0, [3])])
def test_availability_from_the_cache_is_what_the_engine_uses(deadline, late):
    """Expert 1 arrives at 2 s: late by a deadline of 1 s; by one of 2 s it is in time, and is waited for."""
    with world("zero") as made:
        asked = CacheAvailability(made.cache, E, arrivals=lambda: {1: 2.0}, deadline=lambda layer: deadline)
        names, here = tuple(map(str, range(E))), made.switches[0].late
        np.testing.assert_array_equal(here.resident(0), CacheAvailability(made.cache, E)(0, names).numpy())
        here.available = lambda layer: asked(layer, names).numpy()
        out, want = made.decode(X, mx.array(MIXED)), made.expected(X, MIXED)
        want[..., np.isin(MIXED[0, 0], late), :] = 0.0
        np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("answer", [np.ones(E - 1, bool), np.ones(E), np.ones((1, E), bool)])
def test_an_availability_of_another_shape_is_refused(answer):
    with world("zero") as made:
        made.switches[0].late.available = lambda layer: answer
        with pytest.raises(GeometryError, match="one answer an expert"):
            made.decode(X, mx.array(HAVE))


def test_prefill_always_waits():
    with world("zero") as made:
        np.testing.assert_array_equal(made.prefill(X, mx.array(MIXED)), made.expected(X, MIXED))
        assert made.forward.phase is None and made.switches[0].late.counters.used == 0
        assert made.forward.timeline.phase.count(DECODED) == 0
