"""Scoring a ranking of experts on held-out threads: the same way for a control and for a predictor.

Whole threads are scored, since history and caches need every earlier row, but only decoded rows of the
named set *count*. A horizon of one layer says nothing about the first layer, so that layer is left out
for every arm compared at it. Wasted bytes are net of an LRU cache of a stated share of all expert bytes,
replayed over the same routes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..artifacts import read_tensors, write_tensors
from ..errors import ContractError
from ..routes import DECODED, PREFILLED, Routes
from .calibration import calibration, conformal_candidates
from .dataset import Dataset
from .estimates import Estimate
from .metrics import by_group, by_layer, rank_blocks, summarise
from .residency import Visits, replay
from .waste import miss_waste

LATER = "without the first layer"
"""Group of figures in bytes over all layers but the first, for comparison at a horizon that cannot know it."""

Blocks = Callable[[Routes], Iterator[tuple[slice, np.ndarray]]]
"""Routes of the held-out threads → `(rows, scores [n,L,E])` covering them once."""


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The held-out threads of a dataset.

    Attributes:
        rows: `i64[N]` their rows in the dataset. routes: those rows.
        counted: set name → `bool[N]`, decoded rows of that set.
        cluster: `i32[N]`, one label a thread (two sequences of a thread share it).
        domain, owner: `[N]`.
        resident: `u8[N,L,ceil(E/8)]` what the stated cache held, packed along E.
        cache_bytes: its budget. hit_rate: of the counted rows.
    """

    rows: np.ndarray
    routes: Routes
    counted: dict[str, np.ndarray]
    cluster: np.ndarray
    domain: np.ndarray
    owner: np.ndarray
    resident: np.ndarray
    cache_bytes: int
    hit_rate: float

    @classmethod
    def of(cls, dataset: Dataset, sets: tuple[str, ...] | list[str], *, cache_fraction: float) -> HeldOut:
        """Threads of `sets`; the cache holds `cache_fraction` of all expert bytes.

        Raises:
            ContractError: no decoded row in the first of the sets: there is nothing to judge on.
        """
        chosen = np.array([entry["set"] in sets and entry["mode"] == "forced" for entry in dataset.table])
        rows = np.flatnonzero(chosen[dataset.routes.thread])
        routes = dataset.routes.select(rows)
        counted = {name: dataset.rows(name, decoded=True)[rows] for name in sets}
        if not counted[sets[0]].any():
            raise ContractError(f"no decoded row in the {sets[0]} set", field="sets", got=0, expected=">= 1 row")
        budget = int(cache_fraction * routes.experts * int(routes.expert_bytes.sum()))
        visits = Visits.of(routes.ids, routes.experts, routes.thread, prefilled=routes.phase == PREFILLED)
        residency = replay(visits, routes.expert_bytes, budget=budget, record=True)
        _, cluster = np.unique(dataset.of_thread("thread")[rows], return_inverse=True)
        decoded = routes.phase == DECODED
        return cls(
            rows=rows,
            routes=routes,
            counted=counted,
            cluster=cluster.astype(np.int32),
            domain=dataset.of_thread("domain")[rows],
            owner=dataset.of_thread("owner")[rows],
            resident=residency.resident,
            cache_bytes=budget,
            hit_rate=float(residency.hits[decoded].mean()),
        )


@dataclass(frozen=True, eq=False)
class Judged:
    """One ranking on the held-out threads.

    Attributes:
        name, horizon: of the ranking. layers: `bool[L]`, those that count at this horizon.
        ranks: `u16[N,L,K]` place of each used expert (see `metrics`).
        rows: long table, one dict a figure: set, metric, group, value, se, n, threads.
        wasted: set → bytes a token read for nothing at the stated miss recall, net of the cache.
    """

    name: str
    horizon: str
    layers: np.ndarray
    ranks: np.ndarray
    rows: list[dict[str, Any]]


def judge(
    name: str,
    horizon: str,
    blocks: Blocks,
    held: HeldOut,
    *,
    layers: np.ndarray,
    miss_recall: float,
    probabilities: bool = False,
) -> Judged:
    """Every figure of one ranking. `probabilities`: scores are in [0, 1] and calibration is asked as well."""
    routes = held.routes
    ranks = rank_blocks(blocks(routes), routes.ids)
    out: list[dict[str, Any]] = []

    def add(where: str, metric: str, group: str, estimate: Estimate) -> None:
        out.append(
            {"ranking": name, "horizon": horizon, "set": where, "metric": metric, "group": group} | estimate.plain()
        )

    def cut(kept: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
        for rows, scores in blocks(routes):
            yield rows, scores[:, kept]

    spans = {"all": layers}
    if layers.all() and len(layers) > 1:
        spans[LATER] = np.arange(len(layers)) > 0

    for where, counted in held.counted.items():
        if not counted.any():
            continue
        part, cluster = ranks[counted][:, layers], held.cluster[counted]
        for metric, estimate in summarise(part, cluster).items():
            add(where, metric, "all", estimate)
        for index, estimate in zip(
            np.flatnonzero(layers), by_layer(part, cluster, candidates=routes.top_k), strict=True
        ):
            add(where, "recall@1x", f"layer {routes.layer_ids[index]}", estimate)
        for domain, estimate in by_group(part, cluster, held.domain[counted], candidates=routes.top_k).items():
            add(where, "recall@1x", f"domain {domain}", estimate)
        for group, kept in spans.items():
            cost = miss_waste(
                cut(kept),
                routes.ids[:, kept],
                held.resident[:, kept],
                routes.expert_bytes[kept],
                held.cluster,
                miss_recall=miss_recall,
                counted=counted,
            )
            add(where, "wasted bytes/token", group, cost.wasted_bytes)
            add(where, "read bytes/token", group, cost.read_bytes)
            add(where, "demand bytes/token", group, cost.demand_bytes)
            needed = _exactly(cost.candidates, cost.wasted_bytes)
            add(where, f"candidates for {miss_recall:g} miss recall", group, needed)
        found = conformal_candidates(part, cluster) if len(np.unique(cluster)) > 1 else None
        if found is not None and found.candidates is not None:
            add(where, "candidates for .95 coverage", "all", _exactly(found.candidates, found.coverage))
            add(where, "coverage reached", "all", found.coverage)
        if probabilities:
            made = calibration(cut(layers), routes.ids[:, layers], held.cluster, counted=counted)
            add(where, "ece", "all", made.ece)
            for p, f, n in zip(made.confidence, made.frequency, made.count, strict=True):
                add(where, "reliability", f"{p:.6f}", Estimate(float(f), None, int(n), made.ece.clusters))
    return Judged(name, horizon, layers, ranks.astype(np.uint16), out)


def _exactly(value: float, like: Estimate) -> Estimate:
    """A figure without a spread of its own, on the items of another."""
    return Estimate(float(value), None, like.n, like.clusters)


def write_ranks(path: Path, judged: list[Judged], held: HeldOut, header: dict[str, Any]) -> None:
    """Ranks of several rankings over the same rows, so that they can be compared pair by pair later."""
    tensors = {f"ranks {j.name} | {j.horizon}": j.ranks for j in judged}
    tensors |= {f"counted {name}": counted for name, counted in held.counted.items()}
    tensors |= {"cluster": held.cluster, "rows": held.rows}
    layers = {f"{j.name} | {j.horizon}": [int(i) for i in np.flatnonzero(j.layers)] for j in judged}
    write_tensors(path, tensors, {**header, "record": "ranks", "schema_version": 1, "layers": layers})


def read_ranks(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Inverse of `write_ranks`: arrays and header."""
    return read_tensors(path)
