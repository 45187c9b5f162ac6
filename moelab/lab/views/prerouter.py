"""The prerouter's modes: notebook 81."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any

import pandas as pd

from ...studies.prerouter_verdict import sentences
from .cells import KB, MS, estimate

Figures = Mapping[str, Mapping[str, Any]]


def prerouter_agreement(found: Figures) -> pd.DataFrame:
    """Estimates of recall with K candidates, one row a model and ranking; how early, and how the order agrees."""
    return pd.DataFrame(
        [
            {
                "model": m, "predicted by": r["ranking"], "lead, layers": r["lead_layers"],
                "lead, ms of compute": MS * r["lead_s"], "exact set": r["exact"]["value"],
                "first choice": r["top1"]["value"], "place of the first choice": r["rank"]["value"],
                **estimate(r["recall"]),
            }
            for m, r in _rows(found, "agreement", "rows")
        ]
    )  # fmt: skip


def prerouter_less(found: Figures) -> pd.DataFrame:
    """Estimates of recall of the full heads less that of every other ranking, on the same experts."""
    return pd.DataFrame(
        [
            {"model": m, "full heads less": r["ranking"], **estimate(r["recall"])}
            for m, r in _rows(found, "agreement", "less")
        ]
    )


def prerouter_bytes(found: Figures) -> pd.DataFrame:
    """Estimates of misses covered with K candidates a layer, one row a model and ranking, with both kinds of bytes."""
    return pd.DataFrame(
        [
            {
                "model": m, "predicted by": r["ranking"], "lead, layers": r["lead_layers"],
                "weights, kB": r["nbytes"] / KB, "read ahead, kB a token": r["read"]["value"] / KB,
                "of that unused, kB": r["wasted"]["value"] / KB, **estimate(r["covered"]),
            }
            for m, r in _rows(found, "agreement", "rows")
        ]
    )  # fmt: skip


def prerouter_frontier(found: Figures) -> pd.DataFrame:
    """Lead, agreement, misses covered and both kinds of bytes of every ranking: two panels a model."""
    kinds = {"agreement": "recall", "misses covered": "covered"}
    return pd.DataFrame(
        [
            {
                "panel": f"{m}: {kind}", "predicted by": _weighed(r), "share": r[name]["value"],
                "lead, ms of compute": MS * r["lead_s"], "read ahead, kB a token": r["read"]["value"] / KB,
            }
            for m, r in _rows(found, "agreement", "rows")
            for kind, name in kinds.items()
        ]
    )  # fmt: skip


def prerouter_layers(figures: Mapping[str, Any]) -> pd.DataFrame:
    """Recall of one model by layer, one line a ranking."""
    rows = figures["agreement"]["layers"]
    return pd.DataFrame(
        [
            {
                "layer": r["layer"], "predicted by": r["ranking"], "recall": r["recall"]["value"],
                "exact set": r["exact"]["value"], "first choice": r["top1"]["value"], "se": r["recall"]["se"] or 0.0,
            }
            for r in rows
        ]
    )  # fmt: skip


def prerouter_layer_table(found: Figures, ranking: str) -> pd.DataFrame:
    """Estimates of one ranking's recall, one row a model and layer, beside set, first choice and its place."""
    return pd.DataFrame(
        [
            {
                "model": m, "layer": r["layer"], "exact set": r["exact"]["value"], "first choice": r["top1"]["value"],
                "place of the first choice": r["rank"]["value"], **estimate(r["recall"]),
            }
            for m, r in _rows(found, "agreement", "layers")
            if r["ranking"] == ranking
        ]
    )  # fmt: skip


def prerouter_modes(found: Figures) -> pd.DataFrame:
    """Estimates of loss over the native model, one row a model and mode."""
    return pd.DataFrame([{"model": m, "mode": r["arm"], **_cost(r)} for m, f in found.items() for r in f["modes"]])


def prerouter_mode_points(found: Figures) -> pd.DataFrame:
    """The same as points, one a model and replacing mode."""
    frame = prerouter_modes(found)
    return frame[frame["mode"] != "off"].rename(columns={"value": "nats a token over the native model"})


def prerouter_top_k(found: Figures) -> pd.DataFrame:
    """The same for other numbers of experts; beside it the loss over the native gate with as many."""
    return pd.DataFrame(
        [
            {
                "model": m, "experts a token": r["top_k"], "route": r["arm"],
                "over the gate's own, nats": r["over_gate"]["value"], **_cost(r),
            }
            for m, f in found.items()
            for r in f["top_k"]
        ]
    ).drop(columns="routes replaced")  # fmt: skip


