"""What is installed by default is what the committed figures of notebook 81 say."""

from repository import ROOT

from moelab import artifacts
from moelab.studies.prerouter_study import REPORTED, WIDER
from moelab.studies.prerouter_verdict import COMMITTED, COMMITTED_FILE, SMALLEST, choose, free

REPORT = ROOT / COMMITTED_FILE


def test_the_default_is_the_choice_of_the_committed_figures():
    from moelab.prerouter.modes import DEFAULT_MODE, DEFAULT_THRESHOLD

    found = artifacts.read_json(REPORT)["models"]
    assert set(found) == {"softmax", "sigmoid"}
    assert choose(found) == (DEFAULT_MODE, DEFAULT_THRESHOLD)
    for figures in found.values():
        plain = next(row for row in figures["modes"] if row["arm"] == "replace")
        assert not free(plain) and plain["loss"]["value"] > 5 * SMALLEST


def test_the_report_holds_what_its_command_asks():
    report = artifacts.read_json(REPORT)
    assert report["command"].startswith("python -m moelab.studies.prerouter_study reference")
    for figures in report["models"].values():
        assert set(figures) == set(REPORTED) and figures["texts"]["threads"] == COMMITTED >= WIDER["part_texts"]
        assert {row["top_k"] for row in figures["top_k"]} == {4, *WIDER["top_ks"]}
        assert {r["threshold"] for r in figures["modes"] if r["mode"] == "gated"} == set(WIDER["thresholds"])
        assert all(row["loss"]["n"] == figures["texts"]["tokens"] for row in figures["depth"]["rows"])
