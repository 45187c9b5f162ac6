"""Tables show n and standard errors, and frames keep their contract through a file."""

import pandas as pd
import pandera.pandas as pa
import pytest
from pandera.typing.pandas import Series

from moelab.errors import ContractError, MissingArtifactError, RecordError
from moelab.lab import tables


class Cells(pa.DataFrameModel):
    control: Series[str]
    recall: Series[float] = pa.Field(ge=0, le=1)

    class Config:
        strict = True


FRAME = pd.DataFrame({"control": ["gate", "previous"], "value": [0.5, 0.25], "se": [0.01, 0.002], "n": [100, 2000]})


def test_estimates_show_value_error_and_n():
    html = tables.estimate_table(FRAME, id="recall", caption="Recall at K").as_raw_html()
    for text in (
        "0.500\u00a0±\u00a00.010",
        "0.250\u00a0±\u00a00.002",
        "2,000",
        "Recall at K",
        "value ± standard error",
        'id="recall"',
    ):
        assert text in html, text


def test_estimates_separate_thousands_and_have_no_negative_zero():
    frame = FRAME.assign(value=[174838.2, -0.0001], se=[3090.0, 0.0])
    html = tables.estimate_table(frame, id="x", caption="x", decimals=1).as_raw_html()
    assert "174,838.2\u00a0±\u00a03,090.0" in html and ">0.0\u00a0±\u00a00.0<" in html


def test_a_figure_is_not_broken_in_the_middle():
    frame = pd.DataFrame({"range": ["1 to -2.5", None], "words": ["± 0.1 of all, from 3 to five", "nothing to add"]})
    html = tables.table(frame, id="x", caption="x").as_raw_html()
    for text in ("1\u00a0to\u00a0-2.5", "± 0.1 of all, from 3 to five", "nothing to add"):
        assert text in html
    assert frame["range"].tolist()[0] == "1 to -2.5"


def test_truths_are_yes_and_no():
    html = tables.table(pd.DataFrame({"undominated": [True, False]}), id="x", caption="x").as_raw_html()
    assert "yes</td>" in html and "no</td>" in html and "True" not in html


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"se": [-1.0, 0.0]}, "se: greater_than"),
        ({"n": [0, 1]}, "n: greater_than"),
        ({"value": [1, 2]}, "value: dtype"),
    ],
)
def test_a_mean_without_its_error_and_n_is_refused(change, message):
    with pytest.raises(RecordError, match=message):
        tables.estimate_table(FRAME.assign(**change), id="x", caption="c")
    with pytest.raises(RecordError, match="se: column_in_dataframe|column_in_dataframe.*se"):
        tables.estimate_table(FRAME.drop(columns="se"), id="x", caption="c")


def test_equal_tables_are_equal_text_and_labels_are_checked():
    one, two = (tables.table(FRAME, id="t", caption="c", labels={"n": "tokens"}).as_raw_html() for _ in range(2))
    assert one == two and "tokens" in one
    with pytest.raises(ContractError, match="label of no column; field: m"):
        tables.table(FRAME, id="t", caption="c", labels={"m": "tokens"})


def test_numbers_read_well_small_large_and_missing():
    frame = pd.DataFrame({"x": [8.643e-7, 1234567.0, 0.5, float("nan"), 0.0], "k": [1, 20000, 3, 4, 5]})
    html = tables.table(frame, id="t", caption="c").as_raw_html()
    cells = [part.split("<")[0] for part in html.split('class="gt_row gt_right">')[1:]]
    assert cells == ["8.64e-07", "1", "1,235,000", "20,000", "0.5", "3", "–", "4", "0", "5"]


def test_every_failure_is_listed():
    bad = pd.DataFrame({"control": ["a", "b"], "recall": [2.0, -1.0]})
    with pytest.raises(RecordError, match=r"\(-1.0\).*\(2.0\).*expected: Cells"):
        tables.check(bad, Cells)


def test_frame_survives_parquet_and_is_checked_on_both_sides(tmp_path):
    frame = pd.DataFrame({"control": ["门", "b"], "recall": [0.5, 1.0]})
    tables.write_frame(tmp_path / "f.parquet", frame, Cells)
    pd.testing.assert_frame_equal(tables.read_frame(tmp_path / "f.parquet", Cells), frame)
    assert [path.name for path in tmp_path.iterdir()] == ["f.parquet"]
    frame.assign(recall=[0.5, 1.5]).to_parquet(tmp_path / "f.parquet")
    with pytest.raises(RecordError, match="file: .*f.parquet.*recall"):
        tables.read_frame(tmp_path / "f.parquet", Cells)
    with pytest.raises(RecordError, match="recall"):
        tables.write_frame(tmp_path / "g.parquet", frame.assign(recall=-1.0), Cells)
    with pytest.raises(MissingArtifactError, match="file not found"):
        tables.read_frame(tmp_path / "h.parquet", Cells)


def test_what_parquet_changes_is_not_written(tmp_path, monkeypatch):
    frame = pd.DataFrame({"control": ["a"], "recall": [0.5]})
    read = pd.read_parquet
    monkeypatch.setattr(pd, "read_parquet", lambda path: read(path).assign(recall=0.25))
    with pytest.raises(RecordError, match="what was written is not what was given"):
        tables.write_frame(tmp_path / "f.parquet", frame, Cells)
    assert not list(tmp_path.iterdir())


def test_integer_categories_that_parquet_would_change_are_refused(tmp_path):
    class Free(pa.DataFrameModel):
        k: Series[pa.Category]

    frame = pd.DataFrame({"k": pd.Categorical([1, 2, 4])})
    with pytest.raises(RecordError, match="numeric categories do not survive parquet; .*field: k"):
        tables.write_frame(tmp_path / "f.parquet", frame, Free)
