"""Observations: what is written is read back; what is damaged or impossible is refused by name."""

import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from observations import RUNTIME, E, change, forge, header, observation

from moelab.artifacts import encode_tensors
from moelab.errors import GeometryError, RecordError
from moelab.flywheel.observe import Authorisation, Observation, Turn, from_bytes, to_bytes


def same(a, b):
    return a.header == b.header and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a.arrays.values(), b.arrays.values(), strict=True)
    )


@pytest.mark.parametrize("group", [False, True])
def test_written_is_read(group):
    seen = observation(group=group)
    back = from_bytes(to_bytes(seen))
    assert same(back, seen.sealed()) and set(back.arrays) == set(seen.arrays)
    assert back.header.payload == seen.payload and len(seen.payload) == 64
    assert (back.group_margin is not None) == group


def test_equal_content_equal_bytes_whatever_the_strides():
    seen = observation()
    weights = np.asfortranarray(seen.weights)
    ids = np.repeat(seen.ids, 2, axis=-1)[..., ::2]
    assert not weights.flags.c_contiguous and not ids.flags.c_contiguous
    assert to_bytes(replace(seen, weights=weights, ids=ids)) == to_bytes(seen)


def test_equal_bytes_in_another_process():
    code = "import hashlib; from observations import *; from moelab.flywheel.observe import to_bytes\n"
    code += "print(hashlib.sha256(to_bytes(observation(group=True))).hexdigest())"
    command = [sys.executable, "-c", code]
    digests = {
        subprocess.run(
            command,
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(digests) == 1


def test_payload_is_content_without_clocks():
    seen = observation()
    assert replace(seen, wall_ns=seen.wall_ns + 1).payload == seen.payload
    for name in set(Observation.SHAPES) - {"wall_ns", "group_margin"}:
        array = getattr(seen, name).copy()
        array.flat[0] += 1
        assert replace(seen, **{name: array}).payload != seen.payload, name
    for field, value in (("owner", "o-002"), ("generation", 1), ("model", "d" * 64), ("began", "why")):
        assert replace(seen, header=header(**{field: value})).payload != seen.payload, field


ROWS = [
    ("token_ids", 3, -1, "token does not exist; file: f; field: token_ids[3]; got: -1, expected: >= 0"),
    ("phase", 2, 2, "unknown phase; file: f; field: phase[2]; got: 2, expected: 0 … 1"),
    ("phase", 5, 0, "row of an answer was not decoded; file: f; field: phase[5]; got: 0, expected: 1"),
    ("ordinal", slice(4, None), 7, "ordinal gap; file: f; field: ordinal[4]; got: 7, expected: 0, 1, …"),
    ("ordinal", slice(None), np.arange(1, 11), "ordinal gap; file: f; field: ordinal[0]; got: 1"),
    ("counter", 6, 105, "counter regression; file: f; field: counter[6]; got: 105, expected: more than the row before"),
    ("counter", 6, 0, "counter regression; file: f; field: counter[6]; got: 0"),
    ("ids", (3, 1, 0), E, f"expert does not exist; file: f; field: ids[3,1,0]; got: {E}, expected: < {E}"),
    ("ids", (3, 1, 0), 0xFFFF, "expert does not exist; file: f; field: ids[3,1,0]; got: 65535"),
    (
        "weights",
        (9, 0, 2),
        np.nan,
        "weight is not a number; file: f; field: weights[9,0,2]; got: nan, expected: finite",
    ),
    ("weights", (9, 0, 2), np.inf, "weight is not a number; file: f; field: weights[9,0,2]; got: inf"),
    (
        "weights",
        (9, 1),
        0,
        "row of zeros; file: f; field: weights[9,1]; got: [0.0, 0.0, 0.0], expected: routing weights",
    ),
    (
        "weights",
        slice(None),
        0,
        "all-zero capture; file: f; field: weights; got: 'only zeros', expected: routing weights",
    ),
    (
        "margin",
        (0, 1),
        np.nan,
        "margin is negative or not a number; file: f; field: margin[0,1]; got: nan, expected: >= 0",
    ),
    ("margin", (0, 1), -1, "margin is negative or not a number; file: f; field: margin[0,1]; got: -1.0"),
    ("group_margin", (4, 0), -1, "margin is negative or not a number; file: f; field: group_margin[4,0]; got: -1.0"),
    ("message_start", 0, 1, "no message at the first row; file: f; field: message_start; got: [1], expected: [0]"),
    (
        "message_start",
        2,
        3,
        "messages out of order; file: f; field: message_start[2]; got: 3, expected: increasing, < 10",
    ),
    ("message_start", 3, 10, "messages out of order; file: f; field: message_start[3]; got: 10"),
    ("role", 1, 4, "unknown role; file: f; field: role[1]; got: 4, expected: < 4"),
]


@pytest.mark.parametrize(("name", "place", "value", "said"), ROWS)
def test_impossible_rows_are_refused(name, place, value, said):
    broken = change(observation(group=True), name, place, value)
    with pytest.raises(RecordError) as refusal:
        broken.validate(file="f")
    assert str(refusal.value).startswith(said)
    with pytest.raises(RecordError):
        to_bytes(broken)  # nor is it ever written
    with pytest.raises(RecordError) as refusal:
        from_bytes(forge_rows(broken), file="f")  # and if another hand wrote it, it is not read
    assert str(refusal.value).startswith(said)


def forge_rows(broken):
    """Sealed bytes of rows that `to_bytes` refuses."""
    return encode_tensors(broken.arrays, msgspec.to_builtins(broken.header))


def test_an_expert_chosen_twice_is_refused():
    seen = observation()
    twice = change(seen, "ids", (7, 1, 2), seen.ids[7, 1, 0])
    row = twice.ids[7, 1].tolist()
    with pytest.raises(RecordError) as refusal:
        twice.validate(file="f")
    assert (
        str(refusal.value) == f"expert chosen twice; file: f; field: ids[7,1]; got: {row}, expected: distinct experts"
    )


def test_a_margin_may_be_infinite_where_every_expert_is_chosen():
    change(observation(), "margin", slice(None), np.inf).validate()


COUNTED, GEOMETRY, TYPE = "rows are not what was counted", "wrong geometry", "wrong type of array"
SHAPES = [
    ("weights", lambda a: a[:-1], RecordError, COUNTED, "weights (T); got: 9, expected: 10"),
    ("counter", lambda a: np.append(a, a[-1:] + 1), RecordError, COUNTED, "counter (T); got: 11, expected: 10"),
    ("ids", lambda a: a[:, :1], GeometryError, GEOMETRY, "ids (L); got: 1, expected: 2"),
    ("ids", lambda a: a[..., :2], GeometryError, GEOMETRY, "ids (K); got: 2, expected: 3"),
    ("margin", lambda a: a[:, :1], GeometryError, GEOMETRY, "margin (L); got: 1, expected: 2"),
    ("role", lambda a: a[:-1], GeometryError, GEOMETRY, "role (M); got: 3, expected: 4"),
    ("ids", np.int16, RecordError, TYPE, "ids; got: 'int16 with 3 dimensions', expected: uint16[T,L,K]"),
    ("margin", lambda a: a[..., None], RecordError, TYPE, "margin; got: 'float32 with 3 dimensions'"),
    ("message_start", lambda a: a[0], RecordError, TYPE, "message_start; got: 'int32 with 0 dimensions'"),
]


@pytest.mark.parametrize(("name", "cut", "error", "problem", "said"), SHAPES)
def test_wrong_shapes_are_refused(name, cut, error, problem, said):
    seen = observation()
    broken = replace(seen, **{name: np.asarray(cut(getattr(seen, name)))})
    for check in (lambda: broken.validate(file="f"), lambda: from_bytes(forge_rows(broken), file="f")):
        with pytest.raises(error) as refusal:
            check()
        assert str(refusal.value).startswith(f"{problem}; file: f; field: {said}")


@pytest.mark.parametrize("rows", [0, 9, 11])
def test_rows_are_the_tokens_that_were_fed(rows):
    """A row lost or added in every array at once is noticed only by a count made elsewhere."""
    seen = observation()
    if rows == 11:
        grown = {n: np.concatenate([a, a[-1:]]) for n, a in seen.arrays.items() if "T" in Observation.SHAPES[n][1]}
        broken = replace(seen, **grown)
    else:
        broken = replace(seen, **{n: a[:rows] for n, a in seen.arrays.items() if "T" in Observation.SHAPES[n][1]})
    with pytest.raises(RecordError, match=rf"rows are not what was counted; .*got: {rows}, expected: 10"):
        broken.validate()


def grant(basis="own writing", purposes=("train",), until="2027-01-01"):
    return {"authorisation": Authorisation(basis, purposes, until)}


IMPOSSIBLE, WRONG = "impossible header", "wrong field in header"
HEADER = [
    (dict(schema_version=2), "unknown version", "schema_version; got: 2, expected: 1"),
    (dict(schema_version="1"), "unknown version", "schema_version; got: '1', expected: 1"),
    (dict(record="proposals"), "another kind of record", "record; got: 'proposals', expected: observation"),
    (dict(model="A" * 64), IMPOSSIBLE, "model; got: 'AAAA"),
    (dict(tokenizer="b" * 63), IMPOSSIBLE, "tokenizer; got: 'bbbb"),
    (dict(template=""), IMPOSSIBLE, "template; got: '', expected: 64 hexadecimal digits"),
    (dict(owner="O-001"), IMPOSSIBLE, "owner; got: 'O-001', expected: o-001"),
    (dict(owner=" "), IMPOSSIBLE, "owner; got: ' ', expected: a name"),
    (dict(thread=""), IMPOSSIBLE, "thread; got: '', expected: a name"),
    (dict(sequence=" "), IMPOSSIBLE, "sequence; got: ' ', expected: a name"),
    (dict(generation=-1), IMPOSSIBLE, "generation; got: -1, expected: >= 0"),
    (dict(generation=True), WRONG, "generation; got: 'Expected `int`, got `bool`', expected: int"),
    (dict(tokens_fed=0, turns=()), "record is empty", "tokens_fed; got: 0, expected: >= 1"),
    (dict(tokens_fed=-1, turns=()), "record is empty", "tokens_fed; got: -1, expected: >= 1"),
    (dict(layer_ids=()), IMPOSSIBLE, "layer_ids; got: (), expected: increasing from 0 on"),
    (dict(layer_ids=(1, 0)), IMPOSSIBLE, "layer_ids; got: (1, 0)"),
    (dict(layer_ids=(-1, 0)), IMPOSSIBLE, "layer_ids; got: (-1, 0)"),
    (dict(top_k=0), IMPOSSIBLE, "top_k; got: 0, expected: 1 … experts (8)"),
    (dict(top_k=9), IMPOSSIBLE, "top_k; got: 9, expected: 1 … experts (8)"),
    (dict(mode="replayed"), WRONG, "mode; got: \"Invalid enum value 'replayed'\", expected: forced or sampled"),
    (dict(machine="laptop"), WRONG, "machine; got: \"Invalid enum value 'laptop'\", expected: runtime or trainer"),
    (dict(turns=(Turn(0, 4, 11),)), IMPOSSIBLE, "turns; got: [0, 4, 11], expected: in order, rows 0 … 10"),
    (dict(turns=(Turn(0, 4, 7), Turn(1, 6, 8))), IMPOSSIBLE, "turns; got: [1, 6, 8], expected: in order, rows 7"),
    (dict(turns=(Turn(1, 4, 7), Turn(0, 9, 10))), IMPOSSIBLE, "turns; got: [0, 9, 10]"),
    (dict(turns=(Turn(0, 7, 4),)), IMPOSSIBLE, "turns; got: [0, 7, 4]"),
    (dict(turns=(Turn(0, 4, 7, seed=5),)), IMPOSSIBLE, "turns.seed; got: 5, expected: a seed for a sampled answer"),
    (dict(mode="sampled", sampling={"temperature": 1.0}), IMPOSSIBLE, "turns.seed; got: None"),
    (dict(mode="sampled", turns=(Turn(0, 4, 7, seed=5),)), IMPOSSIBLE, "sampling; got: {}, expected: as mode sampled"),
    (dict(sampling={"temperature": 1.0}), IMPOSSIBLE, "sampling; got: {'temperature': 1.0}, expected: as mode forced"),
    (dict(runtime={"device": "cpu"}), IMPOSSIBLE, "runtime; got: ['device'], expected: also blas, blas_threads, comp"),
    (grant(basis=" "), IMPOSSIBLE, "authorisation.basis; got: ' ', expected: a basis"),
    (grant(purposes=()), IMPOSSIBLE, "authorisation.purposes; got: (), expected: at least one purpose"),
    (grant(until="never"), IMPOSSIBLE, "authorisation.retention_until; got: 'never', expected: an ISO date"),
]


@pytest.mark.parametrize(("fields", "problem", "said"), HEADER)
def test_impossible_headers_are_refused(fields, problem, said):
    seen = observation()
    raw = msgspec.to_builtins(msgspec.structs.replace(seen.header, **fields))
    for check in (
        lambda: replace(seen, header=header(**fields)).validate(file="f"),
        lambda: from_bytes(forge(seen, **{name: raw[name] for name in fields}), file="f"),
    ):
        with pytest.raises(RecordError) as refusal:
            check()
        assert str(refusal.value).startswith(f"{problem}; file: f; field: {said}")


def test_numpy_values_in_a_header_are_refused():
    with pytest.raises(RecordError, match="header is not plain; field: header; got: .*int64"):
        to_bytes(observation(generation=np.int64(0)))


def test_unknown_missing_and_forbidden_fields_are_refused():
    seen = observation()
    for data, said in (
        (forge(seen, mood="good"), "unknown field; file: f; field: mood; got: ['mood'], expected: ["),
        (forge(seen, tensors={"heat": seen.margin}), "unknown field; file: f; field: heat; got: ['heat'], expected: ["),
        (forge(seen, drop=["margin"]), "partial record; file: f; field: margin; got: ["),
        (
            forge(seen, tensors={"slot": seen.ordinal}),
            "forbidden field; file: f; field: slot; got: 'slot', expected: no place",
        ),
        (forge(seen, cache_slots=[1]), "forbidden field; file: f; field: cache_slots; got: 'cache_slots'"),
        (
            forge(seen, runtime={**RUNTIME, "device_handle": 3}),
            "forbidden field; file: f; field: runtime.device_handle",
        ),
        (
            forge(seen, sampling={"x": {"expert_offset": 1}}),
            "forbidden field; file: f; field: sampling.x.expert_offset",
        ),
        (
            forge(seen, runtime={**RUNTIME, "device": "<Device at 0x7f00aa12>"}),
            "forbidden value; file: f; field: runtime.device; got: '<Device at 0x7f00aa12>', expected: no address",
        ),
    ):
        with pytest.raises(RecordError) as refusal:
            from_bytes(data, file="f")
        assert str(refusal.value).startswith(said)
    with pytest.raises(RecordError, match="forbidden field; field: runtime.weights_address"):
        to_bytes(observation(runtime={**RUNTIME, "weights_address": 1}))
    raw = msgspec.to_builtins(seen.sealed().header)
    for name in raw:
        data = encode_tensors(seen.arrays, {key: value for key, value in raw.items() if key != name})
        with pytest.raises(RecordError, match="partial record|another kind|unknown version"):
            from_bytes(data)


def test_altered_content_under_a_correct_file_seal_is_refused():
    seen = observation()
    data = forge(seen, owner="o-002")
    with pytest.raises(
        RecordError, match="payload altered; file: f; field: payload; got: '[0-9a-f]{64}', expected: [0-9a-f]{64}$"
    ):
        from_bytes(data, file="f")
    with pytest.raises(RecordError, match="payload altered"):
        from_bytes(forge(seen, tensors={"token_ids": seen.token_ids + 1}))


def test_truncated_files_are_refused():
    data = to_bytes(observation())
    for length in (0, 1, 7, 8, 9, 100, len(data) // 2, len(data) - 1):
        with pytest.raises(RecordError) as refusal:
            from_bytes(data[:length], file="f")
        message = str(refusal.value)
        assert message.startswith("not a complete safetensors file; file: f; field: bytes; got: ")
        assert f"{length} bytes" in message and "expected: safetensors" in message
