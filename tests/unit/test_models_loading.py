"""Loading: geometry, identity, checkpoint layouts, precisions; and what must not load."""

import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import quantize_model, save_model

from moelab.errors import (
    ArtifactError,
    GeometryError,
    IdentityError,
    MissingArtifactError,
    ParameterError,
    UnsupportedModelError,
)
from moelab.models import REFUSED, SUPPORTED, find_blocks, known_answers, load, self_test, tiny
from moelab.models.loading import CastSwitchLinear

TOKENS = mx.array([list(range(7, 27))])


@pytest.fixture
def checkpoint(tmp_path):
    tiny.save("qwen3_moe", tmp_path / "tiny")
    return tmp_path / "tiny"


def weights_of(folder):
    return dict(mx.load(str(folder / "model.safetensors")))


def rewrite(folder, weights):
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_reference_models(name):
    lm = load(name)
    g = lm.geometry
    assert (g.layers, g.experts, g.top_k, g.hidden) == (8, 64, 4, 192) and g.layer_ids == tuple(range(8))
    # Stored float16: three projections of 192 x 64.
    assert g.expert_bytes == 3 * 192 * 64 * 2 and g.layer_expert_bytes == (g.expert_bytes,) * 8
    assert lm.precision == "float32" and lm.model.model.embed_tokens.weight.dtype == mx.float32
    assert lm.family.kind == {"softmax": "SOFTMAX_TOPK", "sigmoid": "SIGMOID_GROUP"}[name]
    assert [gate.weight.shape for gate in lm.gate_weights()] == [(64, 192)] * 8
    assert all((gate.bias is None) == (name == "softmax") for gate in lm.gate_weights())
    assert sorted(lm.digests) == ["model", "template", "tokenizer"]
    if name == "sigmoid":
        assert (lm.family.groups, lm.family.kept_groups, lm.family.scale) == (8, 4, 2.5)


def test_layer_ids_skip_dense_layers(tmp_path):
    tiny.save("glm4_moe", tmp_path / "m")
    lm = load(tmp_path / "m")
    assert lm.geometry.layer_ids == (1, 2) and lm.geometry.layers == 2


def test_digests_move_with_what_they_name(checkpoint, tmp_path):
    first = load(checkpoint).digests
    assert load(checkpoint).digests == first
    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    assert load(other).digests == first, "a path is no part of an identity"
    weights = weights_of(other)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.0009765625
    rewrite(other, weights)
    assert load(other).digests["model"] != first["model"]
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "rope_theta": 5e5}))
    changed = load(checkpoint).digests
    assert changed["model"] != first["model"] and changed["tokenizer"] == first["tokenizer"]


def test_nothing_there(tmp_path):
    for name in ("no-such-model", tmp_path, "a/b/c", "/no-such-folder", "./no-such-folder"):
        with pytest.raises(MissingArtifactError, match="no model here"):
            load(name)
    with pytest.raises(ParameterError, match="precision"):
        load("softmax", precision="int8")


# ------------------------------------------------------------ checkpoint layouts: equal, or refused by key


def as_per_expert(weights, projections=("gate_proj", "up_proj", "down_proj")):
    out = {}
    for key, value in weights.items():
        if ".switch_mlp." not in key:
            out[key] = value
            continue
        head, tail = key.split(".switch_mlp.")
        name = dict(zip(("gate_proj", "up_proj", "down_proj"), projections, strict=True))[tail.split(".")[0]]
        for e in range(value.shape[0]):
            out[f"{head}.experts.{e}.{name}.weight"] = value[e]
    return out


def twenty_tokens(lm):
    with lm.tap() as tap:
        logits = lm.model(TOKENS, cache=lm.make_cache())
        mx.eval(logits, *tap.pending())
        return np.array(logits.astype(mx.float32)), tap.take().ids


def test_experts_stored_one_by_one_load_as_the_stacked_ones(checkpoint):
    logits, ids = twenty_tokens(load(checkpoint))
    rewrite(checkpoint, as_per_expert(weights_of(checkpoint)))
    again, same = twenty_tokens(load(checkpoint))
    np.testing.assert_array_equal(logits, again)
    np.testing.assert_array_equal(ids, same)


