"""The one writer and the one reader: canonical bytes, nothing changed in silence, nothing altered accepted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from moelab import artifacts, files
from moelab.artifacts import (
    canonical_json,
    decode_tensors,
    digest_bytes,
    digest_tensors,
    encode_tensors,
    read_json,
    read_tensors,
    write_bytes,
    write_json,
    write_tensors,
)
from moelab.errors import ArtifactError, MissingArtifactError

GRID = np.arange(24, dtype=np.float32).reshape(4, 6)
HEADER = {"schema_version": 1, "layers": [0, 1], "name": "naïve 日本"}

# ---------------------------------------------------------------- JSON


def test_canonical_json_has_one_spelling():
    assert canonical_json({"b": (1, 2.5), "a": None, "ü": True}) == '{"a":null,"b":[1,2.5],"ü":true}'.encode()
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": {"b": [0.0, float("nan")]}}, "JSON cannot carry this; field: a.b[1]; got: nan, expected: plain finite"),
        ({"a": float("inf")}, "JSON cannot carry this; field: a; got: inf"),
        (float("-inf"), "JSON cannot carry this; got: -inf"),
        ({"a": {1: 2}}, "key is not text; field: a; got: 1, expected: text"),
        ({"a": np.int64(3)}, "JSON cannot carry this; field: a; got: np.int64(3)"),
        ({"a": {3}}, "JSON cannot carry this; field: a; got: {3}"),
        ({"a": b"3"}, "JSON cannot carry this; field: a; got: b'3'"),
        ({"a": "\ud800"}, "text that is not Unicode; got: "),
    ],
)
def test_what_json_would_change_is_refused(value, text, tmp_path):
    with pytest.raises(ArtifactError) as caught:
        canonical_json(value)
    assert str(caught.value).startswith(text)
    with pytest.raises(ArtifactError, match="file: .*x.json"):
        write_json(tmp_path / "x.json", value)
    assert not list(tmp_path.iterdir())


def test_json_files(tmp_path):
    write_json(tmp_path / "deep" / "x.json", {"b": [1], "a": "日本"})
    assert (tmp_path / "deep" / "x.json").read_text() == '{\n "a": "日本",\n "b": [\n  1\n ]\n}\n'
    assert read_json(tmp_path / "deep" / "x.json") == {"a": "日本", "b": [1]}
    with pytest.raises(MissingArtifactError, match="file not found; file: .*y.json"):
        read_json(tmp_path / "y.json")


@pytest.mark.parametrize("text", [b'{"a": 1', b"", b'{"a": NaN}', b"[Infinity]", b'"\xff"'])
def test_what_is_not_json_is_refused(text, tmp_path):
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(ArtifactError, match="not valid JSON; file: .*x.json; got: .*expected: JSON") as caught:
        read_json(tmp_path / "x.json")
    assert not isinstance(caught.value, MissingArtifactError)


# ---------------------------------------------------------------- bytes


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    write_bytes(path, b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_the_disk_lost_is_noticed_before_the_rename(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: os.ftruncate(number, 2))
    with pytest.raises(ArtifactError, match="other bytes than were written; file: .*x.bin"):
        write_bytes(tmp_path / "x.bin", b"payload")
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- tensors


def test_bytes_are_equal_in_two_processes(tmp_path):
    """Eight header keys and more, where safetensors itself orders them at random."""
    code = """
