"""Plots: data frame in, figure with a description out.

Every function takes a tidy data frame and a required `alt` text, checks the columns that it draws, and
returns a `Figure` that carries the text wherever it is shown (JupyterLab, papermill, the HTML report).
Nothing goes through pyplot: no global state, no figure drawn twice. What plots share is in `drawing`.

Only seaborn's function API is used; its objects API is not clean under pandas 3.
"""

from __future__ import annotations

import pandas as pd
import seaborn as sns

from .drawing import (
    PALETTE,
    Figure,
    checked,
    colours,
    finish,
    given,
    grid,
    labels_of,
    new_figure,
    parts,
    readable,
    whiskers,
)


def lines(
    frame: pd.DataFrame,
    *,
    x: str,
    y: str,
    alt: str,
    hue: str | None = None,
    se: str | None = None,
    title: str = "",
    log_x: bool = False,
    log_y: bool = False,
) -> Figure:
    """One line a hue value; a band of two standard errors when the column `se` is named."""
    frame = checked(frame, [x, y, *given(se)], hue)
    figure, axes = new_figure(alt, title)
    order = labels_of(frame, hue)
    sns.lineplot(frame, x=x, y=y, hue=hue, hue_order=order, palette=colours(order), ax=axes, errorbar=None, marker="o")
    if se:
        for colour, (_, part) in zip(
            colours(order) or sns.color_palette(PALETTE, 1), parts(frame, hue, order), strict=True
        ):
            part = part.sort_values(x)
            axes.fill_between(part[x], part[y] - 2 * part[se], part[y] + 2 * part[se], color=colour, alpha=0.2, lw=0)
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        if frame[x].nunique() <= 12:  # budgets read better as themselves than as powers of two
            axes.set_xticks(sorted(frame[x].unique()), [f"{value:g}" for value in sorted(frame[x].unique())])
    if log_y:
        axes.set_yscale("log")
    return finish(figure, axes, hue)


def bars(
    frame: pd.DataFrame, *, x: str, y: str, alt: str, hue: str | None = None, se: str | None = None, title: str = ""
) -> Figure:
    """Horizontal bars from zero: `y` names the categories, `x` is the length, whiskers are two standard errors."""
    frame = checked(frame, [x, *given(se)], hue, y)
    figure, axes = new_figure(alt, title, rows=frame[y].nunique())
    order, rows = labels_of(frame, hue), labels_of(frame, y)
    sns.barplot(frame, x=x, y=y, hue=hue, hue_order=order, order=rows, palette=colours(order), ax=axes, errorbar=None)
    if se:
        whiskers(axes, frame, x, y, hue, se, rows, order, width=0.8)
    return finish(figure, axes, hue, beside=True)


def estimates(
    frame: pd.DataFrame, *, x: str, y: str, se: str, alt: str, hue: str | None = None, title: str = ""
) -> Figure:
    """Points with whiskers of two standard errors: for values whose distance from zero says nothing."""
    frame = checked(frame, [x, se], hue, y)
    figure, axes = new_figure(alt, title, rows=frame[y].nunique())
    order, rows = labels_of(frame, hue), labels_of(frame, y)
    sns.stripplot(
        frame,
        x=x,
        y=y,
        hue=hue,
        hue_order=order,
        order=rows,
        palette=colours(order),
        ax=axes,
        jitter=False,
        dodge=bool(hue),
        size=7,
    )
    whiskers(axes, frame, x, y, hue, se, rows, order, width=0.8)
    axes.grid(axis="x", alpha=0.4)
    return finish(figure, axes, hue)


def dots(frame: pd.DataFrame, *, x: str, y: str, alt: str, hue: str, title: str = "") -> Figure:
    """A point a row, hue values side by side and of different shape: which of many things happens where."""
    frame = checked(frame, [x, y], hue)
    figure, axes = new_figure(alt, title)
    order = labels_of(frame, hue)
    shifts = {name: 0.6 * ((k + 0.5) / len(order) - 0.5) for k, name in enumerate(order)}
    moved = frame.assign(**{x: frame[x] + frame[hue].map(shifts).astype(float)})
    sns.scatterplot(
        moved, x=x, y=y, hue=hue, hue_order=order, style=hue, style_order=order, palette=colours(order), ax=axes, s=36
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), title=readable(hue))
    axes.set_xlabel(readable(x))
    axes.set_ylabel(readable(y))
    return figure


