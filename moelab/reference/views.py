"""What notebook 01 shows, as data frames: the text, the learning curves, losses, agreement, calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ..artifacts import Artifact, read_json, read_tensors, root
from .card import table_rows
from .comparison import TOLERANCE, compare
from .corpus import read_corpus
from .notebook import HISTORY, LOSSES, ReferenceOptions
from .recipe import FAMILIES
from .tokens import encode, load_tokenizer, windows


def text_frame(options: ReferenceOptions) -> pd.DataFrame:
    """One row a domain: documents and kilobytes of each split."""
    corpus = read_corpus(options.text_folder())
    rows = []
    for domain in corpus.domains:
        row: dict[str, Any] = {"domain": domain}
        for split in ("train", "val"):
            row[f"{split} documents"] = len(corpus.documents[split][domain])
            row[f"{split} kB"] = corpus.bytes(split, domain) / 1000
        rows.append(row)
    return pd.DataFrame(rows)


def loss_frame(built: Mapping[str, Artifact], *, points: int = 20) -> pd.DataFrame:
    """Training loss and balance loss by step, in means over about `points` blocks of steps."""
    frames = []
    for family, artifact in built.items():
        history, _ = read_tensors(artifact.file(HISTORY))
        blocks = np.array_split(np.arange(len(history["loss"])), min(points, len(history["loss"])))
        frames += [
            {
                "family": family,
                "step": int(block[-1]) + 1,
                "nats a token": float(history["loss"][block].mean()),
                "balance loss": float(history["balance"][block].mean()),
            }
            for block in blocks
        ]
    return pd.DataFrame(frames)


def evaluation_frame(built: Mapping[str, Artifact]) -> pd.DataFrame:
    """Validation loss of each family, one row a domain."""
    losses = {family: read_json(artifact.file(LOSSES)) for family, artifact in built.items()}
    return pd.DataFrame(
        [
            {"domain": domain, **{f"{family}, nats/token": losses[family][domain]["nats"] for family in losses}}
            for domain in sorted(next(iter(losses.values())))
        ]
    )


def probe_tokens(options: ReferenceOptions, artifact: Artifact, *, count: int = 2) -> np.ndarray:
    """Validation windows `i32[count,T]` on which two implementations of a checkpoint are compared."""
    corpus = read_corpus(options.text_folder())
    streams = encode(corpus.documents["val"], load_tokenizer(artifact.file("tokenizer.json")))
    rows = [windows(streams[domain], options.window, limit=1, domain=domain) for domain in corpus.domains]
    return np.concatenate(rows)[:count]


def comparison_frame(options: ReferenceOptions, built: Mapping[str, Artifact]) -> pd.DataFrame:
    """Torch against mlx on each exported checkpoint; one row a family."""
    rows = []
    for family, artifact in built.items():
        found = compare(artifact.path, probe_tokens(options, artifact)).require()
        rows.append(
            {
                "family": family,
                "largest logit difference": found.difference,
                "allowed": TOLERANCE,
                "routes compared": found.rows,
                "routes that differ": found.differing,
                "least margin": found.least_margin,
            }
        )
    return pd.DataFrame(rows)


def calibration_frame() -> pd.DataFrame:
    """The calibration table of both committed models, beside real ones."""
    records = {name: read_json(root() / "artifacts" / "models" / name / "calibration.json") for name in FAMILIES}
    rows = []
    for line in zip(*(table_rows(record) for record in records.values()), strict=True):
        real = {name: value for name, value in line[0].items() if name not in ("figure", "this model")}
        mine = {model: row["this model"] for model, row in zip(records, line, strict=True)}
        rows.append({"figure": line[0]["figure"], **mine, **real})
    return pd.DataFrame(rows)
