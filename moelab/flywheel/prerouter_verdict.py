"""What the figures of notebook 81 come to: sentences made from them, and the mode and threshold to install by default.

A difference is told apart from nothing by two standard errors. A mode is *free* if its loss over the native model is
below `SMALLEST` with that margin. Of the free modes the best is the one that routes most layers by prediction, since a
predicted route is what makes a read certain; and a default has to be free on every model that was looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["SMALLEST", "Found", "choose", "free", "sentences"]

Found = Mapping[str, Mapping[str, Any]]
SMALLEST = 0.02
"""Nats a token: two per cent of perplexity, the smallest loss that matters."""


def free(row: Mapping[str, Any]) -> bool:
    """Whether a mode's loss over the native model is below `SMALLEST`, two standard errors included."""
    loss = row["loss"]
    return loss["se"] is not None and loss["value"] + 2 * loss["se"] < SMALLEST


def choose(found: Found) -> tuple[str, float] | None:
    """Mode and threshold of the arm that is free on every model and replaces most; None if no replacing arm is."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for figures in found.values():
        for row in figures["modes"]:
            if row["mode"] not in ("off", "advise") and "native" not in row["arm"]:
                arms.setdefault(row["arm"], []).append(row)
    able = [rows for rows in arms.values() if len(rows) == len(found) and all(free(row) for row in rows)]
    if not able:
        return None
    best = max(able, key=lambda rows: min(row["replaced"]["value"] for row in rows))
    return best[0]["mode"], best[0]["threshold"]


def sentences(found: Found) -> list[str]:
    """Plain words, a few lines a model, then the default."""
    out = []
    for model, figures in found.items():
        out += [f"{model}", *(f"  {line}" for line in _of(figures)), ""]
    chosen = choose(found)
    if chosen is None:
        return [*out, f"No replacing mode costs less than {SMALLEST:g} nats on every model: advise is what is left."]
    mode, threshold = chosen
    at = f" at a confidence of {threshold:g}" if mode == "gated" else ""
    shares = ", ".join(f"{_row(f, mode, threshold)['replaced']['value']:.0%} on {m}" for m, f in found.items())
    return [
        *out,
        f"Default: {mode}{at}. Of the modes that cost less than {SMALLEST:g} nats on every model it routes most by "
        f"prediction: {shares}.",
    ]


def _of(figures: Mapping[str, Any]) -> list[str]:
    return [*_agreement(figures), *_cost(figures), *_compounding(figures)]


def _agreement(figures: Mapping[str, Any]) -> list[str]:
    rows = figures["agreement"]["rows"]
    heads = next(r for r in rows if r["ranking"] == "heads, full")
    less = {r["ranking"]: r["recall"] for r in figures["agreement"]["less"]}
    free_ones = [r for r in rows if not r["ranking"].startswith("heads")]
    known = [r for r in free_ones if r["lead_layers"] >= heads["lead_layers"]]
    near = max(known, key=lambda r: r["recall"]["value"])
    early = next(r for r in rows if r["ranking"] == "own gate, 1 layer early")
    token = next(r for r in rows if r["ranking"] == "previous token, same layer")
    word = _than(less[near["ranking"]], "better", "worse")
    idle = heads["wasted"]["value"] / heads["read"]["value"] if heads["read"]["value"] else 0.0
    kept = token["covered"]["value"] < 0.5 * token["recall"]["value"]
    return [
        f"A head names {_percent(heads['recall'])} of a layer's experts, {_lead(heads)} ahead. Without training "
        f"{near['ranking']} names {_percent(near['recall'])} as early: the head is {word}.",
        f"The layer's own gate, one layer early, names {_percent(early['recall'])}, {_lead(early)} ahead.",
        f"Of the experts that the cache lacks, a head's K candidates a layer bring {_percent(heads['covered'])} in "
        f"time; {idle:.0%} of what is read for them is not used.",
        f"The previous token's experts are {_percent(token['recall'])} of the route, {_percent(token['covered'])} of "
        + ("what the cache lacks: mostly it has them already." if kept else "what the cache lacks."),
    ]


def _cost(figures: Mapping[str, Any]) -> list[str]:
    replace, true = (_row(figures, mode) for mode in ("replace", "replace_true_weights"))
    lines = [
        f"replace costs {_nats(replace['loss'])} (perplexity × {math.exp(replace['loss']['value']):.2f}) and keeps "
        f"{_percent(replace['greedy'])} of greedy tokens.",
        f"With the native gate's weights it costs {_nats(true['loss'])} and keeps {_percent(true['greedy'])}: true "
        f"weights are {_than(true['less_replace'], 'worse', 'better')} in loss, "
        f"{_than(true['greedy_less_replace'], 'better', 'worse')} in greedy tokens.",
    ]
    for row in figures["modes"]:
        if row["mode"] == "gated":
            word = "free" if free(row) else "not free"
            lines.append(
                f"{row['arm']} routes {_percent(row['replaced'])} by prediction for {_nats(row['loss'])}, and keeps "
                f"{_percent(row['greedy'])} of greedy tokens: {word}."
            )
    return lines


def _compounding(figures: Mapping[str, Any]) -> list[str]:
    depth, past = figures["depth"], figures["past"]
    alone = [r for r in depth["rows"] if r["layers"] == "this layer alone"]
    every = [r for r in depth["rows"] if r["layers"] == "up to this layer"][-1]
    worst = max(alone, key=lambda r: r["loss"]["value"])
    own = {r["arm"]: r for r in figures["own"]["rows"]}
    return [
        f"With depth: one layer alone costs at most {_nats(worst['loss'])} (layer {worst['layer']}), all together "
        f"{_nats(every['loss'])}; that is {_than(depth['together'], 'more', 'less')} than the sum of single layers "
        f"({depth['together']['value']:+.3f} ± {_se(depth['together']):.3f}).",
        f"With tokens: a predicted past adds {_nats(past)} to what the token in hand costs, "
        f"{_than(past, 'more than nothing', 'less than nothing')}.",
        f"On its own: greedy answers part from the native one after {own['replace']['equal_tokens']['value']:.1f} of "
        f"{figures['own']['tokens']} tokens; the native model would have written "
        f"{_percent(own['replace']['agrees'])} of replace's tokens itself.",
    ]


def _row(figures: Mapping[str, Any], mode: str, threshold: float | None = None) -> Mapping[str, Any]:
    return next(
        r for r in figures["modes"]
        if r["mode"] == mode and "native" not in r["arm"] and threshold in (None, r["threshold"])
    )  # fmt: skip


def _se(estimate: Mapping[str, Any]) -> float:
    return estimate["se"] or 0.0


def _lead(row: Mapping[str, Any]) -> str:
    return f"{row['lead_layers']:g} layers ({1e3 * row['lead_s']:.1f} ms of compute)"


def _percent(estimate: Mapping[str, Any]) -> str:
    return f"{100 * estimate['value']:.1f} ± {100 * _se(estimate):.1f} %"


def _nats(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['value']:+.3f} ± {_se(estimate):.3f} nats"


def _than(difference: Mapping[str, Any], above: str, below: str) -> str:
    if abs(difference["value"]) <= 2 * _se(difference):
        return "not told apart"
    return above if difference["value"] > 0 else below
