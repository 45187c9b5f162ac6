"""Streaming: experts read from disk while the model decodes, within a byte budget.

From the disk up, and each room knows those before it alone:

* `store`: the bytes of one expert, in a checkpoint in place or in a pack, and their way into a slot;
* `cache`: which experts are resident, and which goes;
* `schedule`: which read goes next, and what a prediction may ask for;
* `memory`: the three of them live, on threads;
* `layer`: a switch layer that computes from it, by the exact path or by another;
* `engine`: whole models within a memory budget;
* `simulation`: the same cache and scheduler without a model, on a disk made of arithmetic.

Names are imported on first use: the decisions and the simulator need numpy at most.
"""

from ..lazy import exports

_HOMES = {
    "cache.eviction": (
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
    "cache.cache": ("Cache", "Grant"),
    "cache.counters": ("Counters",),
    "schedule.prefetch": ("ISSUE", "PrefetchCounters", "Prefetcher"),
    "schedule.schedule": ("P0", "P1", "P2", "Scheduler", "SchedulerCounters", "Ticket"),
    "store.pack": ("Pack", "read_pack"),
    "store.packing": ("write_pack",),
    "store.layout": ("ExpertLayout", "TensorSpec"),
    "store.store": ("ExpertStore", "open_store"),
    "layer.options": ("LayerOptions", "profile"),
    "layer.late": ("LateExperts",),
    "layer.paths": ("StagedSwitch",),
    "layer.stack": ("StagedSet",),
    "layer.staged": ("StagedCounters", "StagedSlots"),
    "engine.options": ("EngineOptions",),
    "engine.engine": ("StreamingEngine",),
    "engine.issuing": ("Issuer",),
    "engine.layerwise": ("LayerMajor",),
    "engine.streamed": ("StreamedModel",),
    "store.device": ("Throttle", "VirtualDevice"),
    "schedule.passes": ("Passes",),
    "schedule.oracle": ("NoisyOracle", "Oracle", "PreviousToken"),
    "simulation.simulator": ("simulate",),
    "simulation.simulation": ("Simulation", "share_of_possible"),
    "simulation.validation": ("Recording", "device_of", "record", "resimulate", "wake_late_s"),
}
__getattr__, __dir__, __all__ = exports(__name__, _HOMES)
