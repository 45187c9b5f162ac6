"""A mixture-of-experts checkpoint as large as one likes, with random weights, for questions about bytes.

Caches and disks do not care whether weights were trained, only how large they are and how evenly they are
used; random gates use experts almost evenly, which is the worst case of every cache. So nothing about
*routing* may be concluded from this model, and everything about reading may.

It is a stock Qwen3-MoE checkpoint: one float32 tensor a projection of each expert under the keys of the published
models, one file a decoder layer, so that mlx-lm and transformers both load it as it is. (mlx multiplies experts on
the CPU in float32 only; any other type would be widened by one runtime and not by another.) It is written
expert by expert and never lies in memory whole.

Scales are those of a normalised network: unit embeddings, logits of every router with a spread of 1, and experts
loud enough to turn the next token, so that greedy text depends on each weight that is read and has no ties.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import artifacts
from ...errors import ContractError
from ...files import digest_file, write_json

KIND = "generated-model"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
EXPERT_GAIN = 4.0
"""An expert's SwiGLU leaves an rms of about 0.6, and the mean of K of them about 0.6/sqrt(K): this makes it ~1."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Counts of the model: L MoE layers, E experts, K of them a token, hidden width H, and the width I of an expert."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 8192

    def __post_init__(self):
        if min(asdict(self).values()) < 1 or self.top_k > self.experts or self.heads % self.kv_heads:
            raise ContractError("no such model", field="shape", got=asdict(self), expected="counts >= 1, K <= E")

    @property
    def expert_bytes(self) -> int:
        """float32 bytes of one expert's three projections."""
        return 3 * self.hidden * self.expert_width * 4

    @property
    def routed_bytes(self) -> int:
        """Bytes of the experts that one token uses: sum over layers of K experts."""
        return self.layers * self.top_k * self.expert_bytes


def build(shape: Shape, *, tokenizer: str | Path, seed: int = 0) -> artifacts.Artifact:
    """The checkpoint as an artefact, written once; `tokenizer` is a model folder whose tokenizer files are copied."""
    source = Path(tokenizer)
    inputs = {name: digest_file(source / name) for name in TOKENIZER_FILES if (source / name).is_file()}

    def make(folder: Path) -> Mapping[str, Any]:
        for name in inputs:
            shutil.copyfile(source / name, folder / name)
        return write(folder, shape, seed=seed)

    return artifacts.build(KIND, inputs=inputs, params={**asdict(shape), "seed": seed}, make=make)


def write(folder: Path, shape: Shape, *, seed: int = 0) -> dict[str, int]:
    """Write weights, index and configuration; returns `tensors` and `bytes`. Peak memory: one tensor."""
    count = shape.layers + 1
    names = [f"model-{number + 1:05d}-of-{count:05d}.safetensors" for number in range(count)]
    weight_map: dict[str, str] = {}
    total = 0
    for number, name in enumerate(names):
        tensors = _layer(shape, number) if number < shape.layers else _outside(shape)
        write_safetensors(folder / name, tensors, lambda key, shape_, scale: _fill(seed, key, shape_, scale))
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(4 * int(np.prod(dims)) for dims, _ in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", config(shape))
    return {"tensors": len(weight_map), "bytes": total}


def config(shape: Shape) -> dict[str, Any]:
    """config.json with the spelling of both libraries where they differ. No end token: every run has equal length."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "dtype": "float32",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.expert_width,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "moe_intermediate_size": shape.expert_width,
        "norm_topk_prob": True,
        "num_attention_heads": shape.heads,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "num_local_experts": shape.experts,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


Tensors = dict[str, tuple[tuple[int, ...], float]]
"""Key -> shape and standard deviation; a deviation of 0 means ones (a norm)."""


def _layer(shape: Shape, layer: int) -> Tensors:
    prefix, hidden, wide = f"model.layers.{layer}", shape.hidden, shape.heads * shape.head_dim
    narrow, width, unit = shape.kv_heads * shape.head_dim, shape.expert_width, shape.hidden**-0.5
    tensors: Tensors = {
        f"{prefix}.input_layernorm.weight": ((hidden,), 0.0),
        f"{prefix}.post_attention_layernorm.weight": ((hidden,), 0.0),
        f"{prefix}.self_attn.q_proj.weight": ((wide, hidden), unit),
        f"{prefix}.self_attn.k_proj.weight": ((narrow, hidden), unit),
        f"{prefix}.self_attn.v_proj.weight": ((narrow, hidden), unit),
        f"{prefix}.self_attn.o_proj.weight": ((hidden, wide), wide**-0.5),
        f"{prefix}.self_attn.q_norm.weight": ((shape.head_dim,), 0.0),
        f"{prefix}.self_attn.k_norm.weight": ((shape.head_dim,), 0.0),
        f"{prefix}.mlp.gate.weight": ((shape.experts, hidden), unit),
    }
    for expert in range(shape.experts):
        key = f"{prefix}.mlp.experts.{expert}"
        tensors[f"{key}.gate_proj.weight"] = ((width, hidden), unit)
        tensors[f"{key}.up_proj.weight"] = ((width, hidden), unit)
        tensors[f"{key}.down_proj.weight"] = ((hidden, width), EXPERT_GAIN * width**-0.5)
    return tensors


def _outside(shape: Shape) -> Tensors:
    size = (shape.vocabulary, shape.hidden)
    return {
        "model.embed_tokens.weight": (size, 1.0),
        "model.norm.weight": ((shape.hidden,), 0.0),
        "lm_head.weight": (size, EXPERT_GAIN * shape.hidden**-0.5),
    }


def _fill(seed: int, key: str, shape: tuple[int, ...], scale: float) -> np.ndarray:
    """The same numbers for a key whatever was written before it."""
    if not scale:
        return np.ones(shape, np.float32)
    values = np.random.default_rng([seed, *key.encode()]).standard_normal(shape, np.float32)
    values *= np.float32(scale)
    return values


def write_safetensors(path: Path, tensors: Tensors, fill: Callable[[str, tuple[int, ...], float], np.ndarray]) -> None:
    """Write one float32 safetensors file tensor by tensor, in the order given, and let its pages go."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for key, (shape, _) in tensors.items():
        size = 4 * int(np.prod(shape))
        header[key] = {"dtype": "F32", "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    aside = path.with_name(f".{path.name}.tmp")
    with open(aside, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for key, (shape, scale) in tensors.items():
            file.write(fill(key, shape, scale).tobytes())
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    os.replace(aside, path)


def open_tensors(folder: Path) -> dict[str, Any]:
    """Key -> lazy slice of each tensor of a checkpoint: `.get_shape()`, and `[:]` to read it."""
    from safetensors import safe_open

    files = [safe_open(path, "np") for path in sorted(folder.glob("model*.safetensors"))]
    return {key: file.get_slice(key) for file in files for key in file.keys()}  # noqa: SIM118 (not a mapping)
