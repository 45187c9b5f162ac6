"""Frames for the notebooks: artefacts of the flywheel laid out as tidy tables, nothing computed anew.

Only reading and reshaping happens here. A figure that needs arithmetic belongs to the flywheel, where it
is tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from .. import artifacts
from ..artifacts import Artifact
from ..flywheel import baselines, snapshot, training
from ..flywheel.capture import INDEX
from ..flywheel.split import SETS
from ..flywheel.value import Evidence


def progress(*labels: str, every: float = 0.1):
    """A callback for long stages that prints a line a tenth of the way, for each job; plain text, so that it
    reads the same in JupyterLab, in a log and in the report."""
    last: dict[int, int] = {}

    def report(job: int, message: Mapping[str, Any]) -> None:
        share = message["done"] / max(1, message["total"])
        if (step := int(share / every)) > last.get(job, 0):
            last[job] = step
            print(f"{labels[job] if job < len(labels) else job}: {share:.0%} of {message['total']:,}", flush=True)

    return report


def captured(observations: Mapping[str, Artifact]) -> pd.DataFrame:
    """One row a model and set: threads, owners, sequences, tokens, decoded tokens."""
    rows = []
    for model, artifact in observations.items():
        entries = artifacts.read_json(artifact.file(INDEX))
        for name in SETS:
            part = [e for e in entries if e["set"] == name]
            rows.append(
                {
                    "model": model,
                    "set": name,
                    "owners": len({e["owner"] for e in part}),
                    "threads": len({e["thread"] for e in part}),
                    "sequences": len(part),
                    "tokens": sum(e["tokens"] for e in part),
                    "decoded": sum(e["decoded"] for e in part),
                    "beyond context": sum(e["beyond"] for e in part),
                }
            )
    return pd.DataFrame(rows)


def sequence_kinds(observations: Mapping[str, Artifact]) -> pd.DataFrame:
    """One row a model and kind of sequence (forced, sampled, edge)."""
    rows = []
    for model, artifact in observations.items():
        entries = artifacts.read_json(artifact.file(INDEX))
        tally: dict[str, Counter] = {}
        for entry in entries:
            kind = entry["sequence"].split("-")[0]
            tally.setdefault(kind, Counter()).update(sequences=1, tokens=entry["tokens"], decoded=entry["decoded"])
        rows += [{"model": model, "kind": kind, **counts} for kind, counts in sorted(tally.items())]
    return pd.DataFrame(rows)


def parity(qualified: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> pd.DataFrame:
    """One row a model and identity: exactness over n rows, and the largest chunk that is exact."""
    rows = []
    for model, identities in qualified.items():
        for blas, f in identities.items():
            if "absent" in f:
                continue
            rows.append(
                {
                    "model": model,
                    "identity": blas,
                    "decoded tokens": f["decoded_tokens"],
                    "rows": f["rows"],
                    "rank mismatches": f["order_mismatches"],
                    "set mismatches": f["set_mismatches"],
                    "exact rank rate": f["exact_rank_rate"],
                    "weight error": f["weight_error"],
                    "largest margin at a mismatch": f["largest_margin_at_disagreement"],
                    "largest exact chunk": f["largest_exact_chunk"],
                }
            )
    return pd.DataFrame(rows)


def speeds(qualified: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> pd.DataFrame:
    """One row a model, identity and phase: median, least and largest tokens per second of n pairs, and the ratio."""
    rows = []
    for model, identities in qualified.items():
        for blas, f in identities.items():
            if "absent" in f:
                continue
            decode, replay = np.array(f["speeds"]["decode"]), np.array(f["speeds"]["replay"])
            rows.append(
                {
                    "model": model,
                    "identity": blas,
                    "decode tok/s": float(np.median(decode)),
                    "replay tok/s": float(np.median(replay)),
                    "replay / decode": float(np.median(replay / decode)),
                    "least": float((replay / decode).min()),
                    "largest": float((replay / decode).max()),
                    "n": len(decode),
                }
            )
    return pd.DataFrame(rows)


def collection_times(tokens_per_second: Mapping[str, float], sizes=(100_000, 1_000_000, 10_000_000)) -> pd.DataFrame:
    """Hours that collecting so many tokens takes: tokens / sustained tokens per second (AFN-021)."""
    return pd.DataFrame(
        [
            {"what": name, "tokens": size, "hours": size / speed / 3600}
            for name, speed in tokens_per_second.items()
            for size in sizes
        ]
    )


def checks(snapshots: Mapping[str, Artifact]) -> pd.DataFrame:
    """One row a check of Gate 2, one column a model."""
    return (
        pd.DataFrame({m: artifacts.read_json(a.file(snapshot.CHECKS)) for m, a in snapshots.items()})
        .rename_axis("check")
        .reset_index()
    )


def coverage(artifact: Artifact) -> pd.DataFrame:
    """Threads and tokens by set, kind and value, in long form."""
    return pd.DataFrame(artifacts.read_json(artifact.file(snapshot.COVERAGE)))


def set_sizes(snapshots: Mapping[str, Artifact]) -> pd.DataFrame:
    """One row a model and set: owners, threads, tokens in windows."""
    return pd.DataFrame(
        [
            {"model": m, "set": s, **{k: a.counts[f"{s}_{k}"] for k in ("owners", "threads", "tokens")}}
            for m, a in snapshots.items()
            for s in SETS
        ]
    )


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


def reliability(frame: pd.DataFrame, *, where: str = "validation") -> pd.DataFrame:
    """Predicted probability against observed frequency."""
    part = frame[(frame["metric"] == "reliability") & (frame["set"] == where)]
    return part.assign(predicted=part["group"].astype(float), observed=part["value"])


def training_history(predictors: Mapping[str, Artifact]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Loss by epoch, and one row an arm: recall by heart, examples per second, parameters, bytes."""
    losses, summary = [], []
    for model, artifact in predictors.items():
        for arm, h in artifacts.read_json(artifact.file(training.HISTORY)).items():
            losses += [{"model": model, "arm": arm, "epoch": i + 1, "loss": v} for i, v in enumerate(h["loss"])]
            summary.append({"model": model, "arm": arm, **{k: h[k] for k in h if k != "loss"}})
    return pd.DataFrame(losses), pd.DataFrame(summary)


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


