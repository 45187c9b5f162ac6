"""The committed reference models and freshly trained ones: stock mlx-lm loads them, torch and mlx agree on them."""

import json
import math

import numpy as np
import pytest
import torch

from moelab.artifacts import digest_file, read_json, root
from moelab.errors import ArtifactError, IdentityError, MissingArtifactError
from moelab.reference import calibration, card, checkpoint, comparison, notebook
from moelab.reference.recipe import FAMILIES
from moelab.reference.tokens import SPECIAL, encode, load_tokenizer, windows
from moelab.reference.training import evaluate

MODELS = root() / "artifacts" / "models"
TEXT = (
    "<|system|> Be brief.\n<|user|> Which trains go from Bergen to Oslo before noon, and what do they cost?\n"
    '<|assistant|> <call>search_trains({"from": "Bergen", "to": "Oslo", "before": "12:00"})</call>\n'
    '<|tool|> [{"departs": "06:27", "arrives": "13:12", "price": 399}]\n<|assistant|> One, at 06:27.\n'
)


# ---------------------------------------------------------------- committed


@pytest.mark.parametrize("name", FAMILIES)
def test_stock_mlx_lm_loads_the_committed_model(name):
    import mlx.core as mx
    import mlx_lm
    from mlx.utils import tree_flatten

    folder = MODELS / name
    assert (folder / "model.safetensors").stat().st_size <= 50_000_000
    model, tokenizer = mlx_lm.load(str(folder))
    weights = dict(tree_flatten(model.parameters()))
    odd = {name for name, value in weights.items() if value.dtype != mx.float16}
    assert all(name.endswith("e_score_correction_bias") for name in odd)
    assert tokenizer.eos_token_ids == {0, 1, 2, 3, 4} and tokenizer.has_chat_template
    assert [tokenizer.get_vocab()[token] for token in SPECIAL] == [0, 1, 2, 3, 4]
    model.set_dtype(mx.float32)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Find me a bus."}], add_generation_prompt=True)
    assert len(mlx_lm.generate(model, tokenizer, prompt, max_tokens=4)) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_torch_and_mlx_agree_on_the_committed_model(name):
    tokens = np.array(load_tokenizer(MODELS / name / "tokenizer.json").encode(TEXT).ids)[None, :96]
    found = comparison.compare(MODELS / name, tokens).require()
    assert found.rows == tokens.size * 8
    # The closest decision is far above float32 rounding of a score (1e-7), so the answer is the same elsewhere.
    assert found.least_margin > 1e-6 and found.spread > 5


def test_the_correction_bias_makes_no_selection_score_negative():
    from safetensors.numpy import load_file

    weights = load_file(MODELS / "sigmoid" / "model.safetensors")
    biases = [value for name, value in weights.items() if name.endswith(checkpoint.BIAS)]
    assert len(biases) == 8 and all(bias.min() >= 0 and bias.dtype == np.float32 for bias in biases)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_model_card_is_made_from_the_calibration_of_these_weights(name):
    figures = read_json(MODELS / name / calibration.FILE)
    assert figures["schema_version"] == calibration.SCHEMA_VERSION
    text = (MODELS / name / "README.md").read_text(encoding="utf-8")
    assert f"{card.BEGIN}\n{card.tables(figures)}{card.END}" in text
    assert figures["files"] == calibration.files(MODELS / name)
    assert len(figures["loss"]) == 17 and all({"licence", "source"} <= set(loss) for loss in figures["loss"].values())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_committed_loss_is_computed_again(moelab_data, name):
    figures = read_json(MODELS / name / calibration.FILE)
    tokenizer = load_tokenizer(MODELS / name / "tokenizer.json")
    assert digest_file(MODELS / name / "tokenizer.json") == digest_file(moelab_data / "tokenizer" / "bpe8192.json")
    import gzip

    text = gzip.decompress((moelab_data / "corpus" / "tool_bfcl.val.txt.gz").read_bytes()).decode()
    streams = encode({"tool_bfcl": text.split("\x1e")}, tokenizer)
    network = checkpoint.load_torch(MODELS / name)
    limit, window = figures["text"]["windows_a_domain"], figures["text"]["window"]
    nats, tokens = evaluate(network, streams, window=window, limit=limit)["tool_bfcl"]
    assert tokens == figures["loss"]["tool_bfcl"]["tokens"]
    # Torch here, mlx with another BLAS there; the record keeps four decimals.
    assert nats == pytest.approx(figures["loss"]["tool_bfcl"]["nats"], abs=2e-4)


