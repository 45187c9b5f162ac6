"""What was asked of issuing in the forward, held against the figures of one model (`prerouter_gain`).

Times on a shared machine scatter, and texts differ: so what is judged is the difference of two arms on the same text in
the same round. It exceeds its spread when the median of these pairs is more than their greatest less their least.

A claim is made of all cells (cache and disk) at once. It holds if it holds in each, and names the worst.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["NEAR", "claims", "pairs_of"]

NEAR = 0.03
"""Bytes of two arms that differ by less are called equal."""
Row = Mapping[str, Any]


def claims(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of `claim`, `measured`, `asked`, `n`, `spread` (text) and `holds` (True, False, or None: no evidence)."""
    rows, depths = [], sorted({row["layers"] for row in found["depth"]})
    for who in ("heads", "perfect"):
        rows.append(_waits_less(pairs_of(found["rows"], who, "step_boundary"), who))
        rows += [_simulated_wait(found["depth"], who, layers) for layers in depths]
    rows.append(_over_async([(_where(p), p["speedup"]) for p in pairs_of(found["rows"], "heads", "async_boundary")],
                            "heads", "measured"))  # fmt: skip
    for who in ("heads", "perfect"):
        for layers in depths:
            cells = [row for row in found["depth"] if (row["who"], row["layers"]) == (who, layers)]
            far = {_where(row): row["seconds"] for row in cells if row["issue"] == "async_boundary"}
            near = [row for row in cells if row["issue"] == "in_forward"]
            gained = [(_where(row), far[_where(row)] / row["seconds"]) for row in near]
            rows.append(_over_async(gained, who, f"{layers} layers, simulated"))
    arms = sorted({row["arm"] for row in found["rows"] if row["arm"].startswith(("heads", "gated"))})
    return rows + [_over_off([row for row in found["rows"] if row["arm"] == arm], arm) for arm in arms]


def pairs_of(rows: Sequence[Row], who: str, other: str) -> list[dict[str, Any]]:
    """One row a throttled cell: in_forward beside another issue point of the same arm, text by text.

    `saved`: exposed wait less, of each text, as a share of a token's compute; `bytes_ratio`: bytes of all texts ÷ the
    other's.
    """
    out, cell = [], ("cycles", "ratio", "whose")
    for near in (r for r in rows if r["arm"] == f"{who}, in_forward" and r["ratio"] is not None):
        far = next(r for r in rows if r["arm"] == f"{who}, {other}" and all(r[k] == near[k] for k in cell))
        both = zip(near["exposed_each"], far["exposed_each"], strict=True)
        out.append(
            {k: near[k] for k in cell}
            | {
                "saved": [(b - a) / near["compute"] for a, b in both],
                "bytes_ratio": sum(near["nbytes_each"]) / max(sum(far["nbytes_each"]), 1),
                "speedup": far["seconds"] / near["seconds"],
            }
        )
    return out


def _waits_less(pairs: Sequence[Row], who: str) -> dict[str, Any]:
    """Measured: the worst cell's median, asked: its spread."""
    words = f"{who}: in_forward waits less than step_boundary by more than the spread, at equal bytes"
    equal = [
        (statistics.median(p["saved"]), max(p["saved"]) - min(p["saved"]), p)
        for p in pairs
        if abs(p["bytes_ratio"] - 1) <= NEAR and len(p["saved"]) > 1
    ]
    if not equal:
        return _claim(words, None, None, 0, None, f"of {len(pairs)} cells none has equal bytes and two texts")
    held = sum(median > spread for median, spread, _ in equal)
    median, spread, worst = min(equal, key=lambda cell: cell[0] - cell[1])
    where = f"{held} of {len(equal)} cells of equal bytes, of {len(pairs)}; worst at {_where(worst)}"
    return _claim(words, median, spread, len(worst["saved"]), held == len(equal), where)


def _simulated_wait(depth: Sequence[Row], who: str, layers: int) -> dict[str, Any]:
    """The same without a clock, of all cells in which both read equal bytes: the worst one's wait saved, asked: any."""
    words = f"{who}: in_forward waits less than step_boundary at equal bytes, {layers} layers, simulated"
    cells: dict[tuple[float, float], dict[str, Row]] = {}
    for row in depth:
        if (row["who"], row["layers"]) == (who, layers):
            cells.setdefault((row["cycles"], row["ratio"]), {})[row["issue"]] = row
    both = [(cell["in_forward"], cell["step_boundary"]) for cell in cells.values()]
    equal = [(far["exposed"] - near["exposed"], near) for near, far in both if _same_bytes(near, far)]
    if not equal:
        return _claim(words, None, None, 0, None, f"of {len(both)} cells none has equal bytes")
    saved, worst = min(equal, key=lambda cell: cell[0])
    held = sum(one > 0 for one, _ in equal)
    where = f"{held} of {len(equal)} cells of equal bytes, of {len(both)}; worst at {_where(worst)}"
    return _claim(words, saved, 0.0, worst["tokens"], held == len(equal), where)


def _same_bytes(near: Row, far: Row) -> bool:
    return abs(near["nbytes"] / far["nbytes"] - 1) <= NEAR


def _over_async(gained: Sequence[tuple[str, float]], who: str, how: str) -> dict[str, Any]:
    """Of the worst cell; what is asked is not to lose. n counts cells."""
    ranked = sorted(gained, key=lambda cell: cell[1])
    (least_at, least), (most_at, most) = ranked[0], ranked[-1]
    median = statistics.median(speedup for _, speedup in ranked)
    return _claim(
        f"{who}: speed-up of in_forward over async_boundary, {how}", least, 1.0, len(ranked), least >= 1,
        f"{least:.2f} ({least_at}) to {most:.2f} ({most_at}), median {median:.2f}",
    )  # fmt: skip


def _over_off(rows: Sequence[Row], arm: str) -> dict[str, Any]:
    """Share of the cells in which an arm is faster than no prediction, by the median of pairs; the others named."""
    lost = [f"{_where(row)} (x {row['speedup']:.2f})" for row in rows if row["speedup"] <= 1]
    won = len(rows) - len(lost)
    words = "" if not lost else "loses at " + "; ".join(lost)
    return _claim(f"{arm}: faster than off in every cell", won / len(rows), 1.0, len(rows), not lost, words)


def _where(cell: Row) -> str:
    disk = "this disk" if cell["ratio"] is None else f"reads {cell['ratio']:.3g}"
    return f"cache {cell['cycles']:g}, {disk}"


def _claim(
    claim: str, measured: float | None, asked: float | None, n: int, holds: bool | None, spread: str
) -> dict[str, Any]:
    return {"claim": claim, "measured": measured, "asked": asked, "n": n, "spread": spread, "holds": holds}
