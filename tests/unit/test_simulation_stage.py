"""The studies of notebook 83 on made-up routes: their figures stand in order, and within their bounds."""

import numpy as np
import pytest

from moelab.routes import DECODED, PREFILLED, Routes
from moelab.studies.simulation import SimulationOptions, first_sequences, issue_points, study

LAYERS, TOP_K, EXPERTS = 4, 2, 16


def routes(tokens=80, threads=4, prompt=5):
    """Sticky routes: half of a token's experts are those of the one before."""
    rng = np.random.default_rng(0)
    ids = rng.random((tokens, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint16)
    for t in range(1, tokens):
        keep = ids[t - 1, :, 0]
        ids[t, :, 0] = np.where(ids[t, :, 1] == keep, ids[t, :, 0], keep)
    each = tokens // threads
    position = np.arange(tokens) % each
    return Routes(
        ids=ids,
        weights=None,
        margin=None,
        phase=np.where(position < prompt, PREFILLED, DECODED).astype(np.uint8),
        thread=(np.arange(tokens) // each).astype(np.int32),
        position=position.astype(np.int32),
        experts=EXPERTS,
        layer_ids=tuple(range(LAYERS)),
        expert_bytes=np.full(LAYERS, 4096, np.int64),
    )


OPTIONS = SimulationOptions(
    tokens=45, budgets=[0.25, 0.5], policies=["lru", "layer-lfu"], recalls=[0.5, 1.0], wastes=[0.0, 2.0]
)


@pytest.fixture(scope="module")
def figures():
    return study(routes(), OPTIONS)


def test_whole_sequences_are_taken(figures):
    assert (figures["tokens"], figures["threads"]) == (45, 3)  # 15 decoded tokens each
    assert first_sequences(routes(), 1).tokens == 20  # the first in any case
    assert first_sequences(routes(), 44).tokens == 40


def test_cache_rows_stand_between_their_bounds(figures):
    assert len(figures["cache"]) == 4
    for row in figures["cache"]:
        assert row["timely_recall"] <= row["opt_hit_rate"]
        assert row["demand_bytes"] >= row["opt_bytes"]
        assert row["floor_s"] <= row["bound_s"] <= row["seconds_per_token"]
        assert row["perfect_seconds"] <= row["seconds_per_token"]
        assert row["possible"] > 0
        assert row["prefetch_bytes"] == 0 and row["useful_ratio"] is None


def test_the_device_is_as_slow_as_the_named_system(figures):
    off = figures["issue"][0]
    # MER waits 231.9 s for 60.1 s of compute; prompts between share the device, so that reads of decoded tokens
    # alone are compared. Their device time is a little more than the least possible, by the latency of small batches.
    assert off["issue"] == "off"
    assert off["exposed_s"] == pytest.approx(231.9 / 60.1, rel=0.25)
    assert off["compute_s"] == pytest.approx(1.0)


def test_the_contour_falls_with_waste_and_rises_with_recall(figures):
    speed = {(row["recall"], row["waste"]): row["speedup"] for row in figures["contour"]}
    assert speed[1.0, 0.0] > speed[0.5, 0.0] > 1.0
    assert speed[1.0, 2.0] < 1.0 and speed[0.5, 2.0] < speed[0.5, 0.0]
    for row in figures["contour"]:
        assert (row["read_waste"] > 0) == (row["waste"] > 0)


def test_issue_points_are_the_fluid_limits():
    rows = {(r["layers"], r["ratio"], r["issue"]): r["time"] for r in issue_points(SimulationOptions(ratios=[1.0]))}
    for layers in (8, 48):
        assert rows[layers, 1.0, "off"] == rows[layers, 1.0, "step_boundary"] == pytest.approx(2.0)
        assert rows[layers, 1.0, "async_boundary"] == pytest.approx(1 + 1 / layers)
        assert rows[layers, 1.0, "in_forward"] == pytest.approx(1.0)
