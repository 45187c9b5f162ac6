"""Frames for the notebooks: artefacts of the flywheel laid out as tidy tables, nothing computed anew.

Only reading and reshaping happens here. A figure that needs arithmetic belongs to the flywheel, where it
is tested.
"""

from .data import checks, coverage, coverage_grid, duplicates, leakage, set_sizes
from .rankings import (
    across_sets,
    budgets,
    by_group,
    calibration_rows,
    comparisons,
    figure,
    judged,
    reliability,
    seven,
    shortlist,
    training_history,
    union_growth,
    wasted,
)
from .routes import (
    capture_cost,
    captured,
    collection,
    collection_times,
    feature_cost,
    labels,
    parity,
    progress,
    sequence_kinds,
    speeds,
    tour,
    training_times,
)
from .verdicts import contour, frame, gate_table, hit_curves, machine, reasons, systems

__all__ = [
    "across_sets",
    "budgets",
    "by_group",
    "calibration_rows",
    "capture_cost",
    "captured",
    "checks",
    "collection",
    "collection_times",
    "comparisons",
    "contour",
    "coverage",
    "coverage_grid",
    "duplicates",
    "feature_cost",
    "figure",
    "frame",
    "gate_table",
    "hit_curves",
    "judged",
    "labels",
    "leakage",
    "machine",
    "parity",
    "progress",
    "reasons",
    "reliability",
    "sequence_kinds",
    "set_sizes",
    "seven",
    "shortlist",
    "speeds",
    "systems",
    "tour",
    "training_history",
    "training_times",
    "union_growth",
    "wasted",
]
