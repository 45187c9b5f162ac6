"""Packs: complete or not there, the model's own bytes, and the same bytes whatever interrupted their making."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import msgspec
import numpy as np
import pytest
import store_cases
from filelock import FileLock
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from moelab.__main__ import main
from moelab.errors import ArtifactError, ParameterError, StoreError
from moelab.files import digest_file, read_json, write_json
from moelab.models import find_blocks
from moelab.streaming import EngineOptions, Pack, StreamingEngine, open_store, read_pack, write_pack
from moelab.streaming.store import packing
from moelab.streaming.store.skeleton import skeleton

READERS = ("auto", "buffered", "mmap")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Four MoE layers of six tensors each: gpt_oss has biases."""
    folder = tmp_path_factory.mktemp("models") / "gpt_oss"
    store_cases.save("gpt_oss", folder)
    return folder


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("packs") / "whole"
    write_pack(model, out)
    return out


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def digests(folder: Path) -> dict[str, str]:
    return {file.name: digest_file(file) for file in sorted(folder.iterdir())}


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- what is in it


@pytest.mark.parametrize("reader", READERS)
def test_a_pack_holds_the_experts_of_its_model(reader, model, whole):
    with open_store(whole, reader=reader, precision="stored", verify="records") as store:
        assert store_cases.same(store, store_cases.expected(model))
        with open_store(model) as in_place:
            assert store.identity["model"] == in_place.identity["model"]
        assert store.identity["source"] == "pack"


def test_every_other_parameter_is_under_the_models_own_name(model, whole):
    network, _ = load_model(model, lazy=True)
    parameters = tree_flatten(network.parameters(), destination={})
    weights = mx.load(str(whole / "model.safetensors"))
    pack = read_pack(whole)
    assert weights.keys() | pack.absent.keys() == parameters.keys() and not weights.keys() & pack.absent.keys()
    for name, array in weights.items():
        assert array.dtype == parameters[name].dtype and mx.array_equal(array, parameters[name])
    for name, (shape, dtype) in pack.absent.items():
        assert (shape, dtype) == (tuple(parameters[name].shape), str(parameters[name].dtype).removeprefix("mlx.core."))
    frame = skeleton(whole)
    assert frame.packed and len(frame.blocks) == len(pack.layers)
    assert [(b.layer_id, b.experts) for b in frame.blocks] == [(p.layer_id, pack.experts) for p in pack.layers]


def test_a_pack_in_the_precision_of_the_run_is_read_straight_into_the_slot(model, tmp_path):
    write_pack(model, tmp_path / "half", precision="float16")
    write_pack(model, tmp_path / "wide", precision="float32")
    with open_store(tmp_path / "wide") as store, open_store(model) as in_place:
        assert not any(tensor.converted for layout in store.layouts for tensor in layout.tensors)
        for name, array in store.read(3, 7).items():
            assert np.array_equal(array, in_place.read(3, 7)[name])
        assert store.physical_bytes == store.layouts[3].slot_bytes
    with open_store(tmp_path / "half") as store, open_store(model, precision="float16") as in_place:
        assert {tensor.stored for tensor in store.layouts[0].tensors} == {"F16"}
        for name, array in store.read(0, 1).items():
            assert np.array_equal(array, in_place.read(0, 1)[name].astype(np.float32))
    assert all(array.dtype == mx.float16 for array in mx.load(str(tmp_path / "half" / "model.safetensors")).values())


def test_quantised_modules_are_listed_and_scales_follow_the_precision(tmp_path):
    mode = {"group_size": 32, "bits": 4, "mode": "affine"}
    store_cases.save("qwen3_moe", tmp_path / "model", quantise=mode)
    write_pack(tmp_path / "model", tmp_path / "pack", precision="bfloat16")
    pack = read_pack(tmp_path / "pack")
    network, _ = load_model(tmp_path / "model", lazy=True)
    expected = {name for name, module in network.named_modules() if hasattr(module, "bits")}
    assert pack.quantised.keys() == expected
    assert {(q.bits, q.group_size, q.mode) for q in pack.quantised.values()} == {(4, 32, "affine")}
    assert {t.name: t.dtype for t in pack.layers[0].tensors}["gate_proj.scales"] == "BF16"
    frame = skeleton(tmp_path / "pack")
    assert frame.blocks[0].switch.gate_proj.scales.dtype == mx.bfloat16
    with open_store(tmp_path / "pack", precision="stored") as store:
        found = store.read(1, 2)
        for name, array in tree_flatten(find_blocks(network)[1].switch.parameters()):
            wanted = array[2] if array.dtype == mx.uint32 else mx.view(array[2].astype(mx.bfloat16), mx.uint16)
            assert np.array_equal(found[name], np.array(wanted))