def test_the_figures_of_real_models_are_computed_again(moelab_data):
    found = json.loads(json.dumps(calibration.real_figures(moelab_data / "traces")))
    for name in FAMILIES:
        assert read_json(MODELS / name / calibration.FILE)["beside"] == found
    # Published for the same traces (route overlap .380 and .357, OLMoE total variation .29/.60/.70).
    assert found["Qwen3-30B-A3B"]["along_thread"]["overlap"]["value"] == pytest.approx(0.380, abs=0.002)
    assert found["gemma-4-26B-A4B"]["along_thread"]["overlap"]["value"] == pytest.approx(0.357, abs=0.002)
    assert found["OLMoE-1B-7B"]["domains"]["named"]["book / github"] == pytest.approx([0.29, 0.60, 0.70], abs=0.005)


# ---------------------------------------------------------------- freshly trained


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    (folder / "text").mkdir()
    text = "".join(f"<|user|> item {i}\n<|assistant|> it costs {i * 7 % 50}\n" for i in range(600))
    (folder / "text" / "a.txt").write_text(text)
    (folder / "text" / "b.txt").write_text(text.replace("item", "article").replace("costs", "weighs"))
    options = notebook.ReferenceOptions.from_profile(
        "tiny", text=str(folder / "text"), vocabulary=300, hidden=32, layers=2, heads=1, steps=20, batch=4, window=32
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOELAB_ARTIFACTS", str(folder / "artifacts"))
        told = []
        yield options, notebook.train_models(options, on_progress=told.append), told


def test_training_leaves_a_checkpoint_its_history_and_its_losses(built):
    _, models, told = built
    assert set(models) == set(FAMILIES) and len(told) == 20
    for artifact in models.values():
        assert artifact.counts["tokens_seen"] == 20 * 4 * 32
        assert artifact.counts["last_loss"] < artifact.counts["first_loss"]
        assert set(artifact.manifest.files) == {
            "chat_template.jinja", "config.json", "generation_config.json", "history.safetensors", "losses.json",
            "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        }  # fmt: skip
        losses = read_json(artifact.file("losses.json"))
        assert set(losses) == {"a", "b"} and all(0 < loss["nats"] < math.log(300) for loss in losses.values())


def test_a_second_run_trains_nothing(built, monkeypatch):
    options, models, _ = built
    monkeypatch.setattr("moelab.reference.training.train", None)
    again = notebook.train_models(options)
    assert {name: artifact.path for name, artifact in again.items()} == {n: a.path for n, a in models.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_and_mlx_agree_on_an_exported_model(built, family):
    _, models, _ = built
    tokens = np.arange(5, 69).reshape(2, 32)
    found = comparison.compare(models[family].path, tokens)
    assert found.passed and found.rows == 2 * 32 * 2 and found.weight_difference < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_exported_is_what_was_trained(built, family):
    """Float16 is the only loss: the reloaded network has the trained one's weights to half precision."""
    options, _, _ = built
    from moelab.reference.recipe import make_network

    network = make_network(options.recipe(family), 300)
    layer = network.model.layers[1].mlp
    if family == "sigmoid":
        layer.gate.e_score_correction_bias.copy_(torch.linspace(-2.0, 1.0, 16))
    tensors = checkpoint.expert_tensors(network)
    gate, up = layer.experts.gate_up_proj[3].detach().split(32)
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.experts.3.gate_proj.weight"], gate.half().numpy())
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.experts.3.up_proj.weight"], up.half().numpy())
    down = layer.experts.down_proj[3].detach().half().numpy()
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.experts.3.down_proj.weight"], down)
    assert ("lm_head.weight" in tensors) == (family == "sigmoid")
    if family == "sigmoid":
        bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
        np.testing.assert_allclose(bias, np.linspace(0.0, 3.0, 16), atol=1e-6)


def test_a_weight_that_half_precision_cannot_hold_is_refused(built, tmp_path):
    options, models, _ = built
    from moelab.reference.recipe import make_network

    network = make_network(options.recipe("softmax"), 300)
    with torch.no_grad():
        network.model.norm.weight[3] = 1e6
    with pytest.raises(ArtifactError, match="model.norm.weight"):
        checkpoint.export(network, load_tokenizer(models["softmax"].file("tokenizer.json")), tmp_path)


@pytest.mark.parametrize("fault", ["gate and up swapped", "negative bias", "norm"])
def test_a_faulty_export_is_noticed(built, tmp_path, fault):
    """Each fault is one that both sides load without complaint."""
    import shutil

    from safetensors.numpy import load_file, save_file

    _, models, _ = built
    shutil.copytree(models["sigmoid"].path, tmp_path / "model")
    sound = comparison.compare(tmp_path / "model", np.arange(5, 37)[None])
    weights = load_file(tmp_path / "model" / "model.safetensors")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    if fault == "negative bias":
        weights["model.layers.0.mlp.gate.e_score_correction_bias"] -= 5.0
    elif fault == "norm":
        config["rms_norm_eps"] = 0.5
        (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    else:
        for layer in range(2):
            for expert in range(16):
                gate, up = (f"model.layers.{layer}.mlp.experts.{expert}.{n}_proj.weight" for n in ("gate", "up"))
                weights[gate], weights[up] = weights[up], weights[gate]
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    other = comparison.compare(tmp_path / "model", np.arange(5, 37)[None])
    if fault == "negative bias":
        assert other.differing > 0
        with pytest.raises(IdentityError, match=f"{other.differing} of 64 routes differ"):
            other.require()
    else:
        # Both sides read the same file, so they still agree; that it is another model shows in what it says.
        assert other.passed and other.spread != sound.spread


def test_calibration_measures_what_training_measures(built):
    options, models, _ = built
    found = calibration.calibrate(models["softmax"].path, options.text_folder(), limit=4, window=160, blas="reference")
    network = checkpoint.load_torch(models["softmax"].path)
    tokenizer = load_tokenizer(models["softmax"].file("tokenizer.json"))
    from moelab.reference.corpus import read_corpus

    streams = encode(read_corpus(options.text_folder()).documents["val"], tokenizer)
    for domain, (nats, tokens) in evaluate(network, streams, window=160, limit=4).items():
        assert found["loss"][domain]["tokens"] == tokens == 4 * 159
        assert found["loss"][domain]["nats"] == pytest.approx(nats, abs=2e-4)
    assert found["along_thread"]["overlap"]["n"] == 2 * 4 * 128 * 2 * 4
    assert found["from_other_text"]["overlap"]["n"] == 2 * 2 * 159 * 2 * 4
    assert found["domains"]["pairs"] == 1 and len(found["load"]["busiest"]) == 2
    assert windows(streams["a"], 160, limit=4).shape == (4, 160)


def test_text_that_is_not_there_is_named(monkeypatch):
    monkeypatch.delenv("MOELAB_DATA", raising=False)
    options = notebook.ReferenceOptions.from_profile("reference")
    with pytest.raises(MissingArtifactError, match=r"no text here.*\$MOELAB_DATA/corpus"):
        notebook.train_models(options)
