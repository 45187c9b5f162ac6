"""Routing policies: notebook 82."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from .cells import estimate

Figures = Mapping[str, Mapping[str, Any]]
LATE_LABELS = {
    "deadline": "reads hidden", "token time": "token-times", "value": "loss, nats a token", "se": "standard error",
    "price": "nats a token-time saved",
}  # fmt: skip
"""Columns of `late_experts` with their units."""


def routing_sets(found: Figures) -> pd.DataFrame:
    """One row a model: the layer, its anchor, and what stands behind the figures."""
    names = ("layer", "anchor", "experts", "top_k", "train_tokens", "train_owners", "validation_tokens")
    names += ("validation_threads", "validation_owners")
    return pd.DataFrame(
        [
            {"model": m, **{n.replace("_", " "): f[n] for n in names}, "loss as trained": f["native_loss"]["value"]}
            for m, f in found.items()
        ]
    )


def calibration_bins(found: Figures) -> pd.DataFrame:
    """Promised against measured utility in bins of the score; none straddles zero."""
    bins = pd.concat(
        [pd.DataFrame(f["calibration"]["bins"]).assign(model=m) for m, f in found.items()], ignore_index=True
    )
    return bins.dropna(subset=["se"]).rename(columns={"predicted": "promised", "value": "measured"})


def calibration_zero(found: Figures) -> pd.DataFrame:
    """Estimates of the utility on both sides of zero, and of the best specialist of each token."""
    sides = {
        "score > 0": "helps_when_positive",
        "score ≤ 0": "helps_when_not",
        "best specialist": "best_helps",
    }
    return pd.DataFrame(
        [
            {"model": m, "pairs": side, **estimate(f["calibration"][name])}
            for m, f in found.items()
            for side, name in sides.items()
        ]
    )


def calibration_signs(found: Figures) -> pd.DataFrame:
    """How well the zero holds, by pair and by bin, and how often it decides."""
    names = {
        "r2": "variance explained",
        "signs_agree": "pairs whose sign is right",
        "bins_agree": "bins whose sign is right",
        "positive_a_token": "positive scores a token",
        "anchor_wins": "tokens that the anchor wins",
    }
    return pd.DataFrame(
        [{"model": m, **{label: f["calibration"][n] for n, label in names.items()}} for m, f in found.items()]
    )


def routing_picture(figures: Mapping[str, Any], policies: list[str]) -> pd.DataFrame:
    """Which expert each of the first tokens runs; -1 is the anchor alone."""
    frame = pd.DataFrame(figures["picture"])
    return frame[frame["policy"].isin(policies)].reset_index(drop=True)


def routing_quality(found: Figures) -> pd.DataFrame:
    """Loss over the layer as trained: one row a model and policy whose loss was measured."""
    rows = _first_budget(found)
    return pd.DataFrame(
        [
            {
                "model": m,
                "policy": r["policy"],
                "experts a token": round(r["arity"], 2),
                "anchor alone": round(r["anchor_share"], 3),
                **estimate(r["loss"]),
            }
            for m, r in rows
            if "loss" in r
        ]
    )


def routing_errors(found: Figures) -> pd.DataFrame:
    """Output error, the anchor alone being 1: one row a model and policy, all ways of mixing."""
    return pd.DataFrame(
        [
            {"model": m, "policy": r["policy"], "mixing": r["mixing"], **estimate(r["error"])}
            for m, r in _first_budget(found)
        ]
    )


def routing_bytes(found: Figures) -> pd.DataFrame:
    """Kilobytes read a token ± standard error, one row a model and policy, one column a cache share."""
    out = []
    for m, f in found.items():
        for name in dict.fromkeys(r["policy"] for r in f["policies"] if "loss" in r):
            rows = [r for r in f["policies"] if r["policy"] == name]
            cells = {f"cache of {r['share']:g}": _kilobytes(estimate(r["bytes"])) for r in rows}
            out.append({"model": m, "policy": name, **cells, "n": rows[0]["bytes"]["n"]})
    return pd.DataFrame(out)


def routing_frontier(figures: Mapping[str, Any]) -> pd.DataFrame:
    """Loss against bytes of one model, a point a policy and budget; in kB, and never 0 for a logarithmic axis.

    Without the policies that look at part of the bank only: ten lines can be told apart.
    """
    return pd.DataFrame(
        [
            {
                "policy": r["policy"],
                "kilobytes a token": max(r["bytes"]["value"] / 1e3, 0.1),
                "loss over native, nats": r["loss"]["value"],
                "se": r["loss"]["se"],
            }
            for r in figures["policies"]
            if "loss" in r and r["mixing"] == "unit" and not r["policy"].startswith(("hierarchical", "compatible"))
        ]
    )


def late_experts(found: Figures) -> pd.DataFrame:
    """Waiting and doing without, at the middle budget: time of a token, loss, and what a saved unit of time costs.

    All losses are on the windows that late ways are run on, so that like stands beside like. `price` is loss per
    token-time saved against waiting for the router's own route. `undominated`: no other way is at once faster and
    better.
    """
    out = []
    for m, f in found.items():
        shares = sorted({r["share"] for r in f["late"]})
        share = shares[len(shares) // 2]
        for deadline in sorted({r["deadline"] for r in f["late"]}):
            late = [r for r in f["late"] if (r["share"], r["deadline"]) == (share, deadline)]
            slow = next(r for r in late if r["mode"] == "exact")["time"]["value"]
            rows = [(False, f"late: {r['mode']}", r["time"]["value"], r["loss"]) for r in late if r["mode"] != "exact"]
            rows += [
                (True, r["policy"], r["time"][str(deadline)]["value"], r["loss_beside_late"])
                for r in f["policies"]
                if r["share"] == share and "loss" in r
            ]
            points = [(time, loss["value"]) for *_, time, loss in rows]
            for waits, name, time, loss in sorted(rows, key=lambda row: row[2]):
                here = (time, loss["value"])
                beaten = any(t <= here[0] and x <= here[1] and (t, x) != here for t, x in points)
                price = loss["value"] / (slow - time) if slow - time > 1e-9 else np.nan
                out.append(
                    {
                        "model": m, "deadline": deadline, "way": name, "waits": waits, "token time": time,
                        **estimate(loss), "price": price, "undominated": not beaten,
                    }
                )  # fmt: skip
    return pd.DataFrame(out)


def late_errors(found: Figures) -> pd.DataFrame:
    """Output error of doing without, by budget and deadline."""
    return pd.DataFrame(
        [
            {
                "model": m, "cache share": r["share"], "deadline": r["deadline"], "late": r["mode"],
                "tokens affected, share": r["late_tokens"]["value"], "experts late, of a token": r["late_experts"],
                **estimate(r["error"]),
            }
            for m, f in found.items()
            for r in f["late"]
            if r["mode"] != "exact"
        ]
    )  # fmt: skip


def late_live(found: Figures) -> pd.DataFrame:
    """The engine without late experts: loss over the resident model's, a row a model, place of experts and way."""
    return pd.DataFrame(
        [
            {
                "model": m, "experts lie in": r["place"], "late": r["mode"],
                "tokens affected, share": r["touched"]["value"], "experts late, share": r["late"]["value"],
                **estimate(r["loss"]),
            }
            for m, f in found.items()
            for r in f["live"]["rows"]
            if r["loss"] is not None
        ]
    )  # fmt: skip


def late_times(found: Figures) -> pd.DataFrame:
    """What the same ways take on a slowed store: medians over windows, and the quartiles of a token's time."""
    return pd.DataFrame(
        [
            {
                "model": m, "experts lie in": r["place"], "late": r["mode"], "n": f["live_times"]["n"],
                "ms a token": 1e3 * r["seconds"][1],
                "quartiles": " to ".join(f"{1e3 * r['seconds'][q]:.1f}" for q in (0, 2)),
                "of it waiting, ms": 1e3 * r["exposed"][1], "kB a token": r["nbytes"][1] / 1e3,
            }
            for m, f in found.items()
            for r in f["live_times"]["rows"]
        ]
    )  # fmt: skip


def _first_budget(found: Figures):
    for m, f in found.items():
        share = f["policies"][0]["share"]
        for r in f["policies"]:
            if r["share"] == share:
                yield m, r


def _kilobytes(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['value'] / 1e3:,.1f} ± {estimate['se'] / 1e3:,.1f}"