def test_selection_biases_keep_their_precision(tmp_path):
    store_cases.save("glm4_moe", tmp_path / "model")
    write_pack(tmp_path / "model", tmp_path / "pack", precision="float16")
    types = {name: array.dtype for name, array in mx.load(str(tmp_path / "pack" / "model.safetensors")).items()}
    kept = {name for name, dtype in types.items() if dtype == mx.float32}
    assert kept and all(name.endswith("e_score_correction_bias") for name in kept)


def test_equal_models_make_equal_packs(model, whole, tmp_path):
    write_pack(model, tmp_path / "again")
    assert digests(tmp_path / "again") == digests(whole)
    for layer in range(4):  # nothing of a neighbour's bytes in the padding
        layout = read_pack(whole).layers[layer].layout("stored")
        records = np.fromfile(whole / f"experts-{layer:03d}.bin", np.uint8).reshape(-1, layout.record_bytes)
        for tensor, offset, following in zip(
            layout.tensors, layout.record_offsets, (*layout.record_offsets[1:], layout.record_bytes), strict=True
        ):
            assert not records[:, offset + tensor.stored_bytes : following].any()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("reader", READERS)
def test_a_corrupted_record_is_found_when_asked(reader, copy):
    layout = read_pack(copy).layers[2].layout("stored")
    flip(copy / "experts-002.bin", 5 * layout.record_bytes + layout.record_offsets[-1])
    with pytest.raises(StoreError, match="layer 2, expert 5.*fix: pack the model again"):
        open_store(copy, reader=reader, verify="records")
    for precision in ("stored", "bfloat16"):
        with open_store(copy, reader=reader, precision=precision, check_reads=True) as store:
            store.read(2, 4)
            with pytest.raises(StoreError, match="layer 2, expert 5"):
                store.read(2, 5)
            assert store.reads == 1


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", ["experts-003.bin", "model.safetensors"])
def test_a_shortened_file_is_refused_by_every_reader(reader, name, copy):
    os.truncate(copy / name, (copy / name).stat().st_size - 4096)
    with pytest.raises(ArtifactError, match=name):
        open_store(copy, reader=reader)


def test_a_missing_file_is_refused(copy):
    (copy / "experts-001.bin").unlink()
    with pytest.raises(ArtifactError, match="missing.*experts-001.bin"):
        open_store(copy)


def test_another_configuration_is_another_model(copy):
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text.replace("1e-06", "1e-05", 1))
    assert (copy / "config.json").read_text() != text
    with pytest.raises(ArtifactError, match="altered.*config.json"):
        open_store(copy)


def test_another_tokenizer_is_found_too(copy):
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    with pytest.raises(ArtifactError, match="altered.*tokenizer.json"):
        open_store(copy)


def test_a_pack_is_not_packed_again(whole, tmp_path):
    with pytest.raises(ParameterError, match="this is a pack already.*pack the checkpoint"):
        write_pack(whole, tmp_path / "again")
    with pytest.raises(ParameterError, match="kept for unfinished packs"):
        write_pack(whole, tmp_path / "again.partial")


def test_the_engine_compares_every_read_of_a_pack(copy):
    file = copy / "experts-000.bin"
    data = bytearray(file.read_bytes())
    data[3::4096] = bytes(byte ^ 0x40 for byte in data[3::4096])
    file.write_bytes(data)
    with (
        StreamingEngine.load(copy, EngineOptions(cache_bytes=1 << 24)) as engine,
        pytest.raises(StoreError, match="not those that were packed"),
    ):
        list(engine.stream_tokens([5, 6, 7], max_tokens=3))
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ArtifactError, match="altered.*model.safetensors"):
        StreamingEngine.load(copy, EngineOptions(cache_bytes=1 << 24))


