"""Gates 0 to 3: every status and every reason."""

import pytest

from moelab.errors import RecordError
from moelab.flywheel import gates
from moelab.flywheel.gates import Verdict, from_json, gate0, gate1, gate2, gate3, to_json


def ceiling(**changes):
    fields = dict(model="m", speedup_bound=1.5, precision_needed=0.4, smallest_speedup=1.1, figures={"rho": 2.0})
    return gate0(**fields | changes)


def parity(**changes):
    counts = dict.fromkeys(
        ("order_mismatches", "set_mismatches", "token_mismatches", "position_mismatches", "prefix_mismatches"), 0
    )
    fields = dict(model="m", decoded_tokens=200, rows=1600, weight_error=1e-7, weight_tolerance=1e-5, smallest_n=100)
    return gate1(**fields | counts | changes)


def integrity(violations=None, counts=None, **changes):
    fields = dict(
        model="m",
        violations={"owners_in_two_sets": 0, "near_identical_left": 0, **(violations or {})},
        counts={"validation_owners": 3, "train_tokens": 500, **(counts or {})},
        smallest={"validation_owners": 2, "train_tokens": 500},
    )
    return gate2(**fields | changes)


def offline(**changes):
    fields = dict(
        model="m",
        cell="half layer, 1 x K",
        difference=0.05,
        standard_error=0.01,
        smallest_effect=0.02,
        wasted_learned=900.0,
        wasted_control=1000.0,
    )
    return gate3(**fields | changes)


def test_gate0_passes_when_there_is_something_to_win():
    found = ceiling()
    assert (found.gate, found.status, found.reason) == (0, "pass", "")
    assert found.figures == {"speedup_bound": 1.5, "precision_needed": 0.4, "rho": 2.0}
    assert found.thresholds["smallest_speedup"] == 1.1
    assert ceiling(speedup_bound=1.1, precision_needed=1.0).status == "pass", "thresholds are inclusive"


def test_gate0_says_nothing_to_win():
    found = ceiling(speedup_bound=1.0999)
    assert found.status == "fail" and "nothing to win" in found.reason and "1.1x is what matters" in found.reason


def test_gate0_fails_when_no_precision_would_break_even():
    found = ceiling(precision_needed=1.01)
    assert found.status == "fail" and found.reason


def test_gate1_passes_exact_labels():
    found = parity()
    assert (found.gate, found.status, found.reason) == (1, "pass", "")
    assert found.n == {"decoded_tokens": 200, "rows": 1600}
    assert parity(weight_error=1e-5).status == "pass" and parity(decoded_tokens=100).status == "pass"


@pytest.mark.parametrize(
    "name", ["order_mismatches", "set_mismatches", "token_mismatches", "position_mismatches", "prefix_mismatches"]
)
def test_gate1_fails_on_one_difference_however_many_agree(name):
    found = parity(**{name: 1}, decoded_tokens=10**6, figures={"largest_margin_at_disagreement": 1e-9})
    assert found.status == "fail" and f"{name} 1 of 1600" in found.reason
    assert "may not label" in found.reason and found.figures[name] == 1
    assert found.figures["largest_margin_at_disagreement"] == 1e-9, "a small margin stands there and excuses nothing"


def test_gate1_fails_on_weights():
    found = parity(weight_error=1.1e-5)
    assert found.status == "fail" and "weight error 1.1e-05 above 1e-05" in found.reason


def test_gate1_does_not_take_a_weight_error_that_is_no_number():
    with pytest.raises(RecordError):
        parity(weight_error=float("nan"))


def test_gate1_refuses_too_few_tokens_but_one_difference_among_them_fails():
    found = parity(decoded_tokens=99)
    assert found.status == "refused" and found.reason == "99 decoded tokens compared, 100 needed"
    assert parity(decoded_tokens=99, order_mismatches=1).status == "fail"


def test_gate2_passes():
    found = integrity()
    assert (found.gate, found.status, found.reason) == (2, "pass", "")
    assert found.thresholds == {
        "owners_in_two_sets": 0, "near_identical_left": 0, "validation_owners": 2, "train_tokens": 500,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["owners_in_two_sets", "near_identical_left", "another_that_is_counted"])
def test_gate2_fails_on_any_violation_even_with_too_little_evidence(name):
    assert integrity({name: 2}).status == "fail" and f"{name}: 2" in integrity({name: 2}).reason
    assert integrity({name: 2}, {"train_tokens": 1}).status == "fail"


def test_gate2_refuses_a_set_that_is_too_small_or_absent():
    found = integrity(counts={"validation_owners": 1})
    assert found.status == "refused" and found.reason == "too little evidence: validation_owners: 1 of 2"
    absent = integrity(smallest={"stress_threads": 1})
    assert absent.status == "refused" and "stress_threads: 0 of 1" in absent.reason


def test_gate3_passes():
    found = offline()
    assert (found.gate, found.status, found.reason) == (3, "pass", "")
    assert found.standard_errors == {"recall_gain": 0.01}
    assert offline(difference=0.05, standard_error=0.0249).status == "pass"


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"standard_error": 0.025}, "not above 2 standard errors"),  # strictly more than two
        ({"standard_error": 0.02, "sigmas": 3.0}, "not above 3 standard errors"),
        ({"difference": 0.019, "standard_error": 0.001}, "below the smallest effect that matters, 0.02"),
        ({"difference": -0.05}, "not above 2 standard errors"),
        ({"difference": 0.0, "standard_error": 0.0, "smallest_effect": 0.0}, "not above"),
        ({"wasted_learned": 1000.0}, "wastes 1000 bytes a token, the control 1000"),
    ],
)
def test_gate3_fails_and_says_why(changes, reason):
    found = offline(**changes)
    assert found.status == "fail" and reason in found.reason


def test_gate3_names_every_reason():
    found = offline(difference=0.001, wasted_learned=2000.0)
    assert found.reason.count(";") == 2


def test_gate3_is_refused_without_evidence():
    one = offline(standard_error=None)
    assert one.status == "refused" and "a second thread" in one.reason
    two = offline(missing=["the sidecar"], difference=-1.0)
    assert two.status == "refused" and two.reason == "evidence missing: the sidecar"


@pytest.mark.parametrize("made", [ceiling(), parity(), integrity(), offline(), parity(order_mismatches=1)])
def test_a_verdict_survives_json(made):
    assert from_json(to_json(made)) == made


def good(**changes):
    return Verdict(**dict(gate=1, model="m", status="pass", question="Is it?", figures={"x": 0.5}) | changes)


@pytest.mark.parametrize(
    "changes, field",
    [
        ({"gate": 7}, "gate"),
        ({"status": "ok"}, "status"),
        ({"question": ""}, "question"),
        ({"status": "fail"}, "reason"),
        ({"status": "refused"}, "reason"),
        ({"figures": {"x": float("nan")}}, "figures.x"),
        ({"measured": {"s": float("inf")}}, "measured.s"),
        ({"figures": {"x": True}}, "figures.x"),
        ({"standard_errors": {"y": 0.1}}, "standard_errors.y"),
    ],
)
def test_what_is_no_verdict_is_refused(changes, field):
    with pytest.raises(RecordError) as caught:
        good(**changes)
    assert caught.value.field == field


def test_unknown_fields_are_refused():
    with pytest.raises(RecordError):
        from_json({**to_json(good()), "confidence": 1})
    assert set(gates.GATES) == set(range(7))
