"""Frames of notebook 80 from a few figures written by hand, and the picture of one token."""

import pytest

from moelab.errors import ContractError
from moelab.lab import plots, views

ANSWER = {"place": "pack", "cycles": 1.0, "request": "first", "n": 8, "largest": 0.0, "read_bytes": 2e3}
FIGURES = {
    "m": {
        "equality": {
            "rows": [
                {**ANSWER, "blas": "reference", "tokens_equal": 8, "logits_equal": 7},
                {**ANSWER, "blas": "openblas", "tokens_equal": 8, "logits_equal": 0},
            ]
        },
        "cache": {
            "bytes_per_s": 1e6,
            "rows": [
                {"policy": "lru", "share": 0.5, "value": 40e3, "se": 1e3, "n": 9, "lru": 4e4, "opt": 2e4, "cold": 5e3},
                {"policy": "x", "share": 0.5, "value": 30e3, "se": None, "n": 9, "lru": 40e3, "opt": 20e3, "cold": 5e3},
            ],
        },
        "overlap": {
            "rows": [
                {"arm": "off", "ratio": 1.0, "seconds": 0.02, "bound": 0.01, "share": None, "compute": 0.008,
                 "exposed": 0.01},
                {"arm": "in_forward", "ratio": 1.0, "seconds": 0.012, "bound": 0.01, "share": 0.8, "share_least": 0.7,
                 "exposed": 0.004,
                 "share_greatest": 0.9, "n": 3, "simulated_share": 1.0},
            ],
            "picture": [
                {"arm": arm, "layer": layer, "missing": 1, "issue": at, "ready": at + wait, "consume": at + 0.003}
                for arm, wait in (("off", 0.002), ("in_forward", 0.0))
                for layer, at in enumerate((0.0, 0.003))
            ],
        },
        "claims": [
            {"claim": "a", "measured": 1.0, "asked": 1.0, "most": False, "n": 8, "spread": "", "holds": True},
            {"claim": "b", "measured": 0.5, "asked": 0.95, "most": False, "n": 3, "spread": "0.4 to 0.6",
             "holds": False},
            {"claim": "c", "measured": None, "asked": 1.02, "most": True, "n": 2, "spread": "", "holds": None},
        ],
    }
}  # fmt: skip


def test_bits_are_counted_without_the_blas_that_rounds_otherwise():
    assert views.streaming_equal(FIGURES) == {"m": "8 of 8 tokens, 7 of 8 rows of logits"}
    assert views.streaming_equality(FIGURES)["logits equal"].tolist() == [7, 0]


def test_bytes_are_shares_of_their_bounds():
    frame = views.cache_bytes(FIGURES).set_index("policy")
    assert frame.loc["x", "÷ global LRU"] == 0.75 and frame.loc["x", "÷ OPT"] == 1.5
    assert frame["way from LRU to OPT"].tolist() == [0.0, 0.5]
    assert frame.loc["x", "tokens/s by disk"] == pytest.approx(1e6 / 30e3)
    curves = views.cache_curves(FIGURES["m"])
    assert curves.set_index("policy")["kB a token"].to_dict() == {
        "lru": 40.0, "x": 30.0, "OPT": 20.0, "first uses alone": 5.0,
    }  # fmt: skip


def test_a_disk_shows_the_range_of_its_rate_in_each_models_run():
    cell = {"size": 4096, "depth": 1, "mb_per_s": 62.9, "ms": 0.1, "n": 9, "mb_per_s_range": [12.0, 1312.0]}
    disk = {"method": "o_direct", "cells": [cell, {**cell, "mb_per_s_range": None}]}
    frame = views.streaming_disk({"m": {"disk": disk}, "other": {"disk": disk}})
    assert frame["in the run of"].tolist() == ["m", "m", "other", "other"]
    assert frame["least to greatest"].tolist()[0] == "12 to 1,312" and frame["least to greatest"].isna().tolist()[1]


def test_shares_leave_out_what_they_are_shares_of():
    shares = views.overlap_shares(FIGURES)
    assert shares["arm"].tolist() == ["in_forward"]
    assert shares["waiting hidden"].tolist() == pytest.approx(
        [0.75]
    )  # of 10 ms two stay, since reads take 10 and compute 8
    assert views.overlap_times(FIGURES["m"])["arm"].tolist() == ["off", "in_forward", "bound"]


def test_the_summary_says_what_does_not_hold_and_what_is_not_known():
    lines = views.streaming_summary(FIGURES).splitlines()
    assert lines[0] == "m: 1 of 3 claims hold."
    assert lines[1] == "  does not hold: b: 0.5, asked ≥ 0.95 (0.4 to 0.6, n = 3)"
    assert lines[2] == "  no evidence: c (n = 2)"
    assert views.streaming_claims(FIGURES)["asked"].tolist() == ["≥ 1", "≥ 0.95", "≤ 1.02"]
    assert views.streaming_claims(FIGURES)["verdict"].tolist() == ["holds", "does not hold", "no evidence"]


def test_a_token_is_drawn_as_bars_in_time():
    frame = views.overlap_picture(FIGURES["m"])
    figure = plots.spans(
        frame, start="start", end="end", y="layer", hue="what", panel="arm", x="milliseconds", alt="One token."
    )
    assert [axes.get_title() for axes in figure.axes] == ["off", "in_forward"]
    waits = [bar.get_width() for bar in figure.axes[0].patches][:2]
    assert waits == pytest.approx([2.0, 2.0])
    assert [bar.get_x() for bar in figure.axes[0].patches] == pytest.approx([0.0, 3.0, 2.0, 5.0])
    assert figure.axes[-1].get_xlabel() == "milliseconds" and figure.alt == "One token."
    with pytest.raises(ContractError, match="no such column"):
        plots.spans(frame, start="begin", end="end", y="layer", hue="what", x="ms", alt="x")


def test_simulated_figures_have_units():
    row = {"predictor": "oracle", "issue": "off", "demand_bytes": 1.83e6, "prefetch_bytes": None, "useful_ratio": 0.5,
           "hidden_fraction": -2.22e-16}  # fmt: skip
    frame = views.simulated_issue({"m": {"issue": [row, {**row, "prefetch_bytes": 4e6}]}})
    assert [str(x) for x in frame["hidden fraction"]] == ["0.0", "0.0"]
    assert frame["on demand, MB a token"].tolist() == [1.83, 1.83]
    assert frame["ahead, MB a token"].tolist()[1] == 4.0 and frame["ahead, MB a token"].isna().tolist()[0]
    assert frame["useful share of what was read ahead"].tolist() == [0.5, 0.5]
    contour = {"contour": [{"recall": 0.5, "waste": 1.0, "speedup": 1.1, "fluid_speedup": 1.2}]}
    names = {"recall of the predictor", "useless candidates a useful one", "speed-up"}
    assert names <= set(views.simulated_contour(contour).columns)
    lines = views.simulated_speedups(contour)
    assert lines["time by"].tolist() == ["closed loop, recall 0.5", "fluid, recall 0.5"]
    assert lines["speed-up"].tolist() == [1.1, 1.2]
