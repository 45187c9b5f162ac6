"""The streaming engine: notebook 80."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from .cells import HOLDS, MB

Figures = Mapping[str, Mapping[str, Any]]


def streamed(found: Figures) -> pd.DataFrame:
    """One row a model: what stays in memory, what is streamed, and the least a cache may be."""
    return pd.DataFrame(
        [
            {
                "model": m, "MoE layers": s["layers"], "experts": s["experts"], "experts a token": s["top_k"],
                "expert kB": s["expert_bytes"] / 1e3, "all experts MB": s["all_expert_bytes"] / MB,
                "all else MB": s["other_bytes"] / MB, "one token's experts MB": s["cycle_bytes"] / MB,
            }
            for m, s in _part(found, "sizes")
        ]
    )  # fmt: skip


def streaming_places(found: Figures) -> pd.DataFrame:
    """One row a model and place where its experts lie."""
    names = {"place": "where", "types": "stored as", "run": "run as", "tensors": "tensors an expert"}
    names |= {"stored_bytes": "bytes an expert", "reader": "read by"}
    return pd.DataFrame(
        [{"model": m, **{label: row[n] for n, label in names.items()}} for m, s in _part(found, "sizes")
         for row in s["places"]]
    )  # fmt: skip


def streaming_disk(found: Figures) -> pd.DataFrame:
    """One row a model's run, read size and depth: the disk's rate, median and range over turns, and the time of a
    read."""
    return pd.DataFrame(
        [
            {
                "in the run of": m, "read kB": c["size"] / 1e3, "at once": c["depth"], "MB/s": c["mb_per_s"],
                "least to greatest": _range(c["mb_per_s_range"]), "ms a read": c["ms"], "reads": c["n"],
                "read by": disk["method"],
            }
            for m, disk in _part(found, "disk")
            for c in disk["cells"]
        ]
    )  # fmt: skip


def streaming_equality(found: Figures) -> pd.DataFrame:
    """One row a model, BLAS, place, budget and request: tokens and logits equal, of n."""
    return pd.DataFrame(
        [
            {
                "model": m, "BLAS": r["blas"], "where": r["place"], "cache, token cycles": round(r["cycles"], 3),
                "request": r["request"], "tokens equal": r["tokens_equal"], "logits equal": r["logits_equal"],
                "of": r["n"], "largest difference": r["largest"], "kB read a token": r["read_bytes"] / 1e3,
            }
            for m, e in _part(found, "equality")
            for r in e["rows"]
        ]
    )  # fmt: skip


def streaming_equal(found: Figures) -> dict[str, str]:
    """Model → how many tokens and logits were equal bit for bit, in words: the same wherever the claim is true."""
    words = {}
    for m, e in _part(found, "equality"):
        rows = [r for r in e["rows"] if r["blas"] != "openblas"]
        n, tokens, logits = (sum(r[name] for r in rows) for name in ("n", "tokens_equal", "logits_equal"))
        words[m] = f"{tokens} of {n} tokens, {logits} of {n} rows of logits"
    return words


def read_rates(found: Figures) -> pd.DataFrame:
    """One row a model, place and depth: the store beside a raw probe of the same reads, by turns. Where not all bytes
    go straight into slots, also beside a probe that copies and converts as well."""
    return pd.DataFrame(
        [
            {
                "model": m, "where": r["place"], "expert kB": r["nbytes"] / 1e3, "at once": r["depth"],
                "raw MB/s": r["raw"] / MB, "store MB/s": r["store"] / MB, "store ÷ raw": r["ratio"],
                "lower quartile": r["low"], "upper quartile": r["high"], "straight into slots": r["direct"],
                "store ÷ (raw and copied)": r["filled"], "pairs": r["n"], "reads a turn": r["reads"],
            }
            for m, reads in _part(found, "reads")
            for r in reads["throughput"]
        ]
    )  # fmt: skip


def read_amplification(found: Figures) -> pd.DataFrame:
    """One row a model, place and reader: bytes asked for and given ÷ bytes of the experts."""
    names = {"place": "where", "reader": "reader", "asked": "asked ÷ experts", "device": "from the device ÷ experts"}
    return pd.DataFrame(
        [
            {"model": m, **{label: r[n] for n, label in names.items()}, "experts read": r["n"]}
            for m, reads in _part(found, "reads")
            for r in reads["amplification"]
        ]
    )


def cache_bytes(found: Figures) -> pd.DataFrame:
    """Estimates of kilobytes read a token, one row a model, budget and policy, each as shares of its bounds."""
    return pd.DataFrame(
        [
            {
                "model": m, "cache share": r["share"], "policy": r["policy"],
                "÷ global LRU": r["value"] / r["lru"], "÷ OPT": r["value"] / r["opt"] if r["opt"] else None,
                "way from LRU to OPT": (r["lru"] - r["value"]) / (r["lru"] - r["opt"]) if r["lru"] > r["opt"] else None,
                "cold kB": r["cold"] / 1e3, "tokens/s by disk": c["bytes_per_s"] / r["value"] if r["value"] else None,
                "value": r["value"] / 1e3, "se": (r["se"] or 0.0) / 1e3, "n": r["n"],
            }
            for m, c in _part(found, "cache")
            for r in c["rows"]
        ]
    )  # fmt: skip


def cache_curves(figures: Mapping[str, Any]) -> pd.DataFrame:
    """Kilobytes read a token by cache share, one line a policy, with OPT and first uses alone below."""
    rows = figures["cache"]["rows"]
    lines = [(r["policy"], r["share"], r["value"], r["se"] or 0.0) for r in rows]
    for share in sorted({r["share"] for r in rows}):
        row = next(r for r in rows if r["share"] == share)
        lines += [("OPT", share, row["opt"], 0.0), ("first uses alone", share, row["cold"], 0.0)]
    return pd.DataFrame([{"policy": p, "cache share": s, "kB a token": v / 1e3, "se": e / 1e3} for p, s, v, e in lines])


def overlapped(found: Figures) -> pd.DataFrame:
    """One row a model, ratio and arm: milliseconds a token, measured beside simulated, with bound and bytes."""
    return pd.DataFrame(
        [
            {
                "model": m, "reads ÷ compute": r["ratio"], "arm": r["arm"], "ms a token": 1e3 * r["seconds"],
                "least": 1e3 * r["least"], "greatest": 1e3 * r["greatest"], "n": r["n"], "bound ms": 1e3 * r["bound"],
                "exposed ms": 1e3 * r["exposed"], "kB a token": r["nbytes"] / 1e3,
                "simulated ms": 1e3 * r["simulated"], "(simulated − measured) ÷ measured": r["difference"],
            }
            for m, o in _part(found, "overlap")
            for r in o["rows"]
        ]
    )  # fmt: skip


def overlap_shares(found: Figures) -> pd.DataFrame:
    """One row a model, ratio and arm with a prediction: what is hidden of the waiting that can be, and the share of the
    time that can be won, measured (and from where to where) and simulated."""
    from ...studies.streaming_claims import waiting_hidden

    return pd.DataFrame(
        [
            {
                "model": m, "reads ÷ compute": r["ratio"], "arm": r["arm"],
                "waiting hidden": waiting_hidden(o["rows"], r), "share": r["share"],
                "least": r["share_least"], "greatest": r["share_greatest"], "n": r["n"],
                "simulated share": r["simulated_share"],
            }
            for m, o in _part(found, "overlap")
            for r in o["rows"]
            if r["arm"] != "off"
        ]
    )  # fmt: skip


def overlap_times(figures: Mapping[str, Any]) -> pd.DataFrame:
    """Milliseconds a token of one model by arm and ratio, with the bound as an arm of its own."""
    rows = figures["overlap"]["rows"]
    times = [(r["arm"], r["ratio"], r["seconds"]) for r in rows]
    times += [("bound", r["ratio"], r["bound"]) for r in rows if r["arm"] == "off"]
    return pd.DataFrame([{"arm": arm, "reads ÷ compute": f"{x:g}", "ms a token": 1e3 * s} for arm, x, s in times])


def overlap_picture(figures: Mapping[str, Any]) -> pd.DataFrame:
    """One token's layers in milliseconds: waiting for experts, then using them, one panel an arm."""
    parts = (("waiting for experts", "issue", "ready"), ("computing", "ready", "consume"))
    return pd.DataFrame(
        [
            {"arm": r["arm"], "layer": r["layer"], "what": what, "start": 1e3 * r[a], "end": 1e3 * r[b]}
            for what, a, b in parts
            for r in figures["overlap"]["picture"]
        ]
    )


