"""Prerouter heads as a stage: the right rows, the right layers, files that load, figures beside the controls."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from moelab import artifacts
from moelab.errors import GateRefusedError, GeometryError
from moelab.flywheel import head_training
from moelab.flywheel.baselines import BaselineOptions
from moelab.flywheel.batches import BatchShape
from moelab.flywheel.evaluation import read_ranks
from moelab.flywheel.examples import regenerate
from moelab.flywheel.head_examples import HORIZON, consumers, head_rows, on_layers
from moelab.flywheel.head_recipe import HeadRecipe, tier_of
from moelab.flywheel.head_training import FILES, HISTORY, RANKS, TABLE, heads_model
from moelab.prerouter import PrerouterSpec, load_heads, read_heads
from moelab.prerouter.torch_form import NONE

pytestmark = pytest.mark.usefixtures("inside")

RECIPE = HeadRecipe(
    hidden=16, rank=8, epochs=2, shared_epochs=2, batch=128, overfit_tokens=12, overfit_epochs=80, overfit_recall=0.9
)


@pytest.fixture
def judged_as(world):
    own = dict(sets=["validation", "temporal", "stress"], batch_tokens=256, chunk=24, cache_fraction=0.25)
    return BaselineOptions(**world.shared(), **own)


@pytest.fixture
def wiring(loaded):
    return tier_of(loaded, 16).wiring


@pytest.fixture
def hidden(loaded, dataset, records):
    return regenerate(loaded, dataset, records, ("moe_input",), BatchShape(256, 24))["moe_input"]


def test_a_row_is_told_of_the_token_before_its_target(dataset, wiring, hidden):
    routes = dataset.routes
    K, H = routes.top_k, hidden.shape[-1]
    made = head_rows(hidden, routes, wiring, dataset.rows("train"))
    examples = made.examples(routes, wiring)
    assert len(made.target) > 100 and len(wiring) == routes.layers - 1
    firsts = 0
    for row in [0, 1, 2, *range(3, len(made.target), 17)]:
        t = int(made.target[row])
        assert routes.thread[t - 1] == routes.thread[t] and routes.position[t - 1] == routes.position[t] - 1
        first = routes.position[t - 1] == 0
        firsts += first
        for i, owner in enumerate(wiring.owner_index):
            told = made.features[row, i]
            assert (told[:H] == hidden[t - 1, owner]).all()
            assert (told[H : H + K] == routes.ids[t - 1, owner]).all()
            assert (told[H + K :] == (NONE if first else routes.ids[t - 2, owner])).all()
            assert (examples.ids[row, i] == routes.ids[t, owner + 1]).all()
    assert firsts  # the second token of a thread was among those looked at
    starts = np.flatnonzero(routes.previous_row() < 0)
    assert not np.isin(made.target, starts).any()


def test_executed_experts_may_come_from_elsewhere(dataset, wiring, hidden):
    routes, mask = dataset.routes, dataset.rows("train")
    K = routes.top_k
    native = head_rows(hidden, routes, wiring, mask)
    own = head_rows(hidden, routes, wiring, mask, executed=lambda r: (r.ids.astype(int) + 1) % r.experts)
    assert ((native.features[..., -2 * K : -K] + 1) % routes.experts == own.features[..., -2 * K : -K]).all()
    none = native.features[..., -K:] == NONE
    assert (own.features[..., -K:][none] == NONE).all()
    assert (native.examples(routes, wiring).ids == own.examples(routes, wiring).ids).all()  # labels are the gate's
    with pytest.raises(GeometryError, match="executed"):
        head_rows(hidden, routes, wiring, mask, executed=lambda r: r.ids[1:])


def test_rows_of_other_layers_are_refused(dataset, wiring, hidden):
    with pytest.raises(GeometryError, match="line up"):
        head_rows(hidden[1:], dataset.routes, wiring, dataset.rows("train"))
    other = PrerouterSpec(start_layer=1).wiring(range(len(wiring.layer_ids) + 1))
    with pytest.raises(GeometryError, match="other layers"):
        head_rows(hidden, dataset.routes, other, dataset.rows("train"))


def test_scores_land_on_the_consumer_at_the_target(dataset, wiring, hidden):
    made = head_rows(hidden, dataset.routes, wiring, dataset.rows("train"))
    scores = np.arange(len(made.target) * len(wiring) * 3, dtype=np.float32).reshape(-1, len(wiring), 3)
    whole = on_layers(scores, wiring, made, dataset.routes.tokens, fill=-1.0)
    for row in (0, 5, len(made.target) - 1):
        for i, owner in enumerate(wiring.owners):
            assert (whole[made.target[row], owner + 1] == scores[row, i]).all()
    assert (whole[:, ~consumers(wiring)] == -1).all() and (whole != -1).any(-1).sum() == scores[..., 0].size


def test_a_run_writes_heads_that_load_and_figures_beside_the_controls(world, before, fresh, loaded, judged_as):
    built = artifacts.open_artifact(heads_model(world.model, judged_as, before, judged_as, RECIPE))
    tier, shape = tier_of(loaded, RECIPE.hidden), loaded.geometry
    facts = dict(layer_ids=shape.layer_ids, experts=shape.experts, top_k=shape.top_k, width=shape.hidden)
    for form, name in FILES.items():
        identity = read_heads(built.file(name)).identity
        assert identity.form == form and identity.snapshot == before.snapshot.content
        assert len(identity.confidence) == len(tier.wiring) and all(scale > 0 for scale, _ in identity.confidence)
        bank = load_heads(built.file(name), tier.spec, model=loaded.digests["model"], **facts)
        assert bank.owners == tier.wiring.owners
        assert built.counts[f"{form}_bytes"] == built.file(name).stat().st_size
    table = artifacts.read_json(built.file(TABLE))
    names = {row["ranking"] for row in table}
    assert {
        "prerouter, full",
        "prerouter, shared",
        "previous token, same layer",
        "previous-token co-occurrence",
    } <= names
    assert {row["set"] for row in table} == {"validation", "stress"}  # the temporal set calibrated
    recall = {
        r["ranking"]: r for r in table if (r["metric"], r["group"], r["set"]) == ("recall@1x", "all", "validation")
    }
    assert recall["prerouter, full"]["horizon"] == HORIZON
    less = {(r["ranking"], r["group"]): r for r in table if r["metric"] == "recall@1x less"}
    pair = less["prerouter, full", "previous token, same layer (1 token)"]
    expected = recall["prerouter, full"]["value"] - recall["previous token, same layer"]["value"]
    assert pair["value"] == pytest.approx(expected, abs=1e-6) and pair["se"] > 0
    assert pair["n"] == recall["prerouter, full"]["n"]
    arrays, header = read_ranks(built.file(RANKS))
    assert header["layers"][f"prerouter, full | {HORIZON}"] == list(tier.wiring.consumer_index)
    history = artifacts.read_json(built.file(HISTORY))
    assert all(h["weight_error"]["heads"] <= 1.05 * h["weight_error"]["equal"] for h in history.values())
    assert all(len(h["loss"]) == 2 and h["overfit_recall"] >= 0.9 for h in history.values())
    # again in another folder: the same heads to the byte
    again = fresh / "again"
    again.mkdir()
    (again / "vault").symlink_to(world.artifacts / "vault")
    with world.entered(again):
        same = artifacts.open_artifact(heads_model(world.model, judged_as, before, judged_as, RECIPE))
        assert same.content == built.content


def test_the_scale_of_logits_is_the_one_that_gives_the_native_weights():
    from moelab.flywheel.head_recipe import SCALES, weight_scale
    from moelab.models.families import RoutingFamily

    rng = np.random.default_rng(0)
    family = RoutingFamily(top_k=3, normalise=True)
    logits = rng.normal(size=(50, 2, 12)).astype(np.float32)
    ids, weights, _ = family.select(logits)
    steep = logits / np.array([SCALES[3], SCALES[7]], np.float32)[:, None]
    assert weight_scale(family, steep, ids, weights) == pytest.approx([SCALES[3], SCALES[7]])


def test_labels_that_are_not_exact_are_refused(world, before, fresh, judged_as, monkeypatch):
    monkeypatch.setattr(head_training, "labels_status", lambda dataset, exact: "fail")
    with pytest.raises(GateRefusedError, match="exact"):
        heads_model(world.model, judged_as, before, judged_as, RECIPE)


def test_heads_that_cannot_learn_by_heart_are_refused(world, before, fresh, judged_as):
    recipe = replace(RECIPE, overfit_epochs=1, overfit_recall=1.0)
    with pytest.raises(GateRefusedError, match="by heart") as caught:
        heads_model(world.model, judged_as, before, judged_as, recipe)
    assert "full" in caught.value.field


def test_the_command_puts_files_beside_the_models_it_is_given(monkeypatch, tmp_path, capsys):
    model, made = tmp_path / "model", tmp_path / "made"
    for folder in (model, made):
        folder.mkdir()
    (model / "config.json").write_text("{}")
    for name in FILES.values():
        (made / name).write_bytes(name.encode())
    row = {"set": "validation", "metric": "recall@1x", "group": "all", "ranking": "random", "value": 0.1, "se": 0.01}
    artifacts.write_json(made / TABLE, [row])
    asked = []

    def train(options):
        asked.append((options.profile, options.models))
        return {str(model): SimpleNamespace(file=lambda name: made / name)}

    monkeypatch.setattr(head_training, "train_heads", train)
    head_training.main(["reference", str(model)])
    assert asked == [("reference", [str(model)])]
    assert all((model / name).read_bytes() == name.encode() for name in FILES.values())
    assert "+0.1000 ± 0.0100" in capsys.readouterr().out
