"""The tables of a model card, made from `calibration.json` and from nothing else.

A card is prose by hand with one block between two marks that is rewritten by the calibration command, so
that no figure in it is typed. `table_rows` is also what notebook 01 shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artifacts import write_bytes
from ..errors import RecordError

BEGIN, END = "<!-- calibration: begin -->", "<!-- calibration: end -->"
ABSENT = "–"


def write_tables(card: Path, figures: Mapping[str, Any]) -> None:
    """Rewrite the block between the marks of a model card.

    Raises:
        RecordError: the card does not hold both marks, once and in order.
    """
    text = card.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise RecordError("the card lacks its marks", file=card, field=f"{BEGIN} {END}", got=text.count(BEGIN))
    write_bytes(card, f"{head}{BEGIN}\n{tables(figures)}{END}{tail}".encode())


def tables(figures: Mapping[str, Any]) -> str:
    """Both tables as Markdown, with where they come from."""
    text, runtime = figures["text"], figures["runtime"]
    said = (
        f"`{figures['command']}`, {figures['date']}; mlx {runtime['libraries']['mlx']}, {runtime['precision']}, "
        f"{runtime['blas'].split()[0]}; up to {text['windows_a_domain']} windows of {text['window']} tokens a domain."
    )
    mean = f"\nMean of {len(figures['loss'])} domains: {figures['mean_loss']:.2f}.\n"
    return "\n".join([said, "", _markdown(loss_rows(figures)), mean, _markdown(table_rows(figures)), ""])


def loss_rows(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """Validation loss by domain, with licence and source of its text."""
    return [
        {
            "domain": domain,
            "licence": loss.get("licence", ABSENT),
            "source": loss.get("source", ABSENT),
            "nats/token": f"{loss['nats']:.2f}",
            "tokens": f"{loss['tokens']:,}",
        }
        for domain, loss in sorted(figures["loss"].items())
    ]


def table_rows(figures: Mapping[str, Any]) -> list[dict[str, str]]:
    """The calibration table: one row a figure, one column a model, `–` where a record cannot say."""
    beside = figures["beside"]
    order = sorted(beside, key=lambda name: ("along_thread" not in beside[name], name))  # traces, then counts
    columns = {"this model": figures, **{name: beside[name] for name in order}}
    rows = []
    for name, read in _ROWS.items():
        cells = {}
        for column, record in columns.items():
            try:
                cells[column] = read(record)
            except KeyError:  # a trace of one prompt has no domains; counts have no order of tokens
                cells[column] = ABSENT
        rows.append({"figure": name, **cells})
    return rows


def _overlap(record):
    figure = record["along_thread"]["overlap"]
    return f"{figure['value']:.3f} ({figure['low']:.2f} to {figure['high']:.2f})"


def _recalls(part: str, kind: str):
    return lambda record: " / ".join(f"{record[part][kind][m]['value']:.3f}" for m in ("1x", "2x", "4x"))


def _depths(values: list[float]) -> str:
    """First, middle and last layer."""
    return " / ".join(f"{values[i]:.2f}" for i in (0, len(values) // 2, -1))


def _load(kind: str):
    return lambda record: f"{record['along_thread']['thread_load'][kind]:.2f}"


_ROWS = {
    "previous-token overlap (range over layers)": _overlap,
    "most used so far in the thread, recall at 1× / 2× / 4× K": _recalls("along_thread", "frequency"),
    "adjacent-layer table grown along the thread, 1× / 2× / 4×": _recalls("along_thread", "adjacent"),
    "busiest expert ÷ mean, within 128 tokens": _load("busiest"),
    "share of the busiest eighth, within 128 tokens": _load("hottest_eighth"),
    "popularity from other text, recall at 1× / 2× / 4× K": _recalls("from_other_text", "frequency"),
    "adjacent-layer table from other text, 1× / 2× / 4×": _recalls("from_other_text", "adjacent"),
    "distance of two domains, mean over pairs (first / middle / last layer)": lambda r: _depths(r["domains"]["mean"]),
    "distance of program text and prose (same layers)": lambda r: _depths([*r["domains"]["named"].values()][0]),
    "distance of two halves of one domain (same layers)": lambda r: _depths(r["domains"]["same_domain"]),
    "busiest expert ÷ mean, all domains (same layers)": lambda r: _depths(r["load"]["busiest"]),
    "share of the busiest eighth, all domains (same layers)": lambda r: _depths(r["load"]["hottest_eighth"]),
}


def _markdown(rows: list[dict[str, str]]) -> str:
    names = [*rows[0]]
    lines = [names, ["---"] * len(names), *([row[name] for name in names] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
