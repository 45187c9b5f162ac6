"""The snapshot: which rows may be learned from, which are held out, and proof that they do not touch.

Sets were assigned by owner when the decode was captured (`split`), before any window existed. Here each
sequence is cut into windows, which are *index ranges* into rows replayed with their full prefix, never a
re-run of a truncated text; windows that repeat text of a better protected set are dropped (`dedup`); and
everything that Gate 2 asks is counted. A predictor is trained on a snapshot and on nothing else (`dataset` opens one).

Edge sequences serve Gate 1 only. Of a sequence that the model wrote itself, only the decoded rows count:
its prompt is already there in the forced sequence of the same thread.

Source: AFN-021, "Split threads before creating windows" and Gate 2.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from .. import artifacts
from ..artifacts import Artifact
from ..errors import OwnershipError
from ..params import Options, param
from ..routes import DECODED, Routes
from ..threads import SYSTEM
from . import dedup, stage
from .capture import CaptureOptions, capture
from .dataset import WINDOWS
from .engine import opened
from .gates import Verdict, gate2
from .observations import Records
from .observe import Observation
from .qualification import ReplayOptions
from .replay import read_routes, replay
from .split import HOLDOUT_ORDER, SETS
from .vault import check_authorised

COVERAGE, CHECKS, DUPLICATES = "coverage.json", "checks.json", "duplicates.json"


@dataclass(frozen=True, kw_only=True)
class SnapshotOptions(Options):
    notebook: ClassVar[str] = "30"

    window: int = param(32, "rows of a window", min=8)
    threshold: float = param(0.5, "share of a window's shingles that makes it near-identical", min=0.05, max=1.0)
    smallest_validation_owners: int = param(2, "owners that the validation set needs", min=1)
    smallest_validation_threads: int = param(2, "threads that the validation set needs", min=1)
    smallest_train_tokens: int = param(300, "tokens that the training set needs", min=1)


def snapshot(options: SnapshotOptions, *, on_progress: stage.Progress | None = None) -> dict[str, Artifact]:
    """Snapshots of every model: model → artefact of kind `snapshot`."""
    observed = capture(options.upstream(CaptureOptions))
    routes = replay(options.upstream(ReplayOptions))
    jobs = {m: {"observations": observed[m], "routes": routes[m]} for m in options.models}
    return stage.run(snapshot_model, options, jobs, on_progress=on_progress)


def snapshot_model(model: str, options: SnapshotOptions, observations: Path, routes: Path) -> Path:
    """One model in this process; returns the artefact's folder."""
    with opened(model) as loaded:
        records, rows = Records(artifacts.open_artifact(observations)), artifacts.open_artifact(routes)
        built = artifacts.build(
            "snapshot",
            inputs={"observations": records.artifact.content, "routes": rows.content},
            params={**options.own(), "runtime": records.artifact.manifest.params["runtime"]},
            make=lambda folder: _build(folder, loaded, records, rows, options),
        )
    return built.path


