"""Live decoding without late experts: who is late, against a slow oracle, and what must hold whatever the model is."""

import numpy as np
import pytest

from moelab import models
from moelab.models.tiny import save
from moelab.studies.late_experts import ARMS, PLACES, late_at, live, prefixes
from moelab.studies.routing import Part


def part(lengths, owners, seed=0):
    rng = np.random.default_rng(seed)
    return Part([rng.integers(5, 250, n).astype(np.int32) for n in lengths], np.arange(len(lengths)), np.array(owners))


def test_late_is_what_was_not_among_the_most_recent():
    rng = np.random.default_rng(0)
    ids = np.stack([[rng.permutation(9)[:2] for _ in range(3)] for _ in range(20)])
    got = late_at(ids, 4, 5)
    for t in range(5, 20):
        for layer in range(3):
            used = []  # latest first
            for before in range(t - 1, -1, -1):
                used += [e for e in sorted(ids[before, layer].tolist()) if e not in used]
            assert got[t - 5, layer] == sum(e not in used[:4] for e in ids[t, layer].tolist())
    assert late_at(ids[:4], 4, 5).shape == (0, 3)


def test_windows_go_round_the_owners():
    windows, owners = prefixes(part([20, 20, 20, 6, 20], [7, 7, 3, 3, 5]), context=12, tokens=20, prompt=5)
    assert owners.tolist() == [7, 3, 5, 7] and [len(w) for w in windows] == [12] * 4  # 6 predicted tokens each
    assert len(prefixes(part([20, 6], [1, 2]), context=20, tokens=99, prompt=5)[0]) == 1, "nothing predicted in six"


@pytest.fixture(scope="module", params=["glm4_moe", "qwen3_moe"])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save(request.param, folder, seed=1)
    windows = part([18] * 5, [0, 1, 2, 3, 0])
    return request.param, *live(
        models.load(folder), windows, context=18, tokens=50, prompt=5, slots=5, timed=3, ratio=1.0
    )


def test_exact_loses_nothing_and_the_others_what_is_late(found):
    family, figures, _ = found
    assert figures["tokens"] == 60
    rows = {(r["place"], r["mode"]): r for r in figures["rows"]}
    modes = [mode for mode in ARMS if mode != "anchor" or family == "glm4_moe"]
    assert set(rows) == {("staged", "raise"), *((place, mode) for place in PLACES for mode in modes)}
    for (place, mode), row in rows.items():
        assert 0 < row["late"]["value"] < 1 and row["touched"]["value"] >= row["late"]["value"]
        if mode == "exact":  # chunks of other lengths, in float32
            assert abs(row["loss"]["value"]) < 1e-5
        elif mode != "raise":
            assert abs(row["loss"]["value"]) > 1e-5
            assert row["loss"]["n"] == (48 + 12 if place == "staged" else 24)
    counted, predicted = rows["staged", "exact"], rows["staged", "raise"]
    assert counted["late"]["n"] == 12 and predicted["late"]["n"] == 60


def test_a_family_without_a_shared_expert_refuses_the_anchor(found):
    family, figures, _ = found
    refused = [(r["place"], r["mode"]) for r in figures["refused"]]
    assert refused == ([] if family == "glm4_moe" else [("staged", "anchor"), ("cache", "anchor")])
    assert all("no shared expert" in r["problem"] for r in figures["refused"])


def test_times_have_a_row_an_engine(found):
    _, figures, times = found
    assert (times["n"], times["tokens"]) == (4, 12) and times["bytes_per_s"] > 0
    arms = {(r["place"], r["mode"]) for r in figures["rows"] if r["mode"] != "raise"}
    assert {(r["place"], r["mode"]) for r in times["rows"]} == arms
    for row in times["rows"]:
        assert all(row[name] == sorted(row[name]) for name in ("seconds", "exposed", "nbytes"))
        assert row["seconds"][0] > 0 and (row["place"] != "cache" or row["mode"] == "exact" or row["exposed"][2] < 1e-3)
