"""Calibration: what a reference model costs in nats, how it routes, and how real models route.

    python -m moelab.reference.calibration softmax sigmoid --data "$MOELAB_DATA"

runs validation text through a checkpoint (windows of the training length, prefill, float32), and writes
`calibration.json` beside its weights and the tables of its model card. Figures of real models come from
recorded traces and counts in the same folder of data; they are computed here, by the same code.

Every window is a thread of its own: nothing is carried from one to the next. Figures "along a thread" use
the first 156 rows of a window and score the last 128 of them, the length of the recorded traces; figures
"from other text" are fitted on the first half of each domain's windows and scored on the second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from ..artifacts import digest_file, read_json, write_json
from ..commands import Parser
from ..errors import MissingArtifactError
from ..routes import PREFILLED, Routes, read_trace
from .corpus import read_corpus
from .figures import domain_distance, load_balance, route_figures, use_counts
from .tokens import encode, load_tokenizer, windows

SCHEMA_VERSION = 1
FILE = "calibration.json"
PROMPT, DECODED = 28, 128
"""Rows of a recorded trace: about so many of a prompt, then so many decoded."""
TRACES = {"Qwen3-30B-A3B": "qwen.route.csv.gz", "gemma-4-26B-A4B": "gemma.route.csv.gz"}
COUNTS = {"OLMoE-1B-7B": "olmoe_1b7b_domain_counts.npz"}
COUNTED_LAYERS = (0, 7, 15)
NAMED_PAIRS = (("code_py", "en_prose"), ("book", "github"))
"""The pair of domains that is shown by name: program text against prose, in either set of names."""


def measure(*, model: str, tokens: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Run windows `i32[n,T]` of each domain through a model: losses, expert ids, and what ran them.

    For a process of its own, so that the BLAS can be chosen (`models.run_workers`).
    """
    import mlx.core as mx

    from ..models import load, report_progress, runtime_identity

    loaded = load(model)
    losses, ids = {}, {}
    for domain, rows in tokens.items():
        parts, sums = [], []
        for start in range(0, len(rows), 4):
            batch = mx.array(rows[start : start + 4])
            with loaded.tap() as tap:
                logits = loaded.model(batch)
                nats = mx.logsumexp(logits[:, :-1], axis=-1)
                nats = nats - mx.take_along_axis(logits[:, :-1], batch[:, 1:, None], axis=-1)[..., 0]
                mx.eval(nats, *tap.pending())
                parts.append(tap.take().ids)
            sums.append(np.array(nats, np.float64))
        ids[domain] = np.concatenate(parts)
        values = np.concatenate(sums)
        losses[domain] = {"nats": round(float(values.mean()), 4), "tokens": values.size}
        report_progress(f"{model} {domain} {losses[domain]['nats']:.3f}")
    geometry = loaded.geometry
    return {
        "loss": losses,
        "ids": ids,
        "experts": geometry.experts,
        "layer_ids": geometry.layer_ids,
        "runtime": runtime_identity(loaded.precision),
    }


def as_routes(ids: np.ndarray, experts: int, layer_ids: Iterable[int], first_thread: int = 0) -> Routes:
    """Routes of windows `u16[n,T,L,K]`, each window a thread."""
    count, length = ids.shape[:2]
    return Routes(
        ids=ids.reshape(-1, *ids.shape[2:]),
        experts=experts,
        layer_ids=tuple(layer_ids),
        phase=np.full(count * length, PREFILLED, np.uint8),
        thread=np.repeat(np.arange(first_thread, first_thread + count, dtype=np.int32), length),
        position=np.tile(np.arange(length, dtype=np.int32), count),
    ).validate()


