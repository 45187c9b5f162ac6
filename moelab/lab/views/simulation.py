"""Simulated decode: notebook 83."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

from .cells import MB

POINTS = {
    "off": "no prediction",
    "step_boundary": "synchronous boundary",
    "async_boundary": "asynchronous boundary",
    "in_forward": "in the forward",
}
AXES = {"recall": "recall of the predictor", "waste": "useless candidates a useful one", "speedup": "speed-up"}


def issue_points(rows: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row a depth and ratio: time of a pass, compute = 1, by issue point, beside the bound."""
    frame = pd.DataFrame(rows).assign(issue=lambda f: f["issue"].map(POINTS))
    table = frame.pivot(index=["layers", "ratio", "bound"], columns="issue", values="time").reset_index()
    return table[["layers", "ratio", *POINTS.values(), "bound"]].rename(columns={"ratio": "reads ÷ compute"})


def simulated_caches(found: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row a model, budget and policy: hits, bytes, time, and how far from the possible."""
    names = {
        "share": "cache share",
        "policy": "policy",
        "timely_recall": "hit rate",
        "opt_hit_rate": "OPT hit rate",
        "demand_bytes": "MB a token",
        "opt_bytes": "OPT, MB a token",
        "seconds_per_token": "s a token, no prediction",
        "perfect_seconds": "s a token, perfect layer ahead",
        "bound_s": "bound, s",
        "possible": "share of the possible",
    }
    return _rows(found, "cache", names)


def simulated_issue(found: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row a model, predictor and issue point, `off` beside each."""
    names = {
        "predictor": "predictor",
        "issue": "issue",
        "seconds_per_token": "s a token",
        "bound_s": "bound, s",
        "possible": "share of the possible",
        "hidden_fraction": "hidden fraction",
        "timely_recall": "timely recall",
        "timely_miss_recall": "timely miss recall",
        "demand_bytes": "on demand, MB a token",
        "prefetch_bytes": "ahead, MB a token",
        "useful_ratio": "useful share of what was read ahead",
    }
    frame = _rows(found, "issue", names)
    # A difference of two sums: what is left of equal ones is rounding.
    hidden = pd.to_numeric(frame["hidden fraction"]).round(9) + 0.0
    return frame.assign(**{"issue": frame["issue"].map(POINTS), "hidden fraction": hidden})


def simulated_contour(figures: Mapping[str, Any]) -> pd.DataFrame:
    """Recall x waste of one model: closed-loop speed-up, and that of the fluid model of Gate 0."""
    return pd.DataFrame(figures["contour"]).rename(columns=AXES)


def simulation_check(found: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row a model and real run, beside its simulation."""
    names = {
        "store": "store",
        "prediction": "prediction",
        "tokens": "tokens",
        "seconds": "s a token",
        "simulated_seconds": "simulated, s a token",
        "ratio": "simulated ÷ real",
        "wake_late_ms": "threads wake late by, ms",
        "hits": "hits",
        "simulated_hits": "simulated hits",
        "read_bytes": "read, MB",
        "simulated_bytes": "simulated, MB",
    }
    return _rows(found, "rows", names)


def simulated_speedups(figures: Mapping[str, Any]) -> pd.DataFrame:
    """The contour in long form: `time by` names the model of time, and the recall."""
    frame = pd.DataFrame(figures["contour"])
    parts = [
        frame.assign(**{"speedup": frame[column], "time by": name + frame["recall"].map(", recall {:g}".format)})
        for column, name in (("speedup", "closed loop"), ("fluid_speedup", "fluid"))
    ]
    return pd.concat(parts, ignore_index=True).rename(columns=AXES)


def _rows(found: Mapping[str, Mapping[str, Any]], study: str, names: Mapping[str, str]) -> pd.DataFrame:
    frame = pd.concat([pd.DataFrame(f[study]).assign(model=m) for m, f in found.items()], ignore_index=True)
    sizes = {name: frame[name] / MB for name in names if name.endswith("_bytes")}
    return frame.assign(**sizes).reindex(columns=["model", *names]).rename(columns=names)
