"""Route figures, calibration and model cards against plain loops; and what is refused."""

import json

import numpy as np
import pytest

from moelab.errors import GeometryError, MissingArtifactError, RecordError
from moelab.reference import calibration, card
from moelab.reference.calibration import as_routes, distances
from moelab.reference.figures import domain_distance, load_balance, overlap, route_figures, use_counts
from moelab.routes import MISSING, Routes


@pytest.fixture(scope="module")
def routes():
    draw = np.random.default_rng(0)
    ids = np.argsort(draw.random((3, 9, 2, 8)), axis=-1)[..., :3].astype(np.uint16)
    return as_routes(ids, 8, (0, 1))


def test_windows_become_threads(routes):
    assert routes.thread.tolist() == [0] * 9 + [1] * 9 + [2] * 9
    assert routes.position.tolist() == [*range(9)] * 3
    assert (routes.previous_row() < 0).sum() == 3


def test_overlap_is_the_share_of_experts_seen_one_token_before(routes):
    scored = routes.position >= 2
    hits = [
        int(e) in set(routes.ids[t - 1, layer].tolist())
        for t in np.flatnonzero(scored)
        for layer in range(2)
        for e in routes.ids[t, layer]
    ]
    figure = overlap(routes, scored)
    assert figure.value == pytest.approx(np.mean(hits)) and figure.n == len(hits) == 7 * 3 * 2 * 3
    by_layer = [np.mean(hits[i::6] + hits[i + 1 :: 6] + hits[i + 2 :: 6]) for i in (0, 3)]
    assert (figure.low, figure.high) == pytest.approx((min(by_layer), max(by_layer)))
    assert figure.se > 0
    # The first token of a thread has none before it, and the thread before does not count.
    assert overlap(routes, np.ones(routes.tokens, bool)).n == 8 * 3 * 2 * 3


def test_absent_slots_neither_count_nor_match():
    ids = np.array([[[0, 1]], [[1, MISSING]], [[MISSING, 3]]], np.uint16)
    routes = Routes(
        ids=ids,
        mask=ids != MISSING,
        experts=4,
        layer_ids=(0,),
        phase=np.ones(3, np.uint8),
        thread=np.zeros(3, np.int32),
        position=np.arange(3, dtype=np.int32),
    ).validate()
    figure = overlap(routes, np.ones(3, bool))
    assert (figure.value, figure.n, figure.se) == (0.5, 2, None)
    assert use_counts(routes).tolist() == [[1, 2, 0, 1]]


def test_figures_that_grow_along_a_thread_know_nothing_of_later_rows(routes):
    scored = np.zeros(routes.tokens, bool)
    scored[[4, 13]] = True
    before = route_figures(routes, scored).plain()
    later = routes.ids.copy()
    later[5:9], later[14:18] = later[5:9, ::-1], later[14:18, ::-1]
    changed = Routes(**{**{f: getattr(routes, f) for f in Routes.__dataclass_fields__}, "ids": later})
    assert route_figures(changed, scored).plain() == before


def test_a_table_that_grows_along_a_thread_learns_from_its_rows():
    draw = np.random.default_rng(1)
    first = np.argsort(draw.random((60, 8)), axis=-1)[:, :2]
    follows = as_routes(np.stack([first, (first + 1) % 8], axis=1)[None].astype(np.uint16), 8, (0, 1))
    figures = route_figures(follows, follows.position >= 40)
    assert figures.adjacent[0].value > 0.9 > 0.5 > figures.frequency[0].value
    assert figures.adjacent[0].n == 20 * 2  # the second layer's slots: the first has no layer before it


def test_popularity_from_other_text_is_the_share_of_its_best_experts(routes):
    first, second = routes.select(routes.thread == 0), routes.select(routes.thread > 0)
    found = route_figures(second, np.ones(second.tokens, bool), fitted_on=first).frequency[0]
    best = np.argsort(-use_counts(first), axis=-1, kind="stable")[:, :3]
    hits = [int(e) in best[layer] for row in second.ids for layer in range(2) for e in row[layer]]
    assert found.value == pytest.approx(np.mean(hits)) and found.n == len(hits)


