"""Route arrays refuse what cannot be a route, and never bridge a gap."""

import gzip
from dataclasses import replace

import numpy as np
import pytest

from moelab.errors import ContractError, GeometryError, RecordError
from moelab.routes import DECODED, MISSING, PREFILLED, Routes, concat, read_trace


def make(tokens=6, layers=2, top_k=2, experts=8, **changes):
    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(8), (tokens, layers, 1)), axis=-1)[..., :top_k].astype(np.uint16)
    arrays = dict(
        ids=ids,
        experts=experts,
        layer_ids=tuple(range(layers)),
        phase=np.full(tokens, DECODED, np.uint8),
        thread=np.zeros(tokens, np.int32),
        position=np.arange(tokens, dtype=np.int32),
    )
    return Routes(**arrays | changes)


def with_mask(routes):
    mask = np.ones(routes.ids.shape, bool)
    mask[0, 1] = False
    ids = routes.ids.copy()
    ids[0, 1] = MISSING
    weights = np.full(ids.shape, 0.5, np.float32)
    weights[0, 1] = np.nan
    return replace(routes, ids=ids, mask=mask, weights=weights)


def test_valid_routes_pass():
    assert make().validate().tokens == 6
    routes = with_mask(make()).validate()
    assert (routes.layers, routes.top_k, routes.present().sum()) == (2, 2, 22)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ids", np.zeros((6, 2), np.uint16)),
        ("ids", np.zeros((6, 2, 2), np.int64)),
        ("weights", np.zeros((6, 2, 3), np.float32)),
        ("weights", np.zeros((6, 2, 2), np.float64)),
        ("margin", np.zeros((6, 3), np.float32)),
        ("mask", np.ones((6, 2, 2), np.uint8)),
        ("phase", None),
        ("thread", np.zeros(5, np.int32)),
        ("position", [0, 1, 2, 3, 4, 5]),
        ("expert_bytes", np.ones(3, np.int64)),
        ("layer_ids", (0,)),
        ("layer_ids", (1, 1)),
        ("experts", 0),
        ("experts", MISSING),
    ],
)
def test_wrong_shape_or_type_is_refused_by_name(field, value):
    with pytest.raises(GeometryError, match=field) as error:
        make(**{field: value})
    assert error.value.got is not None or value is None
    assert error.value.expected is not None


def changed(name, at, value):
    routes = make(weights=np.full((6, 2, 2), 0.5, np.float32), margin=np.ones((6, 2), np.float32))
    array = getattr(routes, name).copy()
    array[at] = value
    return replace(routes, **{name: array})


@pytest.mark.parametrize(
    ("name", "at", "value", "text"),
    [
        ("ids", (3, 1, 0), 8, "out of range at (3, 1, 0)"),
        ("ids", (3, 1, 0), MISSING, "out of range"),
        ("ids", (2, 0), 5, "twice in one row at (2, 0)"),
        ("weights", (1, 1, 1), np.nan, "a weight is impossible at (1, 1, 1)"),
        ("weights", (1, 1, 1), -0.1, "a weight is impossible"),
        ("margin", (4, 0), np.nan, "a margin is not a number at (4, 0)"),
        ("phase", 2, 2, "an unknown code at (2,)"),
        ("thread", 2, 7, "not contiguous"),
        ("thread", slice(None), -1, "a negative index"),
        ("position", 3, 2, "positions must increase at (3,)"),
    ],
)
def test_impossible_values_are_refused(name, at, value, text):
    with pytest.raises(RecordError) as error:
        changed(name, at, value).validate(file="shard-3")
    assert text in str(error.value)
    assert error.value.file == "shard-3"


def test_an_all_zero_capture_is_refused():
    with pytest.raises(RecordError, match="nothing was captured"):
        make(top_k=1, ids=np.zeros((6, 2, 1), np.uint16)).validate()


def test_absent_slots_cannot_pass_for_experts():
    routes = with_mask(make())
    ids = routes.ids.copy()
    ids[0, 1, 0] = 0
    with pytest.raises(RecordError, match="an absent slot holds an expert id"):
        replace(routes, ids=ids).validate()
    with pytest.raises(RecordError, match="an absent slot holds a weight"):
        replace(routes, weights=np.zeros_like(routes.weights)).validate()


def test_previous_row_bridges_neither_threads_nor_gaps():
    routes = make(
        thread=np.array([0, 0, 0, 4, 4, 4], np.int32), position=np.array([0, 1, 3, 4, 5, 6], np.int32)
    ).validate()
    assert routes.previous_row().tolist() == [-1, 0, -1, -1, 3, 4]
    assert routes.select([1, 2, 5]).previous_row().tolist() == [-1, -1, -1]
    assert routes.select(np.zeros(6, bool)).previous_row().tolist() == []


