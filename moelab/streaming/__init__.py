"""Streaming: experts read from disk while the model decodes, within a byte budget.

Where things are, from the disk up:

* bytes: `layout` of one expert; where it lies: `checkpoint` in place, or `pack` (`packing`, `origin`, `shards`);
  `plan` and `readers` fetch, `device` is a disk as arithmetic; `store` is all of it behind `read_into`;
* decisions, pure and without a clock: `eviction` (`ranking`, `hotpin`), `cache` (`pools`, `holds`, `counters`),
  `schedule` (`tickets`), `prefetch`;
* the live machine: `slab` (slots that a disk fills and a kernel reads), `memory` (threads), `forward` (one pass after
  the other), `timeline`, `layer` (the exact path), `issuing` (predictions inside the pass);
* other paths of a layer: `options`, `install`, `paths`, `stack`, `staged`, `late`, `prefill`, `fill`;
* whole models: `skeleton`, `footprint`, `allocator`, `streamed`, `engine`, `generate`; `layerwise` for replay;
* without a model: `passes`, `oracle`, `simulator` (`simulated_memory`, `demand_only`, `simulation`), `validation`.

Names are imported on first use: the decisions and the simulator need numpy at most.
"""

from importlib import import_module

_HOMES = {
    "eviction": (
        "DEFAULT",
        "POLICIES",
        "ExpectedNextUse",
        "HotPin",
        "LayerLfu",
        "LayerStaleness",
        "Lru",
        "Policy",
        "RecentLfu",
        "policy",
    ),
    "cache": ("Cache", "Grant"),
    "counters": ("Counters",),
    "prefetch": ("PrefetchCounters", "Prefetcher"),
    "schedule": ("P0", "P1", "P2", "Scheduler", "SchedulerCounters", "Ticket"),
    "pack": ("Pack", "read_pack"),
    "packing": ("write_pack",),
    "layout": ("ExpertLayout", "TensorSpec"),
    "store": ("ExpertStore", "open_store"),
    "options": ("LayerOptions", "profile"),
    "late": ("LateExperts",),
    "paths": ("StagedSwitch",),
    "stack": ("StagedSet",),
    "staged": ("StagedCounters", "StagedSlots"),
    "engine": ("EngineOptions", "StreamingEngine"),
    "issuing": ("Issuer",),
    "layerwise": ("LayerMajor",),
    "streamed": ("StreamedModel",),
    "device": ("Throttle", "VirtualDevice"),
    "passes": ("Passes",),
    "oracle": ("NoisyOracle", "Oracle", "PreviousToken"),
    "simulator": ("ISSUE", "simulate"),
    "simulation": ("Simulation", "share_of_possible"),
    "validation": ("Recording", "device_of", "record", "resimulate", "wake_late_s"),
}
_OWNER = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_OWNER)


def __getattr__(name: str):
    if name not in _OWNER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_OWNER[name]}", __name__), name)


def __dir__():
    return __all__