import sys, numpy as np
from moelab.artifacts import write_tensors
names = [f"key{i}" for i in range(12)]
header = {name: {"value": i, "more": list(names)} for i, name in enumerate(names)}
write_tensors(sys.argv[1], {n: np.arange(i + 2, dtype=np.float16) for i, n in enumerate(names)}, header)
"""
    digests = set()
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / seed)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(artifacts.__file__).parents[1],
            check=True,
        )
        digests.add(artifacts.digest_file(tmp_path / seed))
    assert len(digests) == 1


def test_order_of_names_and_layout_in_memory_do_not_matter():
    plain = encode_tensors({"a": GRID, "b": GRID.T}, {"x": 1, "y": 2})
    assert encode_tensors({"b": np.ascontiguousarray(GRID.T), "a": np.asfortranarray(GRID)}, {"y": 2, "x": 1}) == plain


@pytest.mark.parametrize(
    "array",
    [
        GRID.T,
        GRID[::2, ::3],
        GRID[::-1],
        np.broadcast_to(np.float32(7), (3, 2)),
        np.asfortranarray(GRID),
        GRID.astype(">f4"),
        np.array(3, np.int64),
        np.zeros((0, 5), np.uint16),
        np.zeros((3, 0, 2), np.bool_),
        np.array([0, 1, 65535], np.uint16),
        np.array([1.5, -0.0, np.nan, 65504], np.float16),
        np.array([[True, False]]),
        np.array([2**64 - 1], np.uint64),
        np.array([-(2**63)], np.int64),
        np.array([np.pi]),
        np.array([-1], np.int8),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}",
)
def test_arrays_come_back_as_they_went(array, tmp_path):
    write_tensors(tmp_path / "x.safetensors", {"x": array}, HEADER)
    arrays, header = read_tensors(tmp_path / "x.safetensors")
    assert header == HEADER
    assert arrays["x"].shape == array.shape
    assert arrays["x"].dtype == array.dtype.newbyteorder("<")
    assert arrays["x"].flags.writeable
    np.testing.assert_array_equal(arrays["x"], array)


def test_no_tensors_at_all(tmp_path):
    write_tensors(tmp_path / "x", {}, {})
    assert read_tensors(tmp_path / "x") == ({}, {})


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.array([1 + 2j]), np.zeros(1, "M8[s]")])
def test_other_types_are_refused_by_name(array):
    with pytest.raises(ArtifactError, match="no such tensor type; field: bad; got: '.*', expected: bool, int or float"):
        encode_tensors({"good": GRID, "bad": array}, {})


@pytest.mark.parametrize("header", [{"a": float("nan")}, {"a": {1: 1}}, {"a": np.float32(1)}])
def test_header_json_cannot_carry_is_refused(header, tmp_path):
    with pytest.raises(ArtifactError):
        write_tensors(tmp_path / "x", {"a": GRID}, header)
    assert not list(tmp_path.iterdir())


def test_reserved_header_key_is_refused():
    with pytest.raises(ArtifactError, match="header key is reserved; field: payload_sha256"):
        encode_tensors({}, {"payload_sha256": "x"})


def test_digest_tells_name_type_and_shape_apart():
    same = [{"a": GRID}, {"b": GRID}, {"a": GRID.view(np.int32)}, {"a": GRID.reshape(6, 4)}, {"a": GRID.T}]
    assert len({digest_tensors(tensors) for tensors in same}) == len(same)
    assert digest_tensors({"a": GRID.astype(">f4")}) == digest_tensors({"a": GRID})


def test_writer_that_permutes_is_caught(monkeypatch):
    """The library's own writer did: strided arrays came back in another order."""
    monkeypatch.setattr(
        "safetensors.numpy.save",
        lambda arrays, metadata: save({k: v[::-1].copy() for k, v in arrays.items()}, metadata=metadata),
    )
    with pytest.raises(ArtifactError, match="payload altered; field: payload_sha256"):
        encode_tensors({"a": GRID}, {})


def test_truncated_and_padded_files_are_refused(tmp_path):
    data = encode_tensors({"a": GRID}, HEADER)
    for other in (*(data[:n] for n in (0, 4, 9, 40, len(data) - 40, len(data) - 1)), data + b"\0"):
        (tmp_path / "x").write_bytes(other)
        with pytest.raises(ArtifactError, match="not a complete safetensors file; file: .*x; got: '[0-9]+ bytes"):
            read_tensors(tmp_path / "x")


def replaced(old: bytes, new: bytes) -> bytes:
    data = encode_tensors({"a": GRID}, HEADER)
    assert len(old) == len(new)
    assert data.count(old) == 1
    return data.replace(old, new)


def test_altered_tensor_and_altered_header_are_told_apart():
    old = GRID[1].tobytes()
    with pytest.raises(ArtifactError, match="payload altered; file: here; field: payload_sha256; got: .*expected: "):
        decode_tensors(replaced(old, old[::-1]), file="here")
    with pytest.raises(ArtifactError, match="header altered; file: here; field: header_sha256"):
        decode_tensors(replaced(b'schema_version\\":1', b'schema_version\\":2'), file="here")
    with pytest.raises(ArtifactError, match="unreadable header; file: here; field: moelab"):
        decode_tensors(replaced(b"header_sha256", b"header_sha257"), file="here")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"moelab": "{}", "format": "pt"}])
def test_foreign_safetensors_are_refused(metadata):
    with pytest.raises(ArtifactError, match=r"unknown header; field: __metadata__; got: .*expected: \['moelab'\]"):
        decode_tensors(save({"a": GRID}, metadata=metadata))


@pytest.mark.parametrize("text", ["", "[]", "1", "{", "{}"])
def test_unsealed_header_is_refused(text):
    with pytest.raises(ArtifactError, match="unreadable header"):
        decode_tensors(save({"a": GRID}, metadata={"moelab": text}))


def test_missing_file_is_another_error(tmp_path):
    with pytest.raises(MissingArtifactError, match="file not found"):
        read_tensors(tmp_path / "x")


def test_artifacts_offers_everything_of_files():
    public = {name for name in vars(files) if not name.startswith("_") and getattr(files, name) is vars(files)[name]}
    functions = {name for name in public if getattr(vars(files)[name], "__module__", "") == files.__name__}
    assert functions <= set(artifacts.__all__)
    assert digest_bytes(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert json.loads(canonical_json(HEADER)) == HEADER
