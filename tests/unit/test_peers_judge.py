"""The verdict on a comparison: what refuses it, what fails it, and the figures of its rows."""

import msgspec
import pandas as pd
import pytest

from moelab.lab.peers.cap import Refusal
from moelab.lab.peers.comparison import Run, last_lines
from moelab.lab.peers.generated import Shape
from moelab.lab.peers.judge import judge
from moelab.lab.peers.views import peer_rows
from moelab.lab.peers.worker import Answer

SHAPE = Shape(layers=2, experts=8, top_k=2, hidden=64, expert_width=32, heads=4, kv_heads=2, head_dim=16)
ROUTED = SHAPE.routed_bytes
EXPERTS = SHAPE.layers * SHAPE.experts * SHAPE.expert_bytes
TOKENS, ROUNDS = 20, 5
ARMS = {"reference": ("reference", 0.01, 0), "ours": ("ours", 0.1, ROUTED), "other": ("rival", 0.3, 4 * ROUTED)}


def answer(arm, seconds, read, number, changes):
    fields = {
        "options": {"runtime": arm},
        "options_digest": arm,
        "tokens": [number] * (TOKENS + 1),
        "seconds": [2.0 + step * seconds for step in range(TOKENS + 1)],
        "device": [1_000_000 + step * read for step in range(TOKENS + 1)],
        "read": [None] * (TOKENS + 1),
        "loaded_seconds": 1.0,
        "peak_rss": 5,
        "report": {"distinct_experts": 10} if arm == "reference" else {},
    }
    return Answer(**{**fields, **changes})


def runs(**changes):
    """Good runs; `changes` maps an arm to fields of its answers."""
    made = []
    for number in range(ROUNDS):
        for arm, (role, seconds, read) in ARMS.items():
            given = answer(arm, seconds, read, number, changes.get(arm, {}))
            made.append(
                Run(arm=arm, role=role, round=number, answer=given, capped=arm != "reference", cached_before=0.0,
                    device_total=given.device[-1])
            )  # fmt: skip
    return made


def verdict(made, *, model=2000, cap=1000, refusal=None):
    return judge(made, shape=SHAPE, model_bytes=model, cap_bytes=cap, refusal=refusal)


def edited(made, arm, **changes):
    return [msgspec.structs.replace(run, **changes) if run.arm == arm else run for run in made]


def test_good_runs_pass_and_their_rows_say_what_was_measured():
    outcome = verdict(runs())
    assert (outcome.status, outcome.reasons) == ("pass", [])
    ours, other = outcome.rows[1:]
    assert (ours.rounds, ours.equal_tokens, ours.amplification, ours.bytes_per_token) == (5, True, 1.0, ROUTED)
    assert ours.seconds_per_token == pytest.approx(0.1) and ours.seconds_spread == pytest.approx(0)
    assert (ours.times_ours, ours.device_per_read) == (None, None)
    assert (other.amplification, other.rounds_slower) == (4.0, 5) and other.times_ours == pytest.approx(3)


