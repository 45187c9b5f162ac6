"""The laboratory: run the notebooks, render the reports, draw the plots, lay out the tables.

Nothing is decided here. Figures come from the flywheel's pure functions; this room shows them with n and
standard errors, in pages that open without a network.
"""

from importlib import import_module

_HOMES = {
    "publish": "report",
    "lines": "plots",
    "bars": "plots",
    "estimates": "plots",
    "heatmap": "plots",
    "contour": "plots",
    "reliability": "plots",
    "table": "tables",
    "estimate_table": "tables",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
