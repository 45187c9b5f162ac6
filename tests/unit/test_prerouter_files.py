"""Weight files: every spelling and header that is read, the published shapes, and everything that is refused."""

import json
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import save, save_file

from moelab import artifacts
from moelab.errors import (
    ArtifactError,
    ContractError,
    GeometryError,
    IdentityError,
    MissingArtifactError,
    ParameterError,
    RecordError,
)
from moelab.prerouter import (
    HeadIdentity,
    PrerouterSpec,
    convert_legacy,
    edge0_8b,
    edge0_35b,
    find_weights,
    load_heads,
    read_heads,
    write_heads,
)

E, H, D, K = 12, 8, 5, 3
OWNERS = (3, 4, 5)
IDENTITY = HeadIdentity(model="abc", top_k=K, experts=E, width=H, hidden=D, owners=OWNERS)
SPEC = PrerouterSpec(start_layer=4, hidden=D)
MODEL = dict(model="abc", layer_ids=range(7), experts=E, top_k=K, width=H)


def heads(identity=IDENTITY, dtype=np.float16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = identity.shapes()
    return {o: {part: rng.normal(size=s).astype(dtype) for part, s in shapes.items()} for o in identity.owners}


def upstream(tensors, spelling="layers.{}.{}.weight"):
    return {spelling.format(o, part): value for o, parts in tensors.items() for part, value in parts.items()}


FLAT = {"model": "abc", "kind": "prerouter", "K": "3", "owners": "[3, 4, 5]", "format_version": "1"}
NESTED = {"__metadata__": json.dumps({**FLAT, "r": 16, "converted": "2026-09-01T00:00:00"})}


def same(found, tensors):
    assert list(found.tensors) == list(tensors)
    for owner, parts in tensors.items():
        for part, value in parts.items():
            got = found.tensors[owner][part]
            assert got.dtype == value.dtype and (got == value).all()


def test_a_file_round_trips_and_is_a_function_of_its_content(tmp_path):
    tensors, confidence = heads(), ((1.5, -0.25),) * 3
    identity = replace(IDENTITY, snapshot="s", confidence=confidence)
    write_heads(tmp_path / "a", identity, tensors)
    write_heads(tmp_path / "b", identity, tensors)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    found = read_heads(tmp_path / "a")
    assert found.identity == identity and found.dtype == "float16"
    same(found, tensors)


def test_the_shared_form_round_trips(tmp_path):
    identity = replace(IDENTITY, form="shared", hidden=4)
    tensors, trunk = heads(identity), np.random.default_rng(1).normal(size=(4, H + 2 * E)).astype(np.float16)
    write_heads(tmp_path / "a", identity, tensors, trunk)
    found = read_heads(tmp_path / "a")
    assert found.identity == identity and (found.trunk == trunk).all()
    same(found, tensors)
    bank = load_heads(tmp_path / "a", SPEC, **MODEL)  # D of the spec is the width of full heads
    assert bank.owners == OWNERS and bank.form.__name__ == "SharedHead"


@pytest.mark.parametrize("spelling", ["layers.{}.{}.weight", "layers.{}.mlp.prerouter.{}.weight"])
@pytest.mark.parametrize("metadata", [FLAT, NESTED], ids=["flat", "nested"])
def test_released_spellings_and_headers_are_read(tmp_path, spelling, metadata):
    tensors = heads()
    save_file(upstream(tensors, spelling), tmp_path / "a", metadata=metadata)
    found = read_heads(tmp_path / "a")
    assert found.identity == IDENTITY
    same(found, tensors)
    bank = load_heads(tmp_path / "a", SPEC, **MODEL)
    arrays = [np.array(bank.head(4).arrays[name]) for name in ("map", "columns")]
    assert (np.concatenate(arrays).T[:D] == tensors[4]["fc1"].astype(np.float32)).all()  # layer 4 has layer 4's weights


def test_reloaded_heads_give_the_same_logits(tmp_path):
    tensors = heads()
    write_heads(tmp_path / "a", IDENTITY, tensors)
    bank = load_heads(tmp_path / "a", SPEC, **MODEL)
    rng = np.random.default_rng(0)
    hidden, ids = mx.array(rng.normal(size=(4, H)).astype(np.float32)), mx.array([[0, 5, 7]] * 4)
    from moelab.prerouter import PrerouterHead

    for owner, parts in tensors.items():
        head = PrerouterHead(*(mx.array(parts[name]) for name in ("fc1", "fc2", "linear_init")))
        assert (np.array(head(hidden, ids, ids)) == np.array(bank.head(owner)(hidden, ids, ids))).all()


@pytest.mark.parametrize("make", [edge0_35b, edge0_8b])
def test_the_published_shapes_are_read(tmp_path, make):
    """All layers of a released file's shapes and size; zeros, so that the disk keeps no hundred megabytes of noise."""
    tier = make()
    D, E, F = tier.spec.hidden, tier.experts, tier.feature_width
    shapes = {"fc1": [D, F], "fc2": [E, D], "linear_init": [E, F]}
    sizes = {"edge0-35b": ([512, 2560], [256, 512], [256, 2560]), "edge0-8b": ([512, 1792], [128, 512], [128, 1792])}
    assert tuple(shapes.values()) == sizes[tier.name]
    header, offset = {}, 0
    for owner in tier.spec.owners:
        for part, shape in shapes.items():
            end = offset + 2 * shape[0] * shape[1]
            header[f"layers.{owner}.{part}.weight"] = {"dtype": "F16", "shape": shape, "data_offsets": [offset, end]}
            offset = end
    said = {"model": tier.name, "kind": "prerouter", "K": tier.top_k, "owners": json.dumps(tier.spec.owners)}
    header["__metadata__"] = {"__metadata__": json.dumps({**said, "format_version": "1"})}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = tmp_path / tier.spec.weights_file
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)  # a hole: nothing is written
    assert abs(path.stat().st_size - tier.weights_bytes) < 8_000  # only the headers differ
    found = read_heads(find_weights(tier.spec.weights_file, tmp_path))
    found.check(
        tier.spec, owners=tier.wiring.owners, model=("digest", tier.name), experts=E, top_k=tier.top_k, width=tier.width
    )
    assert len(found.tensors) == len(tier.wiring)


