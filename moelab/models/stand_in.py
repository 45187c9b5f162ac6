"""A model that reads like a large one: experts of half a megabyte at 4 bits, random weights, a few seconds to write.

The embedded reference models are trained, so routing is studied on them; but their experts are so small that handing
a read from thread to thread takes as long as the read. Models that people stream have experts of 1 to 20 MB at 4 bits.
This one comes near that at a size that fits beside everything else, and computes long enough per byte for a disk
of a gigabyte a second to keep up, as theirs do. What it shows is how reading overlaps with computing; nothing about
*routing* may be concluded from it.

    write(folder)          # a stock mlx-lm checkpoint of the Qwen3-MoE architecture, 8 layers, 32 experts, top-4

Scales are those of a normalised network (unit embeddings, router logits with a spread of 1, experts loud enough to
turn the next token), so that greedy text wanders and routes with it.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from ..files import read_json, write_json
from . import tiny

__all__ = ["write"]

GROUP = 64
LOUD = 4.0
"""Gain of the experts' outputs and of the head: a SwiGLU of unit inputs leaves about 0.6, the mean of four 0.3."""


def write(
    folder: Path,
    *,
    hidden: int = 768,
    width: int = 384,
    layers: int = 8,
    experts: int = 32,
    bits: int = 4,
    seed: int = 0,
) -> Path:
    """Write the checkpoint into an existing folder; returns it.

    Args:
        hidden, width: H and an expert's I, multiples of 64. An expert has 3·H·I weights.
        bits: of the experts; everything else stays float32.
    """
    heads = max(hidden // 64, 1)
    tiny.save(
        "qwen3_moe", folder, seed=seed, hidden_size=hidden, moe_intermediate_size=width, intermediate_size=width,
        num_experts=experts, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(heads // 4, 1), head_dim=64,
    )  # fmt: skip
    weights = mx.load(str(folder / "model.safetensors"))
    mx.random.seed(seed + 1)
    quantised = {}
    for name, weight in weights.items():
        if ".switch_mlp." in name:
            gain = LOUD if "down_proj" in name else 1.0
            packed, scales, biases = mx.quantize(_normal(weight.shape, gain), group_size=GROUP, bits=bits)
            stem = name.removesuffix(".weight")
            quantised |= {name: packed, f"{stem}.scales": scales, f"{stem}.biases": biases}
        elif name == "model.embed_tokens.weight":
            quantised[name] = mx.random.normal(weight.shape)
        elif name == "lm_head.weight":
            quantised[name] = _normal(weight.shape, LOUD)
        else:
            quantised[name] = weight
        mx.eval(quantised)
    mx.save_safetensors(str(folder / "model.safetensors"), quantised, {"format": "mlx"})
    config = read_json(folder / "config.json")
    kept = {name.removesuffix(".weight"): False for name in weights if ".switch_mlp." not in name}
    write_json(folder / "config.json", {**config, "quantization": {"group_size": GROUP, "bits": bits, **kept}})
    return folder


def _normal(shape: tuple[int, ...], gain: float) -> mx.array:
    return mx.random.normal(shape) * (gain * shape[-1] ** -0.5)
