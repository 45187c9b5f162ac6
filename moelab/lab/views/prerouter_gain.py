"""What a prerouter buys: notebook 81."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import pandas as pd

from .cells import HOLDS, KB, MS

Figures = Mapping[str, Mapping[str, Any]]


def gain_measured(found: Figures) -> pd.DataFrame:
    """One row a model, cache, disk and arm: time and exposed wait of a token, its bytes, and the share of the possible
    (medians over texts, least and greatest)."""
    return pd.DataFrame(
        [
            {
                "model": m, "cache, token cycles": r["cycles"], "reads ÷ compute": _disk(r), "arm": r["arm"],
                "ms a token": MS * r["seconds"],
                "least to greatest": f"{MS * r['seconds_least']:.1f} to {MS * r['seconds_greatest']:.1f}",
                "exposed ms": MS * r["exposed"], "bound ms": MS * r["bound"], "kB a token": r["nbytes"] / KB,
                "bytes ÷ off": r["bytes_ratio"], "share of the possible": r["share"],
                "its least to greatest": _ends(r["share_least"], r["share_greatest"]), "texts": r["n"],
            }
            for m, r in _rows(found, "rows")
        ]
    )  # fmt: skip


def gain_committed(report: Mapping[str, Any] | None, command: str) -> pd.DataFrame:
    """The committed report, one row a model and arm: its time beside `off` over all cells of cache and disk (the cells
    are in the file); of no report the command that makes it."""
    if report is None:
        return pd.DataFrame([{"committed report": "none yet", "made by": command}])
    out = []
    for m, figures in report["models"].items():
        for arm in dict.fromkeys(r["arm"] for r in figures["rows"]):
            times, waits, sizes, shares = zip(*_beside_off(figures["rows"], arm), strict=True)
            out.append(
                {
                    "model": m, "arm": arm, "cells": len(times), "faster than off in": sum(t < 1 for t in times),
                    "time ÷ off, median": median(times), "least to greatest": _ends(min(times), max(times)),
                    "exposed wait ÷ compute, median": median(waits), "bytes ÷ off, median": median(sizes),
                    "share of the possible, median": None if arm == "off" else median(shares),
                }
            )  # fmt: skip
    return pd.DataFrame(out)


def gain_waits(figures: Mapping[str, Any]) -> pd.DataFrame:
    """Exposed wait of one model as a share of a token's compute, by arm and cell; no disk that is not slowed."""
    return pd.DataFrame(
        [
            {"arm": r["arm"], "exposed wait ÷ compute": r["exposed"] / r["compute"],
             "cell": f"cache {r['cycles']:g}, reads {r['ratio']:.3g}"}
            for r in figures["rows"]
            if r["ratio"] is not None
        ]
    )  # fmt: skip


def gain_heads(found: Figures) -> pd.DataFrame:
    """One row a model and way of running heads: what they take where nothing is missing."""
    ways = {"in_forward": "one by one, in the pass", "async_boundary": "all at once, after it"}
    return pd.DataFrame(
        [
            {
                "model": m, "heads are run": ways[r["issue"]], "ms a token without": MS * r["token"],
                "ms more": MS * r["extra"], "least": MS * r["extra_least"], "greatest": MS * r["extra_greatest"],
                "texts": r["n"],
            }
            for m, r in _rows(found, "heads")
        ]
    )  # fmt: skip


def gain_depth(found: Figures) -> pd.DataFrame:
    """One row a model, depth, cache and disk, simulated: time of a token ÷ its compute, one column a predictor and
    issue point, beside the bound."""
    place = ["model", "layers", "cache, token cycles", "reads ÷ compute", "bound"]
    frame = pd.DataFrame(
        [
            {
                "model": m, "layers": r["layers"], "cache, token cycles": r["cycles"], "reads ÷ compute": r["ratio"],
                "bound": r["bound"], "time": r["seconds"],
                "arm": f"{r['who']}, {r['issue']}" if r["issue"] else r["who"],
            }
            for m, r in _rows(found, "depth")
        ]
    )  # fmt: skip
    arms = sorted(frame["arm"].unique(), key=lambda arm: (arm != "off", arm))
    return frame.pivot(index=place, columns="arm", values="time")[arms].reset_index().rename_axis(columns=None)