def test_other_weights_are_found_when_asked(copy):
    flip(copy / "model.safetensors", (copy / "model.safetensors").stat().st_size - 1)
    open_store(copy).close()
    with pytest.raises(ArtifactError, match="model.safetensors"):
        open_store(copy, verify="records")
    with pytest.raises(ParameterError, match="unknown way to verify"):
        open_store(copy, verify="everything")


@pytest.mark.parametrize("change, match", [
    ({"version": 1}, "unknown version of a pack.*got: 1, expected: 3"),
    ({"version": None}, "unknown version"),
    ({"shiny": True}, "unknown field `shiny`"),
    ({"experts": "16"}, "not a pack"),
    ({"precision": "float16"}, "the manifest was altered"),
])  # fmt: skip
def test_a_manifest_that_is_not_ours_is_refused(change, match, copy):
    write_json(copy / "pack.json", {**read_json(copy / "pack.json"), **change})
    with pytest.raises(ArtifactError, match=match):
        open_store(copy)


def test_records_at_other_places_are_refused_even_when_sealed(copy):
    pack = read_json(copy / "pack.json")
    pack["layers"][0]["tensors"][1]["offset"] += 64
    write_json(copy / "pack.json", msgspec.to_builtins(msgspec.convert(pack, Pack).sealed()))
    with pytest.raises(ArtifactError, match="laid out otherwise.*experts-000.bin"):
        open_store(copy)


def test_a_checkpoint_has_no_checksums(model):
    with pytest.raises(ParameterError, match="no checksums"):
        open_store(model, verify="records")


# ---------------------------------------------------------------- interrupted


KILLED = """
import os, sys
from moelab.streaming import write_pack
write_pack(sys.argv[1], sys.argv[2], progress=lambda done, total: done > 0.6 * total and os.kill(os.getpid(), 9))
"""