def calibrate(
    model: str, corpus_folder: str | Path, *, limit: int = 64, window: int = 256, blas: str = "auto"
) -> dict[str, Any]:
    """Losses and route figures of a model on the validation text of a corpus, as plain values.

    `limit` windows of `window` tokens a domain. Raises as `read_corpus`, `windows` and `models.load`.
    """
    from ..models import find, run_workers

    corpus = read_corpus(corpus_folder)
    streams = encode(corpus.documents["val"], load_tokenizer(find(model) / "tokenizer.json"))
    tokens = {name: windows(stream, window, limit=limit, domain=name) for name, stream in sorted(streams.items())}
    run = run_workers(
        measure,
        [{"model": str(model), "tokens": tokens}],
        blas=blas,
        workers=1,
        on_progress=lambda _, message: print(message, file=sys.stderr, flush=True),
    )[0]
    halves = [{d: part[: len(part) // 2] for d, part in run["ids"].items()}]
    halves.append({d: part[len(part) // 2 :] for d, part in run["ids"].items()})
    first, second = (as_routes(np.concatenate([*half.values()]), run["experts"], run["layer_ids"]) for half in halves)
    short = as_routes(
        np.concatenate([part[:, : PROMPT + DECODED] for part in run["ids"].values()]), run["experts"], run["layer_ids"]
    )
    counts = {d: use_counts(as_routes(part, run["experts"], run["layer_ids"])) for d, part in run["ids"].items()}
    floor = [domain_distance({"a": _count(run, a), "b": _count(run, b)})["a", "b"] for a, b in _pairs(halves)]
    licences = _licences(Path(corpus_folder))
    return {
        "schema_version": SCHEMA_VERSION,
        "files": files(find(model)),
        "runtime": run["runtime"],
        "text": {"corpus": corpus.digest, "split": "val", "window": window, "windows_a_domain": limit},
        "loss": {domain: {**loss, **licences.get(domain, {})} for domain, loss in run["loss"].items()},
        "mean_loss": round(float(np.mean([loss["nats"] for loss in run["loss"].values()])), 4),
        "along_thread": route_figures(short, short.position >= PROMPT).plain(),
        "from_other_text": route_figures(second, second.position > 0, fitted_on=first).plain(),
        "domains": {**distances(counts), "same_domain": np.mean(floor, axis=0).round(3).tolist()},
        "load": load_balance(sum(_share(part) for part in counts.values())),
    }


def files(folder: Path) -> dict[str, str]:
    """Digests of what the figures of a checkpoint depend on: its weights, configuration and tokenizer."""
    names = ("config.json", "tokenizer.json", *(path.name for path in folder.glob("model*.safetensors")))
    return {name: digest_file(folder / name) for name in sorted(names)}


def _pairs(halves):
    """Ids of the two halves of each domain that has two."""
    return [(halves[0][d], halves[1][d]) for d in halves[0] if len(halves[0][d]) and len(halves[1][d])]


def _count(run: Mapping[str, Any], ids: np.ndarray) -> np.ndarray:
    return use_counts(as_routes(ids, run["experts"], run["layer_ids"]))


def _share(counts: np.ndarray) -> np.ndarray:
    return counts / counts.sum(-1, keepdims=True)


def _licences(folder: Path) -> dict[str, dict[str, str]]:
    """Licence and source of each domain, where the corpus has a manifest that says."""
    file = folder / "manifest.json"
    entries = read_json(file) if file.is_file() else {}
    return {domain: {"licence": entry["license"], "source": entry["source"]} for domain, entry in entries.items()}


def distances(counts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """By layer: mean, least and greatest total variation over all pairs of domains; the pairs in `NAMED_PAIRS`."""
    pairs = domain_distance(counts)
    table = np.stack([*pairs.values()])
    return {
        "pairs": len(pairs),
        "mean": table.mean(0).round(3).tolist(),
        "least": table.min(0).round(3).tolist(),
        "greatest": table.max(0).round(3).tolist(),
        "named": {f"{a} / {b}": pairs[a, b].round(3).tolist() for a, b in NAMED_PAIRS if (a, b) in pairs},
    }


def real_figures(traces: str | Path) -> dict[str, Any]:
    """The same figures of real models, from a folder of recorded traces and counts.

    Raises:
        MissingArtifactError: a file is not there.
    """
    folder = Path(traces)
    for name in (*TRACES.values(), *COUNTS.values()):
        if not (folder / name).is_file():
            raise MissingArtifactError("no such trace", file=folder / name)
    found: dict[str, Any] = {}
    for model, name in TRACES.items():
        routes = read_trace(folder / name)
        found[model] = {"along_thread": route_figures(routes, routes.phase != PREFILLED).plain()}
    for model, name in COUNTS.items():
        with np.load(folder / name) as arrays:
            counts = {key.removeprefix("counts_"): arrays[key] for key in arrays if key.startswith("counts_")}
        shares = sum(_share(part) for part in counts.values())
        found[model] = {"layers": [*COUNTED_LAYERS], "domains": distances(counts), "load": load_balance(shares)}
    return found


def main(arguments: list[str] | None = None) -> None:
    """Calibrate models and write `calibration.json` and the tables of the model card beside each."""
    from ..models import find
    from .card import write_tables

    parser = Parser(prog="python -m moelab.reference.calibration", description=__doc__)
    parser.add_argument("models", nargs="+", help="names under artifacts/models, or checkpoint folders")
    parser.add_argument("--data", default=os.environ.get("MOELAB_DATA"), help="folder with corpus/ and traces/")
    parser.add_argument("--windows", type=int, default=64, help="windows a domain")
    given = parser.parse_args(arguments)
    if not given.data:
        parser.error("--data or MOELAB_DATA names no folder")
    beside = real_figures(Path(given.data) / "traces")
    for model in given.models:
        figures = calibrate(model, Path(given.data) / "corpus", limit=given.windows)
        command = f"python -m moelab.reference.calibration {model} --windows {given.windows}"
        figures |= {"beside": beside, "command": command, "date": date.today().isoformat()}
        write_json(find(model) / FILE, figures)
        if (card := find(model) / "README.md").is_file():
            write_tables(card, figures)


if __name__ == "__main__":
    main()
