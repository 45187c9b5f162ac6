"""Training: the loss is what it says, the labels must be exact, and a killed run ends like any other."""

import math
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from predictor_cases import examples, identity, recall

from moelab import artifacts
from moelab.artifacts import digest_tensors, read_tensors, write_tensors
from moelab.errors import ArtifactError, GateRefusedError, GeometryError, IdentityError, RecordError
from moelab.flywheel.predictors import NearTermPredictor
from moelab.flywheel.train import Examples, Recipe, _optimiser, fit, loss

OWN = identity()
ROWS = examples(OWN, 50)
RECIPE = Recipe(epochs=3, batch=16)  # four steps an epoch, twelve in all


def start(**options) -> NearTermPredictor:
    return NearTermPredictor(OWN, rank=6, **options)


def weights(model: NearTermPredictor) -> str:
    return digest_tensors({name: value.numpy() for name, value in model.state_dict().items()})


# ---------------------------------------------------------------- the loss


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def slow_loss(scores: np.ndarray, ids: np.ndarray, recipe: Recipe) -> float:
    """The module text, one token, layer and expert at a time."""
    rows = []
    for t, layer in np.ndindex(ids.shape[:2]):
        z, native = scores[t, layer].astype(float), [int(e) for e in ids[t, layer]]
        others = [e for e in range(len(z)) if e not in native]
        discounts = [1 / math.log2(k + 2) for k in range(len(native))]
        rank = 0.0
        for discount, k in zip(discounts, native, strict=True):
            share = math.exp(z[k]) / (math.exp(z[k]) + sum(math.exp(z[j]) for j in others))
            rank += discount / sum(discounts) * -math.log(share)
        wasted = sum(sigmoid(z[j]) for j in others)
        confidence = -sum(math.log(sigmoid(z[k])) for k in native) - sum(math.log(1 - sigmoid(z[j])) for j in others)
        deadline = 1.0 if recipe.deadline is None else recipe.deadline[layer]
        rows.append(deadline * rank + recipe.over * wasted + recipe.calibration * confidence / len(native))
    return sum(rows) / len(rows)


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(),
        Recipe(over=0.0, calibration=0.0),
        Recipe(over=2.0, calibration=0.3),
        Recipe(deadline=(1.0, 0.0, 2.5)),
        Recipe(over=0.0, calibration=0.0, deadline=(0.0, 3.0, 1.0)),
    ],
)
def test_loss_is_the_formula(recipe):
    rng = np.random.default_rng(0)
    scores, ids = rng.standard_normal((5, 3, 16)) * 3, ROWS.ids[:5].astype(np.int64)
    got = loss(torch.from_numpy(scores), torch.from_numpy(ids), recipe)
    assert float(got) == pytest.approx(slow_loss(scores, ids, recipe), rel=1e-12)  # both float64


def test_rank_term_never_sets_native_experts_against_each_other():
    """The usual cross entropy over all experts does: it pulls the best-scored native expert down."""
    scores = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.from_numpy(ROWS.ids[:5].astype(np.int64))
    loss(scores, ids, Recipe(over=0.0, calibration=0.0)).backward()
    native = torch.zeros(5, 3, 16, dtype=torch.bool).scatter_(-1, ids, True)
    assert (scores.grad[native] < 0).all()
    assert (scores.grad[~native] > 0).all()


def test_first_ranked_expert_counts_most():
    scores = torch.zeros(1, 1, 16).requires_grad_()
    loss(scores, torch.tensor([[[7, 3, 9, 1]]]), Recipe(over=0.0, calibration=0.0)).backward()
    assert torch.argsort(scores.grad[0, 0])[:4].tolist() == [7, 3, 9, 1]


def test_loss_of_extreme_scores_is_finite():
    ids = torch.from_numpy(ROWS.ids[:2].astype(np.int64))
    for far in (1e4, -1e4):
        scores = torch.full((2, 3, 16), far).requires_grad_()
        loss(scores, ids, Recipe()).backward()
        assert torch.isfinite(scores.grad).all()


# ---------------------------------------------------------------- learning


