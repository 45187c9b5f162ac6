"""Bounds and verdicts: notebooks 10 and 90."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from ...flywheel.gates import GATES, Verdict


def frame(records: Iterable[Any]) -> pd.DataFrame:
    """Records (dataclasses or mappings) as rows."""
    return pd.DataFrame([dataclasses.asdict(r) if dataclasses.is_dataclass(r) else dict(r) for r in records])


def systems(found: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """One row a model and named system: the bounds of Gate 0."""
    return pd.DataFrame(
        [
            {
                "model": model,
                "system": name,
                "read / compute": c["read_to_compute"],
                "cache share": c["cache_fraction"],
                "read share of time": c["io_share"],
                "speed-up bound": c["speedup"],
                "Amdahl": c["amdahl"],
                "with perfect eviction too": c["opt_speedup"],
                "precision needed": c["precision_needed"],
                "hit rate": c["hit_rate"],
                "OPT hit rate": c["opt_hit_rate"],
            }
            for model, figures in found.items()
            for name, c in figures["systems"].items()
        ]
    ).replace({np.inf: np.nan})


def contour(figures: Mapping[str, Any]) -> pd.DataFrame:
    """The recall x waste grid of the judged system, up to three useless experts for each useful one."""
    grid = pd.DataFrame(figures["contour"])
    return grid[grid["waste"] <= 3]


def hit_curves(found: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Hit rate and missed bytes by policy and cache share."""
    return pd.concat([pd.DataFrame(f["curves"]).assign(model=m) for m, f in found.items()], ignore_index=True).astype(
        {"se": float}
    )


def machine(found: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Measured compute and reads of a token on this machine, and the bound they give."""
    names = ("compute_ms", "io_ms", "speedup", "tokens_per_second_by_disk", "token_bytes", "disk_method")
    return pd.DataFrame(
        [{"model": m, **{n.replace("_", " "): f["machine"][n] for n in names}} for m, f in found.items()]
    )


def gate_table(verdicts: Iterable[Verdict]) -> pd.DataFrame:
    """One row a gate, one column a model."""
    verdicts = list(verdicts)
    rows = sorted({v.gate for v in verdicts})
    models = list(dict.fromkeys(v.model for v in verdicts))
    by = {(v.gate, v.model): v.status for v in verdicts}
    return pd.DataFrame(
        [{"gate": g, "asks about": GATES[g], **{m: by.get((g, m), "refused") for m in models}} for g in rows]
    )


def reasons(verdicts: Iterable[Verdict]) -> pd.DataFrame:
    """Why a gate is not a pass."""
    rows = [{"gate": v.gate, "model": v.model, "status": v.status, "reason": v.reason} for v in verdicts if v.reason]
    return pd.DataFrame(rows, columns=["gate", "model", "status", "reason"])
