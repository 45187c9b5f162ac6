"""Peers: other runtimes on the same weights, the same prompts and the same memory cap.

generated    a large random model, written at run time
convert      the same numbers as GGUF and as accelerate's offload folder
cap, cold    a memory cap that the kernel enforces; a start with nothing in memory, proved by device bytes
arms, worker each runtime in a process of its own
comparison, judge, stage
"""

from ...lazy import exports

_HOMES = {
    "generated": ("Shape",),
    "comparison": ("Arm", "Run", "compare"),
    "judge": ("Outcome", "Row", "judge"),
    "stage": ("PeersOptions", "Comparison", "compare_peers", "committed", "record", "write"),
    "views": ("peer_rows",),
}
__getattr__, __dir__, __all__ = exports(__name__, _HOMES)
