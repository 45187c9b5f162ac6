"""Run one notebook with papermill, and say exactly which cell failed when it does not end well.

papermill alone is too lenient for evidence: a cell that raises `SystemExit(0)` ends the run with exit
code 0, and a kernel that dies leaves a page without an error. Here a notebook is done only if every code
cell with source has run to its end; otherwise the outcome names the cell, and the error stands in the
executed notebook, so that the page shows it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import notebooks

ENGINE = "moelab"
STILL_S = 3600
"""Seconds of silence before a kernel is given up: it may have to stand still while another one takes times."""


@dataclass(frozen=True)
class Outcome:
    """`cell` and `error` are empty when the notebook ran to its end."""

    seconds: float
    cell: str = ""
    error: str = ""

    @property
    def done(self) -> bool:
        return not self.error


class Kernels:
    """The kernels now running, so that an interrupted run can end exactly those."""

    def __init__(self):
        self._clients: list[Any] = []
        self._lock = threading.Lock()

    def add(self, client) -> None:
        with self._lock:
            self._clients.append(client)

    def kill(self) -> None:
        with self._lock:
            for client in self._clients:
                provisioner = getattr(client.km, "provisioner", None)
                pid = getattr(provisioner, "pid", None)
                if pid and provisioner.has_process:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def execute(
    source: Path,
    target: Path,
    parameters: dict[str, Any],
    *,
    on_cell: Callable[[int, int], None] = lambda cell, total: None,
    kernels: Kernels | None = None,
) -> Outcome:
    """Execute `source` with `parameters` and leave the executed notebook in `target`, finished or not.

    `on_cell(k, n)` is called as the k-th of n cells starts.
    """
    import papermill
    from jupyter_core.utils import ensure_event_loop
    from nbclient.exceptions import DeadKernelError

    _register_engine()
    logging.getLogger("papermill").setLevel(logging.ERROR)
    last, error = [0], ""
    started = time.monotonic()

    def progress(cell: int, total: int) -> None:
        last[0] = cell
        on_cell(cell + 1, total)

    try:
        papermill.execute_notebook(
            str(source),
            str(target),
            parameters,
            engine_name=ENGINE,
            progress_bar=False,
            on_cell=progress,
            kernels=kernels or Kernels(),
        )
    except papermill.PapermillExecutionError as failure:
        error = f"{failure.ename}: {failure.evalue}"
    except DeadKernelError:
        error = "DeadKernelError: the kernel died (out of memory, a signal, or a crash in native code)"
    finally:
        ensure_event_loop().close()  # nbclient opens one a thread and leaves it to the garbage collector
    return _examine(target, last[0], error, time.monotonic() - started)


def _examine(target: Path, last: int, error: str, seconds: float) -> Outcome:
    """Find the failing cell in the executed notebook, and put a missing error into it."""
    import nbformat
    from papermill.execute import remove_error_markers

    notebook = remove_error_markers(notebooks.load(target))
    cells = notebook.cells
    failing = next((cell for cell in cells if _has_error(cell)), None)
    if failing is None and error:
        failing = cells[min(last, len(cells) - 1)]
        name, _, text = error.partition(": ")
        failing.outputs = [
            *failing.get("outputs", []),
            nbformat.v4.new_output("error", ename=name, evalue=text, traceback=[error]),
        ]
    if failing is not None and not error:
        output = next(output for output in failing.outputs if output.output_type == "error")
        error = f"{output.ename}: {output.evalue} (a notebook must run to its last cell)"
    nbformat.write(notebook, target)
    return Outcome(seconds, _name_cell(cells, failing) if failing is not None else "", error)


def _has_error(cell) -> bool:
    return any(output.output_type == "error" for output in cell.get("outputs", []))


def _name_cell(cells, failing) -> str:
    """`code cell 4 ("first line")`, counted in the notebook as written, without papermill's injected cell."""
    own = [cell for cell in cells if cell.cell_type == "code" and "injected-parameters" not in notebooks.tags(cell)]
    line = next((line for line in failing.source.splitlines() if line.strip()), "")
    number = next((k for k, cell in enumerate(own, 1) if cell is failing), 0)
    return f"code cell {number} ({line.strip()[:60]!r})" if number else "injected parameters"


def _register_engine() -> None:
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine, papermill_engines
    from papermill.log import logger

    class ReportingEngine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man, kernel_name, *, on_cell, kernels, start_timeout=STILL_S, **_):
            begin = nb_man.cell_start

            def cell_start(cell, cell_index=None, **kwargs):
                on_cell(cell_index, len(nb_man.nb.cells))
                return begin(cell, cell_index, **kwargs)

            nb_man.cell_start = cell_start
            client = PapermillNotebookClient(
                nb_man,
                timeout=None,
                startup_timeout=start_timeout,
                iopub_timeout=STILL_S,
                kernel_name=kernel_name,
                log=logger,
                # A kernel's own warnings (it says at each start that loopback is not encrypted) are no progress.
                extra_arguments=["--IPKernelApp.log_level=50"],
            )
            kernels.add(client)
            return client.execute()

    papermill_engines.register(ENGINE, ReportingEngine)
