"""The generated model: a stock checkpoint that two libraries read alike, and its other forms."""

import numpy as np
import pytest

from moelab import artifacts
from moelab.errors import ContractError
from moelab.files import read_json
from moelab.lab.peers import convert, generated

SHAPE = generated.Shape(layers=2, experts=8, top_k=2, hidden=64, expert_width=32, heads=4, kv_heads=2, head_dim=16)
PROMPT = [5, 900, 44, 7000, 12, 3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOELAB_ARTIFACTS", str(tmp_path_factory.mktemp("generated")))
        yield generated.build(SHAPE, tokenizer=artifacts.root() / "artifacts" / "models" / "softmax")


def test_sizes_are_what_the_shape_says(checkpoint):
    sizes = {key: np.prod(value.get_shape()) * 4 for key, value in generated.open_tensors(checkpoint.path).items()}
    one = [key for key in sizes if ".layers.1.mlp.experts.3." in key]
    assert sum(sizes[key] for key in one) == SHAPE.expert_bytes == 24576
    assert sum(sizes.values()) == checkpoint.counts["bytes"]
    assert SHAPE.routed_bytes == 4 * SHAPE.expert_bytes
    index = read_json(checkpoint.path / "model.safetensors.index.json")
    assert set(index["weight_map"]) == set(sizes) and index["metadata"]["total_size"] == sum(sizes.values())


def test_a_weight_depends_on_seed_and_key_alone(checkpoint, tmp_path):
    key = "model.layers.1.mlp.experts.3.down_proj.weight"
    other = generated.Shape(layers=3, experts=5, top_k=1, hidden=64, expert_width=32, heads=2, kv_heads=1, head_dim=8)
    generated.write(tmp_path, other)
    same, ours = (generated.open_tensors(folder)[key][:] for folder in (tmp_path, checkpoint.path))
    assert np.array_equal(same, ours)
    assert abs(ours.std() * 32**0.5 / generated.EXPERT_GAIN - 1) < 0.1
    generated.write(tmp_path, other, seed=1)
    assert not np.array_equal(generated.open_tensors(tmp_path)[key][:], ours)


def test_no_such_model(checkpoint):
    with pytest.raises(ContractError, match="no such model"):
        generated.Shape(layers=1, experts=2, top_k=3, hidden=8, expert_width=8, heads=1, kv_heads=1, head_dim=8)


def test_two_libraries_give_equal_greedy_tokens_without_ties(checkpoint):
    import mlx.core as mx
    import torch
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model
    from transformers import AutoModelForCausalLM

    model, _ = load_model(checkpoint.path)
    ours = [int(token) for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=24)]
    network = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        made = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            return_dict_in_generate=True,
            output_logits=True,
        )
    assert made.sequences[0, len(PROMPT) :].tolist() == ours
    best = torch.cat(made.logits).topk(2).values
    # float32 moves logits with a spread of 4 by about 1e-5: a thousandth is far from a tie.
    assert (best[:, 0] - best[:, 1]).min() > 1e-3
    assert len(set(ours)) > 12  # and the text does not turn in a small circle


def test_every_expert_matters_to_the_text(checkpoint):
    """Random experts that are too quiet would let a runtime that skips them give the same tokens."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(checkpoint.path)
    before = model(mx.array([PROMPT]))
    for layer in model.model.layers:
        layer.mlp.switch_mlp.down_proj.weight *= 0
    assert mx.abs(model(mx.array([PROMPT])) - before).max().item() > 1


def test_gguf_names_every_tensor_once_and_stacks_experts_in_order(checkpoint):
    config = read_json(checkpoint.path / "config.json")
    tensors = generated.open_tensors(checkpoint.path)
    sources = convert.gguf_sources(config)
    assert sorted(key for keys in sources.values() for key in keys) == sorted(tensors)
    values = dict(convert.gguf_values(checkpoint.path))
    stack = values["blk.1.ffn_down_exps.weight"]
    assert stack.shape == (8, 64, 32)
    assert np.array_equal(stack[3], tensors["model.layers.1.mlp.experts.3.down_proj.weight"][:])
    assert np.array_equal(values["blk.0.attn_q.weight"], tensors["model.layers.0.self_attn.q_proj.weight"][:])
    assert {name: value.shape for name, value in values.items()} == convert._shapes(checkpoint.path, config)
