"""Capture and replay: notebooks 20, 21 and the tour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ... import artifacts
from ...artifacts import Artifact
from ...flywheel.capture import INDEX
from ...flywheel.split import SETS
from ...flywheel.tour import Replayed


def progress(*labels: str, every: float = 0.1):
    """A callback for long stages that prints a line a tenth of the way, for each job: plain text, so that it reads the
    same in JupyterLab and in a log. A finished page leaves these lines out (`render`)."""
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


def capture_cost(cost: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row a model: processor time a token with taps on and off, median paired overhead and its quartiles, n."""
    return pd.DataFrame(
        [
            {
                "model": model,
                "on (CPU ms)": c["on_ms"],
                "off (CPU ms)": c["off_ms"],
                "overhead": c["overhead"],
                "lower quartile": c["overhead_quartiles"][0],
                "upper quartile": c["overhead_quartiles"][1],
                "overhead on the clock": c["wall_overhead"],
                "n": c["n"],
            }
            for model, c in cost.items()
        ]
    )


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
                    "feature difference": f["diagnostic"]["live_difference"],
                    "stored = recomputed": f["diagnostic"]["stored_equal"],
                }
            )
    return pd.DataFrame(rows)


def speeds(qualified: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> pd.DataFrame:
    """One row a model, identity and phase: median tokens per second of processor time of n pairs, and the ratio."""
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


def collection_times(tokens_per_second: Mapping[str, float], sizes=(100_000, 1_000_000, 10_000_000)) -> pd.DataFrame:
    """Hours that collecting so many tokens takes: tokens / sustained tokens per second."""
    return pd.DataFrame(
        [
            {"what": name, "tokens": size, "hours": size / speed / 3600}
            for name, speed in tokens_per_second.items()
            for size in sizes
        ]
    )


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


def tour(step: Replayed) -> pd.DataFrame:
    """Decode against replay: tokens, speeds, and whether the routes are equal."""
    joined = speeds(step.qualified).merge(parity(step.qualified), on=["model", "identity"])
    names = [
        "model",
        "identity",
        "decoded tokens",
        "rank mismatches",
        "decode tok/s",
        "replay tok/s",
        "replay / decode",
    ]
    return joined[names]
