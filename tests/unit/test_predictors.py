"""The near-term predictor: starts as the gate it is compared with, and is read back as what it was."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from predictor_cases import examples, identity, recall

from moelab.artifacts import read_tensors, write_tensors
from moelab.errors import ArtifactError, GeometryError, IdentityError, MissingArtifactError, RecordError
from moelab.flywheel.predictors import NearTermPredictor
from moelab.flywheel.train import Examples, Recipe, fit, loss

OWN = identity()
ROWS = examples(OWN, 200)


def trained(seed: int = 0, **options) -> NearTermPredictor:
    """Every parameter moved by a little noise: nothing is zero, nothing is one."""
    model = NearTermPredictor(OWN, rank=5, seed=seed, **options)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


# ---------------------------------------------------------------- what it computes


def test_untrained_ranks_exactly_as_the_gate():
    scores = NearTermPredictor(OWN).scores(ROWS.features, ROWS.gate_scores)
    np.testing.assert_array_equal(
        np.argsort(-scores, axis=-1, kind="stable"), np.argsort(-ROWS.gate_scores, axis=-1, kind="stable")
    )
    assert ((scores > 0).sum(-1) == OWN.top_k).all()  # sigmoid says .5 at the gate's own threshold


def test_ties_of_the_gate_stay_ties():
    gate = np.round(ROWS.gate_scores)  # many equal scores, at the threshold too
    scores = NearTermPredictor(OWN).scores(ROWS.features, gate)
    np.testing.assert_array_equal(
        np.argsort(-scores, axis=-1, kind="stable"), np.argsort(-gate, axis=-1, kind="stable")
    )


def oracle(model: NearTermPredictor, features: np.ndarray, gate: np.ndarray | None) -> np.ndarray:
    """The formula of the module text, one token, layer and expert at a time, in float64."""
    w = {name: value.detach().double().numpy() for name, value in model.state_dict().items()}
    T, (L, E, K) = len(features), (OWN.layers, OWN.experts, OWN.top_k)
    out = np.empty((T, L, E))
    for t in range(T):
        for layer in range(L):
            parts = np.split(features[t, layer].astype(np.float64), model.parts)
            x = np.concatenate([part / np.sqrt((part**2).mean() + 1e-6) for part in parts])
            pre = (w["trunk"] @ x) * w["scale"][layer] + w["shift"][layer]
            u = np.array([v * 0.5 * (1 + torch.erf(torch.tensor(v / 2**0.5)).item()) for v in pre])
            out[t, layer] = w["head"][layer] @ u + w["bias"][layer]
            if gate is not None:
                ordered = np.sort(gate[t, layer].astype(np.float64))[::-1]
                out[t, layer] += w["gain"][layer] * (gate[t, layer] - (ordered[K - 1] + ordered[K]) / 2)
    return out


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("parts", [1, 3])
def test_scores_are_the_formula(gate, parts):
    model = trained(gate=gate, parts=parts)
    few = ROWS.rows(slice(0, 20))
    given = few.gate_scores if gate else None
    # float32 sums of at most 12 terms of order one, against float64
    np.testing.assert_allclose(model.scores(few.features, given), oracle(model, few.features, given), atol=2e-5)


@pytest.mark.parametrize("batch", [1, 7, 200, 5000])
def test_batches_do_not_matter(batch):
    model = trained()
    whole = model.scores(ROWS.features, ROWS.gate_scores)
    # another batch size is another order of summation inside one matrix product
    np.testing.assert_allclose(model.scores(ROWS.features, ROWS.gate_scores, batch=batch), whole, atol=1e-5)
    assert whole.dtype == np.float32
    assert model.scores(ROWS.features[:0], ROWS.gate_scores[:0]).shape == (0, 3, 16)


def test_any_layout_in_memory_will_do():
    model, few = trained(), ROWS.rows(slice(0, 8))
    plain = model.scores(few.features, few.gate_scores)
    turned = np.asfortranarray(few.features[::-1])[::-1]
    turned.flags.writeable = False
    np.testing.assert_array_equal(model.scores(turned, np.asfortranarray(few.gate_scores)), plain)
    half = model.scores(few.features.astype(np.float16), few.gate_scores)
    np.testing.assert_allclose(half, plain, atol=1e-2)  # eleven bits of each of 12 features


def test_equal_seeds_equal_weights_and_nothing_global_is_drawn():
    before = torch.get_rng_state()
    a, b, c = (NearTermPredictor(OWN, gate=False, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.trunk, c.trunk)


def test_every_tensor_follows_its_inputs_to_any_device():
    """With another default device, whatever is made without naming one would not mix with the rest."""
    few, recipe = ROWS.rows(slice(0, 4)), Recipe(deadline=(1.0, 2.0, 3.0))
    features, gate = torch.from_numpy(few.features), torch.from_numpy(few.gate_scores)
    ids = torch.from_numpy(few.ids.astype(np.int64))
    model = trained()
    with torch.device("meta"):
        value = loss(model(features, gate), ids, recipe)
        model.scores(few.features, few.gate_scores)
    assert value.device.type == "cpu"
    far = model.to("meta")
    assert far(features.to("meta"), gate.to("meta")).shape == (4, 3, 16)


def test_fold_is_a_calibration_that_keeps_the_ranking():
    model = trained()
    plain = model.scores(ROWS.features, ROWS.gate_scores)
    scale, bias = np.array([0.5, 2.0, 3.0], np.float32), np.array([1.0, 0.0, -1.0], np.float32)
    model.fold(scale, bias)
    folded = model.scores(ROWS.features, ROWS.gate_scores)
    # the factor moves from the scores to the weights: other roundings of numbers up to about 30
    np.testing.assert_allclose(folded, plain * scale[:, None] + bias[:, None], atol=1e-4)
    with pytest.raises(GeometryError, match="scale would turn a ranking round; field: scale; got: 0.0, expected: > 0"):
        model.fold(np.zeros(3, np.float32), bias)
    with pytest.raises(GeometryError, match="array of another shape; field: scale"):
        model.fold(scale[:2], bias)


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("features", "gate", "text"),
    [
        ((4, 3, 11), (4, 3, 16), r"array of another shape; field: features; got: \(4, 3, 11\), expected: \(4, 3, 12\)"),
        ((4, 2, 12), (4, 2, 16), "field: features"),
        ((4, 3, 12), (4, 3, 1), r"field: gate_scores; got: \(4, 3, 1\), expected: \(4, 3, 16\)"),
        ((4, 3, 12), (3, 3, 16), "field: gate_scores"),
        ((4, 3, 12), None, "gate scores missing, or not wanted; field: gate_scores; got: False, expected: True"),
    ],
)
def test_other_shapes_are_refused(features, gate, text):
    with pytest.raises(GeometryError, match=text):
        trained().scores(np.ones(features, np.float32), None if gate is None else np.ones(gate, np.float32))


def test_gate_scores_not_wanted_are_refused():
    with pytest.raises(GeometryError, match="gate scores missing, or not wanted; .*got: True, expected: False"):
        trained(gate=False).scores(ROWS.features, ROWS.gate_scores)


@pytest.mark.parametrize("where", ["features", "gate_scores"])
def test_prediction_that_is_not_finite_is_refused(where):
    few = ROWS.rows(slice(0, 2))
    arrays = {"features": few.features.copy(), "gate_scores": few.gate_scores.copy()}
    arrays[where][1, 2, 3] = np.nan
    with pytest.raises(RecordError, match="prediction is not finite; field: features, gate_scores"):
        trained().scores(**arrays)


@pytest.mark.parametrize("changes", [{"top_k": 16}, {"top_k": 0}, {"layers": 0}, {"width": 0}])
def test_impossible_geometry_is_refused(changes):
    with pytest.raises(GeometryError, match="impossible geometry"):
        identity(**changes)


def test_parts_must_divide_the_width():
    with pytest.raises(GeometryError, match="not that many equal parts; field: parts; got: 5, expected: of 12"):
        NearTermPredictor(OWN, parts=5)


# ---------------------------------------------------------------- save and load


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "predictor.safetensors"
    trained(parts=3).save(path)
    return path


def test_load_is_what_was_saved(saved, tmp_path):
    model = NearTermPredictor.load(saved, expected=OWN)
    few = ROWS.rows(slice(0, 9))
    np.testing.assert_array_equal(
        model.scores(few.features, few.gate_scores), trained(parts=3).scores(few.features, few.gate_scores)
    )
    assert (model.identity, model.rank, model.gate, model.parts, model.training) == (OWN, 5, True, 3, False)
    model.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == saved.read_bytes()


@pytest.mark.parametrize("field", list(asdict(OWN)))
def test_every_field_of_the_identity_is_compared(saved, field):
    value = getattr(OWN, field)
    other = value + 1 if isinstance(value, int) else value + "x"
    with pytest.raises(IdentityError) as caught:
        NearTermPredictor.load(saved, expected=replace(OWN, **{field: other}))
    expected = other if isinstance(other, str) else repr(other)
    assert str(caught.value) == (
        f"predictor of another identity; file: {saved}; field: {field}; got: {value!r}, expected: {expected}"
    )


def resaved(path, tensors=None, **header):
    own_tensors, own_header = read_tensors(path)
    write_tensors(path, {**own_tensors, **(tensors or {})}, {**own_header, **header})


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ({"format_version": 2}, r"not a predictor this version reads; .*got: \('NearTermPredictor', 2\)"),
        ({"kind": "Sidecar"}, r"not a predictor this version reads; .*got: \('Sidecar', 1\)"),
        ({"identity": {}}, "header lacks or adds a field; .*field: identity"),
        ({"identity": {**asdict(OWN), "owner": 1}}, "header lacks or adds a field"),
        ({"rank": "5"}, "header lacks or adds a field"),
    ],
)
def test_other_headers_are_refused(saved, header, text):
    resaved(saved, **header)
    with pytest.raises(IdentityError, match=text):
        NearTermPredictor.load(saved)


@pytest.mark.parametrize(
    "tensors",
    [
        {"bias": np.zeros((3, 15), np.float32)},
        {"bias": np.zeros((3, 16), np.float64)},
        {"extra": np.zeros(1, np.float32)},
    ],
)
def test_other_tensors_are_refused(saved, tensors):
    resaved(saved, tensors)
    with pytest.raises(GeometryError, match="tensors of another shape; file: .*predictor.safetensors; got: "):
        NearTermPredictor.load(saved)


def test_missing_tensor_is_refused(saved):
    tensors, header = read_tensors(saved)
    del tensors["gain"]
    write_tensors(saved, tensors, header)
    with pytest.raises(GeometryError, match="tensors of another shape"):
        NearTermPredictor.load(saved)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_tensor_that_is_not_finite_is_refused_by_name(saved, value):
    resaved(saved, {"gain": np.full((3, 1), value, np.float32)})
    with pytest.raises(GeometryError, match="tensor is not finite; file: .*; field: gain"):
        NearTermPredictor.load(saved)


def test_damaged_and_missing_files_are_refused(saved, tmp_path):
    saved.write_bytes(saved.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match="not a complete safetensors file"):
        NearTermPredictor.load(saved)
    with pytest.raises(MissingArtifactError):
        NearTermPredictor.load(tmp_path / "nowhere")


# ---------------------------------------------------------------- size


def test_forty_eight_layers_of_512_experts():
    """The source document's geometry: 48 layers x 512 experts x top-10, width 2,560, rank 64.

    7.1 MB of float32 parameters, 6.3 of them heads; a step's largest array is 98 kB of scores a token
    (0.1 GB for the 1,024 tokens that `scores` takes at a time, of which it holds about six).
    """
    own = identity(layers=48, experts=512, top_k=10, width=2560)
    model = NearTermPredictor(own, rank=64)
    assert model.nbytes == 4 * (64 * 2560 + 48 * (2 * 64 + 512 * 64 + 512 + 1)) == 7_069_888
    rng = np.random.default_rng(0)
    gate = rng.standard_normal((4, 48, 512)).astype(np.float32)
    ids = np.argsort(-(gate + rng.standard_normal(gate.shape)), axis=-1)[..., :10].astype(np.uint16)
    few = Examples(rng.standard_normal((4, 48, 2560)).astype(np.float16), ids, gate)
    assert recall(model.scores(few.features, few.gate_scores), few.ids) == recall(few.gate_scores, few.ids)
    history = fit(model, few, Recipe(epochs=2, batch=2), gate1="pass")
    assert history[1] < history[0]
    assert model.scores(few.features, few.gate_scores).shape == (4, 48, 512)
