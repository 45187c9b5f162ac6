"""Every form of a head against committed vectors, and the forms against each other."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from moelab.prerouter import HeadBank, HeadIdentity, TorchHeads, read_heads, told, write_heads
from moelab.prerouter.torch_form import NONE

sys.path.insert(0, str(Path(__file__).parent))
import prerouter_oracle  # noqa: E402

CASES = json.loads(prerouter_oracle.FILE.read_text())
ROUNDING = 2e-6
"""Logits are of size 5; float32 keeps 6e-7 of that, sums of 30 terms a little less; mlx's erf is good to 4e-7."""


def arrays(case):
    weights = {name: np.array(value, np.float16) for name, value in case["weights"].items()}
    hidden = np.array([row["hidden"] for row in case["rows"]], np.float32)
    current = np.array([row["current"] for row in case["rows"]])
    previous = None if case["rows"][0]["previous"] is None else np.array([row["previous"] for row in case["rows"]])
    return weights, hidden, current, previous, np.array([row["logits"] for row in case["rows"]])


def written(case, folder, owners=(3,)):
    """The case's head in a weight file, once an owner."""
    weights = arrays(case)[0]
    trunk = weights.pop("trunk", None)
    fields = {name: case[name] for name in ("form", "width", "experts", "hidden", "top_k")}
    identity = HeadIdentity(model="golden", owners=owners, **fields)
    write_heads(folder / "heads", identity, {o: weights for o in owners}, trunk)
    return read_heads(folder / "heads")


def test_the_vectors_are_the_oracles(tmp_path, monkeypatch):
    monkeypatch.setattr(prerouter_oracle, "FILE", tmp_path / "prerouter" / "heads.json")
    prerouter_oracle.main()
    again = json.loads((tmp_path / "prerouter" / "heads.json").read_text())
    for case, same in zip(CASES, again, strict=True):
        assert {**case, "rows": None} == {**same, "rows": None}
        for row, other in zip(case["rows"], same["rows"], strict=True):
            # erf comes from the machine's math library, which may differ in the last place
            np.testing.assert_allclose(row["logits"], other["logits"], rtol=1e-14, atol=1e-15)
            assert {**row, "logits": None} == {**other, "logits": None}


@pytest.fixture(params=range(len(CASES)), ids=lambda i: f"{CASES[i]['form']}-{i}")
def case(request):
    return json.loads(json.dumps(CASES[request.param]))


def test_mlx_heads_give_the_vectors(case, tmp_path):
    _, hidden, current, previous, expected = arrays(case)
    head = written(case, tmp_path).bank().head(3)
    got = head(mx.array(hidden), mx.array(current), None if previous is None else mx.array(previous))
    assert np.abs(np.array(got) - expected).max() < ROUNDING


def test_torch_heads_give_the_vectors(case, tmp_path):
    _, hidden, current, previous, expected = arrays(case)
    previous = np.full_like(current, NONE) if previous is None else previous
    heads = TorchHeads.of(written(case, tmp_path))
    got = heads.scores(told(hidden[:, None], current[:, None], previous[:, None]))
    assert np.abs(got[:, 0] - expected).max() < ROUNDING


@pytest.mark.parametrize("index", [i for i, c in enumerate(CASES) if c["form"] == "full"])
def test_both_libraries_agree_bit_for_bit_where_nothing_rounds(index, tmp_path):
    """All weights and states are multiples of 1/64 and 1/128 below 4: sums of products fit in 24 bits. GELU is left
    out (fc2 = 0), since two libraries' erf differ in the last place."""
    case = json.loads(json.dumps(CASES[index]))
    _, hidden, current, previous, _ = arrays(case)
    case["weights"]["fc2"] = np.zeros_like(case["weights"]["fc2"]).tolist()
    file = written(case, tmp_path)
    in_mlx = file.bank().head(3)(mx.array(hidden), mx.array(current), None if previous is None else mx.array(previous))
    before = np.full_like(current, NONE) if previous is None else previous
    in_torch = TorchHeads.of(file).scores(told(hidden[:, None], current[:, None], before[:, None]))
    assert (np.array(in_mlx) == in_torch[:, 0]).all()
    assert np.abs(in_torch).max() > 0.5


def test_all_heads_at_once_give_the_vectors(case, tmp_path):
    _, hidden, current, previous, expected = arrays(case)
    file = written(case, tmp_path, owners=(3, 4, 5))
    bank = file.bank()
    assert isinstance(bank, HeadBank)
    three = [None if a is None else mx.array(np.stack([a] * 3)) for a in (hidden, current, previous)]
    assert np.abs(np.array(bank(*three)) - expected).max() < ROUNDING
    before = np.full_like(current, NONE) if previous is None else previous
    told_ = told(*(np.stack([a] * 3, axis=1) for a in (hidden, current, before)))
    assert np.abs(TorchHeads.of(file).scores(told_) - expected[:, None]).max() < ROUNDING
