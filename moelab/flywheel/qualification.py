"""Which runtime identity may label: replay held against decode, under every BLAS asked for (Gate 1).

Labels may come from the fastest identity that is exact. Where none is, only rows that were really decoded
keep a label.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import artifacts, models
from ..params import Options, param
from ..routes import DECODED
from . import parity, stage
from .batches import BatchShape
from .capture import CaptureOptions, capture
from .engine import LiveEngine, opened
from .gates import Verdict, gate1
from .observations import Records

FIGURES_VERSION = 4
"""Raise when `_qualify` writes other figures, so that older artefacts are not taken for these."""
COUNTS = ("order_mismatches", "set_mismatches", "token_mismatches", "position_mismatches", "prefix_mismatches")


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Options):
    notebook: ClassVar[str] = "21"

    identities: list[str] = param(
        ["reference", "openblas"], "BLAS identities to qualify", choices=("reference", "openblas", "auto")
    )
    chunk: int = param(96, "positions fed at once", min=1)
    batch_tokens: int = param(1024, "padded tokens of a batch, at most", min=1)
    shard_sequences: int = param(16, "sequences of a shard", min=1)
    compared_tokens: int = param(120, "decoded tokens to compare, at least; whole sequences are taken", min=1)
    chunk_tokens: int = param(40, "decoded tokens on which the chunk sizes are tried", min=1)
    chunks: list[int] = param([1, 7, 96], "chunk sizes whose exactness is tried", min=1)
    weight_tolerance: float = param(1.0e-5, "largest difference of a routing weight that Gate 1 accepts", min=0.0)
    smallest_n: int = param(100, "decoded tokens that Gate 1 needs, for each model", min=1)
    speed_sequences: int = param(3, "sequences that the timed replay pushes through", min=1)
    speed_repeats: int = param(2, "pairs of decode and replay timed", min=1)

    @property
    def shape(self) -> BatchShape:
        return BatchShape(self.batch_tokens, self.chunk)


def qualify(
    options: ReplayOptions, *, on_progress: stage.Progress | None = None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Model → identity → figures of Gate 1. An identity that this machine lacks has the one figure `absent`.

    Figures: those of `parity.Parity.figures`, `largest_exact_chunk`, `chunk_mismatches`,
    `diagnostic`, `speeds`, `runtime`, and `recorded` (whether the decode side is the recorded capture).
    """
    observed = capture(options.upstream(CaptureOptions))
    out: dict[str, dict[str, dict[str, Any]]] = {model: {} for model in options.models}
    for blas in options.identities:
        if blas == "openblas" and models.find_openblas() is None:
            absent = "OpenBLAS is not installed (libopenblas0-pthread, or MOELAB_OPENBLAS)"
            for model in options.models:
                out[model][blas] = {"absent": absent}
            continue
        jobs = {model: {"observations": observed[model]} for model in options.models}
        for model, found in stage.run(qualify_model, options, jobs, blas=blas, on_progress=on_progress).items():
            out[model][blas] = artifacts.read_json(found.file("parity.json"))
    return out


def qualify_model(model: str, options: ReplayOptions, observations: Path) -> Path:
    """One model under this process's BLAS; returns the folder of a `parity` artefact."""
    with opened(model) as loaded:
        records = Records(artifacts.open_artifact(observations))
        runtime = models.runtime_identity(loaded.precision, loaded.residency)
        built = artifacts.build(
            "parity",
            inputs={"observations": records.artifact.content},
            params={**options.own(), "runtime": runtime, "figures_version": FIGURES_VERSION},
            make=lambda folder: _qualify(folder, loaded, records, runtime, options),
        )
    return built.path


