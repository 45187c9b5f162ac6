"""The laboratory: run the notebooks, render the reports, draw the plots, lay out the tables.

Nothing is decided here. Figures come from the flywheel's pure functions; this room shows them with n and
standard errors, in pages that open without a network.
"""

import warnings

from ..lazy import exports

# Libraries underneath ask tqdm for a notebook widget, and without ipywidgets it complains in the first cell that
# loads a model. Widgets are left out on purpose: in a page they would be empty and fetch a script.
warnings.filterwarnings("ignore", message="IProgress not found")

_HOMES = {
    "report": ("publish",),
    "plots": ("lines", "bars", "estimates", "dots", "spans", "heatmap", "contour", "reliability"),
    "frontiers": ("frontier",),
    "tables": ("table", "estimate_table"),
}
__getattr__, __dir__, __all__ = exports(__name__, _HOMES)