def _build(folder: Path, loaded, records: Records, rows: Artifact, options: SnapshotOptions) -> dict[str, Any]:
    routes, table = read_routes(rows)
    codec = loaded.tokenizer
    everything = [e for e in records.index if e["mode"] == "sampled" or e["sequence"].startswith("forced")]
    observed = dict(
        zip((e["file"] for e in everything), records.open(everything, loaded, purpose="evaluate"), strict=True)
    )

    texts, first = _texts(everything, observed, codec, options.window)
    sets = {e["thread"]: e["set"] for e in everything}
    allowed = _system_prompts(observed.values(), codec)
    found = dedup.near_identical(texts, encode=codec.encode, allowed=allowed, threshold=options.threshold)
    dropped = dedup.to_drop(found, sets, HOLDOUT_ORDER)
    without = dedup.to_drop(
        dedup.near_identical(texts, encode=codec.encode, threshold=options.threshold), sets, HOLDOUT_ORDER
    )

    windows = _windows(table, routes, first, options.window, dropped)
    kept = {t: [x for i, x in enumerate(parts) if (t, i) not in dropped] for t, parts in texts.items()}
    remaining = dedup.to_drop(
        dedup.near_identical(texts | kept, encode=codec.encode, allowed=allowed, threshold=options.threshold),
        sets,
        HOLDOUT_ORDER,
    )
    checks = _checks(records, rows, table, observed, sets, len(remaining))
    artifacts.write_tensors(
        folder / WINDOWS,
        windows,
        {"schema_version": 1, "record": "windows", "sets": list(SETS), "window": options.window},
    )
    artifacts.write_json(folder / COVERAGE, _coverage(everything))
    artifacts.write_json(folder / CHECKS, checks)
    duplicates = [
        {
            "thread": m.thread,
            "window": m.window,
            "other": m.other,
            "share": round(m.share, 4),
            "dropped": key in dropped,
        }
        for m in found
        for key in [(m.thread, m.window)]
    ]
    artifacts.write_json(folder / DUPLICATES, duplicates)
    size = windows["stop"] - windows["start"]
    counts = {f"{name}_tokens": int(size[windows["set"] == i].sum()) for i, name in enumerate(SETS)}
    for name in SETS:
        mine = [e for e in everything if e["set"] == name]
        counts |= {
            f"{name}_threads": len({e["thread"] for e in mine}),
            f"{name}_owners": len({e["owner"] for e in mine}),
        }
    return {
        **counts,
        "windows": len(size),
        "windows_dropped": len(dropped),
        "windows_dropped_without_allow_list": len(without),
        "near_identical_pairs": len({tuple(sorted((m.thread, m.other))) for m in found}),
    }


