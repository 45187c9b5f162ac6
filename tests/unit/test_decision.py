"""What the gate report says of ten findings is made of the verdicts, in words and with units."""

import pytest

from moelab.flywheel.decision import NO_EVIDENCE, NOT_OBSERVED, OBSERVED, SAYS, decide, falsifiers
from moelab.flywheel.gates import NOT_YET, QUESTIONS, Verdict

FIGURES = {
    0: {"speedup_bound": 1.259163},
    1: {"order_mismatches": 0},
    2: {"records_not_authorised": 0},
    3: {
        "recall_gain": 0.064443,
        "wasted_bytes_learned": 1426800.4,
        "recall_temporal": 0.79802,
        "recall_control": 0.73094,
    },
}


def verdicts(**statuses):
    return [
        Verdict(
            gate=gate, model="m", question=QUESTIONS[gate], figures=FIGURES.get(gate, {}),
            status=(status := statuses.get(f"gate{gate}", "refused" if gate in NOT_YET else "pass")),
            reason="" if status == "pass" else NOT_YET.get(gate, "because"),
        )
        for gate in QUESTIONS
    ]  # fmt: skip


def test_evidence_has_a_unit_or_a_plain_name():
    rows = {row.number: row for row in falsifiers(verdicts())}
    assert {n: rows[n].evidence for n in (1, 2, 4, 7, 8, 9)} == {
        1: "0 routes (a token in a layer) with experts in another order",
        2: "recall less that of the best training-free control: 0.06444 of the experts",
        4: "1,427,000 bytes a token read ahead and not used",
        7: "recall of 0.798 of the experts on the newest threads",
        8: "0 records without authorisation",
        9: "at most 1.259 × faster with perfect prefetch",
    }
    assert not any("_" in row.evidence for row in rows.values())
    assert {row.state for row in rows.values()} == {NOT_OBSERVED, NO_EVIDENCE}


@pytest.mark.parametrize("gate, number", [(1, 1), (3, 2), (3, 4), (2, 8), (0, 9)])
def test_a_gate_that_fails_has_observed_its_finding(gate, number):
    rows = {row.number: row.state for row in falsifiers(verdicts(**{f"gate{gate}": "fail"}))}
    assert rows[number] == OBSERVED


def test_a_figure_that_is_not_there_is_none():
    bare = [Verdict(gate=0, model="m", status="refused", question="q?", reason="nothing was run")]
    assert {row.evidence for row in falsifiers(bare)} >= {"no figure"} and len(SAYS) == 6


def test_the_first_gate_that_is_no_pass_decides():
    assert decide(verdicts())["m"].startswith("do not promote: gate 4 (decode distribution) is refused, the runtime")
    assert decide(verdicts(gate3="fail"))["m"].startswith("do not promote: gate 3 (offline value) is fail, because")