def test_the_device_is_held_against_what_an_arm_says_it_read():
    ours = verdict(runs(ours={"read": [step * ROUTED // 2 for step in range(TOKENS + 1)]})).rows[1]
    assert (ours.device_per_read, ours.amplification) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("what", "changed"),
    [
        ("no enforced memory cap: none", lambda: verdict(runs(), refusal=Refusal("none"))),
        ("fits into the cap", lambda: verdict(runs(), model=1000)),
        ("no arm of ours ran", lambda: verdict([run for run in runs() if run.role != "ours"])),
        ("does not count resident memory", lambda: verdict(runs(ours={"peak_rss": None}))),
        ("no reference run", lambda: verdict([run for run in runs() if run.role != "reference"])),
        ("4 of 5 rounds needed", lambda: verdict([run for run in runs() if run.round])),
        ("fewer than 20 decoded", lambda: verdict(runs(other={"tokens": [0] * 20, "seconds": [0.0] * 20}))),
        ("they are one arm", lambda: verdict(runs(other={"options_digest": "ours"}))),
        ("gave other tokens", lambda: verdict(runs(other={"tokens": [9] * (TOKENS + 1)}))),
        ("in memory before it began", lambda: verdict(edited(runs(), "other", cached_before=0.5))),
        ("it was not cold", lambda: verdict(edited(runs(), "ours", device_total=10 * SHAPE.expert_bytes - 1))),
        ("does not count", lambda: verdict(edited(runs(), "ours", device_total=None))),
        ("does not count", lambda: verdict(edited(runs(), "ours", cached_before=None))),
        ("bytes it read", lambda: verdict(runs(ours={"read": [10**9] * 21, "options": {"reader": "o_direct"}}))),
    ],
)  # fmt: skip
def test_what_cannot_be_concluded_from_is_refused(what, changed):
    outcome = changed()
    assert outcome.status == "refused" and any(what in reason for reason in outcome.reasons), outcome.reasons
    assert outcome.rows  # the figures are shown all the same


def test_options_that_change_between_rounds_are_refused():
    made = runs()
    changed = msgspec.structs.replace(made[1].answer, options_digest="another")
    made[1] = msgspec.structs.replace(made[1], answer=changed)
    assert verdict(made).reasons == ["ours ran with other options in other rounds"]


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("other tokens than the reference", {"tokens": [9] * (TOKENS + 1)}),
        ("read amplification 1.030", {"device": [10**6 + step * int(1.03 * ROUTED) for step in range(TOKENS + 1)]}),
        ("other 0.300", {"seconds": [step * 0.31 for step in range(TOKENS + 1)]}),
        ("200,007,001 bytes resident, 200,007,000 allowed", {"peak_rss": 200_007_001, "report": {"slots_given": 7000}}),
    ],
)
def test_what_is_not_met_fails(what, changes):
    outcome = verdict(runs(ours=changes), model=EXPERTS, cap=0)
    assert outcome.status == "fail" and what in outcome.reasons[0]


def test_memory_is_parameters_slots_and_a_fixed_rest():
    given = runs(ours={"peak_rss": 200_000_300, "report": {"slots_given": 200}}, other={"peak_rss": 10**12})
    outcome = verdict(given, model=EXPERTS + 100, cap=0)
    assert (outcome.status, [row.rss_allowed for row in outcome.rows]) == ("pass", [None, 200_000_300, None])


def test_every_arm_of_ours_is_held_to_the_rivals():
    """The second one too: no cache at all is not excused by another arm that has one."""
    slow = [
        msgspec.structs.replace(run, arm="bare", answer=answer("bare", 0.35, ROUTED, run.round, {}))
        for run in runs()
        if run.arm == "ours"
    ]
    outcome = verdict(runs() + slow)
    assert (outcome.status, outcome.reasons) == ("fail", ["bare: 0.350 s a token, other 0.300"])


def test_a_rival_that_failed_is_named_and_shown():
    outcome = verdict(edited(runs(), "other", answer=None, error="Boom: no\nreason"))
    assert (outcome.status, outcome.reasons) == ("pass", ["other did not run"])
    shown = peer_rows(outcome.rows).set_index("arm").loc["other"]
    assert (shown["n"], shown["error"]) == (0, "Boom: no\nreason") and pd.isna(shown["s a token"])


def test_an_arm_of_ours_that_failed_once_is_refused():
    made = runs()
    made[-2] = msgspec.structs.replace(made[-2], answer=None, error="killed")
    assert verdict(made).status == "refused"


def test_the_last_lines_of_an_error_carry_no_folders():
    text = 'Traceback\n  File "/a/very/long/place/module.py", line 3\n\nOSError: /x/y/model.gguf: gone, see https://h/p/q\n'
    assert last_lines(text, 2) == 'File "module.py", line 3\nOSError: model.gguf: gone, see https://h/p/q'