def _texts(
    entries, observed: dict[str, Observation], codec, window: int
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """Text of every window of every thread's forced sequences, by thread: what the shingle join reads.

    Also the place among them of each record's first window. A last window too short to hold shingles of its
    own is read together with the tokens before it.
    """
    texts: dict[str, list[str]] = {}
    first: dict[str, int] = {}
    for entry in entries:
        first[entry["file"]] = 0
        if entry["mode"] == "forced":
            ids = observed[entry["file"]].token_ids
            parts = texts.setdefault(entry["thread"], [])
            first[entry["file"]] = len(parts)
            for start in range(0, len(ids), window):
                begin = max(0, min(start, len(ids) - 2 * dedup.SHINGLE))
                parts.append(codec.decode(ids[begin : start + window].tolist()))
    return texts, first


def _system_prompts(observed, codec) -> list[str]:
    """System messages that more than one thread has: allow-listed, and reported with and without."""
    seen: dict[str, set[str]] = {}
    for o in observed:
        ends = [*o.message_start[1:], len(o.token_ids)]
        for role, start, end in zip(o.role, o.message_start, ends, strict=True):
            if role == SYSTEM:
                seen.setdefault(codec.decode(o.token_ids[start:end].tolist()), set()).add(o.header.thread)
    return sorted(text for text, threads in seen.items() if len(threads) > 1)


def _windows(table, routes: Routes, first: dict[str, int], window: int, dropped) -> dict[str, np.ndarray]:
    """Index ranges `[start, stop)` into the rows of `routes`: arrays start, stop i64, thread i32, set u8."""
    out: dict[str, list[int]] = {"start": [], "stop": [], "thread": [], "set": []}
    begins = np.searchsorted(routes.thread, np.arange(len(table)))
    ends = np.searchsorted(routes.thread, np.arange(len(table)), side="right")
    for entry in table:
        if entry["file"] not in first:  # an edge sequence
            continue
        gone = {i for t, i in dropped if t == entry["thread"]}
        if gone and entry["mode"] == "sampled":  # answers to a question that a better protected set asks too
            continue
        begin, end = int(begins[entry["index"]]), int(ends[entry["index"]])
        position = routes.position[begin:end]
        use = np.ones(end - begin, bool) if entry["mode"] == "forced" else routes.phase[begin:end] == DECODED
        tile = position // window
        use &= ~np.isin(tile, [i - first[entry["file"]] for i in gone])
        for index in np.unique(tile[use]):
            inside = np.flatnonzero(use & (tile == index))
            for run in np.split(inside, np.flatnonzero(np.diff(inside) > 1) + 1):
                out["start"].append(begin + int(run[0]))
                out["stop"].append(begin + int(run[-1]) + 1)
                out["thread"].append(entry["index"])
                out["set"].append(SETS.index(entry["set"]))
    types = {"start": np.int64, "stop": np.int64, "thread": np.int32, "set": np.uint8}
    return {name: np.array(values, types[name]) for name, values in out.items()}


def _checks(records: Records, rows: Artifact, table, observed, sets, remaining: int) -> dict[str, int]:
    """Everything that must be zero for Gate 2, counted."""
    owners: dict[str, set[str]] = {}
    threads: dict[str, set[str]] = {}
    for entry in records.index:
        # Train and temporal holdout may share owners: the latter asks about drift over time, not over people.
        name = "train" if entry["set"] == "temporal" else entry["set"]
        owners.setdefault(entry["owner"], set()).add(name)
        threads.setdefault(entry["thread"], set()).add(entry["set"])
    headers = [o.header for o in observed.values()]
    identity = ("model", "tokenizer", "template", "layer_ids", "experts", "top_k")
    replayed = {entry["payload"] for entry in table}

    def refused(purpose: str) -> int:
        count = 0
        for header in headers:
            if sets[header.thread] != "runtime":
                try:
                    check_authorised(header, purpose, today=date.today())
                except OwnershipError:
                    count += 1
        return count

    return {
        "owners_in_two_sets": sum(len(found) > 1 for found in owners.values()),
        "threads_in_two_sets": sum(len(found) > 1 for found in threads.values()),
        "near_identical_left": remaining,
        "runtime_records_replayed": len(records.holdout & replayed),
        "records_not_authorised": refused("train"),
        "identities_beyond_one": len({tuple(getattr(h, name) for name in identity) for h in headers}) - 1,
        "runtimes_beyond_one": len({artifacts.digest_json(h.runtime) for h in headers}) - 1,
        "rows_of_another_capture": int(rows.manifest.inputs["observations"] != records.artifact.content),
    }


def _coverage(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Threads and tokens of each set by language, domain, length, tool calls and reasoning, in long form."""
    tally: Counter = Counter()
    for entry in entries:
        if entry["mode"] != "forced":
            continue
        kinds = {
            "language": entry["language"],
            "domain": entry["domain"],
            "length": _bucket(entry["tokens"] + entry["beyond"]),
            "tool calls": "with" if entry["tool_calls"] else "without",
            "reasoning": "with" if entry["reasoning_tokens"] else "without",
        }
        for kind, value in kinds.items():
            tally[entry["set"], kind, value, "threads"] += 1
            tally[entry["set"], kind, value, "tokens"] += entry["tokens"]
    keys = sorted({key[:3] for key in tally})
    return [
        {"set": s, "kind": k, "value": v, "threads": tally[s, k, v, "threads"], "tokens": tally[s, k, v, "tokens"]}
        for s, k, v in keys
    ]


def _bucket(tokens: int) -> str:
    for edge in (80, 160, 320, 640):
        if tokens < edge:
            return f"under {edge}"
    return "640 and more"


def verdict(model: str, artifact: Artifact, options: SnapshotOptions) -> Verdict:
    """Gate 2 on one model's snapshot."""
    counts = artifact.counts
    keep = [f"{name}_{what}" for name in SETS for what in ("owners", "threads", "tokens")]
    return gate2(
        model=model,
        violations=artifacts.read_json(artifact.file(CHECKS)),
        counts={name: counts[name] for name in keep},
        smallest={
            "validation_owners": options.smallest_validation_owners,
            "validation_threads": options.smallest_validation_threads,
            "train_tokens": options.smallest_train_tokens,
        },
        figures={name: counts[name] for name in ("windows", "windows_dropped", "near_identical_pairs")},
        inputs={"snapshot": artifact.content, **artifact.manifest.inputs},
        runtime=artifact.manifest.params["runtime"],
    )