@pytest.mark.parametrize("gate", [True, False])
def test_two_thousand_tokens_are_learnt_by_heart(gate):
    own = identity(layers=2, experts=32, width=24)
    rows = examples(own, 2000, noise=4.0)
    assert recall(rows.gate_scores, rows.ids) < 0.6  # the gate alone cannot
    if not gate:
        rows = Examples(rows.features, rows.ids)
    model = NearTermPredictor(own, rank=96, gate=gate)
    recipe = Recipe(epochs=60, batch=64, learning_rate=2e-2, weight_decay=0.0, over=0.0)
    history = fit(model, rows, recipe, gate1="pass")
    assert recall(model.scores(rows.features, rows.gate_scores), rows.ids) >= 0.99
    assert history[-1] < history[0] / 4


def test_learning_holds_on_rows_not_trained_on():
    rows = examples(OWN, 2400, noise=2.0)
    seen, unseen = rows.rows(slice(0, 2000)), rows.rows(slice(2000, 2400))
    model = NearTermPredictor(OWN, rank=32)
    fit(model, seen, Recipe(epochs=8, learning_rate=1e-2), gate1="pass")
    learned = recall(model.scores(unseen.features, unseen.gate_scores), unseen.ids)
    assert learned > recall(unseen.gate_scores, unseen.ids) + 0.05


def test_first_step_finds_the_gain_of_the_gate_and_moves_no_expert():
    model = start()
    fit(model, ROWS, replace(RECIPE, learning_rate=0.0), gate1="pass")
    gate, scores = ROWS.gate_scores, model.scores(ROWS.features, ROWS.gate_scores)
    np.testing.assert_array_equal(np.argsort(-scores, -1, kind="stable"), np.argsort(-gate, -1, kind="stable"))
    assert (model.gain != 1).all()
    assert (model.gain > 0).all()
    # sigmoid(score) sums to K in the mean: what maximum likelihood with an offset gives
    np.testing.assert_allclose((1 / (1 + np.exp(-scores))).sum(-1).mean(0), OWN.top_k, rtol=1e-3)


def test_training_on_does_not_anchor_again():
    model = start()
    fit(model, ROWS, RECIPE, gate1="pass")
    before = weights(model)
    fit(model, ROWS, replace(RECIPE, learning_rate=0.0), gate1="pass")
    assert weights(model) == before


def test_only_the_predictor_changes():
    """Features and gate scores are numbers by the time they get here: no gradient can reach the target model."""
    rows, model = ROWS.rows(slice(None)), start()
    before, digest = weights(model), rows.digest()
    for value in (rows.features, rows.ids, rows.gate_scores):
        value.flags.writeable = False
    fit(model, rows, RECIPE, gate1="pass")
    assert rows.digest() == digest
    assert weights(model) != before
    assert not model.training
    grouped = [p for group in _optimiser(model, RECIPE).param_groups for p in group["params"]]
    assert sorted(map(id, grouped)) == sorted(map(id, model.parameters()))


def test_decay_spares_the_gain_on_the_gate():
    groups = _optimiser(model := start(), replace(RECIPE, weight_decay=0.5)).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed == {id(model.trunk), id(model.head)}


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("status", ["fail", "refused", "", "PASS"])
def test_labels_that_are_not_exact_are_refused(status):
    model = start()
    before = weights(model)
    with pytest.raises(GateRefusedError) as caught:
        fit(model, ROWS, RECIPE, gate1=status)
    assert str(caught.value) == (
        f"labels are not known to be exact: Gate 1 has not passed for them; field: gate1; got: {status!r}, "
        "expected: pass; fix: use an identity whose Gate 1 is exact, or decode-captured labels only"
    )
    assert weights(model) == before


def test_silence_about_the_labels_is_refused_too():
    with pytest.raises(GateRefusedError, match="got: 'refused', expected: pass"):
        fit(start(), ROWS, RECIPE)


def changed(**arrays) -> Examples:
    return Examples(**{"features": ROWS.features, "ids": ROWS.ids, "gate_scores": ROWS.gate_scores, **arrays})


