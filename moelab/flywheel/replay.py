"""Replay: recorded tokens become route labels for every position, and features when asked.

Three steps, each in a process of its own per model and BLAS:

1. `qualify` compares replay with decode under every identity asked for (Gate 1's evidence, `parity`);
2. the fastest identity that is exact becomes the *label identity*; without one, only rows that were really
   decoded keep a label;
3. `replay` writes route shards. A decoded row keeps the label its decode recorded; a prefilled row gets
   the replay's. `label_source` says which, on every row.

Sequences of the runtime holdout are refused, by digest: nothing that Gate 4 will be judged on is ever
replayed. Shards hold no token ids.

Source: AFN-021, "Clean-path replay", "Do not store every large activation".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import artifacts, models
from ..artifacts import Artifact
from ..errors import GateRefusedError, OwnershipError
from ..params import Options, param
from ..routes import CAPTURED, DECODED, REPLAYED, Routes, concat
from . import parity, stage
from .batches import BatchShape
from .batches import replay as replay_batches
from .capture import INDEX, CaptureOptions, capture
from .engine import ResidentEngine
from .observe import Observation
from .reader import Identity, ObservationReader
from .vault import Vault, check_authorised

THREADS = "threads.json"


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Options):
    notebook: ClassVar[str] = "21"

    identities: list[str] = param(
        ["reference", "openblas"], "BLAS identities to qualify", choices=("reference", "openblas", "auto")
    )
    chunk: int = param(256, "positions fed at once", min=1)
    batch_tokens: int = param(2048, "padded tokens of a batch, at most", min=1)
    shard_sequences: int = param(16, "sequences of a shard", min=1)
    compared_tokens: int = param(300, "decoded tokens to compare under an identity other than the capture's", min=1)
    chunks: list[int] = param([1, 7, 64, 256], "chunk sizes whose exactness is tried", min=1)
    weight_tolerance: float = param(1.0e-5, "largest difference of a routing weight that Gate 1 accepts", min=0.0)
    smallest_n: int = param(500, "decoded tokens that Gate 1 needs, for each model", min=1)
    speed_repeats: int = param(3, "pairs of decode and replay timed", min=1)

    @property
    def shape(self) -> BatchShape:
        return BatchShape(self.batch_tokens, self.chunk)


# ---------------------------------------------------------------- reading what was captured


@dataclass(frozen=True)
class Records:
    """The observations of one model: `index` entries as capture wrote them, records opened on demand."""

    artifact: Artifact

    @property
    def index(self) -> list[dict[str, Any]]:
        return artifacts.read_json(self.artifact.file(INDEX))

    @property
    def holdout(self) -> frozenset[str]:
        """Payload digests of the runtime holdout."""
        return frozenset(entry["payload"] for entry in self.index if entry["set"] == "runtime")

    def replayable(self) -> list[dict[str, Any]]:
        return [entry for entry in self.index if entry["set"] != "runtime"]

    def open(
        self, entries: Iterable[dict[str, Any]], loaded: models.LoadedModel, *, purpose: str
    ) -> Iterator[Observation]:
        """Decrypt and check records, in the order of `entries`.

        Raises:
            OwnershipError: a record of the runtime holdout asked for anything but evaluation, or a use that
                its owner did not authorise.
            RecordError, IdentityError, VaultError: as `ObservationReader` and `Vault`.
        """
        reader = ObservationReader(Identity.of(loaded), opener=Vault().open)
        for entry in entries:
            path = self.artifact.file(entry["file"])
            observation = reader.read(path)
            if purpose != "evaluate" and observation.payload in self.holdout:
                raise OwnershipError(
                    "the runtime holdout is never replayed",
                    file=path,
                    field="payload",
                    got=purpose,
                    expected="evaluate",
                )
            check_authorised(observation.header, purpose, today=date.today())
            yield observation


# ---------------------------------------------------------------- Gate 1's evidence


def qualify(
    options: ReplayOptions, *, on_progress: stage.Progress | None = None
) -> dict[str, dict[str, dict[str, Any]]]:
    """Model → identity → figures of Gate 1. An identity that this machine lacks has the one figure `absent`.

    Figures: those of `parity.Parity.figures`, `largest_exact_chunk`, `chunk_mismatches`, `speeds`,
    `runtime`, and `recorded` (whether the decode side is the recorded capture).
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
    loaded = models.load(model)
    records = Records(artifacts.open_artifact(observations))
    runtime = models.runtime_identity(loaded.precision)
    built = artifacts.build(
        "parity",
        inputs={"observations": records.artifact.content},
        params={**options.own(), "runtime": runtime},
        make=lambda folder: _qualify(folder, loaded, records, runtime, options),
    )
    return built.path


