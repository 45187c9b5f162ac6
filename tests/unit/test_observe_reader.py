"""A set of observations may not contradict itself."""

from types import SimpleNamespace

import pytest
from observations import RUNTIME, E, K, observation

from moelab.errors import GeometryError, IdentityError, OwnershipError, RecordError, VaultError
from moelab.flywheel.observe import to_bytes
from moelab.flywheel.reader import Identity, ObservationReader

IDENTITY = Identity(
    model="a" * 64, tokenizer="b" * 64, template="c" * 64, layer_ids=(0, 1), experts=E, top_k=K, runtime=None
)
OTHER = "fedcba9876543210"


def write(folder, name, **changes):
    path = folder / name
    path.write_bytes(to_bytes(observation(**changes)))
    return path


def test_a_set_is_read_in_any_order(tmp_path):
    paths = [
        write(tmp_path, "a", first=100, sequence="0"),
        write(tmp_path, "b", first=110, sequence="1"),
        write(tmp_path, "c", first=50, sequence="2"),
        write(tmp_path, "d", first=100, sequence="0", generation=1),
        write(tmp_path, "e", first=100, sequence="0", thread=OTHER, owner="o-002"),
    ]
    for order in (paths, paths[::-1]):
        seen = list(map(ObservationReader(IDENTITY).read, order))
        assert [int(o.counter[0]) for o in seen] == [{"a": 100, "b": 110, "c": 50}.get(p.name, 100) for p in order]


@pytest.mark.parametrize("name", ["model", "tokenizer", "template"])
def test_wrong_digests_are_refused(tmp_path, name):
    path = write(tmp_path, "a", **{name: "d" * 64})
    with pytest.raises(IdentityError) as refusal:
        ObservationReader(IDENTITY).read(path)
    expected = getattr(IDENTITY, name)
    assert str(refusal.value) == (
        f"made with another {name}; file: {path}; field: {name}; got: '{'d' * 64}', expected: {expected}"
    )


def test_another_runtime_is_refused_where_one_is_expected(tmp_path):
    path = write(tmp_path, "a")
    exact = Identity(**{**vars(IDENTITY), "runtime": RUNTIME})
    ObservationReader(exact).read(path)
    other = Identity(**{**vars(IDENTITY), "runtime": RUNTIME | {"blas": "openblas"}})
    with pytest.raises(IdentityError, match="made with another runtime; file: .*a; field: runtime; got: {"):
        ObservationReader(other).read(path)


@pytest.mark.parametrize(("name", "value"), [("layer_ids", (0, 2)), ("experts", E + 1), ("top_k", K - 1)])
def test_wrong_geometry_is_refused(tmp_path, name, value):
    path = write(tmp_path, "a")
    with pytest.raises(GeometryError) as refusal:
        ObservationReader(Identity(**{**vars(IDENTITY), name: value})).read(path)
    message = str(refusal.value)
    assert message.startswith(f"made with another geometry; file: {path}; field: {name}; got: ")
    assert message.endswith(f"expected: {value!r}")


def test_a_thread_has_one_owner(tmp_path):
    first, second = write(tmp_path, "a"), write(tmp_path, "b", owner="o-002", generation=1)
    reader = ObservationReader(IDENTITY)
    reader.read(first)
    with pytest.raises(OwnershipError) as refusal:
        reader.read(second)
    assert str(refusal.value) == (
        f"thread of another owner; file: {second}; field: owner; got: 'o-002', expected: o-001, as in {first}"
    )


@pytest.mark.parametrize("changes", [{}, {"first": 500}, {"first": 500, "seed": 1}])
def test_a_name_is_used_once(tmp_path, changes):
    first, second = write(tmp_path, "a"), write(tmp_path, "b", **changes)
    reader = ObservationReader(IDENTITY)
    reader.read(first)
    with pytest.raises(OwnershipError) as refusal:
        reader.read(second)
    assert str(refusal.value) == (
        f"generation reused; file: {second}; field: generation; got: 'sequence 0 of generation 0 again', "
        f"expected: once; it is in {first}"
    )


@pytest.mark.parametrize("first", [91, 100, 109, 105])
def test_counters_do_not_run_back_across_files(tmp_path, first):
    paths = [write(tmp_path, "a"), write(tmp_path, "b", first=500, sequence="1")]
    late = write(tmp_path, "c", first=first, sequence="2")
    reader = ObservationReader(IDENTITY)
    for path in paths:
        reader.read(path)
    with pytest.raises(RecordError) as refusal:
        reader.read(late)
    assert str(refusal.value) == (
        f"counter regression; file: {late}; field: counter; got: '{first} … {first + 9}', "
        f"expected: nothing of 100 … 109, which {paths[0]} has"
    )


def test_what_is_refused_leaves_no_trace(tmp_path):
    reader = ObservationReader(IDENTITY)
    with pytest.raises(IdentityError):
        reader.read(write(tmp_path, "a", model="d" * 64, owner="o-002"))
    reader.read(write(tmp_path, "b"))


def test_the_opener_gives_the_bytes(tmp_path):
    path = write(tmp_path, "a")

    def opener(file):
        if file != path:
            raise VaultError("no key", file=file)
        return path.read_bytes()

    reader = ObservationReader(IDENTITY, opener=opener)
    assert reader.read(str(path)).header.sequence == "0"
    with pytest.raises(VaultError):
        reader.read(tmp_path / "b")


def test_identity_of_a_loaded_model():
    loaded = SimpleNamespace(
        digests={"model": "a" * 64, "tokenizer": "b" * 64, "template": "c" * 64},
        geometry=SimpleNamespace(layer_ids=[0, 1], experts=E, top_k=K, hidden=4),
    )
    assert Identity.of(loaded) == IDENTITY