def test_a_killed_pack_is_never_opened_and_ends_as_if_nothing_had_happened(model, whole, tmp_path, monkeypatch):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    done = subprocess.run([sys.executable, "-c", KILLED, model, out], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists() and partial.is_dir()
    for folder in (partial, partial / "pack"):
        with pytest.raises(ArtifactError, match="half-written pack"):
            open_store(folder)
    written = record_files_written(monkeypatch)
    write_pack(model, out)
    assert digests(out) == digests(whole) and not partial.exists()
    assert "experts-000.bin" not in written and "experts-003.bin" in written, "finished layers are kept"


def record_files_written(monkeypatch) -> list[str]:
    written, real = [], packing._sink
    monkeypatch.setattr(packing, "_sink", lambda path: (written.append(path.name), real(path))[1])
    return written


def interrupted(model, out) -> Path:
    """A pack stopped when half of it was written."""

    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_pack(model, out, progress=stop)
    return out.with_name(out.name + ".partial")


def test_a_finished_layer_that_was_altered_since_is_written_again(model, whole, tmp_path, monkeypatch):
    partial = interrupted(model, tmp_path / "out")
    flip(partial / "pack" / "experts-000.bin", 100)
    flip(partial / "pack" / "model.safetensors", 3000)
    written = record_files_written(monkeypatch)
    write_pack(model, tmp_path / "out")
    assert {"experts-000.bin", "model.safetensors"} <= set(written)
    assert digests(tmp_path / "out") == digests(whole)


def test_what_another_pack_left_is_not_taken_over(model, tmp_path):
    partial = interrupted(model, tmp_path / "out")
    with pytest.raises(ArtifactError, match="unfinished pack of something else.*fix: remove this folder"):
        write_pack(model, tmp_path / "out", precision="float16")
    assert partial.is_dir()


def test_two_processes_do_not_write_one_pack(model, tmp_path):
    (tmp_path / "out.partial").mkdir()
    with FileLock(tmp_path / "out.partial" / "lock"), pytest.raises(ArtifactError, match="another process"):
        write_pack(model, tmp_path / "out")


def test_an_existing_folder_and_an_unknown_precision_are_refused_before_anything_is_read(model, whole, tmp_path):
    with pytest.raises(ParameterError, match="something here already"):
        write_pack(model, whole)
    with pytest.raises(ParameterError, match="unknown precision"):
        write_pack(model, tmp_path / "out", precision="int4")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_said_and_what_is_finished_is_kept(model, whole, tmp_path, monkeypatch):
    real, room = os.write, [sum(f.stat().st_size for f in whole.iterdir()) // 2]

    def limited(fd, data):
        room[0] -= len(data)
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", limited)
        with pytest.raises(StoreError, match="the disk is full.*finished layers are kept"):
            write_pack(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    left = {file.name: file.stat().st_size for file in (tmp_path / "out.partial" / "pack").iterdir()}
    assert all(size == (whole / name).stat().st_size for name, size in left.items()), "no half file takes up room"
    written = record_files_written(monkeypatch)
    write_pack(model, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(whole) and not set(left) & set(written)


def test_too_little_room_is_said_before_anything_is_written(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(StoreError, match="the disk is full.*1000 bytes free"):
        write_pack(model, tmp_path / "out")
    assert not list((tmp_path / "out.partial" / "pack").iterdir())


def test_short_writes_go_on(model, whole, tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: max(1, len(data) // 2)]))
    write_pack(model, tmp_path / "out")
    assert digests(tmp_path / "out") == digests(whole)


def test_a_disk_that_returns_other_bytes_is_found_before_the_layer_counts(model, tmp_path, monkeypatch):
    real = os.write

    def wrong(fd, data):
        changed = bytearray(data)
        if len(changed) > 4096 and len(changed) % 4096 == 0:
            changed[77] ^= 1
        return real(fd, changed)

    monkeypatch.setattr(os, "write", wrong)
    with pytest.raises(StoreError, match="other bytes than were written"):
        write_pack(model, tmp_path / "out")


def test_dirty_pages_are_given_up_as_they_come(model, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "FLUSH", 1 << 16)
    unflushed, most, write, flush = {}, [0], os.write, packing._flush

    def counted(fd, data):
        unflushed[fd] = unflushed.get(fd, 0) + write(fd, data)
        most[0] = max(most[0], unflushed[fd])
        return len(data)

    monkeypatch.setattr(os, "write", counted)
    monkeypatch.setattr(packing, "_flush", lambda fd: (unflushed.__setitem__(fd, 0), flush(fd)))
    write_pack(model, tmp_path / "out")
    assert (1 << 16) <= most[0] < (1 << 17)


# ---------------------------------------------------------------- used


def test_another_process_opens_a_pack_while_threads_read_it(whole):
    """Processes are spawned: a forked one would inherit locks in any state."""
    stop = threading.Event()
    with open_store(whole, check_reads=True) as store:
        failures = []

        def work(layer):
            while not stop.is_set():
                try:
                    store.read(layer, 3)
                except StoreError as error:
                    failures.append(error)

        threads = [threading.Thread(target=work, args=(layer,)) for layer in range(4)]
        for thread in threads:
            thread.start()
        child = multiprocessing.get_context("spawn").Process(
            target=open_store, args=(whole,), kwargs={"verify": "records"}
        )
        child.start()
        child.join(60)
        stop.set()
        for thread in threads:
            thread.join()
        assert child.exitcode == 0 and not failures


def test_the_verb(model, whole, tmp_path, capsys):
    assert main(["pack", str(model), str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "4 layers of 16 experts" in shown.out and "100%" in shown.err
    assert digests(tmp_path / "out") == digests(whole)
    assert main(["pack", str(model), str(tmp_path / "out")]) == 3
    shown = capsys.readouterr().err
    assert "something here already" in shown and "B/s" not in shown  # no bar before there is work
    assert main(["pack", str(tmp_path / "absent"), str(tmp_path / "other")]) == 3
    shown = capsys.readouterr().err
    assert shown.startswith("moelab pack: ") and "B/s" not in shown
    with pytest.raises(SystemExit):
        main(["pack", "--help"])
    assert "goes on where it stopped" in capsys.readouterr().out


def test_the_manifest_names_no_place_and_no_time(model, whole):
    text = (whole / "pack.json").read_text()
    assert str(model) not in text and str(whole.parent) not in text
    assert set(json.loads(text)) == {
        "version", "moelab", "model", "precision", "experts", "layers", "absent", "quantised", "weights", "copied",
            "seal",
    }  # fmt: skip
