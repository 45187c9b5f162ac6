"""Executed notebooks to pages that open without a network.

nbconvert's `lab` template links scripts for widgets, diagrams and formulas. Ours blanks those blocks, folds
code into `<details>`, keeps the alt text of figures, and turns formulas into MathML, which browsers draw
themselves. A page therefore makes no request at all, and its formulas stay readable.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from ..flywheel.gates import GATES, QUESTIONS
from . import notebooks
from .record import RunRecord, every_gate
from .report import SIGNS

TEMPLATES = Path(__file__).parent / "templates"
PROGRESS = re.compile(r"^(.*: \d+% of [\d,]+|round \d+ of \d+: .*)(\n|$)", re.MULTILINE)
"""A line of `views.progress`, or of a round of peers: of use while a stage runs, none on the page of one that ended."""


def render(executed: Path, page: Path, *, failure: str = "") -> None:
    """Render an executed notebook to `page`; `failure` is shown above it when it did not finish."""
    notebook = notebooks.load(executed)
    notebook.metadata["title"] = title(notebook, executed)
    drop_progress(notebook)
    html, _ = _exporter().from_notebook_node(
        notebook,
        resources={
            "moelab_css": (TEMPLATES / "moelab.css").read_text(),
            "moelab_failure": failure,
            "metadata": {"name": executed.stem, "path": str(executed.parent)},
        },
    )
    page.write_text(html, encoding="utf-8")


def drop_progress(notebook) -> None:
    """Take lines of progress out of the outputs, and outputs that held nothing else."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for output in cell.outputs:
                if output.output_type == "stream":
                    output.text = PROGRESS.sub("", output.text)
            cell.outputs = [output for output in cell.outputs if output.output_type != "stream" or output.text]


def title(notebook, path: Path) -> str:
    """The first markdown heading, else the file's name."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("# "):
            return cell.source.splitlines()[0].removeprefix("# ").strip()
    return path.stem


def latex_to_mathml(latex: str, *, display: str = "inline") -> str:
    """A formula as MathML; the source travels along as `alttext` for screen readers and copying."""
    from html import escape

    from latex2mathml.converter import convert

    source = latex.strip().strip("$").strip()
    return convert(source, display=display).replace("<math ", f'<math alttext="{escape(source, quote=True)}" ', 1)


@cache
def _exporter_class():
    """nbconvert is a slow import, so the class is made when the first page is."""
    from jinja2 import pass_context
    from nbconvert import HTMLExporter
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):
        def inline_math(self, body: str) -> str:
            return latex_to_mathml(body)

        def block_math(self, body: str) -> str:
            return f"<p>{latex_to_mathml(body, display='block')}</p>"

        def latex_environment(self, name: str, body: str) -> str:
            return self.block_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")

    class Exporter(HTMLExporter):
        @pass_context
        def markdown2html(self, context, source):
            renderer = Renderer(escape=False, anchor_link_text=self.anchor_link_text, exclude_anchor_links=True)
            return MarkdownWithMath(renderer=renderer).render(source)

    return Exporter


def _plain(text: str) -> str:
    from html import escape

    from nbconvert.filters import strip_ansi

    return escape(strip_ansi(text), quote=False)


def _exporter():
    return _exporter_class()(
        template_name="moelab",
        extra_template_basedirs=[str(TEMPLATES)],
        filters={
            "latex2mathml": lambda text: latex_to_mathml(text, display="block"),
            "ansi2html": _plain,  # terminal colours are chosen for a dark terminal; on white many cannot be read
        },
    )


# ---------------------------------------------------------------- index


def index(folder: Path, record: RunRecord) -> None:
    """Write `index.html`: the gate table, the notebooks with links, and the first figure of each gate notebook."""
    from jinja2 import Environment, FileSystemLoader

    rows, plots = [], []
    for entry in record.notebooks:
        executed, page = folder / f"{entry.name[:2]}.ipynb", f"{entry.name[:2]}.html"
        there = (folder / page).is_file()
        name = entry.name.replace("_", " ", 1)
        if executed.is_file():
            notebook = notebooks.load(executed)
            name = title(notebook, executed)
            name = name if name.startswith(entry.name[:2]) else f"{entry.name[:2]} {name}"
            plots += [{**plot, "title": name, "href": page} for plot in _figures(notebook)[:1]]
        rows.append(
            {
                "href": page if there else None,
                "title": name,
                "status": entry.status,
                "seconds": f"{entry.seconds:.0f}",
                "note": " ".join(part for part in (entry.cell, entry.error) if part),
            }
        )
    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True)
    html = environment.get_template("index.html.j2").render(
        record=record,
        css=(TEMPLATES / "moelab.css").read_text(),
        models=sorted({verdict.model for verdict in record.verdicts}),
        gates=_gate_rows(record),
        notebooks=rows,
        plots=plots,
    )
    (folder / "index.html").write_text(html, encoding="utf-8")


def _gate_rows(record: RunRecord) -> list[dict[str, Any]]:
    asked = {verdict.gate: verdict.question for verdict in record.verdicts}
    return [
        {
            "gate": gate,
            "name": name,
            "question": asked.get(gate, QUESTIONS[gate]),
            "cells": [
                {"status": row.status, "sign": SIGNS.get(row.status, "·"), "reason": row.reason}
                for row in every_gate(record.verdicts)
                if row.gate == gate
            ],
        }
        for gate, name in GATES.items()
    ]


def _figures(notebook) -> list[dict[str, str]]:
    return [
        {
            "png": output.data["image/png"].strip(),
            "alt": output.metadata.get("image/png", {}).get("alt", "Figure without a description"),
        }
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
