"""The streaming engine on a model: is it exact, as fast as the disk allows, and within its memory? Notebook 80.

Five studies, each beside its bound: equality with the resident model (`streaming_equality`), the store alone and under
a cache (`streaming_reads`), overlap on a throttled store (`streaming_overlap`), memory of a fresh process
(`streaming_memory`). `claims` holds their figures against what was asked of the engine; a claim without evidence is
neither held nor broken. Times are taken while the rest of the run stands still.

The routes are the model's own recorded decode, of owners that no predictor is trained on. What has to do with time is
also measured on a stand-in with experts of the size that people stream (`streaming_stand_in`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from .. import artifacts, disk, models, quiet
from ..errors import ParameterError, RecordError
from ..flywheel import stage
from ..flywheel.capture import CaptureOptions, capture
from ..flywheel.ceiling import routes_of
from ..flywheel.observations import Records
from ..models.runtime import active_blas
from ..params import Options, param
from ..routes import DECODED, Routes
from ..streaming.cache import eviction
from .streaming_claims import claims
from .streaming_memory import idle_memory, peak_memory
from .streaming_stand_in import SHORT, STAND_IN, stand_in

if TYPE_CHECKING:
    from ..models import LoadedModel

RESULT = "streaming.json"
FIGURES_VERSION = 8
"""Raise when `study` writes other figures, so that older artefacts are not taken for these."""
APART = 16 << 20
"""Bytes by which two idle processes of one kind may differ."""


@dataclass(frozen=True, kw_only=True)
class StreamingOptions(Options):
    notebook: ClassVar[str] = "80"

    prompt: int = param(40, "tokens of a prompt: the beginning of a thread", min=2)
    tokens: int = param(24, "tokens generated and compared at each budget", min=8)
    cycles: list[float] = param([1.0], "cache budgets compared, in token cycles; full is added", min=1.0)
    reads: int = param(128, "experts read in one turn of the throughput study", min=1)
    read_repeats: int = param(3, "pairs of turns, store and raw probe", min=2)
    depths: list[int] = param([1, 4], "threads reading at once", min=1)
    made_up_mb: list[int] = param(
        [1, 4], "sizes, in MiB, of made-up experts that are read beside the models'", min=1, max=256
    )
    stand_in_hidden: int = param(256, "width of the stand-in, a multiple of 128; at 768 an expert has .55 MB", min=128)
    disk_seconds: float = param(0.05, "seconds measured for each read size and depth", min=0.01)
    budgets: list[float] = param([0.125, 0.25, 0.5], "cache budgets, as shares of all expert bytes", min=0.01, max=1.0)
    policies: list[str] = param(
        ["lru", "layer-lfu", "recent-lfu", "expected-next-use"], "eviction policies", choices=(*eviction.POLICIES,)
    )
    cache_threads: int = param(4, "recorded threads replayed through cache and store, at most", min=2)
    cache_tokens: int = param(16, "decoded tokens of each, at most", min=1)
    ratios: list[float] = param([0.5, 1.0, 2.0], "time of a token's reads ÷ its compute", min=0.01)
    overlap_prompt: int = param(8, "tokens of the prompt of the overlap study", min=2)
    overlap_tokens: int = param(12, "tokens of an answer of the overlap study", min=4)
    overlap_repeats: int = param(
        1, "answers of each arm that count, after one that does not; twice as many of the models asked for", min=1
    )
    overlap_cycles: float = param(1.5, "cache of the overlap study, in token cycles", min=1.0)
    reserve_mb: int = param(32, "of the memory budget, kept for attention caches and activations, MiB", min=1)
    memory_share: float = param(
        0.25, "share of all expert bytes that the memory budget leaves room for", min=0.01, max=1.0
    )
    memory_tokens: int = param(24, "tokens of each of two answers while memory is watched", min=1)

    def __post_init__(self):
        super().__post_init__()
        if self.stand_in_hidden % 128:
            raise ParameterError(
                "an expert is half as wide as the model, in groups of 64", field="stand_in_hidden",
                got=self.stand_in_hidden, expected="a multiple of 128",
            )  # fmt: skip


def streaming(options: StreamingOptions, *, on_progress: stage.Progress | None = None) -> dict[str, dict[str, Any]]:
    """Model → figures: `sizes`, `disk`, `equality`, `reads`, `cache`, `overlap`, `memory`, `claims`. Of the stand-in,
    which comes last, those of time alone."""
    observed = capture(options.upstream(CaptureOptions))
    jobs = {model: {"observations": observed[model]} for model in options.models}
    found = stage.run(streaming_model, options, jobs, blas="auto", on_progress=on_progress)
    figures = {model: artifacts.read_json(a.file(RESULT)) for model, a in found.items()}
    return figures | {STAND_IN: stand_in(options)}


def streaming_model(model: str, options: StreamingOptions, observations: Path) -> Path:
    """One model in this process; returns the folder of a `streaming` artefact.

    Raises:
        ParameterError: the model is given with a memory budget; here it is also run resident, to compare.
    """
    name, budget = models.split_budget(model)
    if budget is not None:
        raise ParameterError(
            "streamed answers are compared with the resident model's", field="models", got=model, expected=name,
            fix="give the model without a budget: the notebook makes its own",
        )  # fmt: skip
    loaded = models.load(name)
    records = Records(artifacts.open_artifact(observations))
    entries = [e for e in records.replayable() if e["decoded"] and e["sequence"].startswith("forced")]

    def make(folder: Path) -> dict[str, Any]:
        observed = list(records.open(entries, loaded, purpose="evaluate"))
        routes = prefixes(
            routes_of(observed, loaded.geometry.layer_expert_bytes), options.cache_threads, options.cache_tokens
        )
        result = study(loaded, routes, prompts(observed, options.prompt), options, folder)
        artifacts.write_json(folder / RESULT, result)
        return {"content": artifacts.digest_json({"cache": result["cache"], "sizes": result["sizes"]})}

    return artifacts.build(
        "streaming",
        inputs={"observations": records.artifact.content},
        params={
            **options.own(),
            "runtime": models.runtime_identity(loaded.precision, loaded.residency),
            "figures_version": FIGURES_VERSION,
        },
        make=make,
    ).path


def prompts(observed: Sequence[Any], length: int) -> list[list[int]]:
    """Beginnings of two recorded sequences of different owners.

    Raises:
        RecordError: there are none of that length.
    """
    found: dict[str, list[int]] = {}
    for o in observed:
        if len(o.token_ids) >= length:
            found.setdefault(o.header.owner, [int(token) for token in o.token_ids[:length]])
    if len(found) < 2:
        raise RecordError(
            "two owners' texts are needed for prompts", field="token_ids", got=len(found),
            expected=f"2 of at least {length} tokens",
        )  # fmt: skip
    return list(found.values())[:2]


def prefixes(routes: Routes, threads: int, tokens: int) -> Routes:
    """The beginnings of the first `threads` sequences, each up to its `tokens`-th decoded token."""
    keep = []
    for thread in np.unique(routes.thread)[:threads]:
        rows = np.flatnonzero(routes.thread == thread)
        decoded = np.cumsum(routes.phase[rows] == DECODED)
        keep.append(rows[: int(np.searchsorted(decoded, min(tokens, decoded[-1]))) + 1])
    return routes.select(np.concatenate(keep))


def study(
    loaded: LoadedModel, routes: Routes, asked: list[list[int]], options: StreamingOptions, folder: Path
) -> dict[str, Any]:
    """All figures of one model; plain numbers. Packs are written below `folder` and removed."""
    from ..streaming import ExpertStore, open_store, write_pack
    from ..streaming.store.checkpoint import CheckpointSource
    from ..streaming.store.pack import PackSource
    from . import streaming_equality, streaming_overlap, streaming_rates, streaming_reads

    steps, precision, done = 6, loaded.precision, 0

    def told() -> None:
        nonlocal done
        done += 1
        models.report_progress({"done": done, "total": steps})

    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch, ExitStack() as stack:
        places = {"in place": loaded.path, "pack": Path(scratch) / "pack"}
        write_pack(loaded.path, places["pack"], precision=precision)
        sources = {
            "in place": CheckpointSource(places["in place"], precision),
            "pack": PackSource(places["pack"], precision),
        }
        stores = {place: stack.enter_context(open_store(path, precision=precision)) for place, path in places.items()}
        sizes = streaming_equality.geometry(loaded, stores)
        page_sized = -(-sizes["expert_bytes"] // 4096) * 4096
        equal = _equality(loaded, places, asked, sizes, options)
        told()
        cache = streaming_reads.cached(stores["pack"], routes, budgets=options.budgets, policies=options.policies)
        told()
        memory = _memory(loaded, asked, sizes, options)
        told()
        extra = [
            row
            for place, path in places.items()
            for row in streaming_reads.amplification(
                place, path, sources[place].files, reads=options.reads, seed=options.seed, precision=precision
            )
        ]
        stack.enter_context(quiet.timing())
        profile = disk.measure(
            scratch, sizes=sorted({page_sized, 1 << 20}), depths=sorted({*options.depths, 16}), file_bytes=64 << 20,
            seconds=options.disk_seconds, repeats=3, seed=options.seed,
        )  # fmt: skip
        told()
        read = [(place, sources[place], store) for place, store in stores.items()]
        as_stored = CheckpointSource(loaded.path, "stored")
        if as_stored.layouts != sources["in place"].layouts:
            read.append(("in place, as stored", as_stored, stack.enter_context(ExpertStore(as_stored))))
        rates = [
            {"place": place, **row}
            for place, source, store in read
            for row in streaming_rates.throughput(
                store, source, depths=options.depths, reads=options.reads, seed=options.seed,
                # Where every read is converted as well, three pairs say so.
                repeats=max(options.read_repeats // 4, 2) if place == "in place" else options.read_repeats,
            )
        ]  # fmt: skip
        told()
        overlapped = streaming_overlap.overlap(
            places["pack"], asked[0][: options.overlap_prompt], tokens=options.overlap_tokens,
            repeats=SHORT * options.overlap_repeats, ratios=options.ratios, cycles=options.overlap_cycles,
            policy_name="lru", readers=2, precision=precision,
        )  # fmt: skip
        told()
    figures = {
        "sizes": sizes,
        "disk": {"method": profile.method, "cells": profile.to_json()["cells"]},
        "equality": equal,
        "reads": {"throughput": rates, "amplification": extra},
        "cache": cache | {"bytes_per_s": profile.bytes_per_second(page_sized, max(options.depths))},
        "overlap": overlapped,
        "memory": memory,
    }
    return figures | {"claims": claims(figures)}


def _equality(
    loaded: LoadedModel,
    places: dict[str, Path],
    asked: list[list[int]],
    sizes: dict[str, Any],
    options: StreamingOptions,
) -> dict[str, Any]:
    """Under the reference BLAS at every budget; where this process has another, half as many tokens under that, at the
    smallest."""
    from .streaming_equality import equality, equality_of

    full = sizes["full_bytes"] / sizes["cycle_bytes"]
    given = {"places": places, "prompts": asked, "tokens": options.tokens, "cycle_bytes": sizes["cycle_bytes"]}
    given["budgets"] = sorted({float(c) for c in options.cycles if c < full} | {full})
    if active_blas() != "openblas":
        return equality(loaded, **given)
    job = {"model": loaded.path, "precision": loaded.precision, **given}
    [exact] = models.run_workers(equality_of, [job], blas="reference", workers=1)
    given |= {"places": {"pack": places["pack"]}, "prompts": asked[:1], "budgets": given["budgets"][:1]}
    given["tokens"] = -(-options.tokens // 2)
    here = equality(loaded, **given)
    return here | {"rows": exact["rows"] + here["rows"]}


def _memory(
    loaded: LoadedModel, asked: list[list[int]], sizes: dict[str, Any], options: StreamingOptions
) -> dict[str, Any]:
    """Two fresh processes, one after the other: what an idle engine takes, and answers under a budget made of that."""
    shared = {"path": loaded.path, "precision": loaded.precision}
    reserve = options.reserve_mb << 20
    [idle] = models.run_workers(idle_memory, [{**shared, "cache_bytes": sizes["cycle_bytes"]}], blas="auto", workers=1)
    budget = idle + APART + reserve + max(int(options.memory_share * sizes["full_bytes"]), sizes["cycle_bytes"])
    job = {"memory_budget_bytes": budget, "reserve_bytes": reserve, "prompts": asked, "tokens": options.memory_tokens}
    [memory] = models.run_workers(peak_memory, [{**shared, **job}], blas="auto", workers=1)
    return memory | {"other_bytes": sizes["other_bytes"], "full": sizes["full_bytes"]}