@pytest.mark.parametrize(
    ("rename", "named"),
    [
        (lambda w: {k.replace(".switch_mlp.", ".experts.switch_glu."): v for k, v in w.items()}, "switch_glu"),
        (lambda w: as_per_expert(w, ("w1", "w3", "w2")), "experts.0.w1"),
        (lambda w: {k: v for k, v in w.items() if "layers.1.mlp.gate" not in k}, "layers.1.mlp.gate.weight"),
        (lambda w: {**w, "model.layers.9.mlp.gate.weight": w["model.norm.weight"]}, "layers.9"),
        (
            lambda w: {k: v for k, v in as_per_expert(w).items() if ".experts.5.down_proj" not in k},
            "experts.5.down_proj",
        ),
    ],
    ids=["switch_glu", "w1/w2/w3", "a gate is missing", "an unknown layer", "an expert is missing"],
)
def test_other_layouts_are_refused_by_key_never_loaded_in_part(checkpoint, rename, named):
    rewrite(checkpoint, rename(weights_of(checkpoint)))
    with pytest.raises(UnsupportedModelError, match=named) as caught:
        load(checkpoint)
    assert str(checkpoint) in str(caught.value)


def quantised(checkpoint, **how):
    lm = load(checkpoint)
    model, config = quantize_model(lm.model, json.loads((checkpoint / "config.json").read_text()), **how)
    for file in checkpoint.glob("model*"):
        file.unlink()
    save_model(checkpoint, model)
    (checkpoint / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize(
    "how", [{"group_size": 32, "bits": 4, "mode": "mxfp4"}, {"group_size": 32, "bits": 8}], ids=str
)
def test_quantised_experts_load_quantised(checkpoint, how):
    model = quantised(checkpoint, **how)
    expected = np.array(model(TOKENS).astype(mx.float32))
    lm = load(checkpoint)
    assert {type(b.switch.up_proj).__name__ for b in lm.blocks} == {"QuantizedSwitchLinear"}
    logits, ids = twenty_tokens(lm)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert lm.geometry.expert_bytes < 3 * 64 * 32 * 4
    # The gate is quantised too: its dequantised matrix must give the routes that the model took.
    with lm.tap(("moe_input",)) as tap:
        lm.model(TOKENS)
        record = tap.take()
    top = np.argsort(-lm.early_gate_scores(record.features["moe_input"][:, :, 1], 1, norm=False), -1)[..., :4]
    clear = record.margin[:, :, 1] > 1e-4
    assert (np.sort(top, -1) == np.sort(record.ids[:, :, 1], -1)).all(-1)[clear].all()
    assert self_test(lm)["answers"] == 0


# ------------------------------------------------------------ precision


@pytest.mark.parametrize(
    ("family", "precision"),
    [("qwen3_moe", "bfloat16"), ("glm4_moe", "float16"), ("gemma4_text", "bfloat16"), ("bailing_moe_v3", "bfloat16")],
)
def test_half_precision_needs_the_named_cast(tmp_path, family, precision):
    tiny.save(family, tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match="cast_experts"):
        load(tmp_path / "m", precision=precision)
    lm = load(tmp_path / "m", precision=precision, cast_experts=True)
    assert lm.precision == f"{precision}+float32-experts"
    assert type(lm.blocks[0].switch.up_proj) is CastSwitchLinear
    plain = lm.model(TOKENS)
    with lm.tap(("moe_input", "pre_attention")) as tap:
        tapped = lm.model(TOKENS)
        record = tap.take()
    assert plain.dtype == getattr(mx, precision) and mx.array_equal(plain, tapped).item()
    assert record.features["moe_input"].dtype == np.float32 and np.isfinite(record.weights).all()
    self_test(lm)


def test_selection_biases_stay_in_float32_where_the_model_keeps_them(tmp_path):
    tiny.save("glm4_moe", tmp_path / "m")
    lm = load(tmp_path / "m", precision="bfloat16", cast_experts=True)
    assert lm.blocks[0].gate.e_score_correction_bias.dtype == mx.float32
    assert lm.blocks[0].gate.weight.dtype == mx.bfloat16


# ------------------------------------------------------------ families


def test_every_mlx_lm_file_with_switch_layers_is_listed():
    """A new mlx-lm brings new families: each must be described, refused by name, or reuse a known block."""
    import ast
    from pathlib import Path

    import mlx_lm.models.switch_layers as home

    defining = set()
    for file in Path(home.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("SwitchGLU", "SwitchMLP"):
                defining.add(file.stem)
    assert defining == (set(SUPPORTED) | set(REFUSED)) - {"dbrx"}
    assert not set(SUPPORTED) & set(REFUSED)


@pytest.mark.parametrize(("family", "reason"), [("longcat_flash", "identity experts"), ("dbrx", "separate modules")])
def test_refused_families_say_why(family, reason):
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        find_blocks(tiny.build(family))
    assert family in str(caught.value)


def test_dense_models_and_unknown_blocks_are_refused(checkpoint):
    from mlx_lm.models import llama

    dense = llama.Model(llama.ModelArgs.from_dict({**tiny.config("mixtral"), "model_type": "llama"}))
    with pytest.raises(UnsupportedModelError, match="no mixture-of-experts layer"):
        find_blocks(dense)
    model = tiny.build("mixtral")
    for layer in model.layers:
        layer.block_sparse_moe.__class__ = type("Block", (type(layer.block_sparse_moe),), {"__module__": "new_family"})
    with pytest.raises(UnsupportedModelError, match="new_family"):
        find_blocks(model)


def test_layers_that_route_differently_are_refused():
    model = tiny.build("qwen3_moe")
    model.layers[1].mlp.top_k = 2
    with pytest.raises(GeometryError, match="route differently"):
        find_blocks(model)


def test_a_switch_layer_without_a_gate_is_refused():
    model = tiny.build("mixtral")
    model.layers[0].block_sparse_moe.pop("gate")
    with pytest.raises(UnsupportedModelError, match="without a gate"):
        find_blocks(model)


def test_a_norm_of_another_kind_is_refused():
    from moelab.models.gate_weights import Norm

    class Odd(nn.RMSNorm):
        def __call__(self, x):
            return mx.tanh(super().__call__(x))

    with pytest.raises(UnsupportedModelError, match="not an RMS or layer norm"):
        Norm.of(Odd(64), 64)


# ------------------------------------------------------------ known answers


@pytest.fixture
def reference(tmp_path):
    lm = load("softmax")
    copy = tmp_path / "softmax"
    shutil.copytree(lm.path, copy)
    return load(copy)


def test_known_answers_hold():
    for name in ("softmax", "sigmoid"):
        result = self_test(load(name))
        assert result["answers"] == 3 and result["kernel_error"] < 1e-5 and result["logit_error"] < 1e-4


def test_a_kernel_that_is_off_by_a_hundredth_fails(monkeypatch):
    lm, exact = load("softmax"), mx.gather_mm
    monkeypatch.setattr(mx, "gather_mm", lambda *a, **k: (y := exact(*a, **k)) + 1e-2 * mx.random.normal(y.shape))
    with pytest.raises(IdentityError, match="expert products are wrong"):
        self_test(lm)
    # The answers notice it by themselves as well.
    monkeypatch.setattr(known_answers, "check_kernels", lambda lm: 0.0)
    with pytest.raises(IdentityError, match=r"prompts\[0\]"):
        self_test(lm)


def test_known_answers_notice_a_wrong_route_logit_and_tokenizer(reference):
    file = reference.path / known_answers.FILE
    good = json.loads(file.read_text())
    for field, value in (("routes", "0" * 64), ("token_ids", [1]), ("logits", {"7": 99.0})):
        bad = json.loads(file.read_text())
        bad["prompts"][1][field] = value
        file.write_text(json.dumps(bad))
        with pytest.raises(IdentityError, match=rf"prompts\[1\].{field}"):
            self_test(reference)
        file.write_text(json.dumps(good))
    for change, error in (
        ({"schema_version": 9}, ArtifactError),
        ({"model": "x"}, IdentityError),
        ({"odd": 1}, ArtifactError),
    ):
        file.write_text(json.dumps({**good, **change}))
        with pytest.raises(error):
            self_test(reference)


def test_known_answers_are_the_prompts_with_the_widest_margins(reference):
    texts = ["The cat sat.", "One two three.", "A line of text", "Numbers: 1, 2, 3", "return x + y"]
    file = known_answers.write(reference, texts)
    prompts = json.loads(file.read_text())["prompts"]
    every = {t: known_answers._answer(reference, t)["margin"] for t in texts}
    assert [p["text"] for p in prompts] == sorted(every, key=lambda t: -every[t])[:3]
    assert self_test(reference)["answers"] == 3