def test_rows_to_score_must_be_named(routes):
    for scored in (np.zeros(routes.tokens, bool), np.ones(5, bool)):
        with pytest.raises(GeometryError, match="rows to score"):
            route_figures(routes, scored)


def test_load_is_the_busiest_over_the_mean_and_the_share_of_the_busiest_eighth():
    counts = np.array([[8, 0, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [1] * 16])
    assert load_balance(counts) == {"busiest": [8.0, 1.0], "hottest_eighth": [0.75, 0.125]}


def test_distance_of_domains_is_total_variation():
    counts = {"a": np.array([[2, 2, 0]]), "b": np.array([[0, 1, 1]]), "c": np.array([[20, 20, 0]])}
    found = domain_distance(counts)
    assert {pair: value.tolist() for pair, value in found.items()} == {
        ("a", "b"): [0.5], ("a", "c"): [0.0], ("b", "c"): [0.5]
    }  # fmt: skip
    summary = distances({**counts, "code_py": counts["a"], "en_prose": counts["b"]})
    assert summary["pairs"] == 10 and summary["named"] == {"code_py / en_prose": [0.5]}
    assert (summary["least"], summary["greatest"], summary["mean"]) == ([0.0], [0.5], [0.3])


def test_real_figures_need_every_trace(tmp_path):
    with pytest.raises(MissingArtifactError, match="qwen.route.csv.gz"):
        calibration.real_figures(tmp_path)


RECORD = {
    "command": "c",
    "date": "d",
    "runtime": {"libraries": {"mlx": "1"}, "precision": "float32", "blas": "reference"},
    "text": {"windows_a_domain": 2, "window": 16},
    "mean_loss": 2.5,
    "loss": {"a": {"nats": 2.5, "tokens": 1234, "licence": "MIT", "source": "here"}},
    "domains": {"mean": [0.1, 0.2, 0.3], "named": {"a / b": [0.3, 0.4, 0.5]}, "same_domain": [0.0, 0.0, 0.0]},
    "load": {"busiest": [1.0, 2.0, 3.0], "hottest_eighth": [0.2, 0.3, 0.4]},
    "beside": {"other": {"load": {"busiest": [4.0, 5.0, 6.0], "hottest_eighth": [0.5, 0.6, 0.7]}}},
}


def test_a_figure_that_a_record_lacks_is_shown_as_absent():
    rows = {row["figure"]: row for row in card.table_rows(RECORD)}
    busiest = rows["busiest expert ÷ mean, all domains (same layers)"]
    assert (busiest["this model"], busiest["other"]) == ("1.00 / 2.00 / 3.00", "4.00 / 5.00 / 6.00")
    assert rows["previous-token overlap (range over layers)"] == {
        "figure": "previous-token overlap (range over layers)", "this model": card.ABSENT, "other": card.ABSENT
    }  # fmt: skip


def test_tables_replace_the_block_between_the_marks_and_nothing_else(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{card.BEGIN}\nold\n{card.END}\nafter\n")
    card.write_tables(path, RECORD)
    once = path.read_text()
    card.write_tables(path, json.loads(json.dumps(RECORD)))
    assert path.read_text() == once
    assert once.startswith(f"before\n{card.BEGIN}\n") and once.endswith(f"{card.END}\nafter\n") and "old" not in once
    assert "| a | MIT | here | 2.50 | 1,234 |" in once


@pytest.mark.parametrize("text", ["none", card.BEGIN, card.END + card.BEGIN, f"{card.BEGIN}{card.BEGIN}{card.END}"])
def test_a_card_without_its_marks_is_refused(tmp_path, text):
    path = tmp_path / "README.md"
    path.write_text(text)
    with pytest.raises(RecordError, match="lacks its marks"):
        card.write_tables(path, RECORD)
    assert path.read_text() == text
