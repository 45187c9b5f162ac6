"""Publish verdicts from a notebook, and collect them again from the executed notebook.

A published verdict is one notebook output with three parts:

* `text/html`: the card a reader sees;
* `application/vnd.moelab.verdict+json`: status, question, thresholds, n and the figures that the same
  inputs give on any machine. nbval compares this part, so a verdict cell is a regression test;
* output metadata: the whole verdict, with standard errors, measured times, digests and runtime identity.
  nbval skips metadata, and a run collects its `verdicts.json` from there.

So the executed notebook is the record: nothing else has to be passed from kernel to runner, and a notebook
run by hand, by papermill or in JupyterLab carries the same evidence.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from ..errors import RecordError
from ..flywheel.gates import GATES, Figure, Verdict, from_json, to_json

VERDICT_MIME = "application/vnd.moelab.verdict+json"
METADATA_KEY = "moelab_verdict"
SIGNIFICANT_DIGITS = 4
SIGNS = {"pass": "✓", "fail": "✗", "refused": "–"}


def publish(verdicts: Verdict | Iterable[Verdict]) -> None:
    """Display verdicts so that a reader sees them, nbval compares them and the run collects them."""
    from IPython.display import display

    verdicts = [verdicts] if isinstance(verdicts, Verdict) else list(verdicts)
    if not verdicts:
        raise RecordError("nothing to publish", got=[], expected="at least one verdict")
    for verdict in verdicts:
        bundle = {VERDICT_MIME: compared(verdict), "text/html": card(verdict)}
        display(bundle, raw=True, metadata={METADATA_KEY: to_json(verdict)})


def compared(verdict: Verdict) -> dict[str, Any]:
    """The part of a verdict that must be the same wherever it is computed.

    Floats are rounded to four significant digits; the comparison in `notebooks/conftest.py` allows for
    rounding differences between processors, and for nothing else.
    """
    return {
        "schema_version": 1,
        "gate": verdict.gate,
        "model": verdict.model,
        "status": verdict.status,
        "question": verdict.question,
        "thresholds": _rounded(verdict.thresholds),
        "n": dict(verdict.n),
        "figures": _rounded(verdict.figures),
    }


def _rounded(figures: dict[str, Figure]) -> dict[str, Figure]:
    return {
        name: float(f"{value:.{SIGNIFICANT_DIGITS}g}") if isinstance(value, float) else value
        for name, value in figures.items()
    }


def published(notebook) -> list[Verdict]:
    """The verdicts in an executed notebook's outputs, in order.

    Raises:
        RecordError: a verdict output without its record, or one that is not a valid verdict.
    """
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if VERDICT_MIME in output.get("data", {}):
                found.append(from_json(output.metadata.get(METADATA_KEY), file=notebook.metadata.get("title")))
    return found


def card(verdict: Verdict) -> str:
    """A verdict as accessible HTML: the word, the question, and a table of figures with n, error and threshold."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{show(value)}</td>'
        f"<td>{show(verdict.standard_errors.get(name))}</td><td>{show(verdict.n.get(name))}</td>"
        f"<td>{show(verdict.thresholds.get(name))}</td></tr>"
        for name, value in (verdict.figures | verdict.measured).items()
    )
    shown = verdict.figures | verdict.measured
    loose = [f"{name} = {show(value)}" for name, value in verdict.n.items() if name not in shown]
    loose += [f"threshold {name} = {show(value)}" for name, value in verdict.thresholds.items() if name not in shown]
    table = (
        '<table><thead><tr><th scope="col">figure</th><th scope="col">value</th><th scope="col">standard error</th>'
        f'<th scope="col">n</th><th scope="col">threshold</th></tr></thead><tbody>{rows}</tbody></table>'
    )
    return (
        f'<section class="moelab-verdict moelab-{verdict.status}">'
        f"<p><strong>{SIGNS[verdict.status]} Gate {verdict.gate} ({GATES[verdict.gate]}), {escape(verdict.model)}: "
        f"{verdict.status}</strong></p><p>{escape(verdict.question)}</p>"
        + (f"<p>{escape(verdict.reason)}</p>" if verdict.reason else "")
        + (table if rows else "")
        + (f"<p>{escape('; '.join(loose))}</p>" if loose else "")
        + "</section>"
    )


def show(value: Figure) -> str:
    """A figure as text: four significant digits, thousands separated; a dash for none."""
    if value is None:
        return "–"
    if isinstance(value, bool | str):
        return escape(str(value))
    if isinstance(value, int):
        return f"{value:,}"
    if value and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.3g}"
    return f"{float(f'{value:.{SIGNIFICANT_DIGITS}g}'):,.9g}"  # rounded first, so that no exponent is needed
