"""Run the notebooks as a graph: checked before, resumed by digest, shown while, summed up after.

    plan       every notebook's parameters and Options are checked before the first kernel starts
    execute    papermill, a few kernels at a time; equal digest of a finished notebook: nothing to do
    collect    verdicts out of the executed notebooks into `verdicts.json`, pages and index beside it

Artefacts have their own content addresses (`moelab.artifacts`), so a notebook that runs again after an
edit of its text finds its results where they were.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from graphlib import TopologicalSorter
from pathlib import Path

from .. import artifacts, quiet
from ..errors import MoelabError, ParameterError
from ..flywheel.gates import GATES, Verdict
from . import notebooks, record, render, report
from .execute import Kernels, execute
from .plan import DAG, Job, Node, ancestors, plan
from .record import NotebookRecord, RunRecord

METADATA_KEY = "moelab_run"


def run(
    profile: str = "tiny",
    models: list[str] | None = None,
    threads: str | None = None,
    only: Iterable[str] | None = None,
    *,
    seed: int | None = None,
    workers: int | None = None,
    name: str | None = None,
    into: Path | None = None,
    folder: Path | None = None,
    dag: tuple[Node, ...] = DAG,
    say: Callable[[str], None] = print,
) -> RunRecord:
    """Run the notebooks (default: all but the smoke-only ones) and write `reports/<name>/`, or the folder `into`.

    Returns the record that was written as `verdicts.json`. A failing notebook does not stop those that
    do not depend on it; it still becomes a page, and its record names the cell.

    Raises:
        ParameterError: any notebook would get an unknown, mistyped or out-of-range parameter.
        MissingArtifactError: a notebook, a model or the threads do not exist.
    """
    overrides = {"models": models, "threads": threads and _short(Path(threads).resolve()), "seed": seed}
    overrides = {key: value for key, value in overrides.items() if value is not None}
    if workers is not None and workers < 1:
        raise ParameterError("no notebook would run", field="workers", got=workers, expected=">= 1")
    if name is not None and (Path(name).name != name or name in (".", "..")):
        raise ParameterError("a report is a folder in reports/", field="name", got=name, expected="a name, no path")
    jobs = plan(profile, overrides, only=only, folder=folder, dag=dag)
    target = into or artifacts.root() / "reports" / (name or profile)
    target.mkdir(parents=True, exist_ok=True)
    workers = min(2, os.cpu_count() or 1) if workers is None else workers
    say(f"{len(jobs)} notebooks at profile {profile}, {workers} at a time, into {_short(target)}/")
    with _environment(workers):
        entries = _execute_all(jobs, target, workers, say, dag)
    if only is not None:
        entries = _still_true(target, entries, profile, overrides, folder, dag) + entries
    result = collect(target, profile, entries)
    say(summary(result))
    say(f"\n{_short(target)}/index.html")
    return result


def _short(path: Path) -> str:
    """A path relative to the repository root where it lies inside, since reports are read elsewhere."""
    return str(path.relative_to(artifacts.root()) if path.is_relative_to(artifacts.root()) else path)


# ---------------------------------------------------------------- during


@contextmanager
def _environment(workers: int):
    """What kernels are told: the run that they belong to, and how many threads to use.

    Kernels that share cores get one share each: two-thread torch falls 5-30x when anything else runs.
    """
    share = str(max(1, (os.cpu_count() or 1) // workers))
    told = {"OMP_NUM_THREADS": share, "OPENBLAS_NUM_THREADS": share, quiet.RUN: str(os.getpid())}
    before = {key: os.environ.get(key) for key in told}
    for key, value in before.items():
        os.environ[key] = value or told[key]
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)


def _execute_all(jobs: list[Job], target: Path, workers: int, say, dag) -> list[NotebookRecord]:
    by_number = {job.node.number: job for job in jobs}
    upstream = {number: ancestors(number, dag) & set(by_number) for number in by_number}
    waiting = Counter(number for numbers in upstream.values() for number in numbers)
    place = {number: at for at, number in enumerate(by_number)}
    ready: list[str] = []
    sorter = TopologicalSorter(upstream)
    sorter.prepare()
    progress, kernels = Progress(len(jobs), say), Kernels()
    finished: dict[str, NotebookRecord] = {}
    running: dict[Future, str] = {}
    pool = ThreadPoolExecutor(workers)
    try:
        while sorter.is_active():
            ready += sorter.get_ready()
            # What most others wait for goes first; the rest fills what is free, and last what nothing waits for.
            ready.sort(key=lambda number: (-waiting[number], place[number]))
            while ready and len(running) < workers:
                job = by_number[number := ready.pop(0)]
                culprits = [n for n in sorted(upstream[number]) if finished[n].status != "done"]
                if culprits:
                    entry = NotebookRecord(
                        name=job.node.name,
                        status="blocked",
                        seconds=0.0,
                        digest=job.digest,
                        error=f"needs {culprits[0]}",
                    )
                    (target / f"{number}.html").unlink(missing_ok=True)  # a page of an older run would mislead
                    running[_completed(entry)] = number
                else:
                    running[pool.submit(_execute_one, job, target, progress, kernels)] = number
            for future in wait(running, timeout=progress.interval, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                finished[number] = future.result()
                progress.end(finished[number])
                sorter.done(number)
            progress.show()
    except KeyboardInterrupt:
        kernels.kill()
        say("interrupted: the kernels were ended, finished notebooks are kept")
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return [finished[job.node.number] for job in jobs]


def _completed(value) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


def _execute_one(job: Job, target: Path, progress: Progress, kernels: Kernels) -> NotebookRecord:
    executed, page = target / f"{job.node.number}.ipynb", target / f"{job.node.number}.html"
    if entry := previous(executed, job.digest):
        if not page.is_file():
            render.render(executed, page)
        progress.unchanged.add(entry.name)
        return entry
    parameters = {field: getattr(job.options, field) for field in job.options.names()}
    with quiet.turn():
        pass  # a kernel that starts is work, too
    outcome = execute(
        job.source, executed, parameters, on_cell=lambda k, n: progress.cell(job.node.name, k, n), kernels=kernels
    )
    if outcome.done and (lacking := _lacking_verdicts(executed, job)):
        outcome = type(outcome)(
            outcome.seconds, "last cell", f"published no verdict of gate {job.node.gate} for {lacking}"
        )
    entry = NotebookRecord(
        name=job.node.name,
        status="done" if outcome.done else "failed",
        seconds=round(outcome.seconds, 1),
        digest=job.digest,
        cell=outcome.cell,
        error=outcome.error,
    )
    _stamp(executed, entry)
    render.render(executed, page, failure=f"{outcome.cell}: {outcome.error}" if outcome.error else "")
    return entry


def _lacking_verdicts(executed: Path, job: Job) -> list[str]:
    if job.node.gate is None:
        return []
    judged = {v.model for v in report.published(notebooks.load(executed)) if v.gate == job.node.gate}
    return [model for model in job.options.models if Path(model).name not in judged and model not in judged]


def _stamp(executed: Path, entry: NotebookRecord) -> None:
    import msgspec
    import nbformat

    notebook = notebooks.load(executed)
    notebook.metadata[METADATA_KEY] = msgspec.to_builtins(entry)
    nbformat.write(notebook, executed)


def previous(executed: Path, digest: str) -> NotebookRecord | None:
    """The record of a finished execution with this very digest."""
    import msgspec

    if not executed.is_file():
        return None
    stamp = notebooks.load(executed).metadata.get(METADATA_KEY)
    if not stamp or stamp["digest"] != digest or stamp["status"] != "done":
        return None
    return msgspec.convert(dict(stamp), NotebookRecord)


class Progress:
    """A line when a notebook ends; in between which cells are at work: live on a terminal, else twice a minute."""

    def __init__(self, total: int, say: Callable[[str], None]):
        self.total, self.say = total, say
        self.ended, self.started, self.shown = 0, time.monotonic(), time.monotonic()
        self.at: dict[str, str] = {}
        self.unchanged: set[str] = set()
        self.live = sys.stdout.isatty() and say is print
        self.interval = 1 if self.live else 30

    def cell(self, name: str, number: int, total: int) -> None:
        """Called from the thread of the notebook."""
        self.at[name] = f"{name} cell {number} of {total}"

    def show(self) -> None:
        now = time.monotonic()
        if not self.at or now - self.shown < self.interval:
            return
        self.shown = now
        text = f"[{now - self.started:5.0f} s] {'; '.join(list(self.at.values()))}"
        if self.live:
            print(f"\r\033[K{text}", end="", flush=True)
        else:
            self.say(text)

    def end(self, entry: NotebookRecord) -> None:
        self.ended += 1
        self.at.pop(entry.name, None)
        if self.live:
            print("\r\033[K", end="")
        elapsed = time.monotonic() - self.started
        detail = f" in {entry.seconds:.0f} s" if entry.seconds else ""
        if entry.name in self.unchanged:
            detail = ", unchanged since it last ran"
        trouble = f": {entry.cell} {entry.error}" if entry.error else ""
        self.say(f"[{elapsed:5.0f} s] {self.ended}/{self.total} {entry.name} {entry.status}{detail}{trouble}")


# ---------------------------------------------------------------- after


def _still_true(target: Path, entries, profile, overrides, folder, dag) -> list[NotebookRecord]:
    """Earlier entries of this folder that a full run would leave as they are (`--only` adds to those)."""
    try:
        jobs = plan(profile, overrides, only=[node.number for node in dag], folder=folder, dag=dag)
    except MoelabError:
        return []  # some other notebook cannot be planned now, so nothing vouches for the earlier entries
    ours = {entry.name for entry in entries}
    kept = [previous(target / f"{job.node.number}.ipynb", job.digest) for job in jobs if job.node.name not in ours]
    return [entry for entry in kept if entry is not None]


def collect(target: Path, profile: str, entries: list[NotebookRecord]) -> RunRecord:
    """Write `verdicts.json` and `index.html` from the executed notebooks of a run folder."""
    entries = sorted(entries, key=lambda entry: entry.name)
    verdicts: dict[tuple[int, str], Verdict] = {}
    for entry in entries:
        if entry.status == "done":
            for verdict in report.published(notebooks.load(target / f"{entry.name[:2]}.ipynb")):
                # A gate's own notebook comes before the one that repeats all verdicts.
                verdicts.setdefault((verdict.gate, verdict.model), verdict)
    result = RunRecord(
        schema_version=record.SCHEMA_VERSION,
        run=target.name,
        profile=profile,
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        notebooks=entries,
        verdicts=list(verdicts.values()),
    )
    record.write(target, result)
    render.index(target, result)
    return record.read(target)


def summary(result: RunRecord) -> str:
    """A line for each gate and model, then what did not finish."""
    lines = [""]
    for gate, model, status, reason in record.every_gate(result.verdicts):
        lines.append(f"gate {gate} {GATES[gate]:<22} {model:<12} {status:<15} {reason}".rstrip())
    if not result.verdicts:
        lines.append("no verdicts")
    for entry in result.failures():
        lines.append(f"{entry.name} {entry.status}: {entry.cell} {entry.error}".rstrip())
    return "\n".join(lines)
