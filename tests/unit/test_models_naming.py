"""A model's name says in how much memory it is run."""

import pytest

from moelab.__main__ import NOT_ACCEPTED, main
from moelab.errors import ParameterError
from moelab.models import split_budget


@pytest.mark.parametrize(
    ("name", "model", "budget"),
    [
        ("softmax", "softmax", None),
        ("owner/name@8GiB", "owner/name", 8 << 30),
        ("../a folder@home/m@600MiB", "../a folder@home/m", 600 << 20),
        ("user@host/model-4b", "user@host/model-4b", None),
    ],
)
def test_names(name, model, budget):
    assert split_budget(name) == (model, budget)


@pytest.mark.parametrize("name", ["m@8GB", "m@0MiB", "m@08GiB", "m@8", "m@600mib", "m@ 8GiB", "m@", "m@GiB"])
def test_what_looks_like_a_budget_and_is_none_is_refused(name):
    with pytest.raises(ParameterError, match=f"not a memory budget.*got: '{name}', expected: NAME@600MiB"):
        split_budget(name)


@pytest.mark.parametrize(
    ("model", "words"), [("nosuch@8GiB", "no such model; file: nosuch"), ("softmax@8GB", "not a memory budget")]
)
def test_a_run_refuses_them_before_a_kernel_starts(model, words, capsys):
    assert main(["run", "--model", model]) == NOT_ACCEPTED
    assert words in capsys.readouterr().err
