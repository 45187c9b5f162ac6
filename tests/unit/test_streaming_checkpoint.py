"""Experts found in a stock checkpoint: every spelling read bit for bit as mlx-lm reads it, or refused by name."""

import json
import os
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
import store_cases

from moelab.errors import ArtifactError, ContractError, MissingArtifactError, ParameterError, UnsupportedModelError
from moelab.files import read_json, write_json
from moelab.models import load
from moelab.streaming import open_store, write_pack
from moelab.streaming.store.checkpoint import expert_parameters, model_digest
from moelab.streaming.store.shards import encode_header, read_header

READERS = ("auto", "buffered", "mmap")


def stacked(folder):
    return store_cases.save("qwen3_moe", folder)


def single(folder):
    store_cases.write(folder, store_cases.per_expert(stacked(folder), "switch_mlp", "experts"), shards=3)


def renamed(folder):
    tensors = stacked(folder)
    store_cases.write(folder, {k.replace(".switch_mlp.", ".experts.switch_glu."): v for k, v in tensors.items()})


def numbered(folder):
    tensors = store_cases.per_expert(stacked(folder), "switch_mlp", "experts", store_cases.ALIASES)
    store_cases.write(folder, tensors)


def four_bit_floats(folder):
    store_cases.save("qwen3_moe", folder, quantise={"group_size": 32, "bits": 4, "mode": "mxfp4"})


def four_bits(folder):
    store_cases.save("qwen3_moe", folder, quantise={"group_size": 32, "bits": 4, "mode": "affine"})


def mixtral_numbered(folder):
    tensors = store_cases.save("mixtral", folder)
    store_cases.write(folder, store_cases.per_expert(tensors, "switch_mlp", "experts", store_cases.ALIASES), shards=2)


def gemma_fused(folder):
    tensors = store_cases.save("gemma4_text", folder)
    store_cases.write(folder, store_cases.fused(tensors, "switch_glu", "gate_up_proj", "down_proj"))


def granite_fused(folder):
    tensors = store_cases.save("granitemoe", folder)
    store_cases.write(
        folder, store_cases.fused(tensors, "switch_mlp", "input_linear.weight", "output_linear.weight"), shards=2
    )


def nemotron_single(folder):
    tensors = store_cases.save("nemotron_h", folder)
    names = {"fc1": "up_proj", "fc2": "down_proj"}
    store_cases.write(folder, store_cases.per_expert(tensors, "switch_mlp", "experts", names))


def with_prediction_layer(folder):
    """A layer of another stack (here for multi-token prediction), whose number is that of a real one."""
    nemotron_single(folder)
    tensors = mx.load(str(folder / "model.safetensors"))
    layers = {name.removeprefix("backbone."): v + 1 for name, v in tensors.items() if ".layers." in name}
    store_cases.write(folder, {**tensors, **{f"mtp.{name}": v for name, v in layers.items()}})


@pytest.mark.parametrize("spelling", [
    stacked, single, four_bit_floats, four_bits, mixtral_numbered, gemma_fused, granite_fused, nemotron_single,
    with_prediction_layer,
])  # fmt: skip
def test_every_spelling_is_read_in_place_and_packed_bit_for_bit(spelling, tmp_path):
    spelling(tmp_path / "model")
    expected = store_cases.expected(tmp_path / "model")
    for reader in READERS:
        with open_store(tmp_path / "model", reader=reader, precision="stored") as store:
            assert store.identity["source"] == "checkpoint"
            assert store_cases.same(store, expected)
    write_pack(tmp_path / "model", tmp_path / "pack")
    with open_store(tmp_path / "pack", precision="stored", verify="records") as store:
        assert store_cases.same(store, expected)


@pytest.mark.parametrize("spelling, key", [(renamed, "experts.switch_glu"), (numbered, "w1")])
def test_a_spelling_that_mlx_lm_does_not_know_is_refused_by_its_keys(spelling, key, tmp_path):
    spelling(tmp_path / "model")
    for attempt in (lambda: open_store(tmp_path / "model"), lambda: write_pack(tmp_path / "model", tmp_path / "pack")):
        with pytest.raises(UnsupportedModelError, match=key.replace(".", r"\.")):
            attempt()
    assert not (tmp_path / "pack").exists()


