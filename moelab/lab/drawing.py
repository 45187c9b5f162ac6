"""What every plot shares: a figure that carries its description, checked frames, drawable labels, colours, legends.

A plot refuses a frame that it cannot draw whole. Hue order is always given, so that a colour, its legend entry and its
data cannot be told apart differently.
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


def given(name: str | None) -> list[str]:
    return [name] if name else []


def checked(frame: pd.DataFrame, numbers: list[str], hue: str | None, *categories: str) -> pd.DataFrame:
    """A copy with drawable, ordered labels; refuses absent columns, an empty frame and anything not finite."""
    labels = [*given(hue), *categories]
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


def labels_of(frame: pd.DataFrame, name: str | None) -> list[str] | None:
    """The labels of a column of a checked frame, in their order."""
    return list(frame[name].cat.categories) if name else None


def colours(order: list[str] | None):
    return sns.color_palette(PALETTE, len(order)) if order else None


def parts(frame: pd.DataFrame, hue: str | None, order: list[str] | None):
    """The rows of each label, in order; the whole frame where there is none."""
    return [(name, frame[frame[hue] == name]) for name in order] if order else [("", frame)]


def whiskers(axes: Axes, frame, x, y, hue, se, rows, order, *, width) -> None:
    """Two standard errors on both sides of every mark; groups lie side by side within `width` of a row."""
    groups = order or [""]
    for k, (_, part) in enumerate(parts(frame, hue, order)):
        offset = (k + 0.5) * width / len(groups) - width / 2
        position = [rows.index(name) + offset for name in part[y]]
        axes.errorbar(part[x], position, xerr=2 * part[se], fmt="none", ecolor="black", elinewidth=1, capsize=2)


def grid(frame: pd.DataFrame, x: str, y: str, value: str) -> pd.DataFrame:
    """`[y, x]`, each pair once."""
    if frame.duplicated([x, y]).any():
        raise ContractError("a cell with two values", field=f"{x}, {y}", got="duplicates", expected="one row a pair")
    table = frame.pivot(index=y, columns=x, values=value)
    if table.isna().to_numpy().any():
        raise ContractError("a grid with holes", field=value, got=int(table.isna().to_numpy().sum()), expected="none")
    return table


def new_figure(alt: str, title: str, *, rows: int = 0) -> tuple[Figure, Axes]:
    """A figure with its description, high enough for so many rows of categories, and its axes."""
    if not alt.strip():
        raise ContractError("a figure needs a description", field="alt", got=alt, expected="one or two sentences")
    with sns.axes_style("whitegrid"), matplotlib.rc_context({"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(SIZE[0], max(SIZE[1], 0.42 * rows + 1)), layout="constrained")
        axes = figure.subplots()
    figure.alt = alt
    axes.set_title(readable(title))
    return figure, axes


def finish(figure: Figure, axes: Axes, hue: str | None, *, beside: bool = False) -> Figure:
    """Labels as the font can draw them; the legend where it hides nothing, or `beside` the data in any case."""
    axes.set_xlabel(readable(axes.get_xlabel()))
    axes.set_ylabel(readable(axes.get_ylabel()))
    if hue and (legend := axes.get_legend()) is not None:
        many = beside or len(legend.get_texts()) > MANY
        place = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if many else {"loc": "best"}
        sns.move_legend(axes, **place, frameon=True, title=readable(hue))
    return figure
