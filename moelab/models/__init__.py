"""Models: load an mlx-lm checkpoint, name its routing family, read what it routes.

    from moelab.models import activate, load
    activate("auto")                      # choose the BLAS before mlx is imported
    lm = load("softmax")
    with lm.tap(("moe_input",)) as tap:
        logits = lm.model(tokens[None], cache=lm.make_cache())
        mx.eval(logits, *tap.pending())
        record = tap.take()

Names are imported on first use, so that `activate` can run before mlx is loaded.
"""

from importlib import import_module

_HOMES = {
    "lean": ("without_torch",),
    "naming": ("split_budget",),
    "families": ("RoutingFamily", "Selection"),
    "gates": ("NO_RESIDUAL", "REFUSED", "SUPPORTED"),
    "blocks": ("Block", "find_blocks"),
    "taps": ("Tap", "TapRecord", "FEATURES"),
    "gate_weights": ("GateWeights",),
    "loading": ("LoadedModel", "MoEGeometry", "load", "find"),
    "runtime": ("activate", "find_openblas", "report_progress", "run_workers", "runtime_identity", "synchronisation_s"),
    "known_answers": ("self_test",),
}
_OWNER = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted(_OWNER)


def __getattr__(name: str):
    if name not in _OWNER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_OWNER[name]}", __name__), name)


def __dir__():
    return __all__
