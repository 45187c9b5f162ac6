"""Prerouter heads: the second half of notebook 41."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ... import artifacts, models
from ...artifacts import Artifact
from ...flywheel.head_training import FILES, HISTORY

FULL, SHARED = (f"prerouter, {form}" for form in FILES)


def head_history(heads: Mapping[str, Artifact]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Loss by epoch, and one row a model and form: size, recall by heart, mean error of a weight on native experts."""
    losses, summary = [], []
    for model, artifact in heads.items():
        for form, h in artifacts.read_json(artifact.file(HISTORY)).items():
            losses += [{"model": model, "form": form, "epoch": i + 1, "loss": v} for i, v in enumerate(h["loss"])]
            summary.append(
                {
                    "model": model,
                    "form": form,
                    "parameters": h["parameters"],
                    "bytes": artifact.counts[f"{form}_bytes"],
                    "recall by heart": h["overfit_recall"],
                    "error of a weight": h["weight_error"]["heads"],
                    "of equal weights": h["weight_error"]["equal"],
                    "examples a second": h["examples_per_second"],
                }
            )
    return pd.DataFrame(losses), pd.DataFrame(summary)


def head_gains(judged: pd.DataFrame, *, where: str = "validation") -> pd.DataFrame:
    """Recall of heads less that of every other ranking, paired on the same rows; and in standard errors."""
    part = judged[(judged["metric"] == "recall@1x less") & (judged["set"] == where)]
    part = part.rename(columns={"ranking": "heads", "group": "less"}).dropna(subset=["se"])
    part = part.assign(**{"standard errors": part["value"] / part["se"].where(part["se"] > 0)})
    return part[["model", "heads", "less", "standard errors", "value", "se", "n"]]


def head_bytes(heads: Mapping[str, Artifact], judged: pd.DataFrame, *, where: str = "validation") -> pd.DataFrame:
    """Both forms side by side: bytes, recall, and whether the small one is within a standard error of the other."""
    rows = []
    recall = judged[(judged["metric"] == "recall@1x") & (judged["group"] == "all") & (judged["set"] == where)]
    less = head_gains(judged, where=where)
    for model, artifact in heads.items():
        found = recall[recall["model"] == model].set_index("ranking")
        pair = less[(less["model"] == model) & (less["heads"] == FULL) & less["less"].str.startswith(SHARED)].iloc[0]
        sizes = [artifact.counts[f"{form}_bytes"] for form in FILES]
        rows.append(
            {
                "model": model,
                "full, bytes": sizes[0],
                "shared, bytes": sizes[1],
                "share of bytes": sizes[1] / sizes[0],
                "full, recall": found.loc[FULL, "value"],
                "its standard error": found.loc[FULL, "se"],
                "shared, recall": found.loc[SHARED, "value"],
                "full less shared": pair["value"],
                "paired standard error": pair["se"],
                "within one standard error": "yes" if pair["value"] <= found.loc[FULL, "se"] else "no",
            }
        )
    return pd.DataFrame(rows)


def head_files(heads: Mapping[str, Artifact]) -> pd.DataFrame:
    """Where the files lie: as trained here, and beside the model, where installation looks first."""
    rows: list[dict[str, Any]] = []
    for model, artifact in heads.items():
        for form, name in FILES.items():
            beside = models.find(models.split_budget(model)[0]) / name
            rows.append({"model": model, "form": form, "trained here": _shown(artifact.file(name))})
            same = beside.is_file() and artifacts.digest_file(beside) == artifacts.digest_file(artifact.file(name))
            rows[-1] |= {"beside the model": _shown(beside) if beside.is_file() else "–", "equal": _word(same)}
            rows[-1]["largest difference"] = 0.0 if same else _apart(artifact.file(name), beside)
    return pd.DataFrame(rows)


def _apart(ours: Any, beside: Any) -> float | None:
    """Largest difference of two weight files, as a share of each tensor's largest weight; None: not comparable."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not beside.is_file():
        return None
    try:
        a, b = load_file(ours), load_file(beside)
    except SafetensorError:  # a page shows what lies there; installing refuses it
        return None
    if {name: value.shape for name, value in a.items()} != {name: value.shape for name, value in b.items()}:
        return None
    return max(float(np.abs(a[n].astype(np.float32) - b[n]).max() / max(np.abs(b[n]).max(), 1e-12)) for n in a)


def _shown(path: Any) -> str:
    root = artifacts.root()
    return str(path.relative_to(root)) if path.is_relative_to(root) else path.name


def _word(true: bool) -> str:
    return "yes" if true else "no"
