"""Tiny random models of every mixture-of-experts family in mlx-lm: same code, a few thousand weights.

They prove paths, not findings: taps, streaming and parity are tested on them at length in seconds. Gates
that a family starts at zero (every route would tie) get random values, and so do correction biases.

    model = build("deepseek_v3", seed=0)      # runs, no files
    save("deepseek_v3", folder)                # a checkpoint that `load` reads
"""

from __future__ import annotations

import importlib
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import ParameterError
from ..files import write_json
from .blocks import find_blocks
from .tiny_configs import FAMILIES
from .tiny_parts import COMMON, HIDDEN

ROLE_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|system|>")


def config(family: str, **overrides: Any) -> dict[str, Any]:
    """Tiny configuration of a family, as its config.json would hold it."""
    if family not in FAMILIES:
        raise ParameterError("no tiny configuration", field="family", got=family, expected=sorted(FAMILIES))
    own = FAMILIES[family]
    if "text_config" in own:
        return {"model_type": family, "text_config": {**COMMON, **own["text_config"], **overrides}}
    return {"model_type": family, **COMMON, **own, **overrides}


def build(family: str, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """A random float32 model of this family. Gates, correction biases and block norms get random values."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config(family, **overrides)))
    for block in find_blocks(model):
        # Spread of about 1 in the logits, as after training; inputs are normalised.
        block.matrix["weight"] = mx.random.normal((block.experts, block.matrix["weight"].shape[1])) / HIDDEN**0.5
        if block.bias_owner is not None:
            setattr(block.bias_owner, block.bias_name, 0.1 * mx.random.uniform(shape=(block.experts,)))
        for name in ("weight", "bias"):
            if block.norm is not None and name in block.norm:
                block.norm[name] = block.norm[name] + 0.1 * mx.random.normal(block.norm[name].shape)
    model.eval()
    mx.eval(model.parameters())
    return model


def save(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> nn.Module:
    """Write a tiny model as a checkpoint that `load` reads, with a byte tokenizer, and return it."""
    model = build(family, seed=seed, **overrides)
    arguments = {field.name: field for field in fields(importlib.import_module(f"mlx_lm.models.{family}").ModelArgs)}
    needed = {
        name: value
        for name, value in config(family, **overrides).items()
        if name in arguments and (value is not None or arguments[name].default is MISSING)
    }
    write_json(folder / "config.json", {**needed, "eos_token_id": 0})
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A tokenizer of the five role tokens (ids 0-4) and the 256 bytes (ids 5-260)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate([*ROLE_TOKENS, *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ROLE_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ROLE_TOKENS[0], "model_max_length": 2048},
    )
