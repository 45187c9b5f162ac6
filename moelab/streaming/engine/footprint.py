"""What a request takes beside weights and slots, known before it runs: attention caches and activations, in bytes.

A memory budget holds only if whatever grows with a prompt is counted before it is made. Two things do.

*Attention caches* are read off the model itself. mlx is lazy: passes of 1 and of 33 tokens are built, nothing is
computed, and what their caches would hold says what a position takes, and what is there whatever the length.

*Activations* of a step of T tokens with S positions behind its last one follow from the shapes of the model's modules:

    T · 4 bytes · (3 · outputs of a layer's linear maps + 16·H + K · (2 · outputs of an expert's + 2·H))
    + T · 8 · bytes of a recurrent layer's state
    + T · S · heads · 4 bytes · (4 in families with attention sinks, an indexer or latent attention, else 2)

with *outputs* of the widest layer, and a residual stream that some families keep several times. The last term is of
attention that is not one kernel, as on the CPU. The factors are upper bounds, from half to nearly all used;
`tests/parity/test_streaming_footprint.py` holds them against the allocator's peak on every family.

A prompt is then cut into steps that fit (`Footprint.step`). Shorter steps read more, since every step asks for its own
experts; and another cut is another shape of the same products, which need not give the same last bits. mlx-lm with the
same `prefill_step_size` does the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ...errors import ContractError, UnsupportedModelError
from ...models.blocks import Block

__all__ = ["Footprint", "Growth", "room", "seen_positions"]

HEADS = ("num_attention_heads", "n_heads", "num_heads", "n_head")
NUMBER = 4
"""Bytes of a number of an activation; half precision takes less, and scores are float32 in any case."""
COPIES_OF_SCORES, COPIES_OF_MANY_SCORES, COPIES_OF_STATE, MORE_LOGITS = 2, 4, 8, 3
MANY_SCORES = {"sinks", "indexer", "embed_q"}
"""Parts of attention modules that make scores of their own beside those of the one attention call."""
STEPS_OF_GRAPH = 8 << 10
"""Host bytes of the operations of one token in a layer that takes its tokens one by one."""


@dataclass(frozen=True)
class Growth:
    """One attention cache: bytes whatever its length, bytes a position, and the most positions (None: no end)."""

    fixed: int
    position: int
    limit: int | None

    def nbytes(self, positions: int, step: int) -> int:
        """A rotating cache holds a step beside its window while that step is computed."""
        kept = positions if self.limit is None else min(positions, self.limit + step)
        return self.fixed + self.position * kept


@dataclass(frozen=True)
class Footprint:
    """Sizes of one model. Made by `of`.

    Attributes:
        caches: of all layers.
        token: bytes of a token's activations in a prompt step.
        score: bytes of one token looking at one position.
        logits: bytes of one row of logits.
    """

    caches: tuple[Growth, ...]
    token: int
    score: int
    logits: int

    @classmethod
    def of(cls, network: nn.Module, blocks: Sequence[Block], config: Mapping[str, Any]) -> Footprint:
        """Of a model with all its weights, lazy ones too; nothing of it is evaluated.

        Raises:
            UnsupportedModelError: the configuration does not say how many heads its attention has.
        """
        if not (heads := max(_numbers(config, HEADS), default=0)):
            raise UnsupportedModelError("heads of attention are not known", field="config", expected=HEADS)
        caches = _caches(network)
        recurrent = [growth.fixed for growth in caches if not growth.position]
        block = blocks[0]
        hidden, top_k = block.weight().shape[1], block.family.top_k
        expert = max(_outputs(block.switch, stacked=True) for block in blocks)
        switches = {id(module) for block in blocks for _, module in block.switch.named_modules()}
        dense = max(_outputs(layer, apart=switches) for layer in _layers(network, blocks))
        numbers = 3 * dense + 16 * hidden + top_k * (2 * expert + 2 * hidden)
        parts = {name for _, module in network.named_modules() for name in module}
        copies = COPIES_OF_MANY_SCORES if parts & MANY_SCORES else COPIES_OF_SCORES
        vocabulary = max(_numbers(config, ("vocab_size",)), default=0)
        return cls(
            caches=caches,
            token=NUMBER * numbers + COPIES_OF_STATE * max(recurrent, default=0) + STEPS_OF_GRAPH * len(recurrent),
            score=NUMBER * copies * heads,
            logits=NUMBER * vocabulary,
        )

    def cache_bytes(self, positions: int, step: int = 1) -> int:
        """Attention caches of `positions` tokens, with what one of them takes twice while it grows."""
        sizes = [growth.nbytes(positions, step) for growth in self.caches]
        return sum(sizes) + max(sizes, default=0)

    def pass_bytes(self, tokens: int, positions: int, rows: int = 1) -> int:
        """Activations of a pass of `tokens`, the last of which sees `positions`, with logits of `rows` of them."""
        return tokens * (self.token + self.score * positions) + (rows + MORE_LOGITS) * self.logits

    def need(self, prompt: int, positions: int, step: int) -> int:
        """Bytes of a request whose prompt ends at position `prompt` and whose answer ends at `positions`."""
        step = min(step, prompt)
        return self.cache_bytes(positions, step) + max(self.pass_bytes(step, prompt), self.pass_bytes(1, positions))

    def step(self, room: int, *, prompt: int, positions: int, most: int) -> int:
        """Tokens of a prompt step: `most`, halved until caches and activations fit into `room` bytes.

        Raises:
            ContractError: not even one token at a time fits (both figures named).
        """
        step = most
        while self.need(prompt, positions, step) > room:
            if step == 1:
                raise self.refusal(room, self.need(prompt, positions, 1), positions)
            step //= 2
        return step

    @staticmethod
    def refusal(room: int, need: int, positions: int) -> ContractError:
        return ContractError(
            "the reserve does not hold this request", field="options.reserve_bytes",
            got=f"room for {room} bytes of attention caches and activations",
            expected=f"{need} bytes for {positions} tokens",
            fix="raise reserve_bytes, and the budget by as much, or ask for fewer tokens",
        )  # fmt: skip


def room(memory_budget_bytes: int, base: int, reserve: int) -> int:
    """What a budget for the whole process leaves for experts. Raises ContractError if that is nothing."""
    if memory_budget_bytes <= base + reserve:
        raise ContractError(
            "the budget is spent before the first expert", field="memory_budget_bytes", got=memory_budget_bytes,
            expected=f"> {base} (process without experts) + {reserve} (reserve)",
            fix="raise the budget" + ", or leave torch out first: models.without_torch()" * ("torch" in sys.modules),
        )  # fmt: skip
    return memory_budget_bytes - base - reserve


def seen_positions(cache: list[Any]) -> int:
    """Tokens that attention caches have been fed; 0 where they do not count them."""
    offsets = (getattr(leaf, "offset", 0) for entry in cache for leaf in _leaves(entry))
    return max((offset for offset in offsets if type(offset) is int), default=0)


def _caches(network: nn.Module) -> tuple[Growth, ...]:
    """Caches with `keys` allocate positions ahead; of any other the difference between two lengths says what grows."""
    short, long = (_filled(network, tokens) for tokens in (1, 33))
    found = []
    for few, many in zip(short, long, strict=True):
        keys = getattr(few, "keys", None)
        if isinstance(keys, mx.array):
            each = -(-few.nbytes // keys.shape[2])
            ahead = (getattr(few, "step", 256) - 1) * each
            found.append(Growth(ahead, each, getattr(few, "max_size", None)))
        else:
            each = max(0, math.ceil((many.nbytes - few.nbytes) / 32))
            found.append(Growth(few.nbytes, each, None))
    return tuple(found)


def _filled(network: nn.Module, tokens: int) -> list[Any]:
    """The caches after a pass that was built and not computed."""
    cache = make_prompt_cache(network)
    network(mx.zeros((1, tokens), mx.int32), cache=cache)
    return [leaf for entry in cache for leaf in _leaves(entry)]


def _leaves(cache: Any) -> Iterator[Any]:
    if hasattr(cache, "caches"):
        for part in cache.caches:
            yield from _leaves(part)
    else:
        yield cache


def _numbers(config: Mapping[str, Any], names: Sequence[str]) -> Iterator[int]:
    """Integers of these names, in the configuration and in the parts that it nests."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, names)
        elif name in names and type(value) is int:
            yield value


def _layers(network: nn.Module, blocks: Sequence[Block]) -> list[nn.Module]:
    """All decoder layers: the list that the MoE layers are in."""
    mine = {id(block.layer) for block in blocks}
    for _, module in network.named_modules():
        for value in module.values():
            if isinstance(value, list) and any(id(entry) in mine for entry in value):
                return value
    return [block.layer for block in blocks]


def _outputs(module: nn.Module, *, stacked: bool = False, apart: set[int] = frozenset()) -> int:
    """Outputs of all linear maps below a module; of one expert if these are `stacked`."""
    total = 0
    for _, part in module.named_modules():
        weight = part.get("weight")
        if id(part) in apart or not isinstance(weight, mx.array) or weight.ndim < 2 or isinstance(part, nn.Embedding):
            continue
        if stacked:
            total += weight.shape[1]
        else:
            total += weight.shape[0] if isinstance(part, nn.Conv1d) else math.prod(weight.shape[:-1])
    return total