def with_value(array: np.ndarray, value: float) -> np.ndarray:
    array = array.copy()
    array[7, 1, 2] = value
    return array


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (lambda: ROWS.rows(slice(0, 0)), RecordError, "no rows to train on; field: ids"),
        (lambda: changed(ids=ROWS.ids[..., :3]), GeometryError, r"ids of another shape; .*got: \(3, 3\)"),
        (lambda: changed(ids=with_value(ROWS.ids, 16)), RecordError, r"id out of range; .*expected: 0 to 15"),
        (lambda: changed(ids=with_value(ROWS.ids, ROWS.ids[7, 1, 0])), RecordError, "an expert twice in one row"),
        (lambda: changed(gate_scores=None), GeometryError, "gate scores missing, or not wanted"),
        (lambda: changed(gate_scores=ROWS.gate_scores[..., :1]), GeometryError, "field: gate_scores"),
        (lambda: changed(features=ROWS.features[..., :5]), GeometryError, "array of another shape; field: features"),
        (lambda: changed(features=ROWS.features[:9]), GeometryError, "rows do not line up; field: features; got: "),
        (lambda: changed(features=with_value(ROWS.features, np.nan)), RecordError, "loss is not finite; .*nan at step"),
        (lambda: changed(gate_scores=with_value(ROWS.gate_scores, np.inf)), RecordError, "nothing to calibrate on"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(rows, error, text):
    with pytest.raises(error, match=text):
        fit(start(), rows(), RECIPE, gate1="pass")


def test_loss_that_is_not_finite_stops_before_the_weights_are_spoilt():
    model = start()
    with pytest.raises(RecordError, match="loss is not finite"):
        fit(model, changed(features=with_value(ROWS.features, np.nan)), RECIPE, gate1="pass")
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_recipes_that_train_nothing_are_refused():
    for changes in ({"epochs": 0}, {"batch": 0}):
        with pytest.raises(GeometryError, match="nothing would be trained; field: epochs, batch"):
            Recipe(**changes)
    with pytest.raises(GeometryError, match="one weight a layer; field: deadline; got: 2, expected: 3"):
        fit(start(), ROWS, Recipe(deadline=(1.0, 2.0)), gate1="pass")


# ---------------------------------------------------------------- the same again


def test_equal_seeds_train_equal_weights_and_the_seed_matters():
    ends = []
    for seed in (1, 1, 2):
        model = start()
        history = fit(model, ROWS, replace(RECIPE, seed=seed), gate1="pass")
        ends.append((weights(model), history))
    assert ends[0] == ends[1] != ends[2]
    assert len(ends[0][1]) == RECIPE.epochs


def test_every_epoch_has_its_own_order_of_all_rows():
    losses = []
    still = replace(RECIPE, learning_rate=0.0, batch=1)
    fit(start(), ROWS, still, gate1="pass", on_step=lambda step, steps, value: losses.append(value))
    first, second, third = np.reshape(losses, (3, 50)).tolist()
    assert sorted(first) == sorted(second) == sorted(third)
    assert first != second != third != first


def draw(*_):
    """What other code does between our steps."""
    torch.rand(3), np.random.rand(3), random.random()


def test_global_generators_are_neither_drawn_from_nor_heard():
    quiet, loud = start(), start()
    fit(quiet, ROWS, RECIPE, gate1="pass")
    before = torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()
    fit(quiet := start(), ROWS, RECIPE, gate1="pass")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tobytes(), random.getstate()) == before[1:]
    fit(loud, ROWS, RECIPE, gate1="pass", on_step=draw)
    assert weights(loud) == weights(quiet)


