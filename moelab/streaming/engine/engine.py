"""A mixture-of-experts model that is larger than its memory, run exactly.

    engine = StreamingEngine.load("path/to/model-or-pack", memory_budget_bytes=4 << 30)
    print(engine.generate("Why is the sky blue?", max_tokens=100))

Everything but the experts is loaded; experts live in slots within a byte budget and are read from disk when
the router asks for them. The native router decides, so the output is that of the resident model; a
prediction (see `prefetch`) can only move bytes earlier.

`memory_budget_bytes` is the whole process: what imports and weights have taken already is measured, a
reserve is kept for attention caches and activations, and the expert cache gets the rest. Imports are most of what
a small budget goes to; `models.without_torch`, called first, leaves torch out of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from ...errors import ContractError, ParameterError
from ...models.loading import MoEGeometry
from ...params import known_names
from ...routes import PREFILLED
from ..cache.cache import Cache
from ..cache.eviction import policy
from ..layer.install import hot_options, install, slots_beside
from ..memory.cores import Cores
from ..memory.forward import Forward
from ..memory.memory import ExpertMemory
from ..schedule.schedule import Scheduler
from ..store.store import ExpertStore
from .footprint import seen_positions
from .options import EngineOptions
from .streamed import StreamedModel

__all__ = ["StreamingEngine"]


class StreamingEngine:
    """A streamed model, ready to generate. Made by `load`; close it, or use it as a context manager.

    Attributes:
        loaded: the model as the rest of moelab knows it (`StreamedModel`); its switch layers stream.
        store, cache, scheduler, memory: the rooms below.
        forward: passes, listeners and the timeline.
        switches: the streamed layers, in the order of `loaded.blocks`.
        options: as given.
        base_bytes: resident set when everything but the slots was loaded.
    """

    def __init__(self, loaded: StreamedModel, memory: ExpertMemory, options: EngineOptions, base_bytes: int):
        self.loaded, self.memory, self.options, self.base_bytes = loaded, memory, options, base_bytes
        self.store, self.cache, self.scheduler = memory.store, memory.cache, memory.scheduler
        self.forward = Forward(memory)
        self.switches = install(loaded.blocks, self.forward, options.layer)

    @classmethod
    @known_names
    def load(
        cls,
        model: str | Path,
        options: EngineOptions | None = None,
        memory_budget_bytes: int | None = None,
    ) -> Self:
        """Load all but the experts, and make room for those.

        Args:
            model: a pack folder, or what `models.load` takes.
            memory_budget_bytes: resident set of the whole process at most. Needed unless `options.cache_bytes` is set,
                or `options.layer`, whose `cache_slots` then are the budget.

        Raises:
            ParameterError: neither budget given, or cores that cannot be had.
            ContractError: the budget does not leave one token's experts, or room to open the checkpoint in place (both
                figures named).
            UnsupportedModelError, StoreError: the checkpoint cannot be read, or not in place (then `moelab pack`).
        """
        options = EngineOptions() if options is None else options
        if not isinstance(options, EngineOptions):
            raise ParameterError(
                "of another type", field="options", got=type(options).__name__, expected="EngineOptions"
            )
        Cores.choose(options.cores)  # what cannot be is said before anything is loaded
        loaded = StreamedModel.load(model, options, memory_budget_bytes)
        with ExitStack() as undo:
            undo.callback(loaded.close)
            memory = expert_memory(loaded.store, loaded.geometry, options, loaded.slots_bytes)
            undo.callback(memory.close)
            engine = cls(loaded, memory, options, loaded.base_bytes)
            loaded.belongs_to(engine)
            undo.pop_all()
        return engine

    @property
    def mode(self) -> None:
        """None, and cannot be set: modes are those of an installed prerouter (`Prerouter.mode`)."""

    @mode.setter
    def mode(self, value: Any) -> None:
        raise ParameterError(
            "an engine has no mode", field="mode", got=value, expected="the mode of its prerouter",
            fix="prerouter = install_prerouter(engine.loaded, spec, engine, mode=...)",
        )  # fmt: skip

    def generate(self, prompt: str | list[int], *, verbose: bool = False, **kwargs: Any) -> str:
        """The whole completion. Arguments as `stream_generate`; `verbose` prints it as it comes."""
        text = ""
        for response in self.stream_generate(prompt, **kwargs):
            if verbose:
                print(response.text, end="", flush=True)
            text += response.text
        return text

    def stream_generate(self, prompt: str | list[int], **kwargs: Any) -> Iterator[Any]:
        """Token by token, as `mlx_lm.stream_generate` (see `generate.stream_generate`)."""
        from .generate import stream_generate

        return stream_generate(self, prompt, **kwargs)

    def stream_tokens(self, prompt: list[int], **kwargs: Any) -> Iterator[tuple[int, mx.array]]:
        """Token ids and log-probabilities, as `mlx_lm.generate_step` (see `generate.stream_tokens`)."""
        from .generate import stream_tokens

        return stream_tokens(self, prompt, **kwargs)

    def run(self, tokens: mx.array, cache: list[Any], phase: int) -> mx.array:
        """One pass of `[B,T]` tokens through the model; logits `[B,T,V]`, evaluated. `phase` as in `routes`.

        Raises:
            ContractError: under a memory budget, the reserve does not hold the pass; nothing was read.
        """
        return self._pass(tokens, cache, phase, lambda logits: logits, tokens.shape[1])

    def prefill(self, tokens: mx.array, cache: list[Any]) -> None:
        """A pass of prompt tokens whose logits nobody wants: as in mlx-lm, they are not computed. Raises as `run`."""
        self._pass(tokens, cache, PREFILLED, lambda _: [layer.state for layer in cache], 0)

    def _pass(
        self, tokens: mx.array, cache: list[Any], phase: int, wanted: Callable[[mx.array], Any], rows: int
    ) -> mx.array:
        self._require_room(tokens.shape, cache, rows)
        self.forward.begin(phase)
        try:
            with nullcontext() if self.memory.cores is None else self.memory.cores.computing():
                logits = self.loaded.model(tokens, cache=cache)
                self.forward.end(wanted(logits))
        except BaseException:
            self.forward.abort()
            raise
        return logits

    def prefill_step(self, prompt: int, max_tokens: int = 256, *, most: int | None = None, seen: int = 0) -> int:
        """Tokens of a prompt that are computed at once, of a request of `prompt` tokens and as many more at most.

        Without `memory_budget_bytes` it is `most`, by default `options.prefill_step_size`; under a budget that is
        halved until attention caches and activations fit into the reserve (`footprint`). `mlx_lm.generate_step` with
        this `prefill_step_size` runs the same shapes, and gives the same bits.

        Args:
            seen: positions that the attention cache holds already.

        Raises:
            ContractError: the reserve does not hold the request (both figures named).
        """
        most = self.options.prefill_step_size if most is None else most
        if (room := self.loaded.request_bytes) is None:
            return most
        positions = seen + prompt + max(max_tokens, 1)
        return self.loaded.footprint.step(room, prompt=seen + prompt, positions=positions, most=most)

    def _require_room(self, shape: tuple[int, ...], cache: list[Any], rows: int) -> None:
        if (room := self.loaded.request_bytes) is None:
            return
        batch, tokens = shape
        positions = seen_positions(cache) + tokens
        footprint = self.loaded.footprint
        need = footprint.cache_bytes(positions, tokens) + footprint.pass_bytes(tokens, positions, rows)
        if batch * need > room:
            raise footprint.refusal(room, batch * need, positions)

    def reset(self) -> None:
        """Forget what belongs to a request. Residents stay: the cache is warm for the next one.

        Raises:
            ContractError: a pass is running; nothing was forgotten.
        """
        with self.forward.between_passes():
            self.memory.reset_request()
            for switch in self.switches:
                switch.reset()

    def close(self) -> None:
        self.memory.close()
        self.loaded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: Any) -> None:
        self.close()


def expert_memory(store: ExpertStore, geometry: MoEGeometry, options: EngineOptions, budget: int) -> ExpertMemory:
    """Cache, scheduler and threads for a store; `budget` bytes are all expert slots, also those beside the cache."""
    slot_bytes, layer = [layout.slot_bytes for layout in store.layouts], options.layer
    beside = slots_beside(layer, store)
    if beside >= budget:
        raise ContractError(
            "staged slots and prefill windows leave nothing for the cache", field="budget", got=budget,
            expected=f"> {beside}", fix="raise the budget, or stage fewer",
        )  # fmt: skip
    pins = hot_options(layer) if layer is not None and layer.hot_per_layer else {}
    cache = Cache(
        layers=store.layers,
        experts=store.experts,
        top_k=geometry.top_k,
        slot_bytes=slot_bytes,
        read_bytes=[store.nbytes(layer) for layer in range(store.layers)],
        budget=budget - beside,
        policy=policy(options.policy, **pins),
        below_cycle=options.below_cycle,
    )
    demand = options.threads * max(slot_bytes)
    early = demand if layer is None else min(layer.prefetch_threads, layer.prefetch_cap) * max(slot_bytes)
    if options.max_inflight_bytes is None:
        scheduler = Scheduler(max_inflight_bytes=demand + early, p0_reserve_bytes=demand)
    else:
        scheduler = Scheduler(max_inflight_bytes=options.max_inflight_bytes)
    cores = Cores.choose(options.cores)
    return ExpertMemory(store, cache, scheduler, threads=options.threads, cores=cores)
