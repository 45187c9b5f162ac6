"""A streamed model as the rest of moelab knows a model: the same calls, within a memory budget.

Everything but the experts is loaded. What is left of the budget is used in turns, never twice:

    with model.decoding():      expert slots of the live engine; `run(tokens, cache, phase)` makes a pass
    with model.replaying():     slabs of whole layers, for layer-major replay (`layerwise`)
    with model.holding(layer):  one layer's experts, to check kernels on

A resident `LoadedModel` has the same members with nothing to do in them, so capture, replay and Gate 1 are
written once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import mlx.core as mx
import psutil

from ...errors import ContractError, GeometryError, ParameterError
from ...files import digest_json
from ...models.loading import LoadedModel, cast, measure, tokenizer_of, widen_experts
from ...params import known_names
from ..layer.install import require_fit, slots_beside, with_top_k
from ..layer.layer import share
from ..memory.allocator import CacheLimit
from ..store.pack import PackSource
from ..store.skeleton import check_layouts, drop_experts, skeleton
from ..store.slab import Slab
from ..store.store import ExpertStore, open_store
from .footprint import Footprint, room
from .layerwise import LayerMajor
from .options import EngineOptions

if TYPE_CHECKING:
    from .engine import StreamingEngine

__all__ = ["StreamedModel"]

BESIDE = 12 << 20
"""Bytes of the reserve for what is neither weights nor arrays: a request's own objects, code that runs first in it."""


