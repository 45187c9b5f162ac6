"""Refresh what is committed of a notebook.

    python -m moelab.lab.refresh notebooks/90_gate_report.ipynb     executed with its defaults, and rewritten in place

A committed notebook keeps the outputs of its checked cells only (tag `nbval-check-output`: verdicts and
small deterministic tables of the tiny profile). Figures, times and everything else belong to reports. nbval
compares a cell only if it has an execution count, so checked cells keep theirs and no other cell has one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from ..commands import Parser
from ..errors import ContractError, MoelabError
from . import notebooks
from .execute import execute
from .report import METADATA_KEY, VERDICT_MIME, card, from_json

KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}


def refresh(path: Path) -> None:
    """Execute a notebook with its defaults and write its checked outputs back into it.

    Raises:
        ContractError: no notebook, or a cell failed; it is left as it was.
    """
    import nbformat

    notebook = notebooks.load(path)
    with tempfile.TemporaryDirectory() as folder:
        executed = Path(folder) / path.name
        outcome = execute(path, executed, {})
        if not outcome.done:
            raise ContractError("notebook failed", file=path, field=outcome.cell, got=outcome.error)
        fresh = notebooks.load(executed)
    for cell, ran in zip(notebook.cells, fresh.cells, strict=True):
        if cell.cell_type == "code":
            checked = notebooks.CHECKED_TAG in notebooks.tags(cell)
            cell.outputs = [_bare(output) for output in ran.outputs] if checked else []
            cell.execution_count = ran.execution_count if checked else None
    strip(notebook)
    nbformat.write(notebook, path)


def strip(notebook) -> None:
    """Leave the metadata that a reader and a kernel need: no versions, no clocks, no empty tag lists."""
    notebook.metadata = {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {"tags": notebooks.tags(cell)} if notebooks.tags(cell) else {}


def _bare(output):
    """A checked output without what changes from run to run."""
    if VERDICT_MIME in output.get("data", {}):
        verdict = from_json(output.metadata[METADATA_KEY])
        output.data["text/html"] = card(msgspec.structs.replace(verdict, measured={}))
    if "metadata" in output:
        output.metadata = {}
    if output.get("execution_count"):
        output.execution_count = None
    return output


def main(arguments: list[str]) -> int:
    """Exit code 0; 3 for a notebook that is refused or fails, as `moelab` has it. The notebooks before it are done."""
    parser = Parser(prog="python -m moelab.lab.refresh", description=__doc__)
    parser.add_argument("notebooks", nargs="+", type=Path, metavar="NOTEBOOK", help="notebook to execute and rewrite")
    for path in parser.parse_args(arguments).notebooks:
        print(path, flush=True)
        try:
            refresh(path)
        except MoelabError as error:
            print(f"{path}: {type(error).__name__}: {error}", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
