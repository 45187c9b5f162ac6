"""On-policy training as a stage: it starts from teacher-forced heads, and every figure is paired with them."""

import numpy as np
import pytest

from moelab import artifacts, models
from moelab.errors import GateRefusedError
from moelab.flywheel import on_policy
from moelab.flywheel.baselines import BaselineOptions
from moelab.flywheel.head_recipe import HeadRecipe
from moelab.flywheel.head_training import FILES, heads_model
from moelab.flywheel.on_policy import MORE, PASS, TABLE, TEACHER, OnPolicyRecipe, lines, on_policy_model
from moelab.prerouter import read_heads, write_heads

pytestmark = pytest.mark.usefixtures("inside")

HEADS = HeadRecipe(
    hidden=16, rank=8, epochs=2, shared_epochs=1, batch=128, overfit_tokens=12, overfit_epochs=80, overfit_recall=0.9
)
RECIPE = OnPolicyRecipe(prompt=4, passes=2, epochs=1, batch=128)


@pytest.fixture
def judged_as(world):
    own = dict(sets=["validation", "temporal", "stress"], batch_tokens=256, chunk=24, cache_fraction=0.25)
    return BaselineOptions(**world.shared(), **own)


def test_heads_learn_on_their_own_states_and_are_held_against_those_they_were(
    world, before, fresh, judged_as, monkeypatch
):
    heads = heads_model(world.model, judged_as, before, judged_as, HEADS)
    with monkeypatch.context() as patch, pytest.raises(GateRefusedError, match="exact"):
        patch.setattr(on_policy, "labels_status", lambda dataset, exact: "fail")
        on_policy_model(world.model, judged_as, before, heads, judged_as, RECIPE)
    trained, fit = [], on_policy.fit

    def noting(heads, rows, recipe, **options):
        trained.append((heads.identity.policy, rows, recipe.epochs))
        return fit(heads, rows, recipe, **options)

    monkeypatch.setattr(on_policy, "fit", noting)
    built = artifacts.open_artifact(on_policy_model(world.model, judged_as, before, heads, judged_as, RECIPE))
    first, second = PASS.format(1), PASS.format(2)
    assert [(policy, epochs) for policy, _, epochs in trained] == [("", 2), (first, 1), (second, 1)]
    native, own, again = (rows for _, rows, _ in trained)
    assert len(native) == len(own) == len(again)
    # Prompts are native; behind them inputs, executed experts and labels have moved, and once more in the next pass.
    moved = (native.features != own.features).any((1, 2))
    assert 0.2 < moved.mean() < 1 and (own.features != again.features).any()
    assert (native.ids != own.ids).any() and (native.ids[~moved] == own.ids[~moved]).mean() > 0.9
    table = {(r["heads"], r["mode"], r["metric"]): r for r in artifacts.read_json(built.file(TABLE))}
    assert {key[0] for key in table} == {TEACHER, MORE, first, second}
    for mode in on_policy.MODES:
        base = table[TEACHER, mode, "loss over native"]
        assert base["se"] >= 0 and base["n"] > 20 and table[TEACHER, mode, "loss less teacher-forced"]["value"] == 0
        for name in (MORE, first, second):
            less = table[name, mode, "loss over native"]["value"] - base["value"]
            assert table[name, mode, "loss less teacher-forced"]["value"] == pytest.approx(less, abs=1e-6)
    for name in (first, second):
        identity = read_heads(built.file(f"{name.replace(', ', '-').replace(' ', '-')}.safetensors")).identity
        assert identity.policy == name and identity.snapshot == before.snapshot.content
        assert len(identity.confidence) == len(identity.owners)
    assert len(lines([{"model": "m", **row} for row in table.values() if row["se"] is not None])) > 8


@pytest.mark.parametrize("form", FILES)
def test_files_of_teacher_forced_heads_say_nothing_of_a_policy(form, tmp_path):
    committed = models.find("softmax") / FILES[form]
    found = read_heads(committed)
    assert found.identity.policy == ""
    write_heads(tmp_path / "same.safetensors", found.identity, found.tensors, found.trunk)
    assert (tmp_path / "same.safetensors").read_bytes() == committed.read_bytes()
    assert np.isfinite(found.tensors[0]["fc2"]).all()