def test_one_published_layer_round_trips(tmp_path):
    for tier in (edge0_35b(), edge0_8b()):
        owner = tier.spec.owners[-1]
        identity = HeadIdentity(
            model=tier.name, top_k=tier.top_k, experts=tier.experts, width=tier.width, hidden=512, owners=(owner,)
        )
        tensors = heads(identity)
        write_heads(tmp_path / tier.name, identity, tensors)
        same(read_heads(tmp_path / tier.name), tensors)


def test_lookup_is_in_the_models_folder_first_and_then_in_artifacts(tmp_path, monkeypatch):
    monkeypatch.setenv("MOELAB_ROOT", str(tmp_path))
    model = tmp_path / "model"
    model.mkdir()
    fallback = artifacts.artifacts_dir()
    fallback.mkdir(parents=True, exist_ok=True)
    with pytest.raises(MissingArtifactError) as caught:
        find_weights("p.safetensors", model)
    assert str(model) in caught.value.expected and str(fallback) in caught.value.expected
    (fallback / "p.safetensors").touch()
    assert find_weights("p.safetensors", model) == fallback / "p.safetensors"
    (model / "p.safetensors").touch()
    assert find_weights("p.safetensors", model) == model / "p.safetensors"
    for name in ("", "a/b", "/p.safetensors", ".."):
        with pytest.raises(ParameterError):
            find_weights(name, model)


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "changes, error, field",
    [
        ({"model": "other"}, IdentityError, "model"),
        ({"top_k": 4}, GeometryError, "top_k"),
        ({"experts": 13}, GeometryError, "experts"),
        ({"width": 9}, GeometryError, "width"),
    ],
)
def test_heads_of_another_model_are_refused(tmp_path, changes, error, field):
    write_heads(tmp_path / "a", IDENTITY, heads())
    with pytest.raises(error) as caught:
        load_heads(tmp_path / "a", SPEC, **{**MODEL, **changes})
    expected = (changes[field],) if field == "model" else changes[field]
    assert (caught.value.field, caught.value.file, caught.value.expected) == (field, tmp_path / "a", expected)
    assert caught.value.got == getattr(IDENTITY, field)


@pytest.mark.parametrize(
    "spec, error, field",
    [
        (replace(SPEC, start_layer=3), GeometryError, "owners"),  # owner 2 is missing
        (replace(SPEC, start_layer=5), GeometryError, "owners"),  # head 3 is nobody's
        (replace(SPEC, hidden=6), GeometryError, "hidden"),
        (replace(SPEC, feature_topk="teacher"), IdentityError, "feature_topk"),
    ],
)
def test_heads_of_another_spec_are_refused(tmp_path, spec, error, field):
    write_heads(tmp_path / "a", IDENTITY, heads())
    with pytest.raises(error) as caught:
        load_heads(tmp_path / "a", spec, **MODEL)
    assert caught.value.field == field and caught.value.file == tmp_path / "a"


