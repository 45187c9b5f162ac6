"""What the tables of notebook 82 come to, in sentences made from their figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from .policies import late_experts

Figures = Mapping[str, Mapping[str, Any]]
WIDTH = 118
UNITS = {"loss": "nats a token", "error": "shares of the anchor's error"}


def utility_unit(utility: str) -> str:
    """What a score is measured in, by the name of the utility that it predicts."""
    return UNITS[utility]


def calibration_sentences(found: Figures, utility: str) -> str:
    """How well zero separates, and how often it decides: a sentence a model."""
    out = []
    for m, f in found.items():
        c = f["calibration"]
        above, below = _estimate(c["helps_when_positive"], 4), _estimate(c["helps_when_not"], 4)
        out.append(
            f"{m}: above zero a specialist takes {above} {UNITS[utility]} off, at or below it {below}; "
            f"{c['bins_agree']:.0%} of the bins have the sign that they promise, {c['signs_agree']:.0%} of single "
            f"pairs. {c['positive_a_token']:.1f} of a token's {f['experts']} scores are above zero, and the anchor "
            f"wins {c['anchor_wins']:.1%} of tokens outright."
        )
    return _folded(out)


def fallback_sentences(found: Figures) -> str:
    """Where the anchor in a late expert's place beats waiting and where it does not: a sentence a model and deadline.

    A loss counts as measurable from two standard errors above the layer as trained; ways that wait are judged on all
    windows, which is the stricter test.
    """
    frame, out = late_experts(found), []
    for (m, deadline), rows in frame.groupby(["model", "deadline"], sort=False):
        late = rows[~rows["waits"]]
        late = late.set_index(late["way"].str.removeprefix("late: "))
        losses = {r["policy"]: r["loss"] for r in found[m]["policies"] if "loss" in r}
        harmless = [name for name, loss in losses.items() if loss["value"] <= 2 * (loss["se"] or 0)]
        waits = rows[rows["waits"] & rows["way"].isin(harmless)]
        waiting = waits.sort_values(["token time", "value"], kind="stable").iloc[0]
        costs = ", ".join(f"{way} {_estimate(row, 4)}" for way, row in late.iterrows())
        slow = max(row["time"]["value"] for row in found[m]["late"] if _middle(found[m], row, deadline))
        anchor = late.loc["anchor"]
        if anchor["value"] <= 2 * anchor["se"]:
            verdict = "with the anchor in their place nothing measurable is lost"
        else:
            verdict = "the anchor in their place loses measurably"
        wait = waiting["token time"] - 1
        after = f"after {wait:.2f} token-times" if wait >= 0.005 else "which has nothing to wait for"
        reads = f"{deadline} read{'s' * (deadline != 1)}"
        out.append(
            f"{m} ({found[m]['anchor']} anchor), {reads} hidden: the whole route waits {slow - 1:.2f} "
            f"token-times. Going on without late experts costs, in nats a token, {costs}; {verdict}. The soonest "
            f"of the ways that would wait, and lose nothing measurable on all windows, is {waiting['way']}, {after}."
        )
    return _folded(out)


def late_sentences(found: Figures) -> str:
    """What the two tables of live decoding come to, a sentence a model."""
    out = []
    for m, f in found.items():
        rows = [r for r in f["live"]["rows"] if r["place"] == "staged"]
        times = {
            place: ", ".join(
                f"{r['mode']} {1e3 * r['seconds'][1]:.1f}" for r in f["live_times"]["rows"] if r["place"] == place
            )
            for place in ("staged", "cache")
        }
        raised = next(r for r in rows if r["mode"] == "raise")["touched"]
        costs = ", ".join(f"{r['mode']} {_estimate(r['loss'], 3)}" for r in rows if r["mode"] not in ("exact", "raise"))
        out.append(
            f"{m}: with {f['live']['slots']} experts a layer in staged slots {raised['value']:.1%} of {raised['n']} "
            f"tokens would raise; in nats a token doing without costs {costs}. Milliseconds a token in staged slots: "
            f"{times['staged']}; on the cache: {times['cache']}."
        )
        out += [f"{m}, {r['mode']}: refused, {r['problem']}." for r in f["live"]["refused"] if r["place"] == "staged"]
    return _folded(out)


def _folded(lines: Iterable[str]) -> str:
    """Lines that a page does not break in the middle of a figure."""
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="    ", break_on_hyphens=False) for line in lines)


def _middle(figures: Mapping[str, Any], row: Mapping[str, Any], deadline: int) -> bool:
    shares = sorted({r["share"] for r in figures["late"]})
    return (row["share"], row["deadline"], row["mode"]) == (shares[len(shares) // 2], deadline, "exact")


def _estimate(row: Mapping[str, Any], decimals: int) -> str:
    return f"{row['value']:+.{decimals}f} ± {row['se'] or 0:.{decimals}f}"
