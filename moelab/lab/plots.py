"""Plots: data frame in, figure with a description out.

Every function takes a tidy data frame and a required `alt` text, checks the columns that it draws, and
returns a `Figure` that carries the text wherever it is shown (JupyterLab, papermill, the HTML report).
Nothing goes through pyplot: no global state, no figure drawn twice.

Only seaborn's function API is used; its objects API is not clean under pandas 3. Hue order is always given,
so that a colour, its legend entry and its data cannot be told apart differently.
"""

from __future__ import annotations

import io
from functools import cache

import matplotlib
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure as BaseFigure

from ..errors import ContractError

PALETTE = "colorblind"
SIZE = (7.2, 4.0)
"""Inches: fits the report's column at 100 dots an inch."""
DPI = 110
MANY = 5
"""Entries from which on a legend stands beside the data: inside it would lie on some of it."""


class Figure(BaseFigure):
    """A matplotlib figure that knows its description and shows itself with it."""

    alt: str

    def _repr_mimebundle_(self, include=None, exclude=None):
        buffer = io.BytesIO()
        # No software version or date inside the file: equal data, equal bytes.
        self.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
        return {"image/png": buffer.getvalue(), "text/plain": self.alt}, {"image/png": {"alt": self.alt}}


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
    frame = _checked(frame, [x, y, *_given(se)], hue)
    figure, axes = _new(alt, title)
    order = _order(frame, hue)
    sns.lineplot(frame, x=x, y=y, hue=hue, hue_order=order, palette=_colours(order), ax=axes, errorbar=None, marker="o")
    if se:
        for colour, (_, part) in zip(
            _colours(order) or sns.color_palette(PALETTE, 1), _parts(frame, hue, order), strict=True
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
    return _finish(figure, axes, hue)


def bars(
    frame: pd.DataFrame, *, x: str, y: str, alt: str, hue: str | None = None, se: str | None = None, title: str = ""
) -> Figure:
    """Horizontal bars from zero: `y` names the categories, `x` is the length, whiskers are two standard errors."""
    frame = _checked(frame, [x, *_given(se)], hue, y)
    figure, axes = _new(alt, title, rows=frame[y].nunique())
    order, rows = _order(frame, hue), _order(frame, y)
    sns.barplot(frame, x=x, y=y, hue=hue, hue_order=order, order=rows, palette=_colours(order), ax=axes, errorbar=None)
    if se:
        _whiskers(axes, frame, x, y, hue, se, rows, order, width=0.8)
    return _finish(figure, axes, hue, beside=True)


def estimates(
    frame: pd.DataFrame, *, x: str, y: str, se: str, alt: str, hue: str | None = None, title: str = ""
) -> Figure:
    """Points with whiskers of two standard errors: for values whose distance from zero says nothing."""
    frame = _checked(frame, [x, se], hue, y)
    figure, axes = _new(alt, title, rows=frame[y].nunique())
    order, rows = _order(frame, hue), _order(frame, y)
    sns.stripplot(
        frame,
        x=x,
        y=y,
        hue=hue,
        hue_order=order,
        order=rows,
        palette=_colours(order),
        ax=axes,
        jitter=False,
        dodge=bool(hue),
        size=7,
    )
    _whiskers(axes, frame, x, y, hue, se, rows, order, width=0.8)
    axes.grid(axis="x", alpha=0.4)
    return _finish(figure, axes, hue)


def dots(frame: pd.DataFrame, *, x: str, y: str, alt: str, hue: str, title: str = "") -> Figure:
    """A point a row, hue values side by side and of different shape: which of many things happens where."""
    frame = _checked(frame, [x, y], hue)
    figure, axes = _new(alt, title)
    order = _order(frame, hue)
    shifts = {name: 0.6 * ((k + 0.5) / len(order) - 0.5) for k, name in enumerate(order)}
    moved = frame.assign(**{x: frame[x] + frame[hue].map(shifts).astype(float)})
    sns.scatterplot(
        moved, x=x, y=y, hue=hue, hue_order=order, style=hue, style_order=order, palette=_colours(order), ax=axes, s=36
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
    frame = _checked(frame, [start, end], hue, y, *_given(panel))
    panels = _parts(frame, panel, _order(frame, panel))
    order, rows = _order(frame, hue), _order(frame, y)
    figure, _ = _new(alt, "", rows=len(rows) * len(panels))
    figure.clear()
    with sns.axes_style("whitegrid"):
        every = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    figure.suptitle(readable(title))
    for axes, (name, part) in zip(every, panels, strict=True):
        for colour, label in zip(_colours(order), order, strict=True):
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
    frame = _checked(frame, [value], None, x, y)
    table = _grid(frame, x, y, value)
    figure, axes = _new(alt, title, rows=len(table))
    sns.heatmap(table, annot=table.size <= 200, fmt=fmt, cmap="viridis", ax=axes, cbar_kws={"label": readable(value)})
    axes.tick_params(axis="y", rotation=0)
    return _finish(figure, axes, None)


def contour(frame: pd.DataFrame, *, x: str, y: str, value: str, alt: str, level: float, title: str = "") -> Figure:
    """Filled contours of `value` over a full grid, with the line where it equals `level` (the break-even)."""
    frame = _checked(frame, [x, y, value], None)
    table = _grid(frame, x, y, value)
    figure, axes = _new(alt, title)
    columns, rows = table.columns.to_numpy(float), table.index.to_numpy(float)
    filled = axes.contourf(columns, rows, table.to_numpy(), levels=12, cmap="viridis")
    figure.colorbar(filled, ax=axes, label=readable(value))
    line = axes.contour(columns, rows, table.to_numpy(), levels=[level], colors="white", linewidths=2.5)
    axes.clabel(line, fmt=f"{value} = {level:g}")
    axes.set_xlabel(readable(x))
    axes.set_ylabel(readable(y))
    return _finish(figure, axes, None)


def reliability(
    frame: pd.DataFrame, *, predicted: str, observed: str, alt: str, hue: str | None = None, title: str = ""
) -> Figure:
    """Observed frequency against predicted probability; the diagonal is perfect calibration."""
    frame = _checked(frame, [predicted, observed], hue)
    figure, axes = _new(alt, title)
    axes.plot([0, 1], [0, 1], ls="--", color="grey", label="calibrated")
    order = _order(frame, hue)
    sns.lineplot(
        frame,
        x=predicted,
        y=observed,
        hue=hue,
        hue_order=order,
        palette=_colours(order),
        ax=axes,
        errorbar=None,
        marker="o",
    )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return _finish(figure, axes, hue)


# ---------------------------------------------------------------- shared


def readable(text: object) -> str:
    """The text with every character that the shipped font cannot draw replaced by a box.

    Thread titles may be in any script; a missing glyph otherwise warns on every draw, and shows nothing.
    """
    have = _glyphs()
    return "".join(char if ord(char) in have or char.isspace() else "□" for char in str(text))


@cache
def _glyphs() -> frozenset[int]:
    from matplotlib import font_manager

    font = font_manager.get_font(font_manager.findfont("DejaVu Sans", fallback_to_default=False))
    return frozenset(font.get_charmap())


def _given(name: str | None) -> list[str]:
    return [name] if name else []


def _checked(frame: pd.DataFrame, numbers: list[str], hue: str | None, *categories: str) -> pd.DataFrame:
    """A copy with drawable, ordered labels; refuses absent columns, an empty frame and anything not finite."""
    labels = [*_given(hue), *categories]
    for name in [*numbers, *labels]:
        if name not in frame.columns:
            raise ContractError("no such column", field=name, got=list(frame.columns), expected=name)
    if frame.empty:
        raise ContractError("nothing to plot", got="an empty frame", expected="at least one row")
    for name in numbers:
        values = pd.to_numeric(frame[name], errors="coerce").to_numpy(float)
        if bad := int((~np.isfinite(values)).sum()):
            raise ContractError(
                "not finite", field=name, got=f"{bad} of {len(values)} values", expected="finite numbers"
            )
    return frame.assign(**{name: _labelled(frame[name]) for name in labels}).reset_index(drop=True)


def _labelled(column: pd.Series) -> pd.Categorical:
    """The column as drawable text, in its own order: categories as given, numbers sorted, text as it comes."""
    if isinstance(column.dtype, pd.CategoricalDtype):
        values = list(column.cat.categories)
    elif pd.api.types.is_numeric_dtype(column):
        values = sorted(column.unique())
    else:
        values = list(dict.fromkeys(column))
    text = {value: readable(value) for value in values}
    return pd.Categorical([text[value] for value in column], categories=list(dict.fromkeys(text.values())))


def _order(frame: pd.DataFrame, name: str | None) -> list[str] | None:
    return list(frame[name].cat.categories) if name else None


def _colours(order: list[str] | None):
    return sns.color_palette(PALETTE, len(order)) if order else None


def _parts(frame: pd.DataFrame, hue: str | None, order: list[str] | None):
    return [(name, frame[frame[hue] == name]) for name in order] if order else [("", frame)]


def _whiskers(axes: Axes, frame, x, y, hue, se, rows, order, *, width) -> None:
    groups = order or [""]
    for k, (_, part) in enumerate(_parts(frame, hue, order)):
        offset = (k + 0.5) * width / len(groups) - width / 2
        position = [rows.index(name) + offset for name in part[y]]
        axes.errorbar(part[x], position, xerr=2 * part[se], fmt="none", ecolor="black", elinewidth=1, capsize=2)


def _grid(frame: pd.DataFrame, x: str, y: str, value: str) -> pd.DataFrame:
    if frame.duplicated([x, y]).any():
        raise ContractError("a cell with two values", field=f"{x}, {y}", got="duplicates", expected="one row a pair")
    table = frame.pivot(index=y, columns=x, values=value)
    if table.isna().to_numpy().any():
        raise ContractError("a grid with holes", field=value, got=int(table.isna().to_numpy().sum()), expected="none")
    return table


def _new(alt: str, title: str, *, rows: int = 0) -> tuple[Figure, Axes]:
    if not alt.strip():
        raise ContractError("a figure needs a description", field="alt", got=alt, expected="one or two sentences")
    with sns.axes_style("whitegrid"), matplotlib.rc_context({"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(SIZE[0], max(SIZE[1], 0.42 * rows + 1)), layout="constrained")
        axes = figure.subplots()
    figure.alt = alt
    axes.set_title(readable(title))
    return figure, axes


def _finish(figure: Figure, axes: Axes, hue: str | None, *, beside: bool = False) -> Figure:
    """Labels as the font can draw them; the legend where it hides nothing, or `beside` the data in any case."""
    axes.set_xlabel(readable(axes.get_xlabel()))
    axes.set_ylabel(readable(axes.get_ylabel()))
    if hue and (legend := axes.get_legend()) is not None:
        many = beside or len(legend.get_texts()) > MANY
        place = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if many else {"loc": "best"}
        sns.move_legend(axes, **place, frameon=True, title=readable(hue))
    return figure
