"""How fast dispatch is, measured here and committed: notebook 82."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from ... import artifacts, quiet
from .cells import HOLDS

Rows = Sequence[dict[str, Any]]


def dispatch_measured(experts: list[int], tokens: list[int], *, hidden: int, rounds: int) -> Rows:
    """Rows of `policies.bench.measure`, while the rest of the run stands still. A dense run of all specialists, which
    takes a minute where they are many, and other policies on many tokens are left to the committed report."""
    from ...policies.bench import measure

    with quiet.timing():
        arms = ("grouped", "loop", "batched")
        return list(measure(experts, tokens, hidden=hidden, rounds=rounds, arms=arms, each_policy=[min(tokens)]))


def dispatch_committed() -> dict[str, Any]:
    """`reports/committed/dispatch.json`: `rows` of an idle machine, `command`, `date`, `hidden`."""
    return artifacts.read_json(artifacts.root() / "reports" / "committed" / "dispatch.json")


def dispatch_speed(rows: Rows) -> pd.DataFrame:
    """The default policy against the plain ways to do its work: medians in milliseconds, and their ratios."""
    from ...policies.bench import ALL_ARMS

    cells: dict[tuple[int, int], dict[str, dict]] = {}
    for row in rows:
        if row["policy"] == ALL_ARMS:
            cells.setdefault((row["experts"], row["tokens"]), {})[row["arm"]] = row
    return pd.DataFrame(
        [
            {
                "specialists": n, "tokens": t, "n": arms["grouped"]["n"],
                **{f"{name} ms": 1e3 * row["median"] for name, row in arms.items() if name != "share"},
                "grouped spread ms": 1e3 * arms["grouped"]["spread"],
                **{
                    f"{name} / grouped": arms[name]["median"] / arms["grouped"]["median"]
                    for name in ("loop", "dense") if name in arms
                },
                "grouped / batched": arms["grouped"]["median"] / arms["batched"]["median"],
            }
            for (n, t), arms in cells.items()
        ]
    )  # fmt: skip


def routing_share(rows: Rows, tokens: int = 1) -> pd.DataFrame:
    """What part of dispatch selection and capacity take, a row a policy, a column a number of specialists: median ±
    interquartile range, per cent."""
    from ...policies.bench import ALL_ARMS

    shares = [r for r in rows if r["arm"] == "share" and r["tokens"] == tokens and r["policy"] != ALL_ARMS]
    out: dict[str, dict[str, Any]] = {}
    for row in shares:
        cell = out.setdefault(row["policy"], {"policy": row["policy"]})
        cell[f"{row['experts']} specialists"] = f"{100 * row['median']:.1f} ± {100 * row['spread']:.1f}"
    return pd.DataFrame([{**cell, "n of each": shares[0]["n"]} for cell in out.values()])


def dispatch_claims(here: Rows, *, hidden: int) -> pd.DataFrame:
    """What was asked of dispatch, a row a claim: measured here and in the committed run (a share with its interquartile
    range), and whether it holds."""
    from ...policies.bench import judged

    committed = dispatch_committed()
    runs = {"here": (here, hidden), f"committed {committed['date']}": (committed["rows"], committed["hidden"])}
    claims: dict[str, dict[str, Any]] = {}
    for name, (rows, width) in runs.items():
        for row in judged(rows, hidden=width):
            claim = claims.setdefault(
                row["claim"],
                {"claim": row["claim"], "asked": f"{'≤' if row['most'] else '≥'} {row['asked']:g}"}
                | dict.fromkeys([key for run in runs for key in (run, f"{run}: verdict")]),
            )
            spread = "" if row["spread"] is None else f" ± {row['spread']:.2g} ({row['who']})"
            claim[name] = f"{row['measured']:.3g}{spread}, n {row['n']}"
            claim[f"{name}: verdict"] = HOLDS[row["holds"]]
    return pd.DataFrame(list(claims.values()))