def streaming_memory(found: Figures) -> pd.DataFrame:
    """One row a model: the budget, what was in use at most, and what of it the parts were."""
    return pd.DataFrame(
        [
            {
                "model": m, "budget MB": f["budget"] / MB, "peak MB": f["peak"] / MB,
                "system's peak MB": None if f["high_water"] is None else f["high_water"] / MB,
                "peak ÷ budget": max(f["peak"], f["high_water"] or 0) / f["budget"],
                "imports MB": f["imports"] / MB, "before slots MB": f["base"] / MB,
                "parameters that stay MB": f["other_bytes"] / MB,
                "slots MB": f["cache"] / MB, "all experts MB": f["full"] / MB, "mlx's peak MB": f["allocator"] / MB,
                "evictions": f["evictions"], "experts shared": f["shared"], "looks": f["looks"], "read by": f["reader"],
            }
            for m, f in _part(found, "memory")
        ]
    )  # fmt: skip


def streaming_claims(found: Figures) -> pd.DataFrame:
    """One row a model and claim: measured, asked, and whether it holds, in words."""
    return pd.DataFrame(
        [
            {
                "model": m, "claim": r["claim"], "measured": r["measured"], "asked": _asked(r), "n": r["n"],
                "spread": r["spread"], "verdict": HOLDS[r["holds"]],
            }
            for m, rows in _part(found, "claims")
            for r in rows
        ]
    )  # fmt: skip


def streaming_summary(found: Figures) -> str:
    """In plain words, for each model: what holds, what does not, and what nothing was learnt about."""
    text = []
    for m, rows in _part(found, "claims"):
        text.append(f"{m}: {sum(r['holds'] is True for r in rows)} of {len(rows)} claims hold.")
        for holds in (False, None):
            for r in (r for r in rows if r["holds"] is holds):
                figure = "" if r["measured"] is None else f": {r['measured']:.3g}, asked {_asked(r)}"
                spread = f" ({r['spread']}, n = {r['n']})" if r["spread"] else f" (n = {r['n']})"
                line = f"{HOLDS[holds]}: {r['claim']}{figure}{spread}"
                text += textwrap.wrap(line, 112, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(text)


def _asked(claim: Mapping[str, Any]) -> str:
    return f"{'≤' if claim['most'] else '≥'} {claim['asked']:g}"


def _range(ends: tuple[float, float] | None) -> str | None:
    return None if ends is None else f"{ends[0]:,.0f} to {ends[1]:,.0f}"


def _part(found: Figures, name: str) -> Iterator[tuple[str, Any]]:
    """Model → part, of those that have it: of the stand-in only times are known."""
    return ((m, f[name]) for m, f in found.items() if name in f)