def test_missing_owners_are_named(tmp_path):
    write_heads(tmp_path / "a", IDENTITY, heads())
    with pytest.raises(GeometryError, match="without a head") as caught:
        load_heads(tmp_path / "a", replace(SPEC, start_layer=2), **MODEL)
    assert caught.value.expected == [1, 2]


def test_wide_weights_are_not_narrowed_in_silence(tmp_path):
    tensors = heads(dtype=np.float32)
    write_heads(tmp_path / "a", IDENTITY, tensors)
    with pytest.raises(GeometryError) as caught:
        load_heads(tmp_path / "a", SPEC, **MODEL)
    assert caught.value.field == "dtype" and "fp32" in caught.value.fix
    load_heads(tmp_path / "a", replace(SPEC, dtype="fp32"), **MODEL)


def altered(tensors=None, metadata=FLAT, names=None):
    named = upstream(heads() if tensors is None else tensors)
    named = {**named, **(names or {})}
    return save(
        {k: np.ascontiguousarray(v) if np.ndim(v) else v for k, v in named.items() if v is not None}, metadata=metadata
    )


def without(key):
    return {k: v for k, v in FLAT.items() if k != key}


NAN = np.full((D, H + 2 * E), np.nan, np.float16)
INF = np.full((E, D), np.inf, np.float16)
BAD_FILES = {
    "nan": (altered(names={"layers.4.fc1.weight": NAN}), RecordError, "layers.4.fc1.weight"),
    "infinite": (altered(names={"layers.5.fc2.weight": INF}), RecordError, "layers.5.fc2.weight"),
    "shape": (
        altered(names={"layers.4.fc2.weight": np.zeros((E, D + 1), np.float16)}),
        GeometryError,
        "layers.4.fc2.weight",
    ),
    "transposed": (altered(names={"layers.4.fc1.weight": NAN.T * 0}), GeometryError, "layers.4.fc1.weight"),
    "scalar": (altered(names={"layers.3.fc1.weight": np.array(1, np.float16)}), GeometryError, "layers.3"),
    "part missing": (altered(names={"layers.4.fc2.weight": None}), GeometryError, "layers.4.fc2.weight"),
    "linear in some": (
        altered(names={"layers.4.linear_init.weight": None}),
        GeometryError,
        "layers.4.linear_init.weight",
    ),
    "owner missing": (altered({o: p for o, p in heads().items() if o != 4}), GeometryError, "owners"),
    "owner more": (altered(heads(replace(IDENTITY, owners=(3, 4, 5, 6)))), GeometryError, "owners"),
    "unknown part": (altered(names={"layers.4.fc3.weight": INF}), RecordError, "layers.4.fc3.weight"),
    "unknown name": (altered(names={"lm_head.weight": INF}), RecordError, "lm_head.weight"),
    "a bias": (altered(names={"layers.4.fc1.bias": INF}), RecordError, "layers.4.fc1.bias"),
    "no number": (altered(names={"layers.x.fc1.weight": INF}), RecordError, "layers.x.fc1.weight"),
    "negative": (altered(names={"layers.-1.fc1.weight": INF}), RecordError, "layers.-1.fc1.weight"),
    "two spellings": (
        altered(names={"layers.4.mlp.prerouter.fc2.weight": INF}),
        RecordError,
        "layers.4.mlp.prerouter.fc2.weight",
    ),
    "legacy": (altered(names={"pregate.4.fc1.weight": INF}), RecordError, "pregate.4.fc1.weight"),
    "mixed types": (
        altered(names={"layers.4.fc2.weight": np.zeros((E, D), np.float32)}),
        RecordError,
        "layers.4.fc2.weight",
    ),
    "integers": (
        altered(names={"layers.4.fc2.weight": np.zeros((E, D), np.int32)}),
        RecordError,
        "layers.4.fc2.weight",
    ),
    "no header": (altered(metadata=None), IdentityError, "__metadata__"),
    "no model": (altered(metadata=without("model")), IdentityError, "__metadata__"),
    "no K": (altered(metadata=without("K")), IdentityError, "__metadata__"),
    "no version": (altered(metadata=without("format_version")), RecordError, "format_version"),
    "version 2": (altered(metadata={**FLAT, "format_version": "2"}), RecordError, "format_version"),
    "a LoRA": (altered(metadata={**FLAT, "kind": "lora"}), IdentityError, "kind"),
    "K is no number": (altered(metadata={**FLAT, "K": "four"}), GeometryError, "top_k, experts, width"),
    "K too large": (altered(metadata={**FLAT, "K": "12"}), GeometryError, "top_k, experts, width"),
    "owners are no list": (altered(metadata={**FLAT, "owners": "6..38"}), GeometryError, "owners"),
    "owners shifted": (altered(metadata={**FLAT, "owners": "[4, 5, 6]"}), GeometryError, "owners"),
    "nested header broken": (altered(metadata={"__metadata__": "{"}), RecordError, "__metadata__.__metadata__"),
    "nested header a list": (altered(metadata={"__metadata__": "[1]"}), RecordError, "__metadata__.__metadata__"),
    "truncated": (altered()[:-3], ArtifactError, None),
    "truncated header": (altered()[:40], ArtifactError, None),
    "empty": (b"", ArtifactError, None),
    "not a tensor file": (b"hello, world, this is text", ArtifactError, None),
    "another record": (artifacts.encode_tensors({"a": np.zeros(1)}, {"record": "ranks"}), IdentityError, "record"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_by_field(tmp_path, name):
    data, error, field = BAD_FILES[name]
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(ContractError) as caught:
        read_heads(tmp_path / "a")
    assert type(caught.value) is error and caught.value.file == tmp_path / "a"
    assert field is None or caught.value.field == field


def test_an_altered_byte_is_found(tmp_path):
    write_heads(tmp_path / "a", IDENTITY, heads())
    data = bytearray((tmp_path / "a").read_bytes())
    data[-5] ^= 1
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(ArtifactError, match="altered"):
        read_heads(tmp_path / "a")
    with pytest.raises(MissingArtifactError):
        read_heads(tmp_path / "b")


def test_nothing_is_written_that_could_not_be_read(tmp_path):
    for identity, tensors in (
        (replace(IDENTITY, owners=(3, 4)), heads()),
        (replace(IDENTITY, hidden=6), heads()),
        (replace(IDENTITY, form="shared"), heads()),
        (replace(IDENTITY, confidence=((1.0, 0.0),)), heads()),
        (replace(IDENTITY, top_k=0), heads()),
    ):
        with pytest.raises(GeometryError):
            write_heads(tmp_path / "a", identity, tensors)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------ the converter


@pytest.mark.parametrize("metadata", [None, FLAT, {"r": "16"}])
def test_legacy_names_are_converted_by_an_explicit_step(tmp_path, metadata):
    tensors = heads()
    save_file(upstream(tensors, "pregate.{}.{}.weight"), tmp_path / "old", metadata=metadata)
    with pytest.raises(ContractError):
        read_heads(tmp_path / "old")
    convert_legacy(tmp_path / "old", tmp_path / "new", IDENTITY)
    found = read_heads(tmp_path / "new")
    assert found.identity == IDENTITY
    same(found, tensors)


@pytest.mark.parametrize("field, value", [("model", "other"), ("top_k", 4), ("owners", (3, 4, 6))])
def test_the_converter_does_not_overrule_what_a_file_says(tmp_path, field, value):
    save_file(upstream(heads(), "pregate.{}.{}.weight"), tmp_path / "old", metadata=FLAT)
    with pytest.raises(IdentityError, match="says otherwise"):
        convert_legacy(tmp_path / "old", tmp_path / "new", replace(IDENTITY, **{field: value}))
    assert not (tmp_path / "new").exists()


def test_the_converter_refuses_what_does_not_fit(tmp_path):
    tensors = heads()
    save_file(upstream(tensors, "pregate.{}.{}.weight") | upstream(tensors), tmp_path / "twice")
    save_file(upstream(tensors, "pregate.{}.{}.weight"), tmp_path / "old")
    with pytest.raises(RecordError, match="two spellings"):
        convert_legacy(tmp_path / "twice", tmp_path / "new", IDENTITY)
    for changes in ({"hidden": 6}, {"width": 9}, {"experts": 11}, {"owners": (3, 4)}):
        with pytest.raises(GeometryError):
            convert_legacy(tmp_path / "old", tmp_path / "new", replace(IDENTITY, **changes))
    assert not (tmp_path / "new").exists()
