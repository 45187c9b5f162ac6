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