def test_nothing_is_forked_or_started(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a process was started")

    for name in ("fork", "forkpty", "posix_spawn"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)
    fit(start(), ROWS, RECIPE, gate1="pass")


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def whole():
    """Weights and history of a run that nobody killed."""
    model = start()
    history = fit(model, ROWS, RECIPE, gate1="pass")
    return weights(model), history


@pytest.mark.parametrize("every", [None, 1, 3, 5])
@pytest.mark.parametrize("last", [1, 2, 4, 5, 8, 11, 12])
def test_killed_run_resumes_to_the_bit(tmp_path, whole, last, every):
    """After the first step, inside an epoch, at an epoch's edge, at the end; other code draws before and after."""

    def kill(step, steps, value):
        draw()
        if step == last:
            raise Killed

    path = tmp_path / "state.safetensors"
    options = {"gate1": "pass", "checkpoint": path, "checkpoint_steps": every}
    with pytest.raises(Killed):
        fit(start(), ROWS, RECIPE, on_step=kill, **options)
    steps = []
    resumed = start()
    history = fit(resumed, ROWS, RECIPE, on_step=lambda step, *_: (steps.append(step), draw()), **options)
    assert (weights(resumed), history) == whole
    interval = every or 4
    assert steps == list(range(last // interval * interval + 1, 13))  # nothing done twice that was saved


def test_killed_again_and_again(tmp_path, whole):
    def kill(step, steps, value):
        raise Killed

    path = tmp_path / "state.safetensors"
    options = {"gate1": "pass", "checkpoint": path, "checkpoint_steps": 1}
    for _ in range(12):
        with pytest.raises(Killed):
            fit(start(), ROWS, RECIPE, on_step=kill, **options)
    model = start()
    assert (fit(model, ROWS, RECIPE, on_step=kill, **options), weights(model)) == whole[::-1]


def test_sigkill_in_the_middle_of_an_epoch(tmp_path, whole):
    path = tmp_path / "state.safetensors"
    code = """
import os, signal, sys
from test_train import OWN, RECIPE, ROWS, fit, start
def kill(step, steps, value):
    if step == 7:
        os.kill(os.getpid(), signal.SIGKILL)
fit(start(), ROWS, RECIPE, gate1="pass", checkpoint=sys.argv[1], checkpoint_steps=3, on_step=kill)
"""
    places = [Path(artifacts.__file__).parents[1], Path(__file__).parent, Path(__file__).parents[1] / "support"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))}
    killed = subprocess.run([sys.executable, "-c", code, str(path)], env=environment)
    assert killed.returncode == -signal.SIGKILL
    assert len(read_tensors(path)[1]["losses"]) == 6
    model = start()
    assert (fit(model, ROWS, RECIPE, gate1="pass", checkpoint=path), weights(model)) == whole[::-1]


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("predictor", {"model": lambda: NearTermPredictor(identity(snapshot="t" * 64), rank=6)}),
        ("start", {"model": lambda: start(seed=5)}),
        ("start", {"model": lambda: NearTermPredictor(OWN, rank=7)}),
        ("recipe", {"recipe": replace(RECIPE, learning_rate=1e-3)}),
        ("recipe", {"recipe": replace(RECIPE, deadline=(1.0, 1.0, 1.0))}),
        ("examples", {"examples": changed(features=with_value(ROWS.features, 0.5))}),
        ("examples", {"examples": ROWS.rows(slice(0, 49))}),
    ],
)
def test_checkpoint_of_another_training_is_refused(tmp_path, field, other):
    path = tmp_path / "state.safetensors"
    fit(start(), ROWS, RECIPE, gate1="pass", checkpoint=path)
    given = {"model": start, "examples": ROWS, "recipe": RECIPE, **other}
    with pytest.raises(
        IdentityError, match=f"checkpoint of another training; file: .*; field: {field}; got: "
    ) as caught:
        fit(given["model"](), given["examples"], given["recipe"], gate1="pass", checkpoint=path)
    assert str(caught.value).endswith("fix: delete the file to train from the start")


def test_damaged_checkpoint_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    fit(start(), ROWS, RECIPE, gate1="pass", checkpoint=path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ArtifactError, match="not a complete safetensors file"):
        fit(start(), ROWS, RECIPE, gate1="pass", checkpoint=path)


def test_checkpoint_is_canonical(tmp_path):
    for name in "ab":
        fit(start(), ROWS, RECIPE, gate1="pass", checkpoint=tmp_path / name, on_step=draw)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    tensors, header = read_tensors(tmp_path / "a")
    write_tensors(tmp_path / "c", tensors, {**header, "owner": {}})
    with pytest.raises(IdentityError, match="field: predictor; got: None"):
        fit(start(), ROWS, RECIPE, gate1="pass", checkpoint=tmp_path / "c")


def test_digest_is_of_the_arrays_trained_on():
    assert ROWS.digest() == examples(OWN, 50).digest()
    others = [ROWS.rows(slice(0, 49)), changed(gate_scores=None), changed(ids=ROWS.ids[..., ::-1])]
    assert len({rows.digest() for rows in [ROWS, *others]}) == 4
