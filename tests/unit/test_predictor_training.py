"""The near-term predictor and its training: what it starts as, what it refuses, what it can learn, how it resumes."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from moelab.errors import GateRefusedError, GeometryError, IdentityError
from moelab.flywheel.metrics import ranks
from moelab.flywheel.predictors import NearTermPredictor, PredictorIdentity
from moelab.flywheel.train import Examples, Recipe, fit, loss

IDENTITY = PredictorIdentity(
    model="m", layers=3, experts=16, top_k=4, width=12, horizon="1 layer", feature="moe_input", shift=1, snapshot="s"
)


def examples(tokens=96, identity=IDENTITY, seed=0):
    """Routes of a random linear router, and a gate that sees it through noise."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(tokens, identity.layers, identity.width)).astype(np.float32)
    router = rng.normal(size=(identity.layers, identity.width, identity.experts)).astype(np.float32)
    logits = np.einsum("tlh,lhe->tle", features, router)
    ids = np.argsort(-logits, -1, kind="stable")[..., : identity.top_k].astype(np.uint16)
    gate = logits + 2 * rng.normal(size=logits.shape)
    return Examples(features, ids, gate.astype(np.float32))


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# ------------------------------------------------------------ the predictor


def test_untrained_it_ranks_exactly_as_the_gate_it_starts_from():
    rows = examples()
    scores = NearTermPredictor(IDENTITY, rank=5).scores(rows.features, rows.gate_scores)
    order = np.argsort(-scores, -1, kind="stable")
    assert np.array_equal(order, np.argsort(-rows.gate_scores, -1, kind="stable"))


def test_it_comes_back_from_its_file_as_it_was(tmp_path):
    rows, model = examples(), NearTermPredictor(IDENTITY, rank=5, seed=3)
    fit(model, rows, Recipe(epochs=1, batch=32), gate1="pass")
    model.save(tmp_path / "p.safetensors")
    again = NearTermPredictor.load(tmp_path / "p.safetensors", expected=IDENTITY)
    assert np.array_equal(model.scores(rows.features, rows.gate_scores), again.scores(rows.features, rows.gate_scores))
    again.save(tmp_path / "q.safetensors")
    assert (tmp_path / "p.safetensors").read_bytes() == (tmp_path / "q.safetensors").read_bytes()


@pytest.mark.parametrize("field", [name for name in asdict(IDENTITY) if name not in ("layers", "experts", "width")])
def test_another_identity_is_refused_by_the_field_that_differs(tmp_path, field):
    path = tmp_path / "p.safetensors"
    NearTermPredictor(IDENTITY, rank=2).save(path)
    other = {"top_k": 3, "shift": 0, "horizon": "half layer"}.get(field, "another")
    with pytest.raises(IdentityError, match=f"field: {field}; got: .*expected: .*{other}") as error:
        NearTermPredictor.load(path, expected=replace(IDENTITY, **{field: other}))
    assert error.value.file == path


def test_tensors_that_are_not_numbers_are_refused(tmp_path):
    model = NearTermPredictor(IDENTITY, rank=2)
    model.bias.data[1, 2] = float("nan")
    model.save(tmp_path / "p.safetensors")
    with pytest.raises(GeometryError, match="not finite; file: .*; field: bias"):
        NearTermPredictor.load(tmp_path / "p.safetensors")


def test_features_of_another_width_are_refused():
    rows = examples()
    with pytest.raises(GeometryError, match="field: features; got: .*11.*expected: .*12"):
        NearTermPredictor(IDENTITY).scores(rows.features[..., :11], rows.gate_scores)


def test_the_shape_of_a_large_model():
    # 48 layers x 512 experts x top 10: scores of 16 tokens are 1.6 MB, parameters at rank 16 about 1.7 MB.
    big = replace(IDENTITY, layers=48, experts=512, top_k=10, width=64)
    rows = examples(16, big)
    model = NearTermPredictor(big, rank=16)
    assert len(fit(model, rows, Recipe(epochs=1, batch=8), gate1="pass")) == 1
    assert model.scores(rows.features, rows.gate_scores).shape == (16, 48, 512)


# ------------------------------------------------------------ the loss


def test_loss_is_that_of_an_obvious_loop():
    rows, recipe = examples(7), Recipe(over=0.3, calibration=0.7)
    z = rows.gate_scores
    total = 0.0
    for t in range(7):
        for layer in range(IDENTITY.layers):
            native = [int(e) for e in rows.ids[t, layer]]
            others = [e for e in range(IDENTITY.experts) if e not in native]
            score = z[t, layer].astype(np.float64)
            against = np.log(np.exp(score[others]).sum())
            discount = np.array([1 / np.log2(k + 2) for k in range(len(native))])
            ranked = [np.log1p(np.exp(against - score[e])) for e in native]
            probability = 1 / (1 + np.exp(-score))
            wasted = probability[others].sum()
            entropy = -np.log(probability[native]).sum() - np.log(1 - probability[others]).sum()
            total += discount @ ranked / discount.sum() + 0.3 * wasted + 0.7 * entropy / len(native)
    got = loss(torch.from_numpy(z), torch.from_numpy(rows.ids.astype(np.int64)), recipe)
    # float32 sums of a few hundred terms
    assert float(got) == pytest.approx(total / (7 * IDENTITY.layers), rel=1e-5)


def test_only_the_predictor_learns():
    rows, model = examples(8), NearTermPredictor(IDENTITY, rank=2)
    features = torch.from_numpy(rows.features).requires_grad_(False)
    value = loss(
        model(features, torch.from_numpy(rows.gate_scores)), torch.from_numpy(rows.ids.astype(np.int64)), Recipe()
    )
    value.backward()
    assert all(p.grad is not None for p in model.parameters())


# ------------------------------------------------------------ training


@pytest.mark.parametrize("status", ["fail", "refused"])
def test_labels_that_are_not_exact_are_refused_before_a_step(status):
    model = NearTermPredictor(IDENTITY)
    before = weights(model)
    with pytest.raises(GateRefusedError, match=f"field: gate1; got: '{status}', expected: pass"):
        fit(model, examples(), Recipe(epochs=1), gate1=status)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_it_can_learn_two_thousand_tokens_by_heart():
    torch.set_num_threads(1)
    rows = examples(2000)
    model = NearTermPredictor(IDENTITY, rank=96)
    fit(model, rows, Recipe(epochs=100, batch=128, learning_rate=1e-2, weight_decay=0.0, over=0.0), gate1="pass")
    found = ranks(model.scores(rows.features, rows.gate_scores), rows.ids)
    assert (found < IDENTITY.top_k).mean() >= 0.99


@pytest.mark.parametrize("stop", [2, 3, 5], ids=["mid-epoch", "epoch edge", "second epoch"])
def test_a_killed_run_resumes_to_the_same_weights(tmp_path, stop):
    rows, recipe = examples(96), Recipe(epochs=3, batch=32)  # three steps an epoch

    def train(path, killed_at=None):
        model = NearTermPredictor(IDENTITY, rank=4)

        def step(done, total, value):
            torch.rand(3), np.random.default_rng().random()  # a global draw must not matter
            if done == killed_at:
                raise KeyboardInterrupt

        fit(model, rows, recipe, gate1="pass", checkpoint=path, on_step=step)
        return weights(model)

    whole = train(None)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "state", killed_at=stop)
    resumed = train(tmp_path / "state")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
