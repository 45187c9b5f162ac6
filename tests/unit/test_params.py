"""Strict parameters: what YAML, papermill and a slip of the pen do to them is refused by name."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import pytest
import yaml

from moelab import params
from moelab.errors import ParameterError
from moelab.params import Options, param, read_params


@dataclass(frozen=True, kw_only=True)
class StudyOptions(Options):
    notebook: ClassVar[str] = "77"

    rate: float = param(0.5, "a rate", min=0.0, max=1.0)
    budget: int | None = param(None, "bytes, or all there are", min=1)
    name: str = param("x", "a label")
    label: str | None = param(None, "another")
    on: bool = param(True, "a switch")
    sizes: list[int] = param([1, 2], "sizes", min=1, max=64)
    shares: list[float] = param([0.5], "shares", min=0.0)
    kind: str = param("lru", "a policy", choices=("lru", "opt"))
    kinds: list[str] = param(["lru"], "policies", choices=("lru", "opt"))
    ceiling: float | None = param(None, "a limit", max=9.0)


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """Writes notebooks/params/tiny/77.yaml of a throw-away checkout."""
    monkeypatch.setenv("MOELAB_ROOT", str(tmp_path))
    folder = tmp_path / "notebooks" / "params" / "tiny"
    folder.mkdir(parents=True)

    def write(text: str):
        (folder / "77.yaml").write_text(text, encoding="utf-8")
        return folder / "77.yaml"

    return write


# ---------------------------------------------------------------- what YAML does


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rate: 1e-4", "wrong type; file: {file}; field: StudyOptions.rate; got: '1e-4', expected: float; fix: this is "
         "text: YAML reads a number like 1e-4 as text, write 1.0e-4 and no quotes"),
        ("budget: 1e9", "wrong type; file: {file}; field: StudyOptions.budget; got: '1e9', expected: int | None; "),
        ("budget: 5.0", "wrong type; file: {file}; field: StudyOptions.budget; got: 5.0, expected: int | None; "
         "fix: write 5"),
        ("budget: '5'", "wrong type; file: {file}; field: StudyOptions.budget; got: '5', expected: int | None; fix: "),
        ("seed: 1.0", "wrong type; file: {file}; field: StudyOptions.seed; got: 1.0, expected: int; fix: write 1"),
        ("seed: 1.5", "wrong type; file: {file}; field: StudyOptions.seed; got: 1.5, expected: int"),
        ("seed: true", "wrong type; file: {file}; field: StudyOptions.seed; got: True, expected: int"),
        ("seed:", "wrong type; file: {file}; field: StudyOptions.seed; got: None, expected: int"),
        ("name: yes", "wrong type; file: {file}; field: StudyOptions.name; got: True, expected: str; fix: YAML reads a "
         "bare on, off, yes or no as a boolean: quote it"),
        ("name: 2026-01-02", "wrong type; file: {file}; field: StudyOptions.name; got: datetime.date(2026, 1, 2), "),
        ("label: no", "wrong type; file: {file}; field: StudyOptions.label; got: False, expected: str | None; "
         "fix: YAML"),
        ("on: yes", "unknown parameter; file: {file}; field: True; got: True, expected: ['budget', 'ceiling', 'kind', "
         "'kinds', 'label', 'models', 'name', 'on', 'profile', 'rate', 'seed', 'shares', 'sizes', 'threads']; fix: "
         "YAML reads a bare on, off, yes or no as a boolean: quote it"),
        ("'on': 1", "wrong type; file: {file}; field: StudyOptions.on; got: 1, expected: bool"),
        ("'on': 'yes'", "wrong type; file: {file}; field: StudyOptions.on; got: 'yes', expected: bool"),
        ("raet: 0.1", "unknown parameter; file: {file}; field: raet; got: 0.1, expected: ['budget', "),
        ("rate: .nan", "wrong type; file: {file}; field: StudyOptions.rate; got: nan, expected: float"),
        ("shares: [.inf]", "wrong type; file: {file}; field: StudyOptions.shares; got: [inf], expected: list[float]"),
        ("rate: true", "wrong type; file: {file}; field: StudyOptions.rate; got: True, expected: float"),
        ("rate: 1.5", "out of range; file: {file}; field: StudyOptions.rate; got: 1.5, expected: at least "
         "0.0, at most 1.0"),
        ("rate: -1", "out of range; file: {file}; field: StudyOptions.rate; got: -1, expected: at least "
         "0.0, at most 1.0"),
        ("budget: 0", "out of range; file: {file}; field: StudyOptions.budget; got: 0, expected: at least 1"),
        ("ceiling: 10", "out of range; file: {file}; field: StudyOptions.ceiling; got: 10, expected: at most 9.0"),
        ("sizes: [1, 65]", "out of range; file: {file}; field: StudyOptions.sizes; got: 65, expected: at least 1, "
         "at most 64"),
        ("sizes: [1, 2.0]", "wrong type; file: {file}; field: StudyOptions.sizes; got: [1, 2.0], expected: list[int]"),
        ("sizes: [true]", "wrong type; file: {file}; field: StudyOptions.sizes; got: [True], expected: list[int]"),
        ("sizes: 3", "wrong type; file: {file}; field: StudyOptions.sizes; got: 3, expected: list[int]"),
        ("sizes: []", "empty list; file: {file}; field: StudyOptions.sizes; got: [], expected: at least one item"),
        ("kind: fifo", "unknown choice; file: {file}; field: StudyOptions.kind; got: 'fifo', expected: ('lru', 'opt')"),
        ("kinds: [lru, fifo]", "unknown choice; file: {file}; field: StudyOptions.kinds; got: 'fifo', expected: "),
        ("seed: 1\nseed: 2", "parameter given twice; file: {file}; field: seed"),
        ("- seed", "not a mapping; file: {file}; got: ['seed'], expected: name: value lines"),
        ("seed: [1", "not valid YAML; file: {file}; got: "),
        ("profile: reference", "file of another profile; file: {file}; field: profile; got: 'reference', "
         "expected: tiny"),
    ],
)  # fmt: skip
def test_refused_with_file_field_got_and_expected(profile, text, message):
    file = profile(text)
    with pytest.raises(ParameterError) as caught:
        StudyOptions.from_profile("tiny")
    assert str(caught.value).startswith(message.format(file=file))


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("budget: 5", "budget", 5),  # papermill calls it unknown or mistyped against a default of None
        ("budget: null", "budget", None),
        ("rate: 1.0e-4", "rate", 1e-4),
        ("rate: 1", "rate", 1.0),
        ("ceiling: 3", "ceiling", 3.0),
        ("shares: [1, 0.5]", "shares", [1.0, 0.5]),
        ("name: 'yes'", "name", "yes"),
        ("'on': no", "on", False),
        ("sizes: [64]", "sizes", [64]),
        ("", "seed", 0),
        ("# nothing\n", "seed", 0),
    ],
)
def test_accepted(profile, text, field, value):
    profile(text)
    got = getattr(StudyOptions.from_profile("tiny"), field)
    assert got == value
    assert [type(x) for x in (got if isinstance(got, list) else [got])] == [
        type(x) for x in (value if isinstance(value, list) else [value])
    ]


def test_yaml_itself_does_what_these_tests_are_for():
    assert yaml.safe_load("{rate: 1e-4, on: yes, a: 1, a: 2}") == {"rate": "1e-4", True: True, "a": 2}


# ---------------------------------------------------------------- constructors


def test_a_notebook_must_have_every_parameter_and_may_have_more():
    values = {field.name: getattr(StudyOptions(), field.name) for field in dataclasses.fields(StudyOptions)}
    assert StudyOptions.from_params({**values, "rate": 0.25, "np": object()}) == StudyOptions(rate=0.25)
    del values["budget"]
    with pytest.raises(ParameterError, match="parameters cell lacks a parameter; field: budget; got: None, expected: "):
        StudyOptions.from_params(values)


def test_every_constructor_checks():
    for construct in (
        lambda: StudyOptions(seed=-1),
        lambda: StudyOptions.from_mapping({"seed": -1}),
        lambda: dataclasses.replace(StudyOptions(), seed=-1),
    ):
        with pytest.raises(ParameterError, match=r"out of range; .*StudyOptions.seed; got: -1, expected: at least 0"):
            construct()


def test_overrides_come_last_and_are_checked(profile):
    profile("rate: 0.25\nseed: 3")
    assert StudyOptions.from_profile("tiny", seed=4) == StudyOptions(rate=0.25, seed=4)
    with pytest.raises(ParameterError, match="unknown parameter; .*field: sead"):
        StudyOptions.from_profile("tiny", sead=4)


def test_unknown_profile_and_absent_file(profile):
    with pytest.raises(ParameterError, match="unknown profile; field: profile; got: 'huge', expected: .*'tiny'"):
        StudyOptions.from_profile("huge")
    with pytest.raises(ParameterError, match="no parameters for this notebook in this profile; file: .*77.yaml"):
        StudyOptions.from_profile("tiny")


def test_whole_numbers_given_for_a_float_are_one_parameter_not_two():
    assert StudyOptions(rate=1).own() == StudyOptions(rate=1.0).own()
    assert type(StudyOptions(rate=1).rate) is float


def test_lists_are_not_shared_with_the_caller_or_the_class():
    mine = [1, 2]
    options = StudyOptions(sizes=mine)
    mine.append(1000)
    assert options.sizes == [1, 2]
    StudyOptions().sizes.append(1000)
    assert StudyOptions().sizes == [1, 2]


def test_upstream_gets_what_is_shared_and_own_is_what_is_not(profile):
    @dataclass(frozen=True, kw_only=True)
    class Downstream(Options):
        width: int = param(3, "a width")

    profile("rate: 0.25")
    options = Downstream(models=["softmax"], threads="elsewhere", seed=7, width=4)
    assert options.upstream(StudyOptions) == StudyOptions(rate=0.25, models=["softmax"], threads="elsewhere", seed=7)
    assert options.own() == {"seed": 7, "width": 4}


def test_type_that_cannot_be_checked_is_our_own_mistake():
    @dataclass(frozen=True, kw_only=True)
    class Odd(Options):
        table: dict[str, int] = param(None, "nothing a notebook can have")

    with pytest.raises(TypeError, match=r"cannot have the type dict\[str, int\]"):
        Odd()


def test_read_params_keeps_every_name(tmp_path):
    (tmp_path / "x.yaml").write_text("seed: 1\nname: [a, {b: 1, c: 2}]\n")
    assert read_params(tmp_path / "x.yaml") == {"seed": 1, "name": ["a", {"b": 1, "c": 2}]}
    (tmp_path / "y.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ParameterError, match="not valid YAML; file: .*y.yaml"):
        read_params(tmp_path / "y.yaml")
    assert params.PROFILES == ("tiny", "reference")
