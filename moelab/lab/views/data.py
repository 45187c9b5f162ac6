"""Snapshots: notebook 30."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ... import artifacts
from ...artifacts import Artifact
from ...flywheel import snapshot
from ...flywheel.split import SETS


def set_sizes(snapshots: Mapping[str, Artifact]) -> pd.DataFrame:
    """One row a model and set: owners, threads, tokens in windows."""
    return pd.DataFrame(
        [
            {"model": m, "set": s, **{k: a.counts[f"{s}_{k}"] for k in ("owners", "threads", "tokens")}}
            for m, a in snapshots.items()
            for s in SETS
        ]
    )


def coverage(artifact: Artifact) -> pd.DataFrame:
    """Threads and tokens by set, kind and value, in long form."""
    return pd.DataFrame(artifacts.read_json(artifact.file(snapshot.COVERAGE)))


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


def checks(snapshots: Mapping[str, Artifact]) -> pd.DataFrame:
    """One row a check of Gate 2, one column a model."""
    return (
        pd.DataFrame({m: artifacts.read_json(a.file(snapshot.CHECKS)) for m, a in snapshots.items()})
        .rename_axis("check")
        .reset_index()
    )