def interleaved(folder):
    """gpt_oss as its makers save it: bytes of 4-bit floats, rows of gate and up projection by turns."""
    mode = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    tensors, out = store_cases.save("gpt_oss", folder, quantise=mode, only=".experts."), {}
    ends = {"weight": "_blocks", "scales": "_scales", "bias": "_bias"}
    for name, array in tensors.items():
        head, found, tail = name.partition(".experts.")
        if not found:
            out[name] = array
            continue
        projection, kind = tail.split(".")
        if projection == "gate_proj":
            other = tensors[f"{head}.experts.up_proj.{kind}"]
            array = mx.stack([array, other], axis=2).reshape(array.shape[0], -1, *array.shape[2:])
        if kind == "weight":
            array = mx.unflatten(mx.view(array, mx.uint8), -1, (-1, 16))
        if projection != "up_proj":
            out[f"{head}.experts.{projection.replace('gate', 'gate_up')}{ends[kind]}"] = array
    store_cases.write(folder, out)
    config = read_json(folder / "config.json")
    del config["quantization"]
    write_json(folder / "config.json", {**config, "quantization_config": {"quant_method": "mxfp4"}})


def transposed(folder):
    """llama4 as its makers save it: fused and transposed."""
    tensors, out = store_cases.save("llama4", folder), {}
    for name, array in tensors.items():
        if ".experts.gate_proj." in name:
            pair = mx.concatenate([array, tensors[name.replace("gate_proj", "up_proj")]], axis=1)
            out[name.replace("gate_proj.weight", "gate_up_proj")] = mx.swapaxes(pair, 1, 2)
        elif ".experts.down_proj." in name:
            out[name.removesuffix(".weight")] = mx.swapaxes(array, 1, 2)
        elif ".experts." not in name:
            out[name] = array
    store_cases.write(folder, out)


@pytest.mark.parametrize("spelling", [interleaved, transposed])
def test_what_does_not_lie_there_as_it_is_run_is_refused_in_place_and_packed_by_mlx_lm(spelling, tmp_path):
    spelling(tmp_path / "model")
    expected = store_cases.expected(tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="gate_up_proj.*fix: moelab pack"):
        open_store(tmp_path / "model")
    write_pack(tmp_path / "model", tmp_path / "pack")
    with open_store(tmp_path / "pack", precision="stored", verify="records") as store:
        assert store_cases.same(store, expected)


def test_opening_in_place_is_refused_without_the_room_for_it(tmp_path):
    single(tmp_path / "model")
    stack = max(array.nbytes for layer in expert_parameters(tmp_path / "model") for array in layer.arrays.values())
    open_store(tmp_path / "model", room=2 * stack).close()
    with pytest.raises(ContractError, match=f"takes more memory.*got: '{2 * stack - 1} bytes'.*>= {2 * stack} bytes"):
        open_store(tmp_path / "model", room=2 * stack - 1)
    stacked(tmp_path / "other")
    open_store(tmp_path / "other", room=0).close()  # lies as the model names it: nothing is guessed, nothing compared


def test_a_match_by_name_with_other_values_is_refused(tmp_path, monkeypatch):
    """Names and shapes that fit prove nothing: here up rows come first, and the model swaps them back."""
    tensors = store_cases.save("gemma4_text", tmp_path / "model")
    swapped = {
        k.replace("gate_proj", "#").replace("up_proj", "gate_proj").replace("#", "up_proj"): v
        for k, v in tensors.items()
    }
    store_cases.write(tmp_path / "model", store_cases.fused(swapped, "switch_glu", "gate_up_proj", "down_proj"))
    backwards = {**vars(mx), "split": lambda array, parts, axis: list(reversed(mx.split(array, parts, axis=axis)))}
    monkeypatch.setattr("mlx_lm.models.gemma4_text.mx", SimpleNamespace(**backwards))
    with pytest.raises(UnsupportedModelError, match="other values of this tensor"):
        open_store(tmp_path / "model")


# ---------------------------------------------------------------- precision


