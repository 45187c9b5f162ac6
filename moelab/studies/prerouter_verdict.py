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
COMMITTED, COMMITTED_FILE = 28, "reports/committed/prerouter_modes.json"
"""Texts a model of the study that the default was chosen by, and where its figures are."""


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
        out += [f"{model}:", *(f"  {line}" for line in (*_agreement(figures), *_cost(figures), *_growth(figures))), ""]
    return [*out, _default(found)]


def _default(found: Found) -> str:
    """What is installed by default and why, and what it does on these texts: a page names no second one."""
    from ..prerouter.modes import DEFAULT_MODE, DEFAULT_THRESHOLD

    rows = {m: _row(f, DEFAULT_MODE, DEFAULT_THRESHOLD) for m, f in found.items()}
    here = [
        f"{row['replaced']['value']:.0%} of routes on {m}, {'' if free(row) else 'not '}within {SMALLEST:g} nats"
        for m, row in rows.items()
        if row is not None
    ]
    return (
        f"The default is {DEFAULT_MODE} at a confidence of {DEFAULT_THRESHOLD:g}, by the committed study of "
        f"{COMMITTED} texts a model ({COMMITTED_FILE}): of all ways whose loss over every native model is within "
        f"{SMALLEST:g} nats there it routes most by prediction. On the texts of this page it routes by prediction "
        f"{'; '.join(here) or 'nothing, as it was not among what was tried'}."
    )


def _agreement(figures: Mapping[str, Any]) -> list[str]:
    rows = {r["ranking"]: r for r in figures["agreement"]["rows"]}
    less = {r["ranking"]: r["recall"] for r in figures["agreement"]["less"]}
    heads, early, token = (rows[n] for n in ("heads, full", "own gate, 1 layer early", "previous token, same layer"))
    plain = [r for n, r in rows.items() if not n.startswith("heads")]
    best = max((r for r in plain if r["lead_layers"] >= heads["lead_layers"]), key=lambda r: r["recall"]["value"])
    word = _word(less[best["ranking"]], "more", "fewer", "not more nor fewer, as far as can be told,")
    idle = heads["wasted"]["value"] / heads["read"]["value"] if heads["read"]["value"] else 0.0
    cached = token["covered"]["value"] < 0.5 * token["recall"]["value"]
    return [
        f"A head names {_percent(heads['recall'])} of a layer's experts, {_lead(heads)} ahead: {word} than the best "
        f"that needs no training and is as early, {best['ranking']}, {_percent(best['recall'])}.",
        f"The layer's own gate, one layer early, names {_percent(early['recall'])}, but only {_lead(early)} ahead.",
        f"Of the experts that the cache lacks, a head's K candidates a layer bring {_percent(heads['covered'])}; of "
        f"what is read for them {idle:.0%} is not used.",
        f"The previous token's experts are {_percent(token['recall'])} of the route and {_percent(token['covered'])} "
        + ("of what the cache lacks: it has most of them already." if cached else "of what the cache lacks."),
    ]


def _cost(figures: Mapping[str, Any]) -> list[str]:
    plain, true = (_row(figures, mode) for mode in ("replace", "replace_true_weights"))
    loss = _word(true["less_replace"], "more than replace", "less than replace", "not to be told from replace")
    kept = _word(true["greedy_less_replace"], "more", "fewer", "as many")
    lines = [
        f"replace costs {_nats(plain['loss'])}, perplexity × {math.exp(plain['loss']['value']):.2f}, and keeps "
        f"{_percent(plain['greedy'])} of greedy tokens. replace_true_weights costs {_nats(true['loss'])}, {loss}, "
        f"and keeps {kept}: {_percent(true['greedy'])}."
    ]
    for row in (r for r in figures["modes"] if r["mode"] == "gated"):
        lines.append(
            f"{row['arm']} replaces {_percent(row['replaced'])} of routes for {_nats(row['loss'])} and keeps "
            f"{_percent(row['greedy'])} of greedy tokens: {'' if free(row) else 'not '}within {SMALLEST:g} nats."
        )
    for top_k in sorted({r["top_k"] for r in figures["top_k"]}):
        of = {r["arm"]: r["loss"] for r in figures["top_k"] if r["top_k"] == top_k}
        if of["off"]["value"] or of["off"]["se"]:
            lines.append(
                f"With {top_k} experts a token the gate's loss over the native model's is {_nats(of['off'])}, replace "
                f"{_nats(of['replace'])}, replace_true_weights {_nats(of['replace_true_weights'])}."
            )
    return lines


def _growth(figures: Mapping[str, Any]) -> list[str]:
    depth, past, own = figures["depth"], figures["past"], {r["arm"]: r for r in figures["own"]["rows"]}
    alone = [r for r in depth["rows"] if r["layers"] == "this layer alone"]
    every = [r for r in depth["rows"] if r["layers"] == "up to this layer"][-1]
    worst, more = max(alone, key=lambda r: r["loss"]["value"]), depth["together"]
    parts = "than the sum of its parts"
    sums = _word(more, f"more {parts}", f"less {parts}", f"not more nor less {parts}, as far as can be told")
    grows = _word(past, "so error grows with tokens", "so it does no harm", "which cannot be told from nothing")
    taken = next(r["greedy_less_replace"] for r in figures["modes"] if "past native" in r["arm"])
    equal, agrees = own["replace"]["equal_tokens"], own["replace"]["agrees"]
    return [
        f"With depth: one layer alone costs at most {_nats(worst['loss'])} (layer {worst['layer']}), all together "
        f"{_nats(every['loss'])}: {sums}, by {_nats(more)}.",
        f"With tokens: a predicted past adds {_nats(past)} to what the token in hand costs, {grows}; of greedy tokens "
        f"it takes {_percent(taken)}.",
        f"On its own: of {figures['own']['tokens']} greedy tokens the first {equal['value']:.1f} are the native "
        f"ones; of what replace writes the native model would choose {_percent(agrees)}.",
    ]


def _row(figures: Mapping[str, Any], mode: str, threshold: float | None = None) -> Mapping[str, Any] | None:
    return next(
        (r for r in figures["modes"]
         if r["mode"] == mode and "native" not in r["arm"] and threshold in (None, r["threshold"])),
        None,
    )  # fmt: skip


def _lead(row: Mapping[str, Any]) -> str:
    layers = row["lead_layers"]
    return f"{layers:g} layer{'s' if layers > 1 else ''} or {1e3 * row['lead_s']:.1f} ms of compute"


def _percent(estimate: Mapping[str, Any]) -> str:
    return f"{100 * estimate['value']:.1f} ± {100 * (estimate['se'] or 0.0):.1f} %"


def _nats(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['value']:+.3f} ± {estimate['se'] or 0.0:.3f} nats"


def _word(difference: Mapping[str, Any], above: str, below: str, neither: str) -> str:
    if difference["se"] is None or abs(difference["value"]) <= 2 * difference["se"]:
        return neither
    return above if difference["value"] > 0 else below
