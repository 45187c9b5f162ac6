"""What a leaky split would have bought, in numbers: one predictor, two ways to split the same rows.

The predictor is a table: which experts followed this token, and this pair of tokens, in training. It needs
no features and remembers what it saw, which is what a leak rewards. It is scored on windows shuffled over
all threads, and on the owner split; the test part is of the same size in both.

Source: AFN-021, "Split threads before creating windows" ("the validation score will be inflated").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .. import artifacts
from ..artifacts import Artifact
from . import stage
from .capture import CaptureOptions, capture
from .controls import used
from .dataset import WINDOWS, Dataset, open_dataset
from .engine import opened
from .estimates import Estimate
from .metrics import ranks, recall
from .observations import Records
from .qualification import ReplayOptions
from .replay import replay
from .snapshot import SnapshotOptions, snapshot
from .split import SETS

RESULT = "leakage.json"


class TokenTable:
    """Share of each expert after a token, and after a pair of tokens: backs off where a pair is rare.

    `fit(pairs i64[N,2], hot f32[N,L,E])`; `scores(pairs) -> f32[M,L,E]` in [0, 1].
    """

    def fit(self, pairs: np.ndarray, hot: np.ndarray) -> TokenTable:
        self.popularity = hot.mean(0)
        self._tables = [_Means(pairs[:, 1], hot), _Means(_joined(pairs), hot)]
        return self

    def scores(self, pairs: np.ndarray) -> np.ndarray:
        out = np.repeat(self.popularity[None], len(pairs), axis=0)
        for table, keys in zip(self._tables, (pairs[:, 1], _joined(pairs)), strict=True):
            mean, count = table.look_up(keys)
            trust = (count / (count + 1.0))[:, None, None].astype(np.float32)
            out = trust * mean + (1 - trust) * out
        return out


class _Means:
    """Mean of `values[N, …]` by integer key."""

    def __init__(self, keys: np.ndarray, values: np.ndarray):
        order = np.argsort(keys, kind="stable")
        self.keys, start, self.count = np.unique(keys[order], return_index=True, return_counts=True)
        self.mean = np.add.reduceat(values[order], start, axis=0) / self.count[:, None, None]

    def look_up(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Means and counts; a key that was never seen has count 0."""
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return self.mean[place], np.where(self.keys[place] == keys, self.count[place], 0)


def _joined(pairs: np.ndarray) -> np.ndarray:
    return pairs[:, 0] * (1 << 32) + pairs[:, 1]


def leakage(options: SnapshotOptions, *, on_progress: stage.Progress | None = None) -> dict[str, dict[str, Any]]:
    """Model → split (`shuffled windows`, `owner split`) → recall at 1 x K with standard error, n and threads."""
    observed = capture(options.upstream(CaptureOptions))
    routes = replay(options.upstream(ReplayOptions))
    snapshots = snapshot(options)
    jobs = {m: {"observations": observed[m], "routes": routes[m], "snapshots": snapshots[m]} for m in options.models}
    found = stage.run(leakage_model, options, jobs, on_progress=on_progress)
    return {model: artifacts.read_json(artifact.file(RESULT)) for model, artifact in found.items()}


def leakage_model(model: str, options: SnapshotOptions, observations: Path, routes: Path, snapshots: Path) -> Path:
    """One model in this process; returns the artefact's folder."""
    with opened(model) as loaded:
        records = Records(artifacts.open_artifact(observations))
        dataset = open_dataset(artifacts.open_artifact(snapshots), artifacts.open_artifact(routes))
        built = artifacts.build(
            "leakage",
            inputs={"snapshot": dataset.artifact.content},
            params={"seed": options.seed},
            make=lambda folder: _build(folder, loaded, records, dataset, options.seed),
        )
    return built.path


def _build(folder: Path, loaded, records: Records, dataset: Dataset, seed: int) -> dict[str, Any]:
    tokens = [o.token_ids for o in records.open(dataset.table, loaded, purpose="train")]
    pairs = _pairs(dataset, tokens)
    windows = _windows(dataset.artifact, ("train", "validation"))
    held = np.array([name == "validation" for name, _ in windows])
    shuffled = np.random.default_rng(seed).permutation(held)
    result = {}
    for split, test in (("shuffled windows", shuffled), ("owner split", held)):
        found = _score(dataset, pairs, windows, test)
        result[split] = found.plain()
    artifacts.write_json(folder / RESULT, result)
    return {}


def _pairs(dataset: Dataset, tokens: list[np.ndarray]) -> np.ndarray:
    """`i64[T,2]` the token before (-1 at the start) and the token itself, for every row."""
    out = np.empty((dataset.routes.tokens, 2), np.int64)
    first = np.searchsorted(dataset.routes.thread, np.arange(len(tokens)))
    last = np.searchsorted(dataset.routes.thread, np.arange(len(tokens)), side="right")
    for ids, start, stop in zip(tokens, first, last, strict=True):
        position = dataset.routes.position[start:stop]
        out[start:stop, 1] = ids[position]
        out[start:stop, 0] = np.where(position > 0, ids[np.maximum(position - 1, 0)], -1)
    return out


def _windows(artifact: Artifact, sets: tuple[str, ...]) -> list[tuple[str, np.ndarray]]:
    """`(set, rows)` of each window of the named sets."""
    arrays, _ = artifacts.read_tensors(artifact.file(WINDOWS))
    return [
        (SETS[name], np.arange(start, stop))
        for start, stop, name in zip(arrays["start"], arrays["stop"], arrays["set"], strict=True)
        if SETS[name] in sets
    ]


def _score(dataset: Dataset, pairs: np.ndarray, windows: list, test: np.ndarray) -> Estimate:
    fit = np.concatenate([rows for (_, rows), held in zip(windows, test, strict=True) if not held])
    score = np.concatenate([rows for (_, rows), held in zip(windows, test, strict=True) if held])
    routes = dataset.routes.select(np.sort(fit))
    table = TokenTable().fit(pairs[np.sort(fit)], used(routes))
    ids, cluster = dataset.routes.ids[score], dataset.of_thread("thread")[score]
    found = np.concatenate([ranks(table.scores(pairs[part]), dataset.routes.ids[part]) for part in _parts(score)])
    return recall(found, np.unique(cluster, return_inverse=True)[1], candidates=ids.shape[-1])


def _parts(rows: np.ndarray, size: int = 1024) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
