"""Plots are tested by the data they carry, not by their pixels; warnings are errors throughout."""

import numpy as np
import pandas as pd
import pytest

from moelab.errors import ContractError
from moelab.lab import drawing, plots

ALT = "Recall by candidates"


@pytest.fixture
def frame():
    return pd.DataFrame(
        {
            "k": [1, 2, 4] * 3,
            "recall": np.linspace(0.1, 0.9, 9),
            "se": np.full(9, 0.02),
            "control": np.repeat(["previous token", "adjacent layer", "gate"], 3),
        }
    )


def draw(figure):
    data, metadata = figure._repr_mimebundle_()
    assert data["image/png"].startswith(b"\x89PNG") and metadata["image/png"]["alt"] == figure.alt == ALT
    return figure.axes[0]


def test_each_line_has_the_data_of_its_legend_entry(frame):
    axes = draw(plots.lines(frame, x="k", y="recall", hue="control", se="se", alt=ALT, log_x=True))
    handles, labels = axes.get_legend().legend_handles, [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["previous token", "adjacent layer", "gate"]
    drawn = {line.get_color(): line.get_ydata() for line in axes.lines if len(line.get_ydata())}
    for handle, label in zip(handles, labels, strict=True):
        np.testing.assert_allclose(drawn[handle.get_color()], frame.recall[frame.control == label])
    bands = [collection.get_paths()[0].get_extents() for collection in axes.collections]
    assert [band.y0 for band in bands] == pytest.approx([0.06, 0.36, 0.66])  # value - 2 se of each first point


def test_a_long_legend_stands_beside_the_data(frame):
    few = plots.lines(frame, x="k", y="recall", hue="control", alt=ALT)
    many = plots.lines(frame.assign(control=list("abcdefghi")), x="k", y="recall", hue="control", alt=ALT)
    for figure, beside in ((few, False), (many, True)):
        draw(figure)
        figure.draw_without_rendering()
        axes = figure.axes[0]
        assert (axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1) == beside


def test_order_of_rows_does_not_swap_colours(frame):
    shuffled = frame.sample(frac=1, random_state=3)
    order = list(dict.fromkeys(shuffled.control))
    axes = draw(plots.lines(shuffled, x="k", y="recall", hue="control", alt=ALT))
    lines = [line for line in axes.lines if len(line.get_ydata())]
    for line, name in zip(lines, order, strict=True):
        np.testing.assert_allclose(np.sort(line.get_ydata()), frame.recall[frame.control == name])


def test_bars_and_whiskers_sit_on_their_rows(frame):
    axes = draw(plots.bars(frame, x="recall", y="control", hue="k", se="se", alt=ALT))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["previous token", "adjacent layer", "gate"]
    bars = {(round(bar.get_y() + bar.get_height() / 2, 3), round(bar.get_width(), 6)) for bar in axes.patches}
    whiskers = {
        (round(float(segment[0, 1]), 3), round(float(segment[:, 0].mean()), 6))
        for collection in axes.collections
        for segment in collection.get_segments()
    }
    assert len(whiskers) == 9 and whiskers <= bars


def test_estimates_do_not_start_at_zero(frame):
    axes = draw(plots.estimates(frame.assign(recall=frame.recall + 5), x="recall", y="control", se="se", alt=ALT))
    assert axes.get_xlim()[0] > 4


def test_heatmap_keeps_numeric_order_and_contour_marks_the_level(frame):
    wide = frame.assign(k=[10, 2, 4] * 3)
    axes = draw(plots.heatmap(wide, x="k", y="control", value="recall", alt=ALT))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "4", "10"]
    grid = pd.DataFrame(
        [(r, w, r - w) for r in np.linspace(0, 1, 5) for w in np.linspace(0, 1, 5)], columns=list("rwg")
    )
    axes = draw(plots.contour(grid, x="w", y="r", value="g", level=0.0, alt=ALT))
    assert any(np.allclose(getattr(item, "levels", [1]), [0.0]) for item in axes.collections)
    draw(plots.contour(grid, x="w", y="r", value="g", level=9.0, alt=ALT))  # no break-even anywhere: no warning


def test_reliability_has_the_diagonal(frame):
    points = pd.DataFrame({"p": [0.1, 0.5], "o": [0.2, 0.5]})
    axes = draw(plots.reliability(points, predicted="p", observed="o", alt=ALT))
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[0, 0], [1, 1]])


def test_titles_in_any_script_draw_without_a_warning(frame):
    strange = frame.assign(control=np.repeat(["学习 🦊", "قرار", "gate"], 3))
    for figure in (
        plots.lines(strange, x="k", y="recall", hue="control", alt=ALT, title="路由 🚀"),
        plots.bars(strange, x="recall", y="control", alt=ALT),
        plots.heatmap(strange, x="k", y="control", value="recall", alt=ALT),
    ):
        draw(figure)
    assert drawing.readable("é ü ж λ 学🦊") == "é ü ж λ □□"


def test_categories_from_parquet_keep_their_order(frame, tmp_path):
    kept = frame.assign(control=pd.Categorical(frame.control, ["gate", "previous token", "adjacent layer"]))
    kept.to_parquet(tmp_path / "f.parquet")
    axes = draw(plots.bars(pd.read_parquet(tmp_path / "f.parquet"), x="recall", y="control", hue="k", alt=ALT))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["gate", "previous token", "adjacent layer"]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["1", "2", "4"]


def test_equal_data_gives_equal_bytes(frame):
    one, two = (plots.lines(frame, x="k", y="recall", hue="control", alt=ALT)._repr_mimebundle_()[0] for _ in range(2))
    assert one["image/png"] == two["image/png"]


@pytest.mark.parametrize(
    ("change", "kwargs", "message"),
    [
        ({}, {"alt": " "}, "needs a description"),
        ({}, {"y": "recal"}, "no such column; field: recal"),
        ({"recall": [np.nan] * 9}, {}, "not finite; field: recall; got: '9 of 9 values'"),
        ({"se": [np.inf] + [0.1] * 8}, {}, "not finite; field: se; got: '1 of 9 values'"),
    ],
)
def test_undrawable_input_is_refused(frame, change, kwargs, message):
    arguments = {"x": "k", "y": "recall", "se": "se", "alt": ALT, **kwargs}
    with pytest.raises(ContractError, match=message):
        plots.lines(frame.assign(**change), **arguments)


def test_empty_frames_duplicates_and_holes_are_refused(frame):
    with pytest.raises(ContractError, match="nothing to plot"):
        plots.lines(frame[:0], x="k", y="recall", alt=ALT)
    twice = pd.concat([frame, frame])
    with pytest.raises(ContractError, match="a cell with two values"):
        plots.heatmap(twice, x="k", y="control", value="recall", alt=ALT)
    with pytest.raises(ContractError, match="a grid with holes"):
        plots.heatmap(frame[1:], x="k", y="control", value="recall", alt=ALT)


def test_dots_stand_beside_each_other_with_the_shape_of_their_legend_entry():
    frame = pd.DataFrame({"token": [0, 0, 1], "expert": [5, 7, 5], "policy": ["native", "anchored", "native"]})
    axes = draw(plots.dots(frame, x="token", y="expert", hue="policy", alt=ALT))
    points = axes.collections[0].get_offsets()
    assert points[:, 1].tolist() == [5, 7, 5] and points[:, 0].tolist() == pytest.approx([-0.15, 0.15, 0.85])
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["native", "anchored"]
    with pytest.raises(ContractError, match="finite"):
        plots.dots(frame.assign(expert=np.nan), x="token", y="expert", hue="policy", alt=ALT)
