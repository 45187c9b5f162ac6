"""Notebook 84: the generated model, the arms that can run here, the rounds, and the record of them.

python -m moelab.lab.peers reports/committed/peers.json        (or: make peers)
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np

from ... import artifacts, pages
from ...errors import MoelabError, ParameterError
from ...files import read_json, write_json
from ...params import Options, param
from . import convert, generated
from .comparison import OURS, REFERENCE, RIVAL, VARIANT, Arm, Run, compare
from .judge import Outcome, judge

SCHEMA_VERSION = 1
COMMAND = "make peers"
PACK = "pack"
INSTALL = "not installed here: `make peers` brings it"
MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class PeersOptions(Options):
    """Parameters of notebook 84. `models` names the one whose tokenizer the generated model takes."""

    notebook: ClassVar[str] = "84"

    models: list[str] = param(["softmax"], "model under artifacts/models whose tokenizer is taken")
    arms: list[str] = param(["engine"], "groups of arms", choices=("resident", "engine", "accelerate", "neurostream"))
    layers: int = param(2, "decoder layers, all with experts", min=1)
    experts: int = param(8, "experts a layer", min=2)
    top_k: int = param(2, "experts a token", min=1)
    hidden: int = param(64, "hidden width", min=8)
    expert_width: int = param(32, "width of an expert", min=8)
    heads: int = param(4, "attention heads", min=1)
    kv_heads: int = param(2, "key and value heads", min=1)
    head_dim: int = param(16, "width of a head", min=2)
    cap_mb: int = param(1200, "memory cap of every arm but the reference, MB", min=64)
    engine_cache_mb: int = param(600, "expert cache of the engine's arm that has one, MB", min=1)
    neurostream_arena_mb: int = param(128, "neurostream: bytes of reads in flight, MB", min=8)
    neurostream_ram_mb: int = param(400, "neurostream: weights it keeps in memory, MB", min=8)
    rounds: int = param(1, "rounds: one prompt each, every arm once", min=1)
    prompt_tokens: int = param(12, "tokens of a prompt", min=1)
    tokens: int = param(4, "decoded tokens a run", min=2)
    cores: int = param(1, "arithmetic threads of every arm", min=1)
    timeout_s: float = param(600.0, "longest time of one run, s", min=1.0)

    def __post_init__(self):
        super().__post_init__()
        for field, ok, expected in (
            ("top_k", self.top_k <= self.experts, f"at most {self.experts} = experts"),
            ("heads", self.heads % self.kv_heads == 0, f"a multiple of {self.kv_heads} = kv_heads"),
        ):
            if not ok:
                raise ParameterError(
                    "no such model", field=f"PeersOptions.{field}", got=getattr(self, field), expected=expected
                )

    @property
    def shape(self) -> generated.Shape:
        names = ("layers", "experts", "top_k", "hidden", "expert_width", "heads", "kv_heads", "head_dim")
        return generated.Shape(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class Comparison:
    """What one run of the comparison found: `runs` and the `outcome` judged on them."""

    options: PeersOptions
    model_bytes: int
    runs: list[Run]
    outcome: Outcome


def compare_peers(options: PeersOptions, *, on_progress: Callable[[str], None] = lambda text: None) -> Comparison:
    """Generate the model, convert it for each peer, run the rounds and judge them."""
    checkpoint = build_model(options)
    arms = list_arms(options, checkpoint)
    runs, refusal = compare(
        arms,
        prompts(options),
        tokens=options.tokens,
        cap_bytes=options.cap_mb * MB,
        threads=options.cores,
        timeout_s=options.timeout_s,
        on_progress=on_progress,
    )
    size = checkpoint.counts["bytes"]
    outcome = judge(runs, shape=options.shape, model_bytes=size, cap_bytes=options.cap_mb * MB, refusal=refusal)
    return Comparison(options, size, runs, outcome)


def build_model(options: PeersOptions) -> artifacts.Artifact:
    """The generated checkpoint of these options."""
    tokenizer = artifacts.root() / "artifacts" / "models" / options.models[0]
    return generated.build(options.shape, tokenizer=tokenizer, seed=options.seed)


def prompts(options: PeersOptions) -> list[list[int]]:
    """Token ids at random, one prompt a round: the model's weights are random, so text would say nothing more."""
    rng = np.random.default_rng([options.seed, 84])
    size = (options.rounds, options.prompt_tokens)
    return rng.integers(1, options.shape.vocabulary, size).tolist()


