"""What was asked of the streaming engine, held against the figures of one model, or of the stand-in.

A claim holds, or does not, or has no evidence (`holds` None): a system without a counter proves nothing either way.
Times on a shared machine scatter. A claim about times is judged on the median of pairs, and says from where to where
they went.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..streaming.cache.eviction import DEFAULT

__all__ = ["claims", "waiting_hidden"]

THROUGHPUT, AMPLIFICATION, HIDDEN, SIMULATED = 0.95, 1.02, 0.90, 0.10
"""Asked: of a raw probe's rate at least, of the routed bytes at most, of the possible at least, and how far a
simulated time may be from the measured one at most."""
BESIDE = 200 * 10**6
"""Bytes that a process may take beside the parameters that stay and the slots: interpreter, libraries, attention caches
and activations."""


def claims(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of `claim`, `measured`, `asked` (at most that where `most`, else at least), `n`, `spread` (text, may be
    empty) and `holds` (True, False or None)."""
    found = []
    for name, judge in JUDGES.items():
        if name in figures:
            found += judge(figures[name])
    return found


def _claim(
    claim: str, measured: float | None, asked: float, n: int, holds: bool | None, spread: str = "", most: bool = False
) -> dict:
    return {
        "claim": claim, "measured": measured, "asked": asked, "most": most, "n": n, "spread": spread, "holds": holds,
    }  # fmt: skip


def _equality(figures: Mapping[str, Any]) -> list[dict]:
    """Bits where the BLAS gives the same ones for any number of rows; tokens where it does not."""
    rows, found = figures["rows"], []
    for name, wanted, exact in (
        ("tokens and logits equal the resident model's, bit for bit", "first", True),
        ("a second request equals the same request cold, bit for bit", "second", True),
        ("tokens equal the resident model's under OpenBLAS", "first", False),
    ):
        part = [row for row in rows if row["request"] == wanted and (row["blas"] != "openblas") == exact]
        n = sum(row["n"] for row in part)
        equal = sum(min(row["tokens_equal"], row["logits_equal"] if exact else row["n"]) for row in part)
        if part:
            budgets, places = ({row[key] for row in part} for key in ("cycles", "place"))
            where = f"budgets: {len(budgets)}; {', '.join(sorted(places))}"
            found.append(_claim(name, equal / n, 1.0, n, equal == n, where))
    return found


def _reads(reads: Mapping[str, Any]) -> list[dict]:
    found = [
        _claim(
            f"the store reads {_what(row)} as fast as a raw probe, {row['depth']} at once",
            row["ratio"], THROUGHPUT, row["n"], row["ratio"] >= THROUGHPUT, _span(row["low"], row["high"]),
        )
        for row in reads["throughput"]
    ]  # fmt: skip
    for row in reads["amplification"]:
        if row["place"] == "pack" and row["reader"] != "mmap":
            # What is asked for and what the device gave: the larger is the amplification.
            worst = None if row["device"] is None else max(row["asked"], row["device"])
            found.append(
                _claim(
                    "a pack is read without amplification", worst, AMPLIFICATION, row["n"],
                    None if worst is None else worst <= AMPLIFICATION, most=True,
                )
            )  # fmt: skip
    return found


def _what(row: Mapping[str, Any]) -> str:
    where = "in place" if row["place"].startswith("in place") else "from a pack"
    return f"{row['nbytes'] / 1e3:,.0f} kB {where}{'' if row['direct'] == 1 else ', copied or converted,'}"


def _cache(figures: Mapping[str, Any]) -> list[dict]:
    """Of the policy that the engine takes when none is named; which one does best here is not known before."""
    rows, found = figures["rows"], []
    ours = sorted((row for row in rows if row["policy"] == DEFAULT), key=lambda row: row["share"])
    if not ours:
        return [
            _claim(f"fewer bytes than a global LRU by the default policy, {DEFAULT}", None, 1.0, 0, None, most=True)
        ]
    for row in ours:
        se = row["less_se"]
        found.append(
            _claim(
                f"fewer bytes than a global LRU at {row['share']:g} of all experts, by the default policy, {DEFAULT}",
                row["value"] / row["lru"], 1.0, row["n"], row["less"] < 0,
                "" if se is None else f"± {se / row['lru']:.3f} standard error", most=True,
            )
        )  # fmt: skip
    return found


def _overlap(figures: Mapping[str, Any]) -> list[dict]:
    rows, found = figures["rows"], []
    for ratio in sorted({row["ratio"] for row in rows}):
        here = [row for row in rows if row["ratio"] == ratio]
        ahead = [row | {"hidden": waiting_hidden(here, row)} for row in here if row["arm"].startswith("in_forward")]
        for name, words in (
            ("hidden", f"hides the waiting that can be hidden, reads {ratio:g} × compute"),
            ("simulated_share", f"wins the time that can be won, reads {ratio:g} × compute, simulated"),
            ("share", f"wins the time that can be won, reads {ratio:g} × compute, measured"),
        ):
            known = [row for row in ahead if row[name] is not None]
            best = max(known, key=lambda row: row[name], default=None)
            arm = f"by the best arm: {best['arm']}" if best else ""
            spread = f"{_span(best['share_least'], best['share_greatest'])} {arm}" if best and name == "share" else arm
            found.append(
                _claim(
                    f"an oracle in the forward {words}", None if best is None else best[name], HIDDEN, ahead[0]["n"],
                    None if best is None else best[name] >= HIDDEN, spread,
                )
            )  # fmt: skip
        worst = max(here, key=lambda row: abs(row["difference"]))
        found.append(
            _claim(
                f"simulated time of a token is off by, reads {ratio:g} × compute", abs(worst["difference"]),
                SIMULATED, worst["n"], abs(worst["difference"]) <= SIMULATED, f"of the worst arm: {worst['arm']}",
                most=True,
            )
        )  # fmt: skip
    return found


def waiting_hidden(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> float | None:
    """Of the waiting for reads that compute could cover, the share that an arm has no more: of its row among the rows
    of the overlap study. More than 1 where predictions also spare bytes, None where nobody waits."""
    off = next(other for other in rows if (other["arm"], other["ratio"]) == ("off", row["ratio"]))
    can = off["exposed"] - max(0.0, off["bound"] - off["compute"])
    return (off["exposed"] - row["exposed"]) / can if can > 0 else None


def _memory(memory: Mapping[str, Any]) -> list[dict]:
    peak = max(memory["peak"], memory["high_water"] or 0)
    allowed = memory["other_bytes"] + memory["cache"] + BESIDE
    looks = memory["looks"]
    return [
        _claim("peak memory ÷ memory budget", peak / memory["budget"], 1.0, looks, peak <= memory["budget"], most=True),
        _claim(
            "peak memory ÷ (other parameters + slots + 200 MB)",
            peak / allowed,
            1.0,
            looks,
            peak <= allowed,
            f"imports alone take {memory['imports'] / 1e6:.0f} MB",
            most=True,
        ),
    ]


JUDGES = {"equality": _equality, "reads": _reads, "cache": _cache, "overlap": _overlap, "memory": _memory}


def _span(low: float, high: float) -> str:
    return f"{low:.2f} to {high:.2f}"
