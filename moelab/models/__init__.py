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

from ..lazy import exports

_HOMES = {
    "lean": ("without_torch",),
    "naming": ("split_budget",),
    "families": ("RoutingFamily", "Selection"),
    "gates": ("NO_RESIDUAL", "REFUSED", "SUPPORTED"),
    "blocks": ("Block", "find_blocks"),
    "taps": ("Tap", "TapRecord", "FEATURES"),
    "gate_weights": ("GateWeights",),
    "loading": ("LoadedModel", "MoEGeometry", "load", "find"),
    "runtime": ("activate", "find_openblas", "in_worker", "report_progress", "run_workers")
    + ("runtime_identity", "synchronisation_s"),
    "known_answers": ("self_test",),
}
__getattr__, __dir__, __all__ = exports(__name__, _HOMES)
