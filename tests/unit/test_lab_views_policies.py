"""Frames of notebook 82: every figure lands in its row, and a dominated way is called so."""

import pytest

from moelab.lab import views


def unfolded(text):
    """Sentences as they were before a page folded them; no line is too long for one."""
    assert max(map(len, text.splitlines())) <= 118
    return text.replace("\n    ", " ")


def estimate(value, se=0.1, n=10):
    return {"value": value, "se": se, "n": n, "owners": 3}


def policy(name, share, loss, time, *, mixing="unit", read=174_838.0):
    row = {
        "policy": name, "mixing": mixing, "share": share, "arity": 1.5, "anchor_share": 0.25,
        "bytes": estimate(read, 3090.0),
        "time": {"0": estimate(time)}, "error": estimate(0.5),
    }  # fmt: skip
    # On all windows a way looks a little worse here than on those that the late ways are run on.
    return row if loss is None else {**row, "loss": estimate(loss + 0.001), "loss_beside_late": estimate(loss)}


@pytest.fixture
def found():
    late = [
        {"share": s, "deadline": 0, "late_tokens": estimate(0.5), "late_experts": 1.0, "mode": mode,
         "time": estimate(time), "error": estimate(0.2), "loss": estimate(loss)}
        for s in (0.1, 0.2, 0.4)
        for mode, time, loss in (("exact", 3.0, 0.0), ("zero", 1.0, 0.02), ("promote", 1.0, 0.05), ("anchor", 1.0, 0.3))
    ]  # fmt: skip
    every = [
        policy(name, share, loss, time, mixing=mixing)
        for name, loss, time, mixing in (
            ("native top-2", 0.0, 3.0, "unit"),
            ("anchored top-1", 0.01, 1.5, "unit"),
            ("compatible top-2", 0.02, 2.0, "unit"),
            ("veto, softmax", 0.03, 2.0, "score softmax"),
            ("veto, equal", None, 2.0, "equal"),
            ("anchor only", 0.04, 1.0, "unit"),
        )
        for share in (0.1, 0.2, 0.4)
    ]  # fmt: skip
    bins = [{"predicted": p, **estimate(p / 2), "positive": p > 0} for p in (-0.5, 0.5)]
    calibration = {
        "bins": bins, "r2": 0.5, "signs_agree": 0.6, "bins_agree": 1.0, "positive_a_token": 2.0, "anchor_wins": 0.1,
        "helps_when_positive": estimate(0.3), "helps_when_not": estimate(-0.1), "best_helps": estimate(0.7),
    }  # fmt: skip
    counts = dict.fromkeys(
        ("layer", "experts", "top_k", "train_tokens", "train_owners", "validation_tokens", "validation_threads",
         "validation_owners"), 4,
    )  # fmt: skip
    picture = [{"policy": "native top-2", "token": 0, "expert": 3}, {"policy": "anchor only", "token": 0, "expert": -1}]
    live = [
        {"place": place, "mode": mode, "touched": estimate(0.9), "late": estimate(0.4), "loss": loss}
        for place in ("staged", "cache")
        for mode, loss in (("raise", None), ("exact", estimate(0.0)), ("zero", estimate(0.25, 0.02)))
    ]  # fmt: skip
    times = [
        {"place": place, "mode": mode, "seconds": [t / 2, t, 2 * t], "exposed": [0.0, t / 4, t],
         "nbytes": [1e3, 2e3, 3e3]}
        for place, mode, t in (("staged", "exact", 0.03), ("staged", "zero", 0.02), ("cache", "exact", 0.04),
                               ("cache", "zero", 0.01))
    ]  # fmt: skip
    refused = [{"place": "staged", "mode": "anchor", "problem": "no shared expert"}]
    counts |= {"live": {"tokens": 10, "slots": 16, "rows": live, "refused": refused},
               "live_times": {"n": 4, "rows": times}}  # fmt: skip
    return {"m": {**counts, "anchor": "shared", "native_loss": estimate(4.5), "calibration": calibration,
                  "policies": every, "late": late, "picture": picture}}  # fmt: skip


def test_one_row_a_policy_for_quality_and_three_for_bytes(found):
    assert views.routing_sets(found)["loss as trained"].tolist() == [4.5]
    quality, errors, read = views.routing_quality(found), views.routing_errors(found), views.routing_bytes(found)
    assert quality["policy"].tolist() == [
        "native top-2",
        "anchored top-1",
        "compatible top-2",
        "veto, softmax",
        "anchor only",
    ]
    assert quality["value"].tolist() == pytest.approx([0.001, 0.011, 0.021, 0.031, 0.041])
    assert len(errors) == 6 and read["policy"].tolist() == quality["policy"].tolist()
    assert read.columns.tolist()[2:] == ["cache of 0.1", "cache of 0.2", "cache of 0.4", "n"]
    assert read["cache of 0.2"].tolist()[0] == "174.8 ± 3.1"
    for frame in (quality, errors):
        assert {"value", "se", "n"} <= set(frame)
    assert set(views.routing_frontier(found["m"])["policy"]) == {"native top-2", "anchored top-1", "anchor only"}