def test_select_and_decoded_take_every_row_array():
    phase = np.array([0, 0, 1, 1, 0, 1], np.uint8)
    routes = with_mask(make(phase=phase, expert_bytes=np.array([3, 4])))
    decoded = routes.decoded()
    assert decoded.position.tolist() == [2, 3, 5]
    assert np.array_equal(decoded.ids, routes.ids[[2, 3, 5]])
    assert decoded.mask.shape == (3, 2, 2)
    assert decoded.expert_bytes.tolist() == [3, 4]
    for rows in ([2, 1], [1, 1], [-1, 0], [6], np.ones(5, bool)):
        with pytest.raises(ContractError):
            routes.select(rows)


def test_concat_joins_validates_and_renumbers():
    a, b = make(), with_mask(make()).validate()
    b = replace(b, weights=None)
    joined = concat([a, b], renumber=True)
    assert joined.tokens == 12
    assert joined.thread.tolist() == [0] * 6 + [1] * 6
    assert joined.mask.sum() == 24 + 22
    with pytest.raises(RecordError, match="positions must increase"):
        concat([a, b])
    with pytest.raises(GeometryError, match="different geometry"):
        concat([a, make(experts=9)])
    with pytest.raises(GeometryError, match="different geometry"):
        concat([a, make(margin=np.ones((6, 2), np.float32))])
    with pytest.raises(GeometryError, match="nothing to concatenate"):
        concat([])


TRACE = """# route_trace v1
# model=tiny.gguf arch=tiny n_layer=3 n_expert=8 n_expert_used=2
# layer=1 expert_bytes=100 dense_bytes=7
# layer=2 expert_bytes=200 dense_bytes=7
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,1,0,3,0.6,0,100
0,0,0,1,1,5,0.4,0,100
0,0,1,1,0,2,0.7,0,100
0,0,1,1,1,3,0.3,1,0
0,0,1,2,0,7,0.9,0,200
0,0,1,2,1,1,0.1,0,200
0,1,2,1,0,4,0.8,0,100
0,1,2,1,1,2,0.2,1,0
0,1,2,2,0,7,0.5,1,0
0,1,2,2,1,6,0.5,0,200
"""


def trace(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_route_trace_is_read_with_its_missing_slots(tmp_path, name):
    routes = read_trace(trace(tmp_path, TRACE, name))
    assert routes.ids.tolist() == [[[3, 5], [MISSING] * 2], [[2, 3], [7, 1]], [[4, 2], [7, 6]]]
    assert routes.present().tolist() == [[[True, True], [False, False]], [[True, True]] * 2, [[True, True]] * 2]
    assert routes.phase.tolist() == [PREFILLED, PREFILLED, DECODED]
    assert routes.layer_ids == (1, 2)
    assert routes.expert_bytes.tolist() == [100, 200]
    assert routes.weights[2].tolist() == [[np.float32(0.8), np.float32(0.2)], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("route_trace v1", "route_trace v2", "unknown trace format"),
        ("n_expert_used=2", "", "lacks a field"),
        ("# layer=1 expert_bytes=100 dense_bytes=7\n", "", "row 0 is out of range"),
        ("turn,phase", "phase,turn", "unknown columns"),
        ("0,1,2,2,1,6,0.5,0,200\n", "0,1,2,2,1,6,0.5,0,200", "the last line is torn"),
        ("0,1,2,2,1,6,0.5,0,200\n", "0,1,2,2,1\n", "cannot be read"),
        ("0,1,2,2,1,6,", "0,1,2,2,1,x,", "cannot be read"),
        ("0,1,2,2,1,6,", "0,1,2,2,1,6.5,", "no integers"),
        ("0,1,2,2,1,6,", "0,1,2,2,1,8,", "row 9 is out of range"),
        ("0,1,2,2,1,6,", "0,1,2,2,2,6,", "row 9 is out of range"),
        ("0,1,2,2,1,6,", "0,2,2,2,1,6,", "row 9 is out of range"),
        ("0,1,2,2,1,6,", "0,1,2,2,0,6,", "recorded twice"),
        ("0,1,2,2,1,6,", "0,0,2,2,1,6,", "both prefill and decode"),
        ("0,1,2,2,1,6,", "0,1,2,2,1,7,", "twice in one row"),
        ("0,1,2,2,1,6,0.5", "0,1,2,2,1,6,nan", "a weight is impossible"),
    ],
)
def test_a_broken_trace_is_refused(tmp_path, old, new, text):
    assert old in TRACE
    path = trace(tmp_path, TRACE.replace(old, new))
    with pytest.raises(RecordError, match=text) as error:
        read_trace(path)
    assert str(path) in str(error.value)


def test_a_truncated_gzip_is_refused(tmp_path):
    path = trace(tmp_path, TRACE, "t.csv.gz")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(RecordError, match="cannot be unpacked"):
        read_trace(path)