def list_arms(options: PeersOptions, checkpoint: artifacts.Artifact) -> list[Arm]:
    """The arms asked for. One whose library or conversion is missing carries its error instead of weights."""
    folder, shape = checkpoint.path, options.shape
    arms = [
        Arm(name="mlx-lm resident, no cap", kind="resident", weights=folder, role=REFERENCE, settings={"routes": True})
    ]
    if "resident" in options.arms:
        arms.append(Arm(name="mlx-lm resident", kind="resident", weights=folder, role=VARIANT))
    if "engine" in options.arms:
        arms += _engine_arms(options, checkpoint, shape)
    if "accelerate" in options.arms:
        settings = {"config": str(folder)}
        arms.append(_converted("accelerate disk offload", "accelerate", convert.offload_folder, checkpoint, settings))
    if "neurostream" in options.arms:
        settings = {"arena_bytes": options.neurostream_arena_mb * MB, "ram_bytes": options.neurostream_ram_mb * MB}
        arms.append(_converted("neurostream", "neurostream", convert.gguf, checkpoint, settings, convert.GGUF_FILE))
    return arms


def _converted(name, kind, make, checkpoint, settings, file=None) -> Arm:
    try:
        made = make(checkpoint)
    except ImportError as error:
        return Arm(name=name, kind=kind, weights=checkpoint.path, role=RIVAL, error=f"{error.name}: {INSTALL}")
    return Arm(name=name, kind=kind, weights=made.file(file) if file else made.path, role=RIVAL, settings=settings)


def _engine_arms(options: PeersOptions, checkpoint: artifacts.Artifact, shape: generated.Shape) -> list[Arm]:
    """Ours without a cache worth the name, and what changes when one thing changes.

    Slots for one token's experts keep a few of them for the next token. Slots for one layer's experts keep none, and
    show what a token costs the disk when nothing at all is reused.
    """
    try:
        pack = _pack(checkpoint).path / PACK
    except (ImportError, MoelabError) as error:
        return [Arm(name="engine, pack", kind="engine", weights=checkpoint.path, role=OURS, error=str(error))]
    cycle = {"cache_bytes": shape.routed_bytes, "policy": "lru"}
    layer = {"cache_bytes": shape.top_k * shape.expert_bytes, "policy": "lru", "below_cycle": True}
    # 64 slots that all layers share, and twice K staged slots a layer; its whole layers in prefill do not fit the cap.
    edge0 = {"layer": {"name": "staged_k8", "full_layer_prefill": False, "staged_n": shape.top_k, "top_k": shape.top_k}}
    edge0["layer"] |= {"staged_trigger": shape.top_k}
    cached = {"cache_bytes": max(options.engine_cache_mb * MB, shape.routed_bytes)}
    return [
        Arm(name="engine, pack", kind="engine", weights=pack, role=OURS, settings=cycle),
        Arm(name="engine, pack, no reuse", kind="engine", weights=pack, role=OURS, settings=layer),
        Arm(name="engine, pack, mmap", kind="engine", weights=pack, role=RIVAL, settings={**cycle, "reader": "mmap"}),
        Arm(
            name="engine, pack, checksums",
            kind="engine",
            weights=pack,
            role=VARIANT,
            settings={**cycle, "check_reads": True},
        ),
        Arm(name="engine, in place", kind="engine", weights=checkpoint.path, role=VARIANT, settings=cycle),
        Arm(name="engine, pack, cache", kind="engine", weights=pack, role=OURS, settings=cached),
        Arm(
            name="engine, edge0's settings",
            kind="engine",
            weights=pack,
            role=VARIANT,
            settings=edge0 | {"policy": "lru"},
        ),
    ]


def _pack(checkpoint: artifacts.Artifact) -> artifacts.Artifact:
    from ...streaming import write_pack
    from ...streaming.store.pack import VERSION

    def make(folder: Path) -> dict[str, Any]:
        return {"layers": len(write_pack(checkpoint.path, folder / PACK).layers)}

    return artifacts.build(
        "generated-pack", inputs={"checkpoint": checkpoint.content}, params={"version": VERSION}, make=make
    )


def machine() -> dict[str, Any]:
    """What the figures depend on here."""
    ahead = sorted(Path("/sys/block").glob("*/queue/read_ahead_kb"))
    return {
        "platform": f"{platform.system().lower()}-{platform.machine()}",
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "huge_pages": pages.setting(),
        "read_ahead_kb": {path.parent.parent.name: int(path.read_text()) for path in ahead if "loop" not in str(path)},
    }


def record(comparison: Comparison) -> dict[str, Any]:
    """The comparison as the JSON that is committed: command, date, machine, settings, outcome and every run."""
    options = comparison.options
    return {
        "schema_version": SCHEMA_VERSION,
        "command": COMMAND,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "options": {name: getattr(options, name) for name in options.names()},
        "model_bytes": comparison.model_bytes,
        "expert_bytes": options.shape.expert_bytes,
        "routed_bytes_per_token": options.shape.routed_bytes,
        "outcome": msgspec.to_builtins(comparison.outcome),
        "runs": [msgspec.to_builtins(run) for run in comparison.runs],
    }


def write(path: str | Path, comparison: Comparison) -> None:
    write_json(path, record(comparison))


def committed() -> tuple[dict[str, Any], Outcome]:
    """The run that is committed with the repository: all of its record, and its outcome."""
    found = read_json(artifacts.root() / "reports" / "committed" / "peers.json")
    return found, msgspec.convert(found["outcome"], Outcome, strict=True)
