"""Peers: other runtimes on the same weights, the same prompts and the same memory cap.

generated    a large random model, written at run time
convert      the same numbers as GGUF and as accelerate's offload folder
cap, cold    a memory cap that the kernel enforces; a start with nothing in memory, proved by device bytes
arms, worker each runtime in a process of its own
comparison, judge, stage
"""

from importlib import import_module

_HOMES = {
    "generated": ("Shape",),
    "comparison": ("Arm", "Run", "compare"),
    "judge": ("Outcome", "Row", "judge"),
    "stage": ("PeersOptions", "Comparison", "compare_peers", "committed", "record", "write"),
    "views": ("peer_rows",),
}
_OWNER = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_OWNER)


def __getattr__(name: str):
    if name not in _OWNER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_OWNER[name]}", __name__), name)


def __dir__():
    return __all__