def spans(
    frame: pd.DataFrame,
    *,
    start: str,
    end: str,
    y: str,
    hue: str,
    alt: str,
    x: str,
    panel: str | None = None,
    title: str = "",
) -> Figure:
    """Bars from `start` to `end`, one line a value of `y` (the first on top), a colour a value of `hue`: when things
    happen. `panel` values stand below each other on one time axis, which `x` names."""
    frame = checked(frame, [start, end], hue, y, *given(panel))
    panels = parts(frame, panel, labels_of(frame, panel))
    order, rows = labels_of(frame, hue), labels_of(frame, y)
    figure, _ = new_figure(alt, "", rows=len(rows) * len(panels))
    figure.clear()
    with sns.axes_style("whitegrid"):
        every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    figure.suptitle(readable(title))
    for axes, (name, part) in zip(every, panels, strict=True):
        for colour, label in zip(colours(order), order, strict=True):
            bars = part[part[hue] == label]
            place = [rows.index(value) for value in bars[y]]
            axes.barh(place, bars[end] - bars[start], left=bars[start], height=0.8, color=colour, label=label)
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set_ylabel(readable(y))
        axes.set_title(readable(name), fontsize="medium")
    every[-1].set_xlabel(readable(x))
    every[0].legend(loc="upper left", bbox_to_anchor=(1, 1), title=readable(hue))
    return figure


def heatmap(frame: pd.DataFrame, *, x: str, y: str, value: str, alt: str, title: str = "", fmt: str = ".2f") -> Figure:
    """One cell a pair (x, y), its value written inside. Raises ContractError when a pair occurs twice."""
    frame = checked(frame, [value], None, x, y)
    table = grid(frame, x, y, value)
    figure, axes = new_figure(alt, title, rows=len(table))
    sns.heatmap(table, annot=table.size <= 200, fmt=fmt, cmap="viridis", ax=axes, cbar_kws={"label": readable(value)})
    axes.tick_params(axis="y", rotation=0)
    return finish(figure, axes, None)


def contour(frame: pd.DataFrame, *, x: str, y: str, value: str, alt: str, level: float, title: str = "") -> Figure:
    """Filled contours of `value` over a full grid, with the line where it equals `level` (the break-even)."""
    frame = checked(frame, [x, y, value], None)
    table = grid(frame, x, y, value)
    figure, axes = new_figure(alt, title)
    columns, rows = table.columns.to_numpy(float), table.index.to_numpy(float)
    filled = axes.contourf(columns, rows, table.to_numpy(), levels=12, cmap="viridis")
    figure.colorbar(filled, ax=axes, label=readable(value))
    line = axes.contour(columns, rows, table.to_numpy(), levels=[level], colors="white", linewidths=2.5)
    axes.clabel(line, fmt=f"{value} = {level:g}")
    axes.set_xlabel(readable(x))
    axes.set_ylabel(readable(y))
    return finish(figure, axes, None)


def reliability(
    frame: pd.DataFrame, *, predicted: str, observed: str, alt: str, hue: str | None = None, title: str = ""
) -> Figure:
    """Observed frequency against predicted probability; the diagonal is perfect calibration."""
    frame = checked(frame, [predicted, observed], hue)
    figure, axes = new_figure(alt, title)
    axes.plot([0, 1], [0, 1], ls="--", color="grey", label="calibrated")
    order = labels_of(frame, hue)
    sns.lineplot(
        frame,
        x=predicted,
        y=observed,
        hue=hue,
        hue_order=order,
        palette=colours(order),
        ax=axes,
        errorbar=None,
        marker="o",
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return finish(figure, axes, hue)
