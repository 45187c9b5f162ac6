"""Frames of what a prerouter buys: every figure under its own name, absent ones absent."""

import pandas as pd
import pytest

from moelab.lab import views
from moelab.studies import prerouter_report


def spread(name, value):
    return {name: value, f"{name}_least": value, f"{name}_greatest": value}


def measured(arm, ratio, whose=""):
    return {
        "cycles": 2.0, "ratio": ratio, "whose": whose, "arm": arm, "n": 3, "compute": 0.01, "io": 0.02, "bound": 0.02,
        **spread("seconds", 0.03), **spread("exposed", 0.005), **spread("nbytes", 4e6), **spread("speedup", 1.1),
        **spread("bytes_ratio", 1.05), **spread("share", None if arm == "off" else 0.5),
    }  # fmt: skip


def simulated(who, issue, threshold, layers=8, **more):
    return {
        "layers": layers, "cycles": 2.0, "ratio": 4.0, "policy": "lru", "who": who, "issue": issue, "tokens": 9,
        "threshold": threshold, "seconds": 1.5, "bound": 1.0, "exposed": 0.5, "bytes_ratio": 1.1, "hits": 0.4,
        "useful": None, "share": 0.5, **more,
    }  # fmt: skip


FOUND = {
    "softmax": {
        "sizes": {"layers": 8},
        "rows": [measured("off", 2.0), measured("heads, in_forward", 4.0, "a system"),
                 measured("off", None, "this machine")],
        "heads": [{"issue": "in_forward", "n": 3, "token": 0.01, **spread("extra", 0.002)}],
        "depth": [simulated("heads", "in_forward", 0.5), simulated("heads", "in_forward", 0.5, layers=48),
                  simulated("perfect", "in_forward", None), simulated("off", None, None),
                  simulated("off", None, None, layers=48)],
        "sweep": [simulated("off", None, None), simulated("heads", "in_forward", 0.3),
                  simulated("heads", "in_forward", 0.7)],
        "uses": [simulated(None, None, None, use="protect")],
        "claims": [
            {"claim": "this", "measured": 0.5, "asked": 0.1, "n": 3, "spread": "here", "holds": True},
            {"claim": "that", "measured": None, "asked": None, "n": 0, "spread": "nowhere", "holds": None},
            {"claim": "other", "measured": 0.9, "asked": 1.0, "n": 3, "spread": "there", "holds": False},
        ],
    }
}  # fmt: skip


def test_measured_rows_name_their_disk_and_their_units():
    frame = views.gain_measured(FOUND)
    assert frame["reads ÷ compute"].tolist() == ["2.00", "4.00, a system", "this machine"]
    assert frame["ms a token"].tolist() == [30.0] * 3 and frame["kB a token"].tolist() == [4000.0] * 3
    assert frame["share of the possible"].isna().tolist() == [True, False, True]
    assert views.gain_waits(FOUND["softmax"])["exposed wait ÷ compute"].tolist() == [0.5, 0.5]  # no slowed disk, no row
    assert views.gain_heads(FOUND)["ms more"].tolist() == [2.0]


def test_simulated_rows():
    # The study's own threshold stands between the others, at the model's own depth alone.
    assert views.gain_sweep(FOUND)["least probability"].tolist() == [0.3, 0.5, 0.7]
    assert views.gain_uses(FOUND)["a prediction may"].tolist() == ["protect"]


def test_times_by_depth_stand_side_by_side():
    frame = views.gain_depth(FOUND)
    assert frame["layers"].tolist() == [8, 48] and frame["off"].tolist() == [1.5, 1.5]
    assert frame["perfect, in_forward"].fillna(-1).tolist() == [1.5, -1]  # not simulated there
    committed = views.gain_depth(prerouter_report.committed()["models"])
    assert len(committed) <= 30 and committed.notna().all().all() and committed.shape[1] == 12


def test_a_report_that_was_not_made_says_how_it_is_made():
    assert views.gain_committed(None, "this command")["made by"].tolist() == ["this command"]
    rows = [{**measured("heads", 1.0), "speedup": s, "share": x} for s, x in ((1.25, 0.2), (0.5, -1.0), (0.8, 0.1))]
    frame = views.gain_committed({"models": {"softmax": {"rows": [measured("off", 1.0), *rows]}}}, "").set_index("arm")
    assert frame.loc["heads", ["cells", "faster than off in"]].tolist() == [3, 1]
    assert frame.loc["heads", ["time ÷ off, median", "least to greatest"]].tolist() == [1.25, "0.80 to 2.00"]
    assert frame.loc["heads", ["exposed wait ÷ compute, median", "share of the possible, median"]].tolist() == [
        0.5,
        0.1,
    ]
    assert pd.isna(frame.loc["off", "share of the possible, median"])


def test_the_committed_table_fits_a_page_and_says_what_the_claims_say():
    report = prerouter_report.committed()
    frame = views.gain_committed(report, "").set_index(["model", "arm"])
    assert len(frame) == sum(len({r["arm"] for r in f["rows"]}) for f in report["models"].values())
    assert frame.shape[1] <= 8
    for model, figures in report["models"].items():
        for claim in figures["claims"]:
            if claim["claim"].endswith("faster than off in every cell"):
                row = frame.loc[model, claim["claim"].rpartition(":")[0]]
                assert row["faster than off in"] / row["cells"] == pytest.approx(claim["measured"])


def test_the_summary_says_what_does_not_hold_first_and_where():
    text = views.gain_summary(FOUND).splitlines()
    assert text[0] == "softmax: 1 of 3 claims hold."
    assert text[1].strip() == "does not hold: other: 0.90, asked 1.00 (n = 3). there"
    assert text[2].strip() == "no evidence: that (n = 0). nowhere"
    assert views.gain_claims(FOUND)["verdict"].tolist() == ["holds", "no evidence", "does not hold"]
