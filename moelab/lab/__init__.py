"""The laboratory: run the notebooks, render the reports, draw the plots, lay out the tables.

Nothing is decided here. Figures come from the flywheel's pure functions; this room shows them with n and
standard errors, in pages that open without a network.
"""

import warnings
from importlib import import_module

# Libraries underneath ask tqdm for a notebook widget, and without ipywidgets it complains in the first cell that
# loads a model. Widgets are left out on purpose: in a page they would be empty and fetch a script.
warnings.filterwarnings("ignore", message="IProgress not found")

_HOMES = {
    "publish": "report",
    "lines": "plots",
    "bars": "plots",
    "estimates": "plots",
    "dots": "plots",
    "spans": "plots",
    "heatmap": "plots",
    "contour": "plots",
    "reliability": "plots",
    "frontier": "frontiers",
    "table": "tables",
    "estimate_table": "tables",
}

__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
