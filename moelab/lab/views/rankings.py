"""Controls and predictors: notebooks 40 to 42."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ... import artifacts
from ...artifacts import Artifact
from ...flywheel import baselines, training
from ...flywheel.examples import ARMS
from ...flywheel.value import Evidence, ValueOptions


def judged(found: Mapping[str, Artifact], *, name: str = baselines.TABLE) -> pd.DataFrame:
    """Every figure of notebook 40 or 41 in long form: model, ranking, horizon, set, metric, group, value, se, n."""
    return pd.concat(
        [pd.DataFrame(artifacts.read_json(a.file(name))).assign(model=m) for m, a in found.items()], ignore_index=True
    )


def figure(frame: pd.DataFrame, metric: str, *, where: str = "validation", group: str = "all") -> pd.DataFrame:
    """The rows of one metric on one set, ranked by value."""
    part = frame[(frame["metric"] == metric) & (frame["set"] == where) & (frame["group"] == group)]
    return part[["model", "horizon", "ranking", "value", "se", "n", "threads"]].sort_values(
        ["model", "horizon", "value"], ascending=[True, True, False]
    )


def by_group(frame: pd.DataFrame, prefix: str, *, metric: str = "recall@1x", where: str = "validation") -> pd.DataFrame:
    """Rows broken down by `layer` or `domain`; the column of that name holds the value."""
    part = frame[(frame["metric"] == metric) & (frame["set"] == where) & frame["group"].str.startswith(f"{prefix} ")]
    return part.assign(**{prefix: part["group"].str.removeprefix(f"{prefix} ")})


def budgets(frame: pd.DataFrame, *, where: str = "validation") -> pd.DataFrame:
    """Recall by candidates in multiples of K."""
    parts = [figure(frame, f"recall@{m}x", where=where).assign(candidates=float(m)) for m in (1, 2, 4)]
    joined = pd.concat(parts, ignore_index=True)
    return joined.assign(ranking=joined["ranking"] + " (" + joined["horizon"] + ")")


def across_sets(frame: pd.DataFrame, metric: str = "recall@1x") -> pd.DataFrame:
    """One row a model, horizon and ranking, one column a held-out set."""
    part = frame[(frame["metric"] == metric) & (frame["group"] == "all")]
    wide = part.pivot_table(index=["model", "horizon", "ranking"], columns="set", values="value", sort=False)
    return wide.reset_index().rename_axis(columns=None)


def union_growth(found: Mapping[str, Artifact]) -> pd.DataFrame:
    """U_B and the accepted tokens a block of B must give to break even in routed bytes: U_B / K."""
    return pd.DataFrame(
        [
            {
                "model": m,
                "block": int(b),
                "distinct experts": u["value"],
                "se": u["se"],
                "n": u["n"],
                "tokens to accept": u["break_even"],
            }
            for m, a in found.items()
            for b, u in artifacts.read_json(a.file(baselines.UNION)).items()
        ]
    )


def reliability(frame: pd.DataFrame, *, where: str = "validation") -> pd.DataFrame:
    """Predicted probability against observed frequency."""
    part = frame[(frame["metric"] == "reliability") & (frame["set"] == where)]
    return part.assign(predicted=part["group"].astype(float), observed=part["value"])


def metrics(frame: pd.DataFrame, *, where: str = "validation") -> pd.DataFrame:
    """One row a ranking: exact set and order, precision, reciprocal rank."""
    names = ["exact set", "exact order", "precision@1x", "precision@2x", "precision@4x", "reciprocal rank"]
    part = frame[frame["metric"].isin(names) & (frame["set"] == where) & (frame["group"] == "all")]
    wide = part.pivot_table(index=["model", "horizon", "ranking"], columns="metric", values="value", sort=False)
    return wide[names].reset_index().rename_axis(columns=None)


def by_domain(frame: pd.DataFrame, *, where: str = "validation") -> pd.DataFrame:
    """Recall at 1 x K by domain of the thread, with standard error and n."""
    return by_group(frame, "domain", where=where)[
        ["model", "horizon", "ranking", "domain", "value", "se", "n"]
    ].dropna()


def calibration_rows(frame: pd.DataFrame, *, where: str = "validation") -> pd.DataFrame:
    """Calibration error, conformal candidates and what they cover, by model and arm."""
    parts = [
        figure(frame, metric, where=where).assign(metric=metric)
        for metric in ("ece", "candidates for .95 coverage", "coverage reached")
    ]
    return pd.concat(parts, ignore_index=True)[["model", "horizon", "ranking", "metric", "value", "se", "n"]]


def training_history(predictors: Mapping[str, Artifact]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Loss by epoch, and one row an arm: recall by heart, examples per second, parameters, bytes."""
    losses, summary = [], []
    for model, artifact in predictors.items():
        for arm, h in artifacts.read_json(artifact.file(training.HISTORY)).items():
            losses += [{"model": model, "arm": arm, "epoch": i + 1, "loss": v} for i, v in enumerate(h["loss"])]
            summary.append({"model": model, "arm": arm, **{k: h[k] for k in h if k != "loss"}})
    return pd.DataFrame(losses), pd.DataFrame(summary)


