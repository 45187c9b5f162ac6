"""What was asked of issuing in the forward, held against the figures of one model (`prerouter_gain`).

Times on a shared machine scatter, and texts differ: so what is judged is the difference of two arms on the same text in
the same round. It exceeds its spread when the median of these pairs does: their greatest less their least.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

__all__ = ["NEAR", "claims", "pairs_of"]

NEAR = 0.03
"""Bytes of two arms that differ by less are called equal."""


def claims(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of `claim`, `measured`, `asked`, `n`, `spread` (text) and `holds` (True, False, or None: no evidence)."""
    rows = []
    for who in ("heads", "perfect"):
        rows += [_waits_less(found, who, pair) for pair in pairs_of(found["rows"], who, "step_boundary")]
        rows.append(_simulated_wait(found["depth"], who))
    rows += _over_async(found)
    return rows + _against_off(found)


def pairs_of(rows: list[Mapping[str, Any]], who: str, other: str) -> list[dict[str, Any]]:
    """One row a throttled cell: in_forward beside another issue point of the same arm, text by text.

    `saved`: seconds of exposed wait a token, of each text; `bytes_ratio`: in_forward's bytes ÷ the other's, of all.
    """
    out = []
    for near in (r for r in rows if r["arm"] == f"{who}, in_forward" and r["ratio"] is not None):
        far = next(
            r for r in rows
            if r["arm"] == f"{who}, {other}" and all(r[k] == near[k] for k in ("cycles", "ratio", "whose"))
        )  # fmt: skip
        out.append(
            {
                "cycles": near["cycles"], "ratio": near["ratio"], "whose": near["whose"], "compute": near["compute"],
                "saved": [b - a for a, b in zip(near["exposed_each"], far["exposed_each"], strict=True)],
                "bytes_ratio": sum(near["nbytes_each"]) / max(sum(far["nbytes_each"]), 1),
                "speedup": far["seconds"] / near["seconds"],
            }
        )  # fmt: skip
    return out


def _waits_less(found: Mapping[str, Any], who: str, pair: Mapping[str, Any]) -> dict[str, Any]:
    """Of a token's compute: exposed wait that the synchronous boundary has and the forward has not."""
    saved = [s / pair["compute"] for s in pair["saved"]]
    spread, equal = max(saved) - min(saved), abs(pair["bytes_ratio"] - 1) <= NEAR
    median = statistics.median(saved)
    where = f"cache {pair['cycles']:g}, reads {pair['ratio']:.3g} x compute"
    return _claim(
        f"{who}: in_forward waits less than step_boundary by more than the spread, at equal bytes ({where})",
        median, spread, len(saved), median > spread if equal else None,
        f"{min(saved):.2f} to {max(saved):.2f} of compute; bytes x {pair['bytes_ratio']:.3f}",
    )  # fmt: skip


def _simulated_wait(depth: list[Mapping[str, Any]], who: str) -> dict[str, Any]:
    """The same without a clock, in the largest cache: there nothing predicted is evicted before its use."""
    cycles = max(row["cycles"] for row in depth)
    rows = [row for row in depth if row["who"] == who and row["cycles"] == cycles]
    near, far = (next(row for row in rows if row["issue"] == p) for p in ("in_forward", "step_boundary"))
    saved, ratio = far["exposed"] - near["exposed"], near["nbytes"] / far["nbytes"]
    return _claim(
        f"{who}: in_forward waits less than step_boundary, simulated (cache {cycles:g})", saved, 0.0, near["tokens"],
        saved > 0 if abs(ratio - 1) <= NEAR else None, f"bytes x {ratio:.3f}",
    )  # fmt: skip


def _over_async(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the forward gains over an asynchronous boundary: reported, and nothing is asked of it but not to lose."""
    rows = []
    for pair in pairs_of(found["rows"], "heads", "async_boundary"):
        where = f"cache {pair['cycles']:g}, reads {pair['ratio']:.3g} x compute"
        saved = [s / pair["compute"] for s in pair["saved"]]
        rows.append(
            _claim(
                f"heads: speed-up of in_forward over async_boundary, measured ({where})", pair["speedup"], 1.0,
                len(saved), pair["speedup"] >= 1, f"wait {min(saved):+.2f} to {max(saved):+.2f} of compute less",
            )
        )  # fmt: skip
    for near in (r for r in found["depth"] if r["who"] != "off" and r["issue"] == "in_forward"):
        same = [r for r in found["depth"] if all(r[k] == near[k] for k in ("layers", "cycles", "ratio", "who"))]
        far = next(r for r in same if r["issue"] == "async_boundary")
        speedup = far["seconds"] / near["seconds"]
        rows.append(
            _claim(
                f"{near['who']}: speed-up of in_forward over async_boundary, {near['layers']} layers simulated "
                f"(cache {near['cycles']:g}, reads {near['ratio']:.3g} x compute)",
                speedup, 1.0, near["tokens"], speedup >= 1, f"bytes x {near['nbytes'] / far['nbytes']:.3f}",
            )
        )  # fmt: skip
    return rows


def _against_off(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where heads pay: every measured cell, faster than no prediction or not."""
    rows = []
    for row in (r for r in found["rows"] if r["arm"].startswith("heads")):
        disk = "this machine's disk" if row["ratio"] is None else f"reads {row['ratio']:.3g} x compute"
        rows.append(
            _claim(
                f"{row['arm']}: faster than off (cache {row['cycles']:g}, {disk})", row["speedup"], 1.0, row["n"],
                row["speedup"] > 1, f"{row['speedup_least']:.2f} to {row['speedup_greatest']:.2f}",
            )
        )  # fmt: skip
    return rows


def _claim(claim: str, measured: float, asked: float, n: int, holds: bool | None, spread: str) -> dict[str, Any]:
    return {"claim": claim, "measured": measured, "asked": asked, "n": n, "spread": spread, "holds": holds}