def test_calibration(found):
    assert views.calibration_bins(found)["promised"].tolist() == [-0.5, 0.5]
    assert views.calibration_zero(found)["value"].tolist() == [0.3, -0.1, 0.7]
    assert views.calibration_signs(found)["tokens that the anchor wins"].tolist() == [0.1]


def test_late_is_judged_at_the_middle_cache_size(found):
    frame = views.late_experts(found).set_index("way")
    assert frame["undominated"].to_dict() == {
        "late: zero": True, "late: promote": False, "late: anchor": False, "anchor only": False, "anchored top-1": True,
        "compatible top-2": False, "veto, softmax": False, "native top-2": True,
    }  # fmt: skip
    assert frame.loc["late: zero", "price"] == pytest.approx(0.01) and frame["price"].isna()["native top-2"]
    assert frame["waits"].sum() == 5 and frame["token time"].is_monotonic_increasing
    assert len(views.late_errors(found)) == 9 and set(views.LATE_LABELS) <= set(frame.columns)


def test_late_experts_live(found):
    frame = views.late_live(found)
    assert frame["late"].tolist() == ["exact", "zero"] * 2 and frame["value"].tolist() == [0.0, 0.25] * 2
    times = views.late_times(found)
    assert times["ms a token"].tolist() == [30, 20, 40, 10] and times["quartiles"].tolist()[0] == "15.0 to 60.0"
    assert times["of it waiting, ms"].tolist()[0] == 7.5 and times["kB a token"].tolist()[0] == 2
    assert unfolded(views.late_sentences(found)).splitlines() == [
        "m: with 16 experts a layer in staged slots 90.0% of 10 tokens would raise; in nats a token doing without "
        "costs zero +0.250 ± 0.020. Milliseconds a token in staged slots: exact 30.0, zero 20.0; on the cache: exact "
        "40.0, zero 10.0.",
        "m, anchor: refused, no shared expert.",
    ]


def test_sentences_say_what_the_figures_say(found):
    assert unfolded(views.calibration_sentences(found, "loss")) == (
        "m: above zero a specialist takes +0.3000 ± 0.1000 nats a token off, at or below it -0.1000 ± 0.1000; 100% of "
        "the bins have the sign that they promise, 60% of single pairs. 2.0 of a token's 4 scores are above zero, and "
        "the anchor wins 10.0% of tokens outright."
    )
    assert views.utility_unit("error") in views.calibration_sentences(found, "error")
    costs = "zero +0.0200 ± 0.1000, promote +0.0500 ± 0.1000, anchor"
    ends = (
        "The soonest of the ways that would wait, and lose nothing measurable on all windows, is anchor only, "
        "which has nothing to wait for."
    )
    assert unfolded(views.fallback_sentences(found)) == (
        "m (shared anchor), 0 reads hidden: the whole route waits 2.00 token-times. Going on without late experts "
        f"costs, in nats a token, {costs} +0.3000 ± 0.1000; the anchor in their place loses measurably. {ends}"
    )
    for row in found["m"]["late"]:
        if row["mode"] == "anchor":
            row["loss"]["value"] = 0.2  # two standard errors are chance
    assert "with the anchor in their place nothing measurable is lost. The soonest" in (
        unfolded(views.fallback_sentences(found))
    )
    for row in found["m"]["policies"]:
        if row["policy"] in ("anchor only", "compatible top-2"):
            row["loss"]["value"] = 0.5  # waiting ways are judged on all windows
    assert "is anchored top-1, after 0.50 token-times." in unfolded(views.fallback_sentences(found))


def test_the_picture_has_the_policies_asked_for(found):
    assert views.routing_picture(found["m"], ["anchor only"])["expert"].tolist() == [-1]


def test_speed_is_measured_here():
    rows = views.dispatch_measured([4], [1, 8], hidden=8, rounds=1)
    frame = views.dispatch_speed(rows)
    assert frame["tokens"].tolist() == [1, 8] and (frame["loop / grouped"] > 0).all()
    assert frame["n"].tolist() == [40, 3] and "dense / grouped" not in frame  # that one is left to the report
    share = views.routing_share(rows)
    assert len(share) == 6 and (share["n of each"] == 200).all()
    assert all(0 < float(cell.split()[0]) < 100 for cell in share["4 specialists"])
    claims = views.dispatch_claims(rows, hidden=8).set_index("claim")
    assert claims.loc["selection and capacity, share of dispatch, 4 specialists, 1 token", "here: verdict"] == (
        "no evidence"  # nothing is asked of so narrow a model
    )


def test_committed_speed_has_every_cell_of_the_report_and_page_82_says_what_holds():
    run = views.dispatch_committed()
    found = views.dispatch_speed(run["rows"]).set_index(["specialists", "tokens"])
    assert sorted(found.index) == [(n, t) for n in (8, 64, 256) for t in (1, 4096)]
    assert found["dense / grouped"].notna().all()
    claims = views.dispatch_claims(run["rows"], hidden=run["hidden"])
    assert len(claims) == 6 + 3 + 2  # a share a cell, the loop at many tokens, one batched pass at 64 specialists
    verdicts = claims.filter(like=": verdict")
    assert verdicts.shape[1] == 2
    assert (verdicts == "holds").all(axis=None)
