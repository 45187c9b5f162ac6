"""Training as a stage: its doors, its rows, its files, and that it ends the same however often it was killed."""

from dataclasses import replace

import numpy as np
import pytest

from moelab import artifacts, models
from moelab.errors import GateRefusedError, ParameterError
from moelab.flywheel import training
from moelab.flywheel.baselines import BaselineOptions, Upstream
from moelab.flywheel.evaluation import read_ranks
from moelab.flywheel.examples import arms
from moelab.flywheel.predictors import NearTermPredictor
from moelab.flywheel.training import HISTORY, RANKS, TABLE, TrainingOptions, labels_status, training_model
from moelab.routes import CAPTURED, REPLAYED

pytestmark = pytest.mark.usefixtures("inside")


def options(world, **changes):
    own = dict(arms=["1 layer"], rank=8, epochs=2, batch=128, overfit_tokens=16, overfit_epochs=60, overfit_rank=64)
    return TrainingOptions(**world.shared(), **own | changes)


@pytest.fixture
def judged_as(world):
    own = dict(sets=["validation", "stress"], batch_tokens=256, chunk=24, cache_fraction=0.25)
    return BaselineOptions(**world.shared(), **own)


def test_gate_0_stands_before_training(world, monkeypatch):
    monkeypatch.setattr(training, "upstream", lambda _: pytest.fail("went on"))
    for status in ("fail", "refused"):
        with pytest.raises(GateRefusedError, match="nothing to win") as caught:
            training.training(options(world), gate0={world.model: status})
        assert caught.value.got == {world.model: status} and "override_gate0" in caught.value.fix
    with pytest.raises(GateRefusedError):
        training.training(options(world), gate0={})


def test_gate_0_can_be_overridden_by_name(world, monkeypatch):
    class Went(Exception):
        pass

    def stop(_):
        raise Went

    monkeypatch.setattr(training, "upstream", stop)
    for changes, status in (({"override_gate0": True}, "fail"), ({}, "pass")):
        with pytest.raises(Went):
            training.training(options(world, **changes), gate0={world.model: status})


def test_labels_are_exact_by_decode_or_by_gate_1(dataset):
    train = dataset.rows("train")
    source = dataset.routes.label_source
    assert (source[train] == REPLAYED).any()
    assert labels_status(dataset, True) == "pass" and labels_status(dataset, False) == "fail"
    decoded = replace(dataset, routes=replace(dataset.routes, label_source=np.full_like(source, CAPTURED)))
    assert labels_status(decoded, False) == "pass"
    # a replayed label outside the training rows is no reason to refuse
    mixed = np.where(train, CAPTURED, REPLAYED).astype(np.uint8)
    assert labels_status(replace(dataset, routes=replace(dataset.routes, label_source=mixed)), False) == "pass"


def test_training_on_labels_that_are_not_exact_is_refused(world, dataset, records, loaded, judged_as, tmp_path):
    """MLA in half precision, say: Gate 1 fails, and no predictor is made from its replayed labels."""
    study = training._Study(tmp_path, loaded, records, replace(dataset, exact=False), options(world), judged_as)
    with pytest.raises(GateRefusedError, match="Gate 1 has not passed") as caught:
        study.run()
    assert caught.value.got == "fail" and list(tmp_path.iterdir()) == []


def test_what_cannot_be_learnt_by_heart_stops_the_training(world, dataset, records, loaded, judged_as, tmp_path):
    hard = options(world, overfit_epochs=1, overfit_rank=1)
    with pytest.raises(GateRefusedError, match="by heart") as caught:
        training._Study(tmp_path, loaded, records, dataset, hard, judged_as).run()
    assert caught.value.field == "overfit_recall (1 layer)" and list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def trained(world, captured, routed, snapped):
    with world.entered():
        up = Upstream(*(artifacts.open_artifact(path) for path in (captured, routed, snapped)))
        own = dict(sets=["validation", "stress"], batch_tokens=256, chunk=24, cache_fraction=0.25)
        return training_model(world.model, options(world), up, BaselineOptions(**world.shared(), **own))


def test_what_training_leaves(trained, dataset, loaded):
    made = artifacts.open_artifact(trained)
    assert set(made.manifest.files) == {"predictor-1-layer.safetensors", TABLE, RANKS, HISTORY}
    assert made.counts["train_tokens"] == dataset.rows("train").sum()
    predictor = NearTermPredictor.load(made.file("predictor-1-layer.safetensors"))
    identity = predictor.identity
    assert identity.model == loaded.digests["model"] and identity.snapshot == dataset.artifact.content
    assert (identity.horizon, identity.feature, identity.shift) == ("1 layer", "moe_input", 1)
    history = artifacts.read_json(made.file(HISTORY))["1 layer"]
    assert history["loss"][-1] < history["loss"][0] and history["overfit_recall"] >= 0.99
    rows = artifacts.read_json(made.file(TABLE))
    assert {r["set"] for r in rows} == {"validation", "stress"} and {r["horizon"] for r in rows} == {"1 layer"}
    recall = next(r for r in rows if r["metric"] == "recall@1x" and r["group"] == "all" and r["set"] == "validation")
    L, K = dataset.routes.layers, dataset.routes.top_k
    assert recall["n"] == dataset.rows("validation", decoded=True).sum() * (L - 1) * K, "the first layer is left out"
    assert any(r["metric"] == "ece" for r in rows)
    _, header = read_ranks(made.file(RANKS))
    assert header["layers"] == {"learned, moe input | 1 layer": [1, 2]} and header["snapshot"] == identity.snapshot


def test_training_killed_anywhere_and_begun_again_ends_with_the_same_digest(
    trained, world, before, judged_as, fresh, monkeypatch
):
    steps = []

    def stop(message):
        steps.append(message)
        if len(steps) in (2, 6):
            raise KeyboardInterrupt

    monkeypatch.setattr(models, "report_progress", stop)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            training_model(world.model, options(world), before, judged_as)
    np.random.seed(5)  # the global generators decide nothing
    built = artifacts.open_artifact(training_model(world.model, options(world), before, judged_as))
    assert built.path.parent.parent == fresh
    expected = artifacts.open_artifact(trained)
    assert built.content == expected.content
    name = "predictor-1-layer.safetensors"
    assert built.manifest.files[name] == expected.manifest.files[name]
    assert not [p for p in built.path.iterdir() if p.name.startswith(".")]


def test_names():
    assert training.checkpoint_name("1 layer, pre-attention") == "predictor-1-layer-pre-attention.safetensors"
    with pytest.raises(ParameterError, match="unknown arm"):
        arms(["2 layers"])
