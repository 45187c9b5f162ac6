"""A stage of the loop: one function per model in a worker process, whose result is an artefact.

Importing mlx and loading a model costs seconds, and every stage asks for those before it. So what a stage
was asked for is remembered beside its artefact: the same request again opens the artefact and starts no
process. The memory only points; the artefact it points to is verified like any other, and anything that
could change the answer (a file of the model or of the threads, a library, a forgotten thread) changes the
request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import artifacts, models
from ..artifacts import Artifact
from ..errors import MissingArtifactError
from ..params import Options
from .vault import Vault

LIBRARIES = ("mlx", "mlx-lm", "numpy", "torch", "tokenizers", "transformers")

Progress = Callable[[int, Any], None]
"""`on_progress(model index, {"done", "total"})`."""


def run(
    fn: Callable[..., Path],
    options: Options,
    jobs: Mapping[str, Mapping[str, Any]],
    *,
    blas: str = "reference",
    on_progress: Progress | None = None,
) -> dict[str, Artifact]:
    """`fn(model=…, options=options, **jobs[model])` for each model under `blas`; returns model → artefact.

    Jobs hold plain values and artefacts; a worker is given an artefact's path. Two models run at a time.
    """
    keys = {model: _request(fn, model, options, job, blas) for model, job in jobs.items()}
    found = {model: _remembered(key) for model, key in keys.items()}
    todo = [model for model in jobs if found[model] is None]
    calls = [{"model": model, "options": options, **_paths(jobs[model])} for model in todo]
    for model, path in zip(todo, models.run_workers(fn, calls, blas=blas, on_progress=on_progress), strict=True):
        found[model] = artifacts.open_artifact(path)
        artifacts.write_json(_memory(keys[model]), {"artifact": str(path.relative_to(artifacts.artifacts_dir()))})
    return {model: found[model] for model in jobs}


def _request(fn: Callable, model: str, options: Options, job: Mapping[str, Any], blas: str) -> str:
    folder = models.find(models.split_budget(model)[0])
    threads = artifacts.root() / options.threads
    openblas = models.find_openblas()
    return artifacts.digest_json(
        {
            "stage": f"{fn.__module__}.{fn.__name__}",
            "code": _code(),
            "model": [model, _stamp(folder)],
            "threads": _stamp(threads),
            "options": {k: v for k, v in dataclasses.asdict(options).items() if k != "models"},
            "job": {name: _plain(value) for name, value in job.items()},
            "blas": [blas, openblas and str(openblas)],
            "libraries": {name: metadata.version(name) for name in LIBRARIES},
            "forgotten": sorted(Vault().forgotten()),
        }
    )


@cache
def _code() -> str:
    """Digest of this package's source: after an edit every stage looks again, and its artefact decides."""
    package = Path(__file__).resolve().parents[1]
    return artifacts.digest_json({str(p.relative_to(package)): artifacts.digest_file(p) for p in package.rglob("*.py")})


def _stamp(path: Path) -> list[list[Any]]:
    """Name, size and time of every file: cheap, and any edit changes it. The digests proper are the worker's."""
    files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    return [[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files]


def _plain(value: Any) -> Any:
    if isinstance(value, Artifact):
        return value.content
    if isinstance(value, Options):
        return {k: v for k, v in dataclasses.asdict(value).items() if k != "models"}
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def _paths(job: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.path if isinstance(value, Artifact) else value for name, value in job.items()}


def _memory(key: str) -> Path:
    return artifacts.artifacts_dir() / "requests" / f"{key[:32]}.json"


def _remembered(key: str) -> Artifact | None:
    if not _memory(key).is_file():
        return None
    try:
        return artifacts.open_artifact(artifacts.artifacts_dir() / artifacts.read_json(_memory(key))["artifact"])
    except MissingArtifactError as error:
        if error.file == artifacts.artifacts_dir() / artifacts.read_json(_memory(key))["artifact"]:
            return None  # the whole folder was cleaned away: build it again
        raise