def gain_sweep(found: Figures) -> pd.DataFrame:
    """The heads' figures at other thresholds, and at that of the study."""
    own = {
        m: {"sweep": f["sweep"] + [r for r in f["depth"] if _same(r, f["sweep"][0], f["sizes"]["layers"])]}
        for m, f in found.items()
    }
    frame = _simulated(own, "sweep", {"threshold": "least probability", "issue": "issued"})
    return frame.sort_values(["model", "issued", "least probability"], kind="stable", ignore_index=True)


def gain_uses(found: Figures) -> pd.DataFrame:
    """One row a model, eviction policy and use of a prediction: bytes and hits, simulated."""
    return _simulated(found, "uses", {"policy": "eviction", "use": "a prediction may"})


def gain_claims(found: Figures) -> pd.DataFrame:
    """One row a model and claim: measured, asked, and whether it holds, in words."""
    return pd.DataFrame(
        [
            {
                "model": m, "claim": r["claim"], "measured": r["measured"], "asked": r["asked"], "n": r["n"],
                "where": r["spread"], "verdict": HOLDS[r["holds"]],
            }
            for m, r in _rows(found, "claims")
        ]
    )  # fmt: skip


def gain_summary(found: Figures, *, width: int = 110) -> str:
    """In plain words: what holds, where an arm loses, and what nothing was learnt about."""
    text = []
    for m, figures in found.items():
        rows = figures["claims"]
        text.append(f"{m}: {sum(r['holds'] is True for r in rows)} of {len(rows)} claims hold.")
        for r in sorted((r for r in rows if r["holds"] is not True), key=lambda r: r["holds"] is None):
            figure = "" if r["measured"] is None else f": {r['measured']:.2f}, asked {r['asked']:.2f}"
            line = f"{HOLDS[r['holds']]}: {r['claim']}{figure} (n = {r['n']}). {r['spread']}"
            text += textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(text)


def _simulated(found: Figures, part: str, names: Mapping[str, str]) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "model": m, **{label: r[n] for n, label in names.items()},
                "time ÷ compute": r["seconds"], "bound": r["bound"], "exposed wait": r["exposed"],
                "bytes ÷ off": r["bytes_ratio"], "resident when asked for": r["hits"], "prefetches used": r["useful"],
                "share of the possible": r["share"], "tokens": r["tokens"],
            }
            for m, r in _rows(found, part)
            if part != "sweep" or r["who"] == "heads"
        ]
    )  # fmt: skip


def _beside_off(rows: list[Mapping[str, Any]], arm: str) -> Iterator[tuple[float, float, float, float | None]]:
    """Of an arm, cell by cell: time ÷ that of `off` (median of pairs), wait ÷ compute, bytes ÷ off, and its share."""
    return ((1 / r["speedup"], r["exposed"] / r["compute"], r["bytes_ratio"], r["share"])
            for r in rows if r["arm"] == arm)  # fmt: skip


def _ends(least: float | None, greatest: float | None) -> str | None:
    return None if least is None else f"{least:.2f} to {greatest:.2f}"


def _same(row: Mapping[str, Any], cell: Mapping[str, Any], layers: int) -> bool:
    return row["who"] == "heads" and row["layers"] == layers and all(row[k] == cell[k] for k in ("cycles", "ratio"))


def _disk(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return row["whose"]
    return f"{row['ratio']:.2f}" + (f", {row['whose']}" if row["whose"] else "")


def _rows(found: Figures, part: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((m, row) for m, figures in found.items() for row in figures[part])
