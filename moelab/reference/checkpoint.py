"""From a torch model to a checkpoint that stock `mlx_lm.load` reads.

Three things differ between the two sides:

* *experts*: transformers keeps one stacked tensor a layer, with gate and up projection fused; published
  checkpoints, and mlx-lm's loaders, have three matrices an expert;
* *tied output*: mlx-lm's `glm4_moe` has no tied form, so its output layer is written out;
* *dropped groups*: torch masks the experts of a dropped group with -inf, mlx-lm with 0. The two agree when
  no selection score is negative, so each layer's correction bias is shifted until its least is zero. A
  constant added to all scores of a layer changes no choice.

Weights are float16; correction biases stay float32, as both sides keep them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ..artifacts import write_bytes, write_json
from ..errors import ArtifactError
from .recipe import CONTEXT
from .tokens import save_tokenizer

BIAS = "e_score_correction_bias"


def export(network: Any, tokenizer: Any, folder: Path) -> None:
    """Write `config.json`, `model.safetensors`, the tokenizer's files and the chat template to `folder`.

    Raises:
        ArtifactError: a weight is not finite in float16.
    """
    from safetensors.numpy import save

    tensors = expert_tensors(network)
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise ArtifactError("a weight is not finite in float16", file=folder, field=name, expected="finite")
    # The marker that transformers asks for; a single key, so the bytes do not depend on a hash order.
    write_bytes(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_json(folder / "config.json", _config(network))
    save_tokenizer(tokenizer, folder, context=CONTEXT)


def expert_tensors(network: Any) -> dict[str, np.ndarray]:
    """Every weight of the model under its checkpoint name: float16, experts apart, biases shifted."""
    tensors: dict[str, np.ndarray] = {}
    separate_output = network.config.model_type == "glm4_moe"
    for name, value in sorted(network.state_dict().items()):
        array = value.detach().cpu().float().numpy()
        if name.endswith(BIAS):
            tensors[name] = array - array.min()
        elif name == "lm_head.weight" and not separate_output:
            continue
        elif name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for expert, fused in enumerate(array):
                gate, up = np.split(fused, 2)
                tensors[f"{base}{expert}.gate_proj.weight"] = _half(gate)
                tensors[f"{base}{expert}.up_proj.weight"] = _half(up)
        elif name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            for expert, matrix in enumerate(array):
                tensors[f"{base}{expert}.down_proj.weight"] = _half(matrix)
        else:
            tensors[name] = _half(array)
    return tensors


def _half(array: np.ndarray) -> np.ndarray:
    # An overflow is reported by the caller, by name; a numpy warning would say less.
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array, np.float16)


def _config(network: Any) -> dict[str, Any]:
    """The model's configuration under the names that transformers and mlx-lm read; both ignore the other's."""
    config = network.config.to_diff_dict()
    rope = config["rope_parameters"]
    config |= {
        "architectures": [type(network).__name__],
        "torch_dtype": "float16",
        "dtype": "float16",
        "rope_theta": rope["rope_theta"],
    }
    if config["model_type"] == "glm4_moe":
        config |= {
            "tie_word_embeddings": False,
            "rope_scaling": None,
            "partial_rotary_factor": rope["partial_rotary_factor"],
        }
    else:
        config["num_experts"] = network.config.num_experts
    return config


def load_torch(folder: str | Path) -> Any:
    """The torch model of an exported checkpoint, float32, ready to evaluate."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    finally:
        if bars:
            logging.enable_progress_bar()