@dataclass(kw_only=True)
class StreamedModel(LoadedModel):
    """A model without its experts. Made by `load`; close it, or use it as a context manager.

    Attributes:
        store: its experts on disk.
        options: how it is streamed.
        memory_budget_bytes: resident set of the whole process at most; None where `options` count slots.
        base_bytes: resident set when everything but slots was loaded.
        waited_s: seconds that `run` waited for reads, so far.
        footprint: what requests take beside weights and slots.
        cache_limit: of the freed bytes that mlx keeps for reuse, until this is closed.
        engine: the live engine inside `decoding()` or around this model, else None.
    """

    store: ExpertStore
    options: EngineOptions
    memory_budget_bytes: int | None
    base_bytes: int
    footprint: Footprint
    cache_limit: CacheLimit
    residency: str = "streamed"
    waited_s: float = 0.0
    engine: StreamingEngine | None = None
    _turn_of: str | None = None

    @classmethod
    @known_names
    def load(
        cls, model: str | Path, options: EngineOptions | None = None, memory_budget_bytes: int | None = None
    ) -> Self:
        """Load all but the experts. Arguments and errors as `StreamingEngine.load`, but for room for slots."""
        options = EngineOptions() if options is None else options
        given = [size for size in (memory_budget_bytes, options.cache_bytes) if size is not None]
        if len(given) != 1 and (given or options.layer is None):
            raise ParameterError(
                "one budget is needed", field="memory_budget_bytes, options.cache_bytes",
                got=(memory_budget_bytes, options.cache_bytes), expected="exactly one of them",
            )  # fmt: skip
        if memory_budget_bytes is not None and (type(memory_budget_bytes) is not int or memory_budget_bytes < 1):
            raise ParameterError(
                "a budget is bytes", field="memory_budget_bytes", got=memory_budget_bytes, expected="int > 0"
            )
        kept = options.allocator_cache_bytes
        if memory_budget_bytes is not None:  # what mlx keeps is a part of the reserve
            kept = min(kept, options.reserve_bytes // 4)
        limit = CacheLimit(kept)
        try:
            return cls._load(model, options, memory_budget_bytes, limit)
        except BaseException:
            limit.close()
            raise

    @classmethod
    def _load(
        cls, model: str | Path, options: EngineOptions, memory_budget_bytes: int | None, limit: CacheLimit
    ) -> Self:
        frame = skeleton(model)
        if options.layer is not None and options.layer.top_k is not None:
            if options.layer.top_k != frame.blocks[0].family.top_k and not options.change_top_k:
                raise GeometryError(
                    "the layer options choose another number of experts than the model", file=frame.path,
                    field="options.layer.top_k", got=options.layer.top_k, expected=frame.blocks[0].family.top_k,
                    fix="top_k=None, as in profile(name, top_k=None); or change_top_k=True, for another output",
                )  # fmt: skip
            frame = with_top_k(frame, options.layer.top_k)
        if options.layer is not None:
            require_fit(options.layer, frame.blocks)
        geometry = measure(frame.blocks)
        cast(frame.network, options.precision)
        widen_experts(frame.blocks, frame.path, allowed=False)
        check = frame.packed if options.check_reads is None else options.check_reads
        left = None if memory_budget_bytes is None else max(0, memory_budget_bytes - psutil.Process().memory_info().rss)
        store = open_store(
            frame.path, reader=options.reader, precision=options.precision, device=options.device, check_reads=check,
            room=left,
        )  # fmt: skip
        try:
            if frame.packed:
                PackSource(frame.path, options.precision).verify_weights()
            check_layouts(frame, store)
            footprint = Footprint.of(frame.network, frame.blocks, frame.config)
            drop_experts(frame.blocks)
            mx.eval(frame.network.parameters())
            tokenizer = tokenizer_of(frame.path, frame.config)
            gc.collect()
            mx.clear_cache()
            return cls(
                frame.network, tokenizer, frame.path.resolve().name, frame.path, options.precision, frame.config,
                frame.blocks, geometry, store=store, options=options, memory_budget_bytes=memory_budget_bytes,
                base_bytes=psutil.Process().memory_info().rss, footprint=footprint, cache_limit=limit,
            )  # fmt: skip
        except BaseException:
            store.close()
            raise

    # ------------------------------------------------------------------ identity

    @cached_property
    def model_digest(self) -> str:
        """A pack is the model that it was made of: its observations and those of the checkpoint belong together.

        The pack's other weights are compared with its manifest first. A pack that may have lost precision is
        another model, named after the first.
        """
        identity = self.store.identity
        if identity["source"] != "pack":
            return identity["model"]
        PackSource(self.path, self.precision).verify_weights()
        if identity["packed"] in ("stored", "float32"):  # what checkpoints hold fits into float32
            return identity["model"]
        return digest_json({"model": identity["model"], "packed": identity["packed"]})

    # ------------------------------------------------------------------ memory

    @property
    def slots_bytes(self) -> int:
        """Bytes for slots: `options.cache_bytes`, what the process and the reserve leave of the budget, or what
        `options.layer` counts. Raises ContractError if nothing is left."""
        if self.options.cache_bytes is not None:
            return self.options.cache_bytes
        if self.memory_budget_bytes is not None:
            return room(self.memory_budget_bytes, self.base_bytes, self.options.reserve_bytes)
        slot = max(layout.slot_bytes for layout in self.store.layouts)
        return self.options.layer.cache_slots * slot + slots_beside(self.options.layer, self.store)

    @property
    def request_bytes(self) -> int | None:
        """Of the reserve, what attention caches and activations may take; None without a budget of the process."""
        if self.memory_budget_bytes is None:
            return None
        return max(0, self.options.reserve_bytes - self.cache_limit.nbytes - BESIDE)

    @property
    def cycle_bytes(self) -> int:
        """Slots for the experts of one token: the least for decoding."""
        return self.geometry.top_k * sum(layout.slot_bytes for layout in self.store.layouts)

    @property
    def layer_bytes(self) -> int:
        """Slots for all experts of one layer (of each size): the least for replaying."""
        return self.store.experts * sum({layout.slot_bytes for layout in self.store.layouts})

    @property
    def bytes_read(self) -> int:
        return self.store.payload_bytes

    def _need(self, nbytes: int, what: str) -> None:
        if self.slots_bytes >= nbytes:
            return
        fixed = 0 if self.memory_budget_bytes is None else self.base_bytes + self.options.reserve_bytes
        raise ContractError(
            f"the memory budget does not hold {what}",
            file=self.path,
            field="options.cache_bytes" if self.memory_budget_bytes is None else "memory_budget_bytes",
            got=f"{self.slots_bytes + fixed} bytes",
            expected=f">= {nbytes + fixed} bytes ({fixed} for the process and its reserve, {nbytes} for experts)",
        )

    @contextmanager
    def _turn(self, name: str) -> Iterator[None]:
        """The memory for one use at a time; afterwards the switch layers are bare again and the memory is free."""
        if self._turn_of is not None:
            raise ContractError(
                "the memory is in use", field="turn", got=self._turn_of, expected=f"none before {name}",
                fix="end that first; a live engine is closed, and `StreamedModel.load` makes a model of its own",
            )  # fmt: skip
        switches, self._turn_of = [block.switch for block in self.blocks], name
        try:
            yield
        finally:
            for block, switch in zip(self.blocks, switches, strict=True):
                setattr(block.switch_owner, block.switch_name, switch)
            drop_experts(self.blocks)
            self._turn_of = None
            gc.collect()  # engine and switch layers refer to each other
            mx.clear_cache()

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Room for passes (`run`): the live engine, its expert cache empty at first.

        Raises:
            ContractError: the budget does not hold one token's experts (both figures named), or another turn is on.
        """
        from .engine import StreamingEngine, expert_memory

        with self._turn("decoding"):
            self._need(0 if self.options.below_cycle else self.cycle_bytes, "the experts of one token")
            memory = expert_memory(self.store, self.geometry, self.options, self.slots_bytes)
            try:
                self.engine = StreamingEngine(self, memory, self.options, self.base_bytes)
                yield
            finally:
                self.engine = None
                memory.close()

    def run(self, tokens: mx.array, cache: list[Any], phase: int) -> mx.array:
        """One pass of `[B,T]` tokens; logits `[B,T,V]`, evaluated. Raises ContractError outside `decoding()`."""
        if self.engine is None:
            raise ContractError("a streamed model runs inside decoding()", field="turn", got=self._turn_of or "none")
        logits = self.engine.run(tokens, cache, phase)
        timeline = self.engine.forward.timeline
        self.waited_s += sum(timeline.blocked)
        timeline.clear()  # a capture of a million tokens must not collect a million visits
        return logits

    @contextmanager
    def replaying(self) -> Iterator[tuple[LayerMajor, int]]:
        """Layer-major replay, and the bytes that the passes of a shard may keep between two layers.

        Two slabs take turns if that leaves as much again for the passes, else one is filled and used in
        turn. Half of the reserve is for what stays, the other half for what a single operation needs.

        Raises:
            ContractError: the budget does not hold the experts of one layer (both figures named).
        """
        with self._turn("replaying"):
            self._need(self.layer_bytes, "the experts of one layer, as layer-major replay must")
            slabs = self.layer_bytes * (2 if self.slots_bytes >= 3 * self.layer_bytes else 1)
            layers = LayerMajor(self.blocks, self.store, budget=slabs, threads=self.options.threads)
            try:
                yield layers, self.slots_bytes - slabs + self.options.reserve_bytes // 2
            finally:
                layers.close()
                del layers

    @contextmanager
    def holding(self, layer: int) -> Iterator[None]:
        """All experts of one MoE layer in memory, in place in its switch module."""
        with self._turn(f"holding layer {layer}"):
            self._need(self.layer_bytes, "the experts of one layer")
            slab = Slab((layout := self.store.layouts[layer]).slot_bytes, self.store.experts)
            self.store.read_many([layer * self.store.experts + n for n in range(self.store.experts)], slab.host)
            share(self.blocks[layer].switch, slab.arrays(layout))
            yield

    def belongs_to(self, engine: StreamingEngine) -> None:
        """An engine runs this model until that is closed: no other turn can begin."""
        self.engine, self._turn_of = engine, "a live engine"

    def close(self) -> None:
        """Close the store, and let go of the limit of mlx's cache."""
        self.store.close()
        self.cache_limit.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: Any) -> None:
        self.close()