@pytest.mark.parametrize("model", ["softmax", "sigmoid"])
def test_reference_models_in_float32_are_what_models_load_makes(model):
    loaded = load(model)
    with open_store(model) as store:
        assert store.identity["model"] == loaded.digests["model"] == model_digest(loaded.path)
        assert store.identity["precision"] == "float32"
        for layer, block in enumerate(loaded.blocks):
            for expert in range(0, store.experts, 9):
                for name, array in store.read(layer, expert).items():
                    projection, kind = name.split(".")
                    assert np.array_equal(array, np.array(block.switch[projection][kind][expert]))


def test_scales_follow_the_precision_and_packed_weights_do_not(tmp_path):
    four_bits(tmp_path / "model")
    with open_store(tmp_path / "model", precision="bfloat16") as store:
        types = {tensor.name: (tensor.stored, tensor.run) for tensor in store.layouts[0].tensors}
    assert types["up_proj.weight"] == ("U32", "U32")
    assert types["up_proj.scales"] == types["up_proj.biases"] == ("F32", "BF16")
    with pytest.raises(ParameterError, match="unknown precision"):
        open_store(tmp_path / "model", precision="float8")


# ---------------------------------------------------------------- files that are not what their header says


@pytest.mark.parametrize("reader", ["auto", "o_direct", "buffered", "mmap"])
def test_a_short_shard_is_refused_by_every_reader_before_anything_is_read(reader, tmp_path):
    single(tmp_path / "model")
    last = sorted((tmp_path / "model").glob("model*.safetensors"))[-1]
    size = last.stat().st_size
    os.truncate(last, size - 40000)
    with pytest.raises(ArtifactError) as refusal:
        open_store(tmp_path / "model", reader=reader)
    assert last.name in str(refusal.value) and "40000 bytes shorter" in str(refusal.value)
    assert (refusal.value.got, refusal.value.expected) == (f"{size - 40000} bytes", f"{size} bytes")
    with pytest.raises(ArtifactError, match="40000 bytes shorter"):
        write_pack(tmp_path / "model", tmp_path / "pack")
    assert not (tmp_path / "pack").exists()


@pytest.mark.parametrize("content, match", [
    (b"", "not a safetensors file"),
    (b"\x07\0\0\0", "not a safetensors file"),
    ((1 << 40).to_bytes(8, "little") + b"{}", "not a safetensors file"),
    ((7).to_bytes(8, "little") + b"garbage", "not a safetensors file"),
    (encode_header({"x": ("F32", (2,))}) + bytes(9), "1 bytes longer"),
])  # fmt: skip
def test_a_header_that_does_not_fit_is_refused(content, match, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match=match):
        read_header(tmp_path / "model.safetensors")


def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_refused(tmp_path):
    header = json.dumps({"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ArtifactError, match="x: bytes 0 to 8"):
        read_header(tmp_path / "model.safetensors")


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    tensors = stacked(tmp_path / "model")
    mx.save_safetensors(str(tmp_path / "model" / "model-2.safetensors"), {"lm_head.weight": tensors["lm_head.weight"]})
    with pytest.raises(ArtifactError, match="lm_head.weight"):
        open_store(tmp_path / "model")


def test_no_model_and_a_missing_shard(tmp_path):
    with pytest.raises(MissingArtifactError):
        open_store(tmp_path / "nothing")
    single(tmp_path / "model")
    sorted((tmp_path / "model").glob("model*.safetensors"))[0].unlink()
    with pytest.raises(UnsupportedModelError):
        open_store(tmp_path / "model")


def test_the_header_writer_is_what_mlx_reads(tmp_path):
    values = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.arange(3, dtype=np.uint8)}
    header = encode_header({"b": ("F32", (2, 3)), "a": ("U8", (3,))})
    assert len(header) % 8 == 0
    (tmp_path / "x.safetensors").write_bytes(header + values["a"].tobytes() + values["b"].tobytes())
    read_header(tmp_path / "x.safetensors")
    loaded = mx.load(str(tmp_path / "x.safetensors"))
    assert {k: np.array(v).tolist() for k, v in loaded.items()} == {k: v.tolist() for k, v in values.items()}


def test_config_alone_is_no_checkpoint(tmp_path):
    stacked(tmp_path / "model")
    write_json(tmp_path / "bare" / "config.json", read_json(tmp_path / "model" / "config.json"))
    with pytest.raises(UnsupportedModelError, match="No safetensors"):
        open_store(tmp_path / "bare")
