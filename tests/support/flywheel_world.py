"""A small flywheel of its own: a tiny random model, short threads of several owners, a folder for artefacts.

The tokenizer has one token a byte, so that the length of a text is its length in tokens. Sequences are at
most `CONTEXT` tokens. Everything runs in this process, without workers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CONTEXT, CHUNK, WINDOW = 96, 8, 32
SYSTEM = "Answer briefly, and say when unsure."
COPIED = ("c0", "c1")
"""Id of a thread of owner 1, who trains, and of its copy in another spelling, of owner 0, who validates."""


@dataclass(frozen=True)
class World:
    root: Path

    @property
    def model(self) -> str:
        return str(self.root / "model")

    @property
    def sigmoid(self) -> str:
        return str(self.root / "sigmoid")

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def threads(self) -> Path:
        return self.root / "threads.jsonl"

    @contextmanager
    def entered(self, artifacts: Path | None = None) -> Iterator[World]:
        """This process keeps its artefacts in the world, or in a folder of its own."""
        before = os.environ.get("MOELAB_ARTIFACTS")
        os.environ["MOELAB_ARTIFACTS"] = str(artifacts or self.artifacts)
        try:
            yield self
        finally:
            if before is None:
                del os.environ["MOELAB_ARTIFACTS"]
            else:
                os.environ["MOELAB_ARTIFACTS"] = before

    def shared(self) -> dict:
        return {"models": [self.model], "threads": str(self.threads)}

    def capture_options(self, **changes):
        from moelab.flywheel.capture import CaptureOptions

        own = dict(context=CONTEXT, chunk=CHUNK, max_threads=None, sampled=2, max_new=5, edge_steps=3)
        return CaptureOptions(**self.shared(), **own | changes)

    def replay_options(self, **changes):
        from moelab.flywheel.qualification import ReplayOptions

        own = dict(chunk=24, batch_tokens=256, shard_sequences=6, smallest_n=20, chunks=[1, 7, 24])
        own |= dict(speed_sequences=1, speed_repeats=1, compared_tokens=20, identities=["reference"])
        return ReplayOptions(**self.shared(), **own | changes)

    def snapshot_options(self, **changes):
        from moelab.flywheel.snapshot import SnapshotOptions

        own = dict(window=WINDOW, smallest_validation_owners=1, smallest_validation_threads=1, smallest_train_tokens=50)
        return SnapshotOptions(**self.shared(), **own | changes)


def babble(rng: np.random.Generator, length: int) -> str:
    """Letters that repeat nothing."""
    return "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), length))


def conversation(owner: str, name: str, day: int, *messages: tuple[str, str], **fields) -> list[dict]:
    """Lines of a thread: `(role, text)` each."""
    fixed = {"source": "test", "license": "MIT", "owner": owner, "thread": name, "lang": "en", "domain": "talk"}
    return [
        {**fixed, **fields, "i": i, "role": role, "ts": f"2026-01-{day:02d}T00:00:{i:02d}Z", "text": text}
        for i, (role, text) in enumerate(messages)
    ]


def write(path: Path, threads: list[list[dict]]) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for lines in threads for line in lines))
    return path


def committed(rng: np.random.Generator) -> list[list[dict]]:
    """Two threads of each of ten owners, and one more that repeats another owner's in another spelling."""
    out = []
    for owner in range(10):
        for number in range(2):
            talk = [(role, babble(rng, 12)) for role in ("user", "assistant", "user", "assistant")]
            if number:
                talk.insert(0, ("system", SYSTEM))
            extra = {"domain": "code" if number else "talk", "lang": "de"} if owner == 7 else {}
            out.append(conversation(f"owner {owner}", f"t{number}", 1 + 2 * owner + number, *talk, **extra))
    said = [("user", babble(rng, 18)), ("assistant", babble(rng, 18)), ("user", babble(rng, 18))]
    out.append(conversation("owner 1", COPIED[0], 2, *said))
    spelt = [(role, f" {text.upper()}  ") for role, text in said]
    out.append(conversation("Owner 0 ", COPIED[1], 2, *spelt))
    return out


def make(root: Path) -> World:
    from moelab.models import tiny

    world = World(root)
    tiny.save("qwen3_moe", Path(world.model))
    tiny.save("glm4_moe", Path(world.sigmoid))
    write(world.threads, committed(np.random.default_rng(0)))
    return world


# ---------------------------------------------------------------- what other processes run


def capture_job(root: str) -> None:
    """Capture the world's model; `MOELAB_ARTIFACTS` says where to."""
    from moelab.flywheel.capture import capture_model

    world = World(Path(root))
    capture_model(world.model, world.capture_options())


def sampled_job(root: str, names: list[str], order: list[int]) -> dict[tuple[str, float], list]:
    """`(thread id, top_p)` → `(seed, tokens)` of each turn that the model wrote itself, threads in this order."""
    from moelab.flywheel.capture import Study
    from moelab.flywheel.engine import LiveEngine
    from moelab.models import load
    from moelab.threads import read

    world = World(Path(root))
    threads = read(world.threads)
    loaded = load(world.model)
    out = {}
    with LiveEngine(loaded) as engine:
        for top_p in (1.0, 0.9):
            study = Study(loaded, engine, threads, world.capture_options(top_p=top_p))
            for name in (names[index] for index in order):
                plan, _, _, turns = study.sampler.sample(next(t for t in threads if t.id == name))
                out[name, top_p] = [(t.seed, plan.tokens[t.start : t.end].tolist()) for t in turns]
    return out


def stage_job(model: str, options, **job) -> Path:
    """A stage that writes what it was asked, and leaves a line in the file `calls` beside the artefacts."""
    from moelab import artifacts

    with open(artifacts.artifacts_dir() / "calls", "a") as file:
        file.write("called\n")
    asked = {**options.own(), "job": {name: str(value) for name, value in job.items()}}
    return artifacts.build(
        "asked", inputs={}, params=asked, make=lambda folder: artifacts.write_json(folder / "asked.json", asked) or {}
    ).path