def shortlist(*frames: pd.DataFrame, horizon: str = "1 layer") -> pd.DataFrame:
    """Rankings that a reader should see side by side at one horizon, best first."""
    joined = pd.concat(frames, ignore_index=True)
    keep = joined["horizon"].eq(horizon) | joined["ranking"].isin(["popularity", "previous token, same layer"])
    return joined[keep].sort_values(["model", "value"], ascending=[True, False]).astype({"se": float})


def comparisons(evidence: Mapping[str, Evidence], multiples=(1, 2, 4)) -> pd.DataFrame:
    """Learned against the best control, every arm and candidate budget: paired difference with standard error."""
    rows = []
    for model, found in evidence.items():
        for arm in found.arms():
            for multiple in multiples:
                c = found.compare(arm, multiple)
                rows.append(
                    {
                        "model": model,
                        "arm": arm.name,
                        "candidates": multiple,
                        "best control": c.control,
                        "control": c.against,
                        "learned": c.learned,
                        "value": c.difference.value,
                        "se": c.difference.se,
                        "n": c.difference.n,
                        "threads": c.difference.clusters,
                    }
                )
    return pd.DataFrame(rows)


def wasted(evidence: Mapping[str, Evidence], metric: str = "wasted bytes/token") -> pd.DataFrame:
    """Wasted bytes of the learned predictor and of its best control, by model and arm."""
    rows = []
    for model, found in evidence.items():
        for arm in found.arms():
            for role, name in (("learned", found.learned(arm)), ("control", found.compare(arm, 1).control)):
                figures = found.figure(name, metric)
                rows.append({"model": model, "arm": arm.name, "role": role, "ranking": name, **_estimate(figures)})
    return pd.DataFrame(rows)


def seven(evidence: Mapping[str, Evidence], options: ValueOptions) -> pd.DataFrame:
    """The seven controls of Gate 3 at the primary cell: recall at 1 x K, or why there is none."""
    names = {
        1: ("random", "random"),
        2: ("frequency / LRU", "recency (LRU)"),
        3: ("previous token, same layer", "previous token, same layer"),
        4: ("adjacent layer", "adjacent-layer co-occurrence"),
        5: ("target gate on an earlier representation", "own gate early, moe input"),
    }
    rows = []
    for model, found in evidence.items():
        for number, (label, ranking) in names.items():
            name = next(n for n in found.ranks if n.split(" | ")[0] == ranking)
            rows.append({"model": model, "control": f"{number}. {label}", **_estimate(found.figure(name, "recall@1x"))})
        learned = found.learned(ARMS[options.primary_arm])
        rows.append({"model": model, "control": "6. learned", **_estimate(found.figure(learned, "recall@1x"))})
    joined = pd.DataFrame(rows)
    sidecar = pd.DataFrame(
        [{"model": m, "control": "7. learned sidecar", "status": "refused: no drafter"} for m in evidence]
    )
    both = pd.concat([joined.assign(status="run"), sidecar], ignore_index=True)
    return both.astype({"n": "Int64"}).sort_values(["model", "control"])


def _estimate(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("value", "se", "n")}
