"""The graph of notebooks, and what one run of it would do: checked and digested before anything starts.

A notebook's digest covers everything its result depends on: its source, its parameters, the package's
source, the content of models and threads, library versions, and the digests of the notebooks it follows.
Equal digest, equal result: that is how a second run finds nothing to do.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from .. import artifacts
from ..errors import MissingArtifactError, ParameterError
from ..models import split_budget
from ..params import PROFILES, Options
from ..threads import read
from . import notebooks

LIBRARIES = ("mlx", "mlx-lm", "torch", "numpy", "tokenizers")
HASH_WHOLE_BELOW = 1 << 28
"""Larger model files are identified by name, size and time: hashing a 60 GB checkpoint takes minutes."""


@dataclass(frozen=True)
class Node:
    """A notebook of the graph, the numbers of those it follows, and the gate it must publish."""

    name: str
    after: tuple[str, ...] = ()
    gate: int | None = None
    default: bool = True

    @property
    def number(self) -> str:
        return self.name[:2]


DAG = (
    Node("00_start_here"),
    Node("01_reference_models", default=False),
    Node("20_capture"),
    Node("10_ceiling", after=("20",), gate=0),
    Node("21_replay_parity", after=("20",), gate=1),
    Node("30_snapshot", after=("21",), gate=2),
    Node("40_baseline_comparison", after=("30",)),
    Node("41_predictor_training", after=("40",)),
    Node("42_offline_value", after=("41",), gate=3),
    Node("80_streaming_engine", after=("20",)),
    Node("81_prerouter_modes", after=("41",)),
    Node("82_routing_policies"),
    Node("83_simulator", after=("20",)),
    Node("84_peers", default=False),
    Node("90_gate_report", after=("10", "42")),
)


@dataclass(frozen=True)
class Job:
    node: Node
    source: Path
    options: Options
    digest: str


def plan(profile, overrides, *, only=None, folder=None, dag=DAG) -> list[Job]:
    """Choose the notebooks and check every one of them. Nothing has been started when this returns."""
    if profile not in PROFILES:
        raise ParameterError("unknown profile", field="profile", got=profile, expected=PROFILES)
    folder = folder or artifacts.root() / "notebooks"
    chosen = _choose(only, dag)
    options: dict[str, Options] = {}
    for node in dag:
        path = folder / f"{node.name}.ipynb"
        if node.number in chosen or _is_upstream(node, chosen, dag):
            if not path.is_file():
                raise MissingArtifactError("no such notebook", file=path)
            options[node.number] = notebooks.declared(path).options.from_profile(profile, **overrides)
    digests: dict[str, str] = {}
    for number in TopologicalSorter({n.number: n.after for n in dag if n.number in options}).static_order():
        node = next(node for node in dag if node.number == number)
        digests[number] = _digest(folder / f"{node.name}.ipynb", options[number], [digests[n] for n in node.after])
    return [
        Job(node, folder / f"{node.name}.ipynb", options[node.number], digests[node.number])
        for node in dag
        if node.number in chosen
    ]


def _choose(only: Iterable[str] | None, dag: tuple[Node, ...]) -> set[str]:
    if only is None:
        return {node.number for node in dag if node.default}
    known = {node.number for node in dag} | {node.name for node in dag}
    chosen = set()
    for item in only:
        if str(item) not in known:
            raise ParameterError("unknown notebook", field="only", got=item, expected=sorted(n.number for n in dag))
        chosen.add(str(item)[:2])
    return chosen


def ancestors(number: str, dag: tuple[Node, ...]) -> set[str]:
    """Every notebook whose result this one needs, directly or not."""
    after = {node.number: node.after for node in dag}
    found: set[str] = set()
    queue = list(after[number])
    while queue:
        if (item := queue.pop()) not in found:
            found.add(item)
            queue += after[item]
    return found


def _is_upstream(node: Node, chosen: set[str], dag: tuple[Node, ...]) -> bool:
    return any(node.number in ancestors(number, dag) for number in chosen)


def _digest(path: Path, options: Options, upstream: list[str]) -> str:
    source = [[cell.cell_type, cell.source] for cell in notebooks.load(path).cells]
    names = [split_budget(model)[0] for model in options.models]
    models = [_content(_model_path(model)) or _repository(model) for model in names]
    threads = artifacts.root() / options.threads
    if (threads_content := _content(threads)) is None:
        raise MissingArtifactError("no such threads", file=threads)
    _readable(threads)
    versions = {library: importlib.metadata.version(library) for library in LIBRARIES}
    parts = [source, asdict(options), _package(), models, threads_content, versions, upstream]
    return artifacts.digest_json(parts)


@cache
def _readable(threads: Path) -> None:
    """Read every thread once, so that a broken line is refused before a kernel starts."""
    read(threads)


def _repository(model: str) -> str:
    """A repository id `owner/name`, which is identified by its name. Raises MissingArtifactError on anything else."""
    if model.count("/") != 1 or model.startswith((".", "/")) or not all(model.split("/")):
        raise MissingArtifactError(
            "no such model", file=model, expected="a name under artifacts/models, a checkpoint folder, or owner/name"
        )
    return model


def _model_path(model: str) -> Path:
    committed = artifacts.root() / "artifacts" / "models" / model
    return committed if committed.is_dir() else Path(model)


@cache
def _content(path: Path) -> str | None:
    """Digest of a file or folder; None when there is neither (a repository id is identified by its name)."""
    if not path.exists():
        return None
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    found = []
    for file in files:
        size = file.stat().st_size
        identity = artifacts.digest_file(file) if size < HASH_WHOLE_BELOW else str(file.stat().st_mtime_ns)
        found.append([file.name, size, identity])
    return artifacts.digest_json(found)


@cache
def _package() -> str:
    home = Path(__file__).resolve().parent.parent
    files = sorted(file for file in home.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    return artifacts.digest_json([[str(file.relative_to(home)), artifacts.digest_file(file)] for file in files])
