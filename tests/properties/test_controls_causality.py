"""No control sees what its horizon forbids: change the forbidden, and the scores stay bit-equal."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.flywheel.controls import AdjacentLayer, DecayedHistory, Popularity, PreviousToken, Random, Recency
from moelab.flywheel.cooccurrence import CombinedCoOccurrence, CoOccurrence
from moelab.routes import DECODED, Routes

CONTROLS = [
    Random(),
    Popularity(),
    PreviousToken(),
    Recency(),
    DecayedHistory(decay=0.8),
    AdjacentLayer(),
    CombinedCoOccurrence(),
    *(CoOccurrence(tokens_back=a, layers_back=b, online=o) for a, b in ((1, 0), (0, 1), (1, 1)) for o in (False, True)),
]
TOKENS, LAYERS, K, E = 12, 3, 2, 6


def routes(seed, thread):
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((TOKENS, LAYERS, E)), axis=-1)[..., :K].astype(np.uint16)
    thread = np.asarray(thread, np.int32)
    starts = np.flatnonzero(np.diff(thread, prepend=-1))
    position = np.arange(TOKENS) - np.repeat(starts, np.diff([*starts, TOKENS]))
    return Routes(
        ids=ids,
        experts=E,
        layer_ids=tuple(range(LAYERS)),
        phase=np.full(TOKENS, DECODED, np.uint8),
        thread=thread,
        position=position.astype(np.int32),
    ).validate()


def allowed(horizon, thread, t, layer):
    """`bool[T,L]`: routes that may be looked at when scoring layer `layer` of token `t`."""
    ok = np.zeros((TOKENS, LAYERS), bool)
    if horizon == "1 token + 1 layer":
        ok[:t] = True
        ok[t - 1 : t, layer:] = False
    else:
        ok[:t] = True
        if horizon == "1 layer":
            ok[t, :layer] = True
    ok[thread != thread[t]] = False
    return ok


@pytest.mark.parametrize(
    "control", CONTROLS, ids=lambda c: f"{c.name}{'-online' if getattr(c, 'online', False) else ''}"
)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999), cut=st.integers(0, TOKENS), t=st.integers(0, TOKENS - 1), layer=st.integers(0, LAYERS - 1)
)
def test_forbidden_routes_do_not_matter(control, seed, cut, t, layer):
    thread = np.arange(TOKENS) >= cut
    control.fit(routes(seed + 1, np.zeros(TOKENS)))
    before = routes(seed, thread)
    others = routes(seed + 2, thread)
    keep = allowed(control.horizon, thread, t, layer)
    after = replace(before, ids=np.where(keep[..., None], before.ids, others.ids))
    assert np.array_equal(control.scores(before)[t, layer], control.scores(after)[t, layer])
