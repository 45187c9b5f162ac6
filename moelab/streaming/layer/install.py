"""Layer options made effective on a model: switches put in place, K, memory and policy as the options say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import GeometryError, UnsupportedModelError
from ...models.blocks import Block, find_blocks
from .layer import StreamingSwitch
from .options import LayerOptions
from .paths import Anchor, StagedSwitch
from .prefill import PrefillWindow, window_slots
from .staged import slot_count

if TYPE_CHECKING:
    from ..memory.forward import Forward
    from ..store.skeleton import Skeleton
    from ..store.store import ExpertStore

__all__ = ["hot_options", "install", "require_fit", "shared_expert", "slots_beside", "with_top_k"]

SHARED = ("shared_experts", "shared_expert", "shared_mlp", "share_expert")
TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "k")


def install(
    blocks: Sequence[Block], forward: Forward, options: LayerOptions | None
) -> list[StreamingSwitch] | list[StagedSwitch]:
    """Put a streamed switch in place of every MoE layer's; in the order of the layers.

    Without options: the exact path alone. The model's dense layers are not touched.

    Raises:
        GeometryError: `top_k` is not the model's K (see `with_top_k`).
        UnsupportedModelError: `on_missing="anchor"` on a family without a shared expert.
    """
    if options is None:
        switches = [StreamingSwitch(block.switch, layer, forward) for layer, block in enumerate(blocks)]
    else:
        if options.top_k not in (None, blocks[0].family.top_k):
            raise GeometryError(
                "the model chooses another number of experts", field="top_k", got=options.top_k,
                expected=blocks[0].family.top_k, fix="with_top_k",
            )  # fmt: skip
        window = PrefillWindow(forward, options) if window_slots(options, forward.memory.store) else None
        switches = [
            StagedSwitch(
                block.switch, layer, forward, options, window=window,
                anchor=shared_expert(block) if options.on_missing == "anchor" else None,
            )
            for layer, block in enumerate(blocks)
        ]  # fmt: skip
    for block, switch in zip(blocks, switches, strict=True):
        setattr(block.switch_owner, block.switch_name, switch)
    return switches


def require_fit(options: LayerOptions, blocks: Sequence[Block]) -> None:
    """Raise GeometryError where the options count more experts or layers than the model has."""
    experts, layers = blocks[0].experts, len(blocks)
    for name, got, most, of in (
        ("staged_n", options.staged_n * options.staged, experts, "experts of a layer"),
        ("hot_per_layer", options.hot_per_layer, experts, "experts of a layer"),
        ("prefill_full_layers", options.prefill_full_layers, layers, "layers"),
    ):
        if got > most:
            raise GeometryError(
                "more than the model has", field=f"options.layer.{name}", got=got, expected=f"<= {most}, the {of}"
            )


def slots_beside(options: LayerOptions | None, store: ExpertStore) -> int:
    """Bytes of all slots that the options put beside the cache: staged slots and prefill windows."""
    if options is None:
        return 0
    staged = slot_count(options, store.experts) + 1 if options.staged else 0  # one more for alignment
    windows = sum(size * (slots + 1) for size, (_, slots) in window_slots(options, store).items())
    return windows + staged * sum(layout.slot_bytes for layout in store.layouts)


def hot_options(options: LayerOptions) -> dict[str, Any]:
    """Options of the policy `hot-pin`."""
    return {
        "hot_per_layer": options.hot_per_layer, "decay": options.hot_decay,
        "update_interval": options.hot_update_interval, "pin_bonus": options.pin_bonus,
    }  # fmt: skip


def with_top_k(frame: Skeleton, top_k: int) -> Skeleton:
    """The same model choosing `top_k` experts a token, in every MoE layer, prefill and decode.

    Raises:
        GeometryError: not 1 to E.
        UnsupportedModelError: the family keeps its K where it cannot be changed.
    """
    if not 1 <= top_k <= frame.blocks[0].experts:
        raise GeometryError("no such K", field="top_k", got=top_k, expected=f"1 to {frame.blocks[0].experts}")
    for block in frame.blocks:
        for module in (block.gate, _owner(block)):
            for name in TOP_K:
                if type(getattr(module, name, None)) is int:
                    setattr(module, name, top_k)
    blocks = find_blocks(frame.network)
    if any(block.family.top_k != top_k for block in blocks):
        raise UnsupportedModelError(
            "this family's number of experts a token cannot be changed", field="top_k", got=blocks[0].defined_in,
            expected="a gate or block that holds it", fix="top_k=None",
        )  # fmt: skip
    return dataclasses.replace(frame, blocks=blocks)


def shared_expert(block: Block) -> Anchor:
    """What the block's shared expert adds to its output. Raises UnsupportedModelError if it has none."""
    owner = _owner(block)
    experts = [owner[name] for name in SHARED if isinstance(owner.get(name), nn.Module)]
    if experts:
        gate = owner.get("shared_expert_gate")
        return experts[0] if gate is None else lambda x: mx.sigmoid(gate(x)) * experts[0](x)
    raise UnsupportedModelError(
        "this family has no shared expert to stand in", field="on_missing", got=block.defined_in,
        expected=f"a block with one of {SHARED}", fix='on_missing="exact"',
    )  # fmt: skip


def _owner(block: Block) -> nn.Module:
    """The module that the gate is a part of."""
    return next(
        module for _, module in block.layer.named_modules()
        if any(child is block.gate for child in module.children().values())
    )  # fmt: skip