def _qualify(folder: Path, loaded, records: Records, runtime: dict[str, Any], options: ReplayOptions) -> dict[str, Any]:
    entries = [entry for entry in records.replayable() if entry["decoded"]]
    observed = list(records.open(entries, loaded, purpose="replay"))
    recorded = all(o.header.runtime == runtime for o in observed)
    # Edge sequences come last in a capture and are what a comparison must not miss.
    edges = [o for o in observed if o.header.sequence.startswith("edge")]
    observed = (
        _until([o for o in observed if not o.header.sequence.startswith("edge")], options.compared_tokens) + edges
    )
    if not recorded:
        with LiveEngine(loaded) as engine:
            decoded = [parity.decode_again(engine, o, records.artifact.manifest.params["chunk"]) for o in observed]
    else:
        decoded = observed
    found = parity.compare(loaded, decoded, options.shape)
    few = _until(decoded, options.chunk_tokens)
    chunk, by_chunk = parity.largest_exact_chunk(loaded, few, options.chunks, options.batch_tokens)
    longest = sorted((d.token_ids for d in decoded), key=len, reverse=True)[: options.speed_sequences]
    speed = parity.speeds(loaded, longest, options.shape, repeats=options.speed_repeats)
    figures = found.figures()
    result = {
        **figures,
        "recorded": recorded,
        "largest_exact_chunk": chunk,
        "chunk_mismatches": {str(size): count for size, count in by_chunk.items()},
        "diagnostic": parity.diagnose(loaded, longest[0], options.shape, folder),
        "speeds": speed,
        "runtime": runtime,
        "inputs": {"observations": records.artifact.content},
    }
    artifacts.write_json(folder / "parity.json", result)
    return {"content": artifacts.digest_json(figures), "decoded": found.decoded, "rows": found.rows}


def _until(items: list, tokens: int) -> list:
    """The first items that together hold `tokens` decoded tokens."""
    taken, count = [], 0
    for item in items:
        if count >= tokens:
            break
        taken.append(item)
        count += int((item.phase == DECODED).sum())
    return taken


def label_identity(figures: dict[str, dict[str, Any]], options: ReplayOptions) -> str | None:
    """The fastest identity whose replay is exact over enough tokens, or None."""
    exact = {
        blas: float(np.median(f["speeds"]["replay"]))
        for blas, f in figures.items()
        if "absent" not in f
        and not any(f[k] for k in f if k.endswith("_mismatches") and k != "chunk_mismatches")
        and f["weight_error"] <= options.weight_tolerance
        and f["decoded_tokens"] >= options.smallest_n
    }
    return max(exact, key=exact.get) if exact else None


def verdict(model: str, figures: dict[str, dict[str, Any]], options: ReplayOptions) -> Verdict:
    """Gate 1 on one model: judged on the label identity, else on the identity of the capture."""
    chosen = label_identity(figures, options)
    absent = {blas: f["absent"] for blas, f in figures.items() if "absent" in f}
    figures = {blas: f for blas, f in figures.items() if blas not in absent}
    if not figures:
        nothing = dict.fromkeys((*COUNTS, "decoded_tokens", "rows", "weight_error"), 0)
        limits = {"weight_tolerance": options.weight_tolerance, "smallest_n": options.smallest_n}
        return gate1(model=model, **nothing, **limits, figures={"identity": "none"}, measured=absent)
    recorded = [blas for blas, f in figures.items() if f.get("recorded")]
    f = figures[chosen or (recorded or list(figures))[0]]
    others = {f"{blas} rank mismatches": other["order_mismatches"] for blas, other in figures.items() if other is not f}
    return gate1(
        model=model,
        decoded_tokens=f["decoded_tokens"],
        rows=f["rows"],
        **{name: f[name] for name in COUNTS},
        weight_error=f["weight_error"],
        weight_tolerance=options.weight_tolerance,
        smallest_n=options.smallest_n,
        figures={
            "identity": chosen or "none",
            # Zero of n rows says that the rate is below 3/n with 95 % confidence (rule of three), and no more.
            "mismatch_rate_below": 3 / max(1, f["rows"]) if not f["order_mismatches"] else None,
            "largest_exact_chunk": f["largest_exact_chunk"],
            "features_stored_equal_recomputed": "yes" if f["diagnostic"]["stored_equal"] else "no",
        },
        measured={
            **others,
            "replay_tokens_per_second": float(np.median(f["speeds"]["replay"])),
            "decode_tokens_per_second": float(np.median(f["speeds"]["decode"])),
        },
        runtime=f["runtime"],
        inputs=f["inputs"],
    )
