"""A frontier of three things: better lies higher, earlier lies further right, and what costs less is smaller."""

from __future__ import annotations

import pandas as pd
import seaborn as sns

from .drawing import Figure, checked, colours, labels_of, new_figure, parts, readable

__all__ = ["frontier"]

MARKERS = "osD^vP*X<>hpd"
AREAS = (24.0, 420.0)
"""Square points, of the least and of the greatest size."""


def frontier(
    frame: pd.DataFrame, *, x: str, y: str, size: str, hue: str, panel: str, alt: str, title: str = ""
) -> Figure:
    """A point a row: its area says `size`, a colour and a shape name its `hue` value; `panel` values, two a row, share
    the time axis and the area's scale."""
    frame = checked(frame, [x, y, size], hue, panel)
    panels, order = parts(frame, panel, labels_of(frame, panel)), labels_of(frame, hue)
    figure, _ = new_figure(alt, "")
    figure.clear()
    rows = -(-len(panels) // 2)
    figure.set_size_inches(figure.get_size_inches()[0] * 1.45, 3.2 * rows + 0.6)
    with sns.axes_style("whitegrid"):
        every = figure.subplots(rows, 2, sharex=True, squeeze=False).reshape(-1)
    figure.suptitle(readable(title))
    low, high = float(frame[size].min()), float(frame[size].max())
    shapes = {label: MARKERS[k % len(MARKERS)] for k, label in enumerate(order)}
    for axes, (name, part) in zip(every, panels, strict=False):
        for colour, label in zip(colours(order), order, strict=True):
            some = part[part[hue] == label]
            share = (some[size] - low) / (high - low) if high > low else some[size] * 0
            area = AREAS[0] + (AREAS[1] - AREAS[0]) * share
            axes.scatter(some[x], some[y], s=area, marker=shapes[label], color=colour, alpha=0.75, edgecolor="black")
        axes.set_title(readable(name), fontsize="medium")
        axes.set_ylabel(readable(y))
        axes.margins(0.1)
        axes.set_ylim(-0.05, max(axes.get_ylim()[1], 0.5))
        axes.set_xlabel(readable(x))
    for axes in every[len(panels) :]:
        axes.set_visible(False)
    handles = [
        figure.axes[0].scatter([], [], marker=shapes[label], color=colour, edgecolor="black", label=label)
        for colour, label in zip(colours(order), order, strict=True)
    ]
    for value in (low, high):
        area = AREAS[0] if value == low else AREAS[1]
        handles.append(figure.axes[0].scatter([], [], s=area, color="white", edgecolor="black", label=f"{value:,.0f}"))
    figure.legend(handles=handles, loc="outside right upper", title=readable(f"{hue}; area: {size}"), fontsize="small")
    return figure
