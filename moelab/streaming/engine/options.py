"""How a model is streamed: what the engine may be told, and what of it contradicts the rest."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import ParameterError
from ...models.loading import PRECISIONS
from ...params import known_names
from ..cache.eviction import DEFAULT, POLICIES
from ..layer.options import MOST_THREADS, LayerOptions
from ..memory.cores import CORES
from ..store.device import VirtualDevice
from ..store.readers import READERS

__all__ = ["EngineOptions"]

MiB = 1 << 20
KINDS: dict[str, type] = {
    "cache_bytes": int, "policy": str, "precision": str, "reader": str, "device": VirtualDevice, "check_reads": bool,
    "threads": int, "cores": str, "max_inflight_bytes": int, "reserve_bytes": int, "allocator_cache_bytes": int,
    "below_cycle": bool, "prefill_step_size": int, "layer": LayerOptions, "change_top_k": bool,
}  # fmt: skip
LEAST = {
    "cache_bytes": 1, "threads": 1, "max_inflight_bytes": 1, "reserve_bytes": 0, "allocator_cache_bytes": 0,
    "prefill_step_size": 1,
}  # fmt: skip
OPTIONAL = {"cache_bytes", "policy", "device", "check_reads", "threads", "max_inflight_bytes", "layer"}


@known_names
@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How a model is streamed. Bytes are bytes, times seconds.

    Attributes:
        cache_bytes: of all expert slots, also those beside the cache; None = what `memory_budget_bytes` leaves.
        policy: eviction policy by name (`eviction.POLICIES`); None = `eviction.DEFAULT`, "hot-pin" if `layer` pins.
        precision: of weights and activations, as in `models.load`.
        reader: "auto", "o_direct", "buffered" or "mmap" (`store.open_store`).
        device: a declared disk that every read is slowed to; None = this machine's own.
        check_reads: compare the checksum of every expert that is read; None = of a pack, which has them.
        threads: reader threads beside the computing one; None = 2, or what `layer` says.
        cores: of passes and readers: "shared", "apart" (each on cores of their own) or "auto": see `memory.cores`.
        max_inflight_bytes: bytes of reads in progress at most; None = two slots a thread, or what `layer` says.
        reserve_bytes: of the budget, for attention caches, activations and freed buffers. Prompts are cut so that they
            fit (`StreamingEngine.prefill_step`); a request that cannot is refused before it reads.
        allocator_cache_bytes: freed buffers that mlx may keep for reuse; under a budget a quarter of the reserve at
            most. `close` gives mlx its old limit back.
        below_cycle: allow a cache smaller than the experts of one token.
        prefill_step_size: prompt tokens a pass, as in mlx-lm; under a budget at most.
        layer: staged slots, pins and prefill windows (`options`); None = the exact path alone.
        change_top_k: `layer.top_k` may be another number than the model's own K. Its output is then another model's.

    Raises:
        ParameterError: an unknown name, a wrong type or range, or a policy that contradicts `layer`.
    """

    cache_bytes: int | None = None
    policy: str | None = None
    precision: str = "float32"
    reader: str = "auto"
    device: VirtualDevice | None = None
    check_reads: bool | None = None
    threads: int | None = None
    cores: str = "shared"
    max_inflight_bytes: int | None = None
    reserve_bytes: int = 64 * MiB
    allocator_cache_bytes: int = 32 * MiB
    below_cycle: bool = False
    prefill_step_size: int = 2048
    layer: LayerOptions | None = None
    change_top_k: bool = False

    def __post_init__(self):
        for name, value in vars(self).items():
            kind = KINDS[name]
            if not (value is None and name in OPTIONAL) and (
                not isinstance(value, kind) or isinstance(value, bool) != (kind is bool)
            ):
                raise ParameterError("of another type", field=name, got=value, expected=kind.__name__)
        pins = self.layer is not None and self.layer.hot_per_layer > 0
        if self.policy is None:
            object.__setattr__(self, "policy", "hot-pin" if pins else DEFAULT)
        elif pins and self.policy != "hot-pin":
            raise ParameterError(
                "only one policy pins", field="policy", got=self.policy, expected="hot-pin, or None, with hot_per_layer"
            )
        if self.threads is None:
            object.__setattr__(self, "threads", 2 if self.layer is None else self.layer.load_threads)
        for name, least in LEAST.items():
            if (value := getattr(self, name)) is not None and value < least:
                raise ParameterError("out of range", field=name, got=value, expected=f">= {least}")
        if self.threads > MOST_THREADS:
            raise ParameterError("out of range", field="threads", got=self.threads, expected=f"<= {MOST_THREADS}")
        for name, known in {
            "precision": PRECISIONS, "reader": READERS, "policy": tuple(POLICIES), "cores": CORES,
        }.items():  # fmt: skip
            if getattr(self, name) not in known:
                raise ParameterError(f"unknown {name}", field=name, got=getattr(self, name), expected=known)
