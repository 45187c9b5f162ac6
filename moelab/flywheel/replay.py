"""Replay: recorded tokens become route labels for every position.

A decoded row keeps the label that its decode recorded; a prefilled row gets the replay's, if the label
identity is exact (`qualification`). `label_source` says which, on every row. Sequences of the runtime
holdout are refused by digest: nothing that Gate 4 will be judged on is ever replayed. Shards hold no token
ids.

Source: AFN-021, "Clean-path replay", "Do not store every large activation".
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .. import artifacts, models
from ..artifacts import Artifact
from ..errors import GateRefusedError
from ..routes import CAPTURED, DECODED, REPLAYED, Routes, concat
from . import stage
from .batches import BatchShape
from .batches import replay as replay_batches
from .capture import CaptureOptions, capture
from .engine import opened
from .observations import Records
from .observe import Observation
from .proposals import prefix_digest
from .qualification import ReplayOptions, label_identity, qualify

THREADS = "threads.json"


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

    `exact`: this identity passed Gate 1. Otherwise prefilled rows get no label and are left out, counted. A streamed
    model is read once a shard: count `expert_bytes_read`, 0 for a resident one.
    """
    with opened(model) as loaded:
        records = Records(artifacts.open_artifact(observations))
        own = {
            name: value
            for name, value in options.own().items()
            if name in ("chunk", "batch_tokens", "shard_sequences", "seed")
        }
        width = 2 * loaded.geometry.layers * loaded.geometry.hidden  # float16, one kind, every layer
        built = artifacts.build(
            "routes",
            inputs={"observations": records.artifact.content},
            params={
                **own,
                "exact": exact,
                "feature_bytes_per_token": width,
                "runtime": models.runtime_identity(loaded.precision, loaded.residency),
            },
            make=lambda folder: _shards(folder, loaded, records, options, exact),
        )
    return built.path


def _shards(folder: Path, loaded, records: Records, options: ReplayOptions, exact: bool) -> dict[str, Any]:
    entries = records.replayable()
    total, began = sum(entry["tokens"] for entry in entries), loaded.bytes_read
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
    read = loaded.bytes_read - began  # by this build: a shard that an earlier one finished is not read for again
    return {**counts, "sequences": len(entries), "shards": number + 1, "expert_bytes_read": read}


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
        "prefixes": [prefix_digest(o.token_ids).hex() for o in observed],
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
