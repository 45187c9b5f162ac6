"""Issue points of a prerouter on a real model's routes, 48 layers deep: Qwen3-30B-A3B, one prompt, simulated.

The trace has no hidden states, so no real heads: theirs are made up, right as often as the reference models' heads.
"""

import random

import numpy as np
import pytest

from moelab.flywheel.systems import SYSTEMS
from moelab.routes import DECODED, read_trace
from moelab.streaming.schedule.prefetch import ISSUE
from moelab.studies.prerouter_depth import Answer, Bench

RECALL, TOKENS = 0.4, 48
"""Recall at K of the committed heads (reports/LOG.md), and tokens that keep the test within seconds."""


@pytest.fixture(scope="module")
def bench(moelab_data):
    routes = read_trace(moelab_data / "traces" / "qwen.route.csv.gz")
    whole = routes.mask.all((1, 2)) & (routes.phase == DECODED)
    ids = routes.ids[whole][: TOKENS + 1].astype(np.int64)
    draw, told = random.Random(0), {}
    for step in range(TOKENS):
        for owner in range(routes.layers - 1):
            truth = ids[1 + step, owner + 1].tolist()
            others = draw.sample(sorted(set(range(routes.experts)) - set(truth)), len(truth))
            hits = [draw.random() < RECALL for _ in truth]
            told[step, owner] = [
                (owner + 1, e if hit else o, 1.0) for hit, e, o in zip(hits, truth, others, strict=True)
            ]
    return Bench([Answer([0], [0] * TOKENS, [0] * TOKENS, ids, told)], routes.experts)


def speedups(bench, who):
    system = SYSTEMS["MER, Qwen3-Coder-30B"]
    cycles = system.cache_fraction * bench.experts / bench.passes.top_k
    assert bench.passes.layers == 48 and cycles > 2
    off, rate = bench.off(cycles, "recent-lfu", system.read_to_compute)
    runs = {issue: bench.run(cycles, "recent-lfu", rate, who=who, issue=issue) for issue in ISSUE}
    return {issue: off.seconds / run.seconds for issue, run in runs.items()}, runs, off


def test_perfect_heads_gain_most_in_the_forward(bench):
    """1.23, 1.09 and 0.95 of the speed without predictions, of 1.26 that overlap permits."""
    speed, runs, off = speedups(bench, "perfect")
    near, between, far = (runs[issue] for issue in ISSUE)
    for run in (near, between, far):
        assert abs(run.bytes_per_token / off.bytes_per_token - 1) < 0.05
    assert near.exposed_s < between.exposed_s < far.exposed_s
    assert speed["in_forward"] > 1.05 * speed["async_boundary"] > speed["step_boundary"]
    assert speed["step_boundary"] < 1  # waiting before the pass is no overlap, and its first layer waits besides


def test_heads_that_are_wrong_as_often_lose_when_all_they_name_is_read(bench):
    """At a disk that is the bottleneck every useless byte is time: no issue point makes up for it."""
    speed, runs, off = speedups(bench, "heads")
    assert max(speed.values()) < 1
    assert all(run.bytes_per_token > 1.2 * off.bytes_per_token for run in runs.values())
