"""What the engine is asked to do in time, on experts of the size that people stream. Notebook 80.

An expert of the embedded models is read in a seventh of a millisecond: there the interpreter's own work on a read
weighs as much as half of it. The stand-in (`models.stand_in`) has experts of half a megabyte at 4 bits and takes some
tens of milliseconds to compute a token, as streamed models do; so it says what the *engine* can hide, and whether the
store keeps up with the disk. Experts of further sizes are made up, for the store alone. (`make timing` measures the
same at length.)
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import artifacts, models, quiet
from .streaming_claims import claims

if TYPE_CHECKING:
    from .streaming_study import StreamingOptions

__all__ = ["STAND_IN", "prompt", "stand_in"]

STAND_IN = "stand-in"
RESULT = "stand-in.json"
FIGURES_VERSION = 6
"""Raise when `measure` writes other figures, so that older artefacts are not taken for these."""
ARMS = ("off", "in_forward, 2 layers ahead", "in_forward, 4 layers ahead")
PROMPT = 24
SHORT = 2
"""Answers of an embedded model for each of the stand-in's: they are short, so their times scatter more."""
PRECISION = "float32"


def stand_in(options: StreamingOptions) -> dict[str, Any]:
    """Figures of the stand-in: `expert_bytes`, `reads`, `overlap`, `claims`, as `streaming_study` has them."""
    (path,) = models.run_workers(_build, [{"options": options}], blas="auto", workers=1)
    return artifacts.read_json(path / RESULT)


def prompt(seed: int, tokens: int = PROMPT) -> list[int]:
    """Any tokens will do: its weights are random."""
    return np.random.default_rng(seed).integers(5, 200, tokens).tolist()


def _build(options: StreamingOptions) -> Path:
    def make(folder: Path) -> Mapping[str, Any]:
        found = measure(options, folder)
        artifacts.write_json(folder / RESULT, found)
        return {"content": artifacts.digest_json(found["expert_bytes"])}

    asked = ("seed", "reads", "read_repeats", "depths", "made_up_mb", "stand_in_hidden")
    asked += ("ratios", "overlap_tokens", "overlap_repeats", "overlap_cycles")
    return artifacts.build(
        "streaming-stand-in",
        inputs={},
        params={
            **{name: getattr(options, name) for name in asked},
            "runtime": models.runtime_identity(PRECISION, "streamed"),
            "figures_version": FIGURES_VERSION,
        },
        make=make,
    ).path


def measure(options: StreamingOptions, folder: Path) -> dict[str, Any]:
    """All figures in this process. Model and files are written below `folder` and removed."""
    from ..models import stand_in as model
    from ..streaming import ExpertStore, open_store, write_pack
    from ..streaming.store.checkpoint import CheckpointSource
    from ..streaming.store.pack import PackSource
    from . import streaming_overlap, streaming_rates

    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch, ExitStack() as stack:
        source, pack = Path(scratch) / "model", Path(scratch) / "pack"
        source.mkdir()
        model.write(source, hidden=options.stand_in_hidden, width=options.stand_in_hidden // 2)
        write_pack(source, pack, precision=PRECISION)
        store = stack.enter_context(open_store(pack, precision=PRECISION))
        in_place = stack.enter_context(open_store(source, precision=PRECISION))
        read = [
            ("pack", PackSource(pack, PRECISION), store),
            ("in place", CheckpointSource(source, PRECISION), in_place),
        ]
        for size in options.made_up_mb:
            made_up = streaming_rates.MadeUp(
                Path(scratch) / f"made-up-{size}", size=size << 20, experts=max(64 // size, 4), seed=options.seed
            )
            read.append((f"made up, {size} MiB", made_up, stack.enter_context(ExpertStore(made_up))))
        turn_bytes = -(-options.reads // 4) * store.nbytes(0)
        with quiet.timing():
            rates = [
                {"place": place, **row}
                for place, source, store in read
                for row in streaming_rates.throughput(
                    store, source, depths=options.depths, seed=options.seed,
                    # Larger reads scatter less than those of a model with small experts, and take longer.
                    repeats=max(options.read_repeats // 2, 2), reads=max(turn_bytes // store.nbytes(0), 8),
                )
            ]  # fmt: skip
            overlapped = streaming_overlap.overlap(
                pack, prompt(options.seed), tokens=options.overlap_tokens, repeats=options.overlap_repeats,
                ratios=options.ratios, cycles=options.overlap_cycles, policy_name="lru", readers=2, precision=PRECISION,
                arms=ARMS,
            )  # fmt: skip
        figures = {
            "expert_bytes": read[0][2].nbytes(0),
            "reads": {"throughput": rates, "amplification": []},
            "overlap": overlapped,
        }
    return figures | {"claims": claims(figures)}
