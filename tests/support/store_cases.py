"""Checkpoints in the spellings that experts are found in, and what mlx-lm itself makes of each."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from moelab.files import read_json, write_json
from moelab.models import find_blocks, tiny
from moelab.pages import PAGE
from moelab.streaming import open_store
from moelab.streaming.store import plan

ALIASES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def save(
    family: str, folder: Path, *, quantise: dict | None = None, only: str = "", **overrides
) -> dict[str, mx.array]:
    """A tiny checkpoint as mlx-lm saves it, its modules with `only` in their names quantised; its tensors by name."""
    folder.mkdir(parents=True)
    model = tiny.save(family, folder, **overrides)
    if quantise is not None:
        nn.quantize(model, **quantise, class_predicate=lambda path, m: hasattr(m, "to_quantized") and only in path)
        config = read_json(folder / "config.json")
        write_json(folder / "config.json", {**config, "quantization": quantise})
    tensors = tree_flatten(model.parameters(), destination={})
    write(folder, tensors)
    return tensors


def write(folder: Path, tensors: dict[str, mx.array], shards: int = 1) -> None:
    for old in folder.glob("model*.safetensors"):
        old.unlink()
    names = sorted(tensors)
    for number in range(shards):
        part = {name: tensors[name] for name in names[number::shards]}
        name = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        mx.save_safetensors(str(folder / name), part, {"format": "mlx"})


def per_expert(tensors: dict[str, mx.array], stack: str, single: str, rename: dict[str, str] | None = None) -> dict:
    """`….{stack}.gate_proj.weight [E, …]` → one key an expert, `….{single}.3.gate_proj.weight`."""
    out = {}
    for name, array in tensors.items():
        head, found, tail = name.partition(f".{stack}.")
        if not found:
            out[name] = array
            continue
        projection, kind = tail.split(".")
        for expert in range(array.shape[0]):
            out[f"{head}.{single}.{expert}.{(rename or {}).get(projection, projection)}.{kind}"] = array[expert]
    return out


def fused(tensors: dict[str, mx.array], stack: str, gate_up: str, down: str) -> dict:
    """Gate and up projection as one stack `[E, 2I, H]`, gate rows first; `down` renamed."""
    out = {}
    for name, array in tensors.items():
        head, found, tail = name.partition(f".{stack}.")
        if not found:
            out[name] = array
        elif tail == "gate_proj.weight":
            other = tensors[f"{head}.{stack}.up_proj.weight"]
            out[f"{head}.{gate_up}"] = mx.concatenate([array, other], axis=1)
        elif tail == "down_proj.weight":
            out[f"{head}.{down}"] = array
    return out


def expected(folder: Path) -> list[dict[str, np.ndarray]]:
    """What mlx-lm makes of a checkpoint: for each MoE layer tensor name → bytes `u8[E, n]`."""
    network, _ = load_model(folder, lazy=True)
    return [
        {name: as_bytes(array) for name, array in tree_flatten(block.switch.parameters())}
        for block in find_blocks(network)
    ]


def as_bytes(array: mx.array) -> np.ndarray:
    return np.array(mx.view(mx.contiguous(array).reshape(array.shape[0], -1), mx.uint8))


def same(store, layers: list[dict[str, np.ndarray]]) -> bool:
    """Whether every expert of a store opened with precision="stored" has exactly these bytes."""
    assert (store.layers, store.experts) == (len(layers), len(next(iter(layers[0].values()))))
    for layer, tensors in enumerate(layers):
        for expert in range(store.experts):
            found = store.read(layer, expert)
            if {name: array.tobytes() for name, array in found.items()} != {
                name: array[expert].tobytes() for name, array in tensors.items()
            }:
                return False
    return True


def fitted(folder, monkeypatch):
    """A model whose layers begin at different places within a page, each with slots laid out for its own reads."""
    monkeypatch.setattr(plan, "WORTH", PAGE)
    tiny.save("qwen3_moe", folder, seed=1, hidden_size=64, moe_intermediate_size=64, num_hidden_layers=4)
    with open_store(folder) as store:
        starts = {layout.slot_offsets for layout in store.layouts}
        assert len(starts) > 1 and () not in starts
        assert len({layout.slot_bytes for layout in store.layouts}) == 1
        store._bounce = None  # nothing is copied
        for layer in range(store.layers):
            store.read(layer, store.experts - 1)
    return folder
