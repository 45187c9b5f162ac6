"""The controls give the published recalls on real decode traces, to ±0.01.

Protocol: nothing is fitted beforehand; tables and histories grow along the one thread, prefill included, and
every decoded row is scored from the rows before it. "Decayed history" is the best decay at each budget and
the popularity is that of the scored rows themselves, an oracle, as published. Tables add raw counts.
"""

import numpy as np
import pytest

from moelab.flywheel.controls import DecayedHistory, Popularity, PreviousToken, Random
from moelab.flywheel.cooccurrence import CoOccurrence
from moelab.flywheel.metrics import rank_blocks
from moelab.routes import DECODED, read_trace

PUBLISHED = {
    "qwen": {
        "random": (0.047, 0.094, 0.187),
        "hot": (0.375, 0.557, 0.773),
        "previous": (0.379, 0.481, 0.535),
        "decayed": (0.379, 0.548, 0.754),
        "token table": (0.406, 0.590, 0.787),
        "layer table": (0.520, 0.710, 0.859),
    },
    "gemma": {
        "random": (0.048, 0.096, 0.188),
        "hot": (0.395, 0.574, 0.774),
        "previous": (0.357, 0.481, 0.534),
        "decayed": (0.385, 0.554, 0.739),
        "token table": (0.400, 0.575, 0.762),
        "layer table": (0.490, 0.679, 0.838),
    },
}


def recalls(control, train, routes):
    found = rank_blocks(control.fit(train).iter_scores(routes), routes.ids, mask=routes.mask)
    decoded = routes.phase == DECODED
    return np.array([(found[decoded] < m * routes.top_k).mean() for m in (1, 2, 4)])


@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_published_recalls(moelab_data, name):
    routes = read_trace(moelab_data / "traces" / f"{name}.route.csv.gz")
    assert routes.present()[routes.phase == DECODED].all()
    nothing = routes.select(np.zeros(routes.tokens, bool))
    got = {
        "random": recalls(Random(), nothing, routes),
        "hot": recalls(Popularity(), routes.decoded(), routes),
        "previous": recalls(PreviousToken(), nothing, routes),
        "decayed": np.max([recalls(DecayedHistory(decay=d), nothing, routes) for d in DecayedHistory.DECAYS], axis=0),
        "token table": recalls(CoOccurrence(tokens_back=1, weighting="counts", online=True), nothing, routes),
        "layer table": recalls(CoOccurrence(layers_back=1, weighting="counts", online=True), nothing, routes),
    }
    for control, figures in PUBLISHED[name].items():
        np.testing.assert_allclose(got[control], figures, atol=0.01, err_msg=control)
    # Adding probabilities instead of counts is the stronger table, and the default.
    stronger = recalls(CoOccurrence(layers_back=1, online=True), nothing, routes)
    assert (stronger > got["layer table"] + 0.02).all()
