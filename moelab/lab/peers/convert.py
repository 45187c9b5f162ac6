"""The same weights in the forms that other runtimes read: GGUF, and accelerate's folder of flat arrays.

A conversion moves numbers and changes none: float32 in, float32 out. What a runtime makes of them is its own.
Both are artefacts of the checkpoint, made before anything is timed and outside the memory cap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ... import artifacts
from ...files import read_json
from .generated import open_tensors

GGUF_FILE = "model.gguf"
_PLAIN = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def gguf_sources(config: Mapping[str, Any]) -> dict[str, list[str]]:
    """GGUF name -> checkpoint keys: one key, or those of all experts in order, which are stacked `[E, out, in]`."""
    names = {theirs: [ours] for ours, theirs in _OUTSIDE.items()}
    for layer in range(config["num_hidden_layers"]):
        prefix, block = f"model.layers.{layer}", f"blk.{layer}"
        names |= {f"{block}.{theirs}.weight": [f"{prefix}.{ours}.weight"] for ours, theirs in _PLAIN.items()}
        for ours, theirs in _EXPERTS.items():
            keys = [f"{prefix}.mlp.experts.{expert}.{ours}.weight" for expert in range(config["num_experts"])]
            names[f"{block}.{theirs}.weight"] = keys
    return names


def gguf_values(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Name and values in the order of `gguf_sources`; at most one stack in memory."""
    tensors = open_tensors(folder)
    for name, keys in gguf_sources(read_json(folder / "config.json")).items():
        yield name, tensors[keys[0]][:] if len(keys) == 1 else np.stack([tensors[key][:] for key in keys])


def gguf(checkpoint: artifacts.Artifact) -> artifacts.Artifact:
    """The checkpoint as one float32 GGUF file, with its byte-level BPE tokenizer.

    Raises:
        ImportError: the package `gguf` is not installed (optional group `peers`).
    """
    import gguf as library  # before the build, so that its absence leaves nothing behind

    def make(target: Path) -> dict[str, int]:
        config = read_json(checkpoint.path / "config.json")
        writer = library.GGUFWriter(target / f".{GGUF_FILE}", "qwen3moe")
        _describe(writer, config)
        _tokenizer(writer, read_json(checkpoint.path / "tokenizer.json"), config["vocab_size"])
        shapes = _shapes(checkpoint.path, config)
        for name, shape in shapes.items():
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, values in gguf_values(checkpoint.path):
            writer.write_tensor_data(values)
        writer.close()
        (target / f".{GGUF_FILE}").rename(target / GGUF_FILE)
        return {"tensors": len(shapes)}

    return artifacts.build("generated-gguf", inputs={"checkpoint": checkpoint.content}, params={}, make=make)


def _shapes(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    tensors, shapes = open_tensors(folder), {}
    for name, keys in gguf_sources(config).items():
        shape = tuple(tensors[keys[0]].get_shape())
        shapes[name] = shape if len(keys) == 1 else (len(keys), *shape)
    return shapes


def _describe(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _tokenizer(writer: Any, tokenizer: Mapping[str, Any], size: int) -> None:
    tokens = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    special = {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    tokens |= special
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens.get(index, f"[unused {index}]") for index in range(size)])
    writer.add_token_types([3 if index in special else 1 for index in range(size)])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])


def offload_folder(checkpoint: artifacts.Artifact) -> artifacts.Artifact:
    """accelerate's own offload folder: one flat array a parameter as transformers holds it (experts fused by layer).

    Raises:
        ImportError: accelerate is not installed (optional group `peers`).
    """
    from accelerate.utils import offload_state_dict

    def make(target: Path) -> dict[str, int]:
        import torch
        from transformers import AutoModelForCausalLM

        state = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).state_dict()
        offload_state_dict(target, state)
        return {"tensors": len(state)}

    return artifacts.build("generated-offload", inputs={"checkpoint": checkpoint.content}, params={}, make=make)