def prerouter_depth(found: Figures) -> pd.DataFrame:
    """Loss over the native model by the layers that are predicted."""
    return pd.DataFrame(
        [
            {
                "layer": r["layer"], "predicted": f"{m}, {r['layers']}", "nats a token": r["loss"]["value"],
                "se": r["loss"]["se"] or 0.0,
            }
            for m, f in found.items()
            for r in f["depth"]["rows"]
        ]
    )  # fmt: skip


def prerouter_drift(found: Figures) -> pd.DataFrame:
    """How far the input of each layer's experts has moved from the native one."""
    return pd.DataFrame(
        [
            {
                "layer": r["layer"], "mode": f"{m}, {r['arm']}", "distance ÷ length": r["drift"]["value"],
                "se": r["drift"]["se"] or 0.0,
            }
            for m, f in found.items()
            for r in f["drift"]
            if r["arm"].startswith("replace")
        ]
    )  # fmt: skip


def prerouter_position(found: Figures) -> pd.DataFrame:
    """Loss over the native model by decoded token, one line a model and mode."""
    return pd.DataFrame(
        [
            {
                "decoded token, from": r["from"] + 1, "mode": f"{m}, {r['arm']}", "nats a token": r["loss"]["value"],
                "se": r["loss"]["se"] or 0.0, "tokens": r["loss"]["n"],
            }
            for m, f in found.items()
            for r in f["position"]
            if r["arm"] != "replace_true_weights"
        ]
    )  # fmt: skip


def prerouter_past(found: Figures) -> pd.DataFrame:
    """Estimates of what a predicted past costs beside a native one, by decoded token, with greedy agreement."""
    return pd.DataFrame(
        [
            {
                "model": m, "decoded tokens": f"{r['from'] + 1} to {r['to'] + 1}",
                "greedy agreement": r["greedy"]["value"], **estimate(r["past"]),
            }
            for m, f in found.items()
            for r in f["position"]
            if r["arm"] == "replace"
        ]
    )  # fmt: skip


def prerouter_own(found: Figures) -> pd.DataFrame:
    """Estimates of equal tokens before a greedy answer parts from the native one; what the native model says of it."""
    return pd.DataFrame(
        [
            {
                "model": m, "mode": r["arm"], "native loss on it, nats": r["loss"]["value"],
                "native agrees": r["agrees"]["value"], **estimate(r["equal_tokens"]),
            }
            for m, f in found.items()
            for r in f["own"]["rows"]
        ]
    )  # fmt: skip


def prerouter_own_agreement(found: Figures) -> pd.DataFrame:
    """Share of tokens of greedy answers that the native model would choose too, by position, one line a mode."""
    return pd.DataFrame(
        [
            {
                "token of the answer, from": r["from"], "mode": f"{m}, {r['arm']}",
                "native agrees": r["agrees"]["value"], "se": r["agrees"]["se"] or 0.0,
            }
            for m, f in found.items()
            for r in f["own"]["position"]
            if r["arm"] != "off"
        ]
    )  # fmt: skip


def prerouter_apart(found: Figures) -> pd.DataFrame:
    """Share of greedy answers that are still the native one after so many tokens."""
    return pd.DataFrame(
        [
            {"tokens": r["tokens"], "mode": f"{m}, {r['arm']}", "equal answers": r["equal"]["value"]}
            for m, f in found.items()
            for r in f["own"]["apart"]
            if r["arm"] != "off"
        ]
    )


def prerouter_engine(found: Figures) -> pd.DataFrame:
    """A few tokens through the streaming engine beside the study's batches."""
    return pd.DataFrame(
        [
            {
                "model": m, "mode": r["arm"], "tokens": r["tokens"], "engine's loss over native": r["loss"],
                "largest difference of a loss": r["largest"],
                "logits have the bits of off": "yes" if r["equal_bits"] else "no",
            }
            for m, f in found.items()
            for r in f["engine"]
        ]
    )  # fmt: skip


def prerouter_verdict(found: Figures) -> str:
    """What the figures come to, in plain words."""
    return "\n".join(textwrap.fill(line, 118, subsequent_indent="    ") for line in sentences(found))


def prerouter_seconds(found: Figures) -> pd.DataFrame:
    """Texts behind the figures, and seconds of processor time."""
    return pd.DataFrame(
        [{"model": m, **f["texts"], **{f"{k}, s": v for k, v in f["seconds"].items()}} for m, f in found.items()]
    )


def _cost(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "perplexity, ×": math.exp(row["loss"]["value"]), "greedy agreement": row["greedy"]["value"],
        "routes replaced": row["replaced"]["value"], "recall of heads": row["recall"]["value"],
        **estimate(row["loss"]),
    }  # fmt: skip


def _weighed(row: Mapping[str, Any]) -> str:
    return f"{row['ranking']} ({row['nbytes'] / KB:,.0f} kB)" if row["nbytes"] else row["ranking"]


def _rows(found: Figures, part: str, name: str):
    return ((m, row) for m, f in found.items() for row in f[part][name])
