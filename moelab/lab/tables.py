"""Tables: every mean stands beside its n and its standard error, and every frame that crosses a file is checked.

`estimate_table` is the table of this project: one row a cell of an experiment, value ± standard error, n.
`table` is for everything that is no estimate. Both return great_tables objects, which show themselves as
static HTML with a fixed id, so that equal tables are equal text.

A frame written to parquet comes back with other string and integer types (an integer category does not
survive), so `read_frame` validates against the same contract as `write_frame`, and both refuse instead of
coercing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pandera.pandas as pa
from great_tables import GT
from pandera.typing.pandas import Series

from ..errors import ContractError, MissingArtifactError, RecordError
from .report import show

SPACED = re.compile(r"(?<=\d) (±|to) (?=-?\d)")
"""What stands in the middle of a figure, where a line must not break."""


class Estimates(pa.DataFrameModel):
    """Rows that report a mean: value, its standard error (clustered by thread), and n behind it."""

    value: Series[float]
    se: Series[float] = pa.Field(ge=0)
    n: Series[int] = pa.Field(ge=1)

    class Config:
        strict = False  # further columns name the cell: control, horizon, candidates, bytes


def check(frame: pd.DataFrame, contract: type[pa.DataFrameModel], *, file: Any = None) -> pd.DataFrame:
    """The frame, if it meets the contract.

    Raises:
        RecordError: with every failure listed, not only the first.
    """
    try:
        return contract.validate(frame, lazy=True)
    except pa.errors.SchemaErrors as errors:
        cases = errors.failure_cases[["column", "check", "failure_case"]].astype(str)
        got = "; ".join(f"{column}: {check} ({case})" for column, check, case in cases.head(8).itertuples(index=False))
        raise RecordError("frame breaks its contract", file=file, got=got, expected=contract.__name__) from None


def write_frame(path: str | Path, frame: pd.DataFrame, contract: type[pa.DataFrameModel]) -> None:
    """Write parquet after checking, and read it back before it counts as written."""
    path = Path(path)
    check(frame, contract, file=path)
    for name, dtype in frame.dtypes.items():
        if isinstance(dtype, pd.CategoricalDtype) and dtype.categories.dtype.kind in "iuf":
            raise RecordError(
                "numeric categories do not survive parquet", file=path, field=name, got=str(dtype.categories.dtype),
                expected="a plain numeric column",
            )  # fmt: skip
    aside = path.with_name(f".{path.name}.tmp")
    frame.to_parquet(aside, index=False)
    back = pd.read_parquet(aside)
    if not back.equals(frame.reset_index(drop=True)):
        aside.unlink()
        raise RecordError("what was written is not what was given", file=path)
    aside.replace(path)


def read_frame(path: str | Path, contract: type[pa.DataFrameModel]) -> pd.DataFrame:
    """Read parquet written by `write_frame`, checked against its contract."""
    if not Path(path).is_file():
        raise MissingArtifactError("file not found", file=path)
    return check(pd.read_parquet(path), contract, file=path)


def table(frame: pd.DataFrame, *, id: str, caption: str, labels: Mapping[str, str] | None = None) -> GT:
    """A static table of a frame: integers with thousands separated, floats to four significant digits, yes and no.

    `labels` renames columns for the reader (with units); a label of no column is refused.
    """
    labels = dict(labels or {})
    if unknown := set(labels) - set(frame.columns):
        raise ContractError("label of no column", field=sorted(unknown)[0], got=sorted(labels), expected=list(frame))
    integers = [name for name in frame if pd.api.types.is_integer_dtype(frame[name])]
    floats = [name for name in frame if pd.api.types.is_float_dtype(frame[name])]
    texts = {name: frame[name].map(_unbroken) for name in frame if pd.api.types.is_string_dtype(frame[name])}
    made = GT(frame.assign(**texts), id=id).tab_header(title=caption).cols_label(cases=labels)
    if integers:
        made = made.fmt_integer(integers)
    if truths := [name for name in frame if pd.api.types.is_bool_dtype(frame[name])]:
        made = made.fmt(lambda value: "yes" if value else "no", columns=truths)
    if floats:
        made = made.fmt(lambda value: show(float(value)), columns=floats)
    return made.sub_missing(missing_text="–")


def _unbroken(value: Any) -> Any:
    return SPACED.sub(lambda found: f"\u00a0{found[1]}\u00a0", value) if isinstance(value, str) else value


def estimate_table(
    frame: pd.DataFrame, *, id: str, caption: str, labels: Mapping[str, str] | None = None, decimals: int = 3
) -> GT:
    """A table of `Estimates`: the cell's columns as they are, then value ± standard error, then n.

    Raises:
        RecordError: a row without n or standard error.
    """
    check(frame, Estimates)
    text = [
        f"{value:z,.{decimals}f} ± {se:,.{decimals}f}" for value, se in zip(frame["value"], frame["se"], strict=True)
    ]
    shown = frame.drop(columns=["value", "se", "n"]).assign(estimate=text, n=frame["n"])
    return table(shown, id=id, caption=caption, labels={"estimate": "value ± standard error", **(labels or {})})