def capture_cost(cost: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row a model: milliseconds a token with taps on and off, median paired overhead and its quartiles, n."""
    return pd.DataFrame(
        [
            {
                "model": model,
                "on (ms)": c["on_ms"],
                "off (ms)": c["off_ms"],
                "overhead": c["overhead"],
                "lower quartile": c["overhead_quartiles"][0],
                "upper quartile": c["overhead_quartiles"][1],
                "n": c["n"],
            }
            for model, c in cost.items()
        ]
    )


def labels(routes: Mapping[str, Artifact]) -> pd.DataFrame:
    """One row a model: rows by label source, and bytes a token on disk."""
    rows = []
    for model, artifact in routes.items():
        shards = [artifact.path / name for name in artifact.manifest.files if name.startswith("shard-")]
        tokens = artifact.counts["tokens"] - artifact.counts["unlabelled"]
        rows.append(
            {
                "model": model,
                "labelled by decode": artifact.counts["decode_labels"],
                "labelled by replay": artifact.counts["replay_labels"],
                "without label": artifact.counts["unlabelled"],
                "shards": artifact.counts["shards"],
                "bytes/token": sum(path.stat().st_size for path in shards) / max(1, tokens),
            }
        )
    return pd.DataFrame(rows)


def collection(qualified: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> pd.DataFrame:
    """Hours to replay 100k, 1M and 10M tokens, by model and identity."""
    frame = speeds(qualified)
    names = frame["model"] + ", " + frame["identity"]
    return _wide_hours(collection_times(dict(zip(names, frame["replay tok/s"], strict=True))))


def training_times(summary: pd.DataFrame, epochs: int) -> pd.DataFrame:
    """Hours to train on 100k, 1M and 10M tokens: examples x epochs / sustained examples per second."""
    names = summary["model"] + ", " + summary["arm"]
    return _wide_hours(collection_times(dict(zip(names, summary["examples_per_second"] / epochs, strict=True))))


def _wide_hours(frame: pd.DataFrame) -> pd.DataFrame:
    wide = frame.pivot(index="what", columns="tokens", values="hours").reset_index()
    return wide.rename(columns={size: f"{size:,} tokens (h)" for size in wide.columns if size != "what"})


def feature_cost(
    qualified: Mapping[str, Mapping[str, Mapping[str, Any]]], routes: Mapping[str, Artifact]
) -> pd.DataFrame:
    """A million tokens of one feature: gigabytes when stored (float16, all layers), hours when made again."""
    rows = []
    for _, speed in speeds(qualified).iterrows():
        width = routes[speed["model"]].manifest.params["feature_bytes_per_token"]
        rows.append(
            {
                "model": speed["model"],
                "identity": speed["identity"],
                "stored (GB)": width * 1e6 / 1e9,
                "made again (h)": 1e6 / speed["replay tok/s"] / 3600,
            }
        )
    return pd.DataFrame(rows)


def coverage_grid(frame: pd.DataFrame, *kinds: str) -> pd.DataFrame:
    """Tokens by set and value for some kinds, zero where a set has none."""
    part = frame[frame["kind"].isin(kinds)]
    grid = part.pivot_table(index="set", columns="value", values="tokens", aggfunc="sum", fill_value=0)
    return grid.stack().rename("tokens").reset_index().astype({"tokens": float})


def duplicates(snapshots: Mapping[str, Artifact]) -> pd.DataFrame:
    """One row a model: windows kept and dropped, with and without the allow-list, and pairs of threads found."""
    names = {
        "windows": "windows kept",
        "windows_dropped": "dropped",
        "windows_dropped_without_allow_list": "dropped without allow-list",
        "near_identical_pairs": "pairs of threads",
    }
    return pd.DataFrame(
        [{"model": m, **{label: a.counts[k] for k, label in names.items()}} for m, a in snapshots.items()]
    )


def leakage(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> pd.DataFrame:
    """One row a model and split."""
    return pd.DataFrame(
        [
            {"model": model, "split": split, "series": f"{model}, {split}", **figures}
            for model, splits in found.items()
            for split, figures in splits.items()
        ]
    ).astype({"se": float})


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
    """U_B and the accepted tokens a block of B must give to break even in routed bytes: U_B / K (AFN-021)."""
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


def calibration_rows(frame: pd.DataFrame, *, where: str = "validation") -> pd.DataFrame:
    """Calibration error, conformal candidates and what they cover, by model and arm."""
    parts = [
        figure(frame, metric, where=where).assign(metric=metric)
        for metric in ("ece", "candidates for .95 coverage", "coverage reached")
    ]
    return pd.concat(parts, ignore_index=True)[["model", "horizon", "ranking", "metric", "value", "se", "n"]]


def wasted(evidence: Mapping[str, Evidence], metric: str = "wasted bytes/token") -> pd.DataFrame:
    """Wasted bytes of the learned predictor and of its best control, by model and arm."""
    rows = []
    for model, found in evidence.items():
        for arm in found.arms():
            for role, name in (("learned", found.learned(arm)), ("control", found.compare(arm, 1).control)):
                figures = found.figure(name, metric)
                rows.append({"model": model, "arm": arm.name, "role": role, "ranking": name, **_estimate(figures)})
    return pd.DataFrame(rows)


def _estimate(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("value", "se", "n")}
