"""Every path of a streamed layer gives the resident layer's outputs for the same ids, bit for bit."""

import mlx.core as mx
import numpy as np
import pytest
from switch_world import PRECISIONS, SWITCHES, E, K, World, inputs, routes

from moelab.streaming.layer.options import LayerOptions

SHAPES = {"decode": (1, 1), "batch": (3, 1), "prefill": (1, 5), "sorted": (1, 80)}
STAGED = {
    "beside": {"staged": True, "staged_n": 8},
    "in_place": {"staged": True, "staged_n": 8, "incr_stack": True},
    "threads": {"staged": True, "staged_n": 8, "staged_sync": False},
}
WINDOWS = {
    "whole": {"full_layer_prefill": True},
    "hot": {"prefill_hot": 3, "hot_update_interval": 1},  # the others are misses
    "all hot": {"prefill_hot": E, "hot_update_interval": 1},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", SWITCHES)
def test_every_path_has_the_bits_of_the_resident_layer(kind, precision, shape):
    x, ids = inputs(SHAPES[shape]), routes(SHAPES[shape])
    used = np.unique(ids)
    with World(LayerOptions(), kind=kind, precision=precision) as world:
        want = world.expected(x, ids)
        np.testing.assert_array_equal(world.decode(x, mx.array(ids)), want)
        np.testing.assert_array_equal(world.prefill(x, mx.array(ids)), want)
    for own in STAGED.values():
        for staged in (used, used[::-2]):  # all of them, and some: the rest is exact
            with World(LayerOptions(**own), kind=kind, precision=precision) as world:
                world.switches[0].staged.stage(staged)
                np.testing.assert_array_equal(world.decode(x, mx.array(ids)), want)
    for own in WINDOWS.values():
        with World(LayerOptions(**own), kind=kind, precision=precision) as world:
            for _ in range(3):
                np.testing.assert_array_equal(world.prefill(x, mx.array(ids)), want)
            filled = sum(stack.counters.read + stack.counters.copied for stack in world.window.stacks.values())
            assert filled >= (E if own is WINDOWS["whole"] else 3)


@pytest.mark.parametrize("order", [[0, 2, 5, 7], [7, 0, 5, 2]])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", SWITCHES)
def test_the_staged_set_as_the_route(kind, precision, order):
    options = LayerOptions(staged=True, staged_n=K, staged_trigger=K, staged_replace=True, incr_stack=True)
    with World(options, kind=kind, precision=precision) as world:
        for seed, shape in enumerate([(1, 1), (3, 1), (1, 20)]):
            x = inputs(shape, seed)
            world.switches[0].staged.stage(order)
            ids = np.broadcast_to(np.array(order, np.uint32), (*shape, K))
            np.testing.assert_array_equal(world.decode(x, None), world.expected(x, ids))
