"""Taps at length on the reference models: 300 tokens of prefill, 212 of cached decode, bit for bit."""

import mlx.core as mx
import numpy as np
import pytest

from moelab.models import load
from moelab.models.runtime import active_blas

TOKENS = np.random.default_rng(11).integers(5, 8000, 512)


def follow(lm, pending=lambda: []):
    cache, parts, counts = lm.make_cache(), [], set()
    for piece in [slice(0, 300), *(slice(i, i + 1) for i in range(300, 512))]:
        parts.append(lm.model(mx.array(TOKENS[piece])[None], cache=cache))
        waiting = pending()
        counts.add(len(waiting))
        mx.eval(parts[-1], *waiting)
    return mx.concatenate(parts, axis=1), counts


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_512_tokens_with_taps_are_those_without(name):
    lm = load(name)
    plain, _ = follow(lm)
    with lm.tap(("moe_input", "pre_attention")) as tap:
        tapped, counts = follow(lm, tap.pending)
        stepped = tap.take()
        mx.eval(lm.model(mx.array(TOKENS)[None]))
        whole = tap.take()
    assert mx.array_equal(plain, tapped).item()
    # A step hands over its own arrays only, however long the sequence is.
    assert counts == {4 * lm.geometry.layers}
    clear = whole.margin > (0 if active_blas() == "reference" else 1e-4)
    assert (stepped.ids == whole.ids).all(-1)[clear].all() and clear.mean() > 0.99
    if active_blas() == "reference":  # whose bits do not depend on how many rows are computed at once
        np.testing.assert_array_equal(stepped.weights, whole.weights)
        np.testing.assert_array_equal(stepped.margin, whole.margin)
        np.testing.assert_array_equal(stepped.features["moe_input"], whole.features["moe_input"])
