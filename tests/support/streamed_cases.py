"""Streamed models with as much memory as a test wants."""

from __future__ import annotations

from dataclasses import replace

from moelab.models import tiny
from moelab.streaming import EngineOptions, StreamedModel

TINY = ("gpt_oss", "qwen3_moe", "deepseek_v3")
"""gpt_oss: experts with biases and a clamped activation; deepseek_v3: its gate returns weights, and notes its input."""


def checkpoint(name, folder, **changes):
    """Name of an embedded model, or the folder of a tiny one that is made there."""
    if name in TINY:
        tiny.save(name, folder, seed=3, **changes)
        return folder
    return name


def streamed(model, *, cycles: float = 0, layers: float = 0, **options):
    """A streamed model with slots for `cycles` tokens, or for all experts of `layers` layers."""
    loaded = StreamedModel.load(model, EngineOptions(cache_bytes=1, **options))
    wanted = int(cycles * loaded.cycle_bytes + layers * loaded.layer_bytes)
    loaded.options = replace(loaded.options, cache_bytes=wanted)
    return loaded


def expert_bytes(loaded) -> int:
    """All experts of the model, as stored."""
    return loaded.store.experts * sum(map(loaded.store.nbytes, range(loaded.store.layers)))