def _qualify(folder: Path, loaded, records: Records, runtime: dict[str, Any], options: ReplayOptions) -> dict[str, Any]:
    entries = [entry for entry in records.replayable() if entry["decoded"]]
    observed = list(records.open(entries, loaded, purpose="replay"))
    recorded = all(o.header.runtime == runtime for o in observed)
    if not recorded:
        observed = _until(observed, options.compared_tokens)
        with ResidentEngine(loaded) as engine:
            decoded = [parity.decode_again(engine, o, records.artifact.manifest.params["chunk"]) for o in observed]
    else:
        decoded = observed
    found = parity.compare(loaded, decoded, options.shape)
    few = _until(decoded, options.compared_tokens)
    chunk, by_chunk = parity.largest_exact_chunk(loaded, few, options.chunks, options.batch_tokens)
    longest = sorted((d.token_ids for d in decoded), key=len, reverse=True)[:8]
    speed = parity.speeds(loaded, longest, options.shape, repeats=options.speed_repeats)
    figures = found.figures()
    result = {
        **figures,
        "recorded": recorded,
        "largest_exact_chunk": chunk,
        "chunk_mismatches": {str(size): count for size, count in by_chunk.items()},
        "speeds": speed,
        "runtime": runtime,
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


# ---------------------------------------------------------------- shards


def replay(options: ReplayOptions, *, on_progress: stage.Progress | None = None) -> dict[str, Artifact]:
    """Route shards of every model, labelled as the module text says. Model → artefact of kind `routes`."""
    observed = capture(options.upstream(CaptureOptions))
    qualified = qualify(options, on_progress=on_progress)
    exact = {model: label_identity(qualified[model], options) for model in options.models}
    out: dict[str, Artifact] = {}
    for blas in sorted({exact[model] or "reference" for model in options.models}):
        group = [model for model in options.models if (exact[model] or "reference") == blas]
        jobs = {m: {"observations": observed[m], "exact": exact[m] is not None} for m in group}
        out |= stage.run(replay_model, options, jobs, blas=blas, on_progress=on_progress)
    return {model: out[model] for model in options.models}


def replay_model(model: str, options: ReplayOptions, observations: Path, exact: bool) -> Path:
    """One model under this process's BLAS; returns the folder of a `routes` artefact.

    `exact`: this identity passed Gate 1. Otherwise prefilled rows get no label and are left out, counted.
    """
    loaded = models.load(model)
    records = Records(artifacts.open_artifact(observations))
    own = {
        name: value
        for name, value in options.own().items()
        if name in ("chunk", "batch_tokens", "shard_sequences", "seed")
    }
    built = artifacts.build(
        "routes",
        inputs={"observations": records.artifact.content},
        params={**own, "exact": exact, "runtime": models.runtime_identity(loaded.precision)},
        make=lambda folder: _shards(folder, loaded, records, options, exact),
    )
    return built.path


def _shards(folder: Path, loaded, records: Records, options: ReplayOptions, exact: bool) -> dict[str, Any]:
    entries = records.replayable()
    total = sum(entry["tokens"] for entry in entries)
    counts = {"tokens": 0, "decode_labels": 0, "replay_labels": 0, "unlabelled": 0}
    table = []
    for number, start in enumerate(range(0, len(entries), options.shard_sequences)):
        part = entries[start : start + options.shard_sequences]
        path = folder / f"shard-{number:04d}.safetensors"
        if path.exists():
            arrays, header = artifacts.read_tensors(path)
        else:
            observed = list(records.open(part, loaded, purpose="replay"))
            arrays, header = _shard(loaded, observed, start, options.shape, exact)
            artifacts.write_tensors(path, arrays, header)
        for name in counts:
            counts[name] += header["counts"][name]
        table += [{**entry, "index": start + i, "shard": path.name} for i, entry in enumerate(part)]
        models.report_progress({"done": sum(e["tokens"] for e in entries[: start + len(part)]), "total": total})
    artifacts.write_json(folder / THREADS, table)
    return {**counts, "sequences": len(entries), "shards": number + 1}


def _shard(loaded, observed: list[Observation], first: int, shape: BatchShape, exact: bool) -> tuple[dict, dict]:
    rows: list[dict[str, np.ndarray] | None] = [None] * len(observed)
    for index, record in replay_batches(loaded, [o.token_ids for o in observed], shape):
        o = observed[index]
        decoded = o.phase == DECODED
        keep = decoded | exact
        label = {
            name: np.where(
                decoded.reshape(-1, *[1] * (getattr(o, name).ndim - 1)), getattr(o, name), getattr(record, name)
            )
            for name in ("ids", "weights", "margin")
        }
        rows[index] = {
            "ids": label["ids"][keep].astype(np.uint16),
            "weights": label["weights"][keep].astype(np.float16),
            # Scores beyond float16's range would become infinite; a margin that large decides nothing.
            "margin": np.minimum(label["margin"], 6.0e4)[keep].astype(np.float16),
            "position": o.ordinal[keep].astype(np.int32),
            "thread": np.full(int(keep.sum()), first + index, np.int32),
            "phase": o.phase[keep],
            "label_source": np.where(decoded, CAPTURED, REPLAYED).astype(np.uint8)[keep],
        }
    arrays = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    tokens = sum(len(o.token_ids) for o in observed)
    shape_ = loaded.geometry
    header = {
        "schema_version": 1,
        "record": "routes",
        "experts": shape_.experts,
        "layer_ids": list(shape_.layer_ids),
        "expert_bytes": list(shape_.layer_expert_bytes),
        "model": loaded.digests["model"],
        "prefixes": [parity.prefix_digest(o.token_ids) for o in observed],
        "counts": {
            "tokens": tokens,
            "decode_labels": int((arrays["label_source"] == CAPTURED).sum()),
            "replay_labels": int((arrays["label_source"] == REPLAYED).sum()),
            "unlabelled": tokens - len(arrays["ids"]),
        },
    }
    return arrays, header


def read_routes(artifact: Artifact) -> tuple[Routes, list[dict[str, Any]]]:
    """All shards as one `Routes`, validated, and the thread table; `Routes.thread` indexes the table."""
    parts = []
    for name in sorted(n for n in artifact.manifest.files if n.startswith("shard-")):
        arrays, header = artifacts.read_tensors(artifact.file(name))
        parts.append(
            Routes(
                ids=arrays["ids"],
                weights=arrays["weights"].astype(np.float32),
                margin=arrays["margin"].astype(np.float32),
                phase=arrays["phase"],
                thread=arrays["thread"],
                position=arrays["position"],
                label_source=arrays["label_source"],
                experts=header["experts"],
                layer_ids=tuple(header["layer_ids"]),
                expert_bytes=np.array(header["expert_bytes"], np.int64),
            )
        )
    if not parts:
        raise GateRefusedError("no route has a label", file=artifact.path, fix="see Gate 1")
    return concat(parts).validate(file=artifact.path), artifacts.read_json(artifact.file(THREADS))
