"""The life of a specialist: installed, listed, attached, removed, and the model as it was."""

import copy
import json

import pytest
import torch
from torch import nn

from moelab.errors import ArtifactError, GeometryError, IdentityError, MissingArtifactError, PolicyError
from moelab.policies import (
    AdaptiveTop1Top2Selection,
    AlwaysOnAnchorCombination,
    CompatibilityIndex,
    CompatibilityTop2Selection,
    DynamicKSelection,
    LoRASpecialist,
    LoRAUpdate,
    PolicyConfig,
    PolicyManifest,
    UnitWeights,
    measure,
)
from moelab.specialists import GatedMlp, RoutedMlp, SpecialistBank, attach, state_digest

H, F = 4, 8
MLP_PATHS = {0: "layers.0.mlp", 1: "layers.1.mlp"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(H), GatedMlp(H, F)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().requires_grad_(False)


@pytest.fixture
def bank(tmp_path, model):
    return SpecialistBank.create(tmp_path / "bank", base_digest=state_digest(model))


@pytest.fixture
def hidden():
    return torch.randn(2, 5, H, generator=torch.Generator().manual_seed(1))


def make_mlp(seed, hidden=H):
    torch.manual_seed(seed)
    return GatedMlp(hidden, F)


def make_lora(seed):
    draw = torch.Generator().manual_seed(seed)
    return LoRASpecialist(
        {"up_proj": LoRAUpdate(torch.randn(2, H, generator=draw), torch.randn(F, 2, generator=draw), 0.5)}
    )


def sides(layer, hidden_states):
    """A router: the signs of the first features decide."""
    return hidden_states[..., :2] * (layer + 1)


def test_append_order_is_kept_and_removal_moves_the_later_ones_down(bank):
    for name in ("zeta:0", "code:0", "math:0"):
        bank.install(name, 1, make_mlp(0))
    bank.install("zeta:0", 0, make_mlp(1))
    assert bank.expert_ids_for_layer(1) == ("zeta:0", "code:0", "math:0")
    assert bank.expert_ids_for_layer(0) == ("zeta:0",) and bank.expert_ids_for_layer(7) == ()
    removed = bank.remove("code:0", 1)
    assert removed.id == "code:0" and not (bank.folder / removed.file).exists()
    assert bank.expert_ids_for_layer(1) == ("zeta:0", "math:0")
    bank.install("code:0", 1, make_mlp(2))
    assert bank.expert_ids_for_layer(1) == ("zeta:0", "math:0", "code:0")
    assert [entry.layer for entry in bank.list()] == [1, 1, 0, 1]
    assert SpecialistBank.open(bank.folder, base_digest=bank.base_digest).list() == bank.list()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_specialist_comes_back_bit_for_bit_and_frozen(bank, dtype):
    mlp = make_mlp(3).to(dtype)
    entry = bank.install("code:0", 2, mlp)
    assert (entry.kind, entry.hidden_size, entry.intermediate_size) == ("complete", H, F)
    assert entry.dtype == str(dtype).removeprefix("torch.")
    loaded = bank.load(entry)
    assert state_digest(loaded) == state_digest(mlp)
    assert all(value.dtype == dtype and not value.requires_grad for value in loaded.parameters())
    assert next(bank.load(entry, dtype=torch.float64).parameters()).dtype == torch.float64


def test_a_lora_comes_back_with_its_scale_folded_in(bank):
    lora = make_lora(0)
    loaded = bank.load(bank.install("code:0", 0, lora, kind="lora"))
    rows = torch.randn(3, H, generator=torch.Generator().manual_seed(2))
    # The scale is a power of two, so folding it in is exact.
    assert torch.equal(loaded.updates["up_proj"](rows), lora.updates["up_proj"](rows))


def test_the_same_specialist_is_the_same_file(bank, tmp_path):
    other = SpecialistBank.create(tmp_path / "other", base_digest=bank.base_digest)
    first, second = (b.install("code:0", 1, make_mlp(0)) for b in (bank, other))
    assert first == second
    assert (bank.folder / first.file).read_bytes() == (other.folder / second.file).read_bytes()
    assert not list(bank.folder.glob("*installing*"))


@pytest.mark.parametrize("execution", ["outputs", "parameters"])
def test_a_model_is_restored_bit_for_bit(bank, model, hidden, execution):
    for layer, name in ((0, "code:0"), (0, "math:0"), (1, "code:0"), (1, "math:0")):
        bank.install(name, layer, make_lora(layer), kind="lora")
    before, digest, modules = model(hidden), state_digest(model), list(model.modules())
    manifest = PolicyManifest(digest, dict.fromkeys((0, 1), PolicyConfig(execution=execution)))
    with attach(model, bank, manifest, mlp_paths=MLP_PATHS, router=sides) as attachment:
        assert isinstance(model.layers[0].mlp, RoutedMlp)
        assert not torch.equal(model(hidden), before)
    assert state_digest(model) == digest and torch.equal(model(hidden), before)
    assert all(one is other for one, other in zip(model.modules(), modules, strict=True))
    attachment.detach()
    assert state_digest(model) == digest


def test_a_model_whose_specialists_are_all_removed_or_unavailable_is_the_model(bank, model, hidden):
    before = model(hidden)
    manifest = PolicyManifest(state_digest(model), {1: PolicyConfig()})
    with attach(model, bank, manifest, mlp_paths=MLP_PATHS, router=lambda layer, x: x[..., :0]):
        assert torch.equal(model(hidden), before)
    for name in ("code:0", "math:0"):
        bank.install(name, 1, make_mlp(0))

    def nothing(layer, expert_ids):
        assert (layer, expert_ids) == (1, ("code:0", "math:0"))
        return torch.zeros(2, dtype=torch.bool)

    with attach(model, bank, manifest, mlp_paths=MLP_PATHS, router=sides, availability=nothing):
        assert torch.equal(model(hidden), before)


def test_kinds_are_run_for_what_they_are(bank, model, hidden):
    """Complete, delta and LoRA specialists with the same function give the same outputs."""
    lora, anchor = make_lora(1), model.layers[0].mlp
    complete = copy.deepcopy(anchor)
    update = lora.updates["up_proj"]
    complete.up_proj.weight += update.scale * update.up @ update.down
    bank.install("complete:0", 0, complete)
    bank.install("lora:0", 0, lora, kind="lora")
    bank.install("delta:0", 0, make_mlp(5), kind="delta")
    x = model.layers[0].norm(hidden)
    delta = bank.load(bank.list()[2])
    expected = {0: complete(x), 1: complete(x), 2: anchor(x) + delta(x)}
    always_on = [AlwaysOnAnchorCombination(UnitWeights(), outputs) for outputs in ("complete", "delta")]
    for combination in (PolicyConfig().combination, *always_on):
        manifest = PolicyManifest(state_digest(model), {0: PolicyConfig(combination=combination)})
        for chosen, output in expected.items():
            scores = torch.nn.functional.one_hot(torch.tensor(chosen), 3).float().expand(2, 5, 3)
            with attach(model, bank, manifest, mlp_paths=MLP_PATHS, router=lambda layer, x, s=scores: s):
                # Sums in another order, in float32, of numbers of order 1.
                torch.testing.assert_close(model.layers[0].mlp(x), output, atol=1e-5, rtol=1e-5)


def test_half_precision_specialists_serve_a_float32_model(bank, model, hidden):
    mlp = make_mlp(5).half()
    bank.install("code:0", 0, mlp)
    manifest = PolicyManifest(state_digest(model), {0: PolicyConfig()})
    with attach(model, bank, manifest, mlp_paths=MLP_PATHS, router=lambda layer, x: torch.ones(2, 5, 1)):
        assert torch.equal(model.layers[0].mlp(hidden), mlp.float()(hidden.flatten(0, 1)).view_as(hidden))


def test_an_observer_sees_every_dispatch(bank, model, hidden):
    for name in ("code:0", "math:0"):
        bank.install(name, 0, make_mlp(0))
    seen = []
    manifest = PolicyManifest(state_digest(model), {0: PolicyConfig(DynamicKSelection(2))})

    def observe(layer, result):
        seen.append((layer, measure(result.capacity)))

    with attach(model, bank, manifest, mlp_paths=MLP_PATHS, router=sides, observer=observe):
        model(hidden)
    [(layer, figures)] = seen
    assert layer == 0 and figures.arity_histogram.sum() == 10


def test_a_failed_attach_leaves_the_model_alone(bank, model):
    bank.install("code:0", 0, make_mlp(0))
    digest, modules = state_digest(model), list(model.modules())

    def refusal(error, manifest=None, paths=MLP_PATHS, selection=None, given=bank, **config):
        config = PolicyConfig(selection or AdaptiveTop1Top2Selection(), **config)
        with pytest.raises(error) as caught:
            manifest = manifest or PolicyManifest(digest, {0: config, 1: config})
            attach(model, given, manifest, mlp_paths=paths, router=sides)
        assert all(one is other for one, other in zip(model.modules(), modules, strict=True))
        return caught.value

    assert refusal(IdentityError, PolicyManifest("another", {})).expected == "another"
    assert refusal(IdentityError, given=SpecialistBank(bank.folder, "another")).expected == "another"
    assert refusal(GeometryError, paths={0: "layers.0.mlp"}).expected == 1
    assert refusal(GeometryError, paths={0: "layers.9.mlp", 1: "layers.1.mlp"}).got == "layers.9.mlp"
    assert refusal(PolicyError, selection=DynamicKSelection(2)).field == "k_max"
    index = CompatibilityIndex(("math:0",), ())
    assert refusal(PolicyError, selection=CompatibilityTop2Selection(index)).field == "index"
    assert refusal(PolicyError, execution="parameters").got == "code:0: complete"
    bank.install("code:0", 1, make_mlp(0, hidden=6))
    assert refusal(GeometryError).got == 6


def test_bad_installs_are_refused(bank):
    bank.install("code:0", 0, make_mlp(0))

    def refusal(error, id="math:0", layer=0, specialist=None, **more):
        with pytest.raises(error) as caught:
            bank.install(id, layer, specialist or make_mlp(0), **more)
        assert bank.expert_ids_for_layer(0) == ("code:0",)
        return caught.value.field, caught.value.got

    assert refusal(PolicyError, id="code:0") == ("id", "code:0")
    assert refusal(PolicyError, id="") == ("id", "")
    assert refusal(PolicyError, layer=-1) == ("layer", -1)
    assert refusal(PolicyError, layer=True) == ("layer", True)
    assert refusal(PolicyError, kind="partial") == ("kind", "'partial' with GatedMlp")
    assert refusal(PolicyError, kind="lora") == ("kind", "'lora' with GatedMlp")
    assert refusal(PolicyError, specialist=make_lora(0)) == ("kind", "'complete' with LoRASpecialist")
    assert refusal(GeometryError, specialist=make_mlp(0, hidden=6)) == ("hidden_size", 6)
    assert refusal(GeometryError, specialist=nn.Linear(H, H, bias=False)) == ("tensors", ["weight"])
    assert refusal(GeometryError, specialist=make_mlp(0).double()) == ("dtype", ["float64"])
    broken = make_mlp(0).requires_grad_(False)
    broken.up_proj.weight[0, 0] = float("nan")
    assert refusal(GeometryError, specialist=broken)[0] == "up_proj.weight"
    crossed = make_mlp(0)
    crossed.down_proj = nn.Linear(F + 1, H, bias=False)
    assert refusal(GeometryError, specialist=crossed)[0] == "tensors"
    assert refusal(GeometryError, specialist=LoRASpecialist({}), kind="lora")[0] == "dtype"


def test_altered_banks_are_refused(bank):
    one, two = (bank.install(name, 0, make_mlp(seed)) for seed, name in enumerate(("code:0", "math:0")))
    with pytest.raises(MissingArtifactError):
        bank.remove("law:0", 0)
    with pytest.raises(MissingArtifactError):
        bank.remove("code:0", 1)
    with pytest.raises(ArtifactError):
        SpecialistBank.create(bank.folder, base_digest="x")
    with pytest.raises(IdentityError):
        SpecialistBank.open(bank.folder, base_digest="another")
    with pytest.raises(MissingArtifactError):
        SpecialistBank.open(bank.folder / "none", base_digest="x")

    (bank.folder / one.file).write_bytes((bank.folder / two.file).read_bytes())
    with pytest.raises(ArtifactError, match="not the specialist"):
        bank.load(one)
    data = bytearray((bank.folder / two.file).read_bytes())
    data[-1] ^= 1
    (bank.folder / two.file).write_bytes(data)
    with pytest.raises(ArtifactError):
        bank.load(two)

    file = bank.folder / "bank.json"
    good = json.loads(file.read_text())
    for change in ({"version": 2}, {"colour": 1}, {"specialists": [{**good["specialists"][0], "rank": 1}]}):
        file.write_text(json.dumps({**good, **change}))
        with pytest.raises(ArtifactError):
            bank.list()
    file.write_text(json.dumps(good)[:-5])
    with pytest.raises(ArtifactError):
        bank.list()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", "math:0"),
        ("id", ""),
        ("layer", -1),
        ("kind", "partial"),
        ("dtype", "int3"),
        ("hidden_size", 0),
        ("hidden_size", 6),
        ("intermediate_size", 0),
        ("sha256", "../../elsewhere"),
    ],
)
def test_a_manifest_edited_by_hand_is_refused_by_entry_and_field(bank, name, value):
    for number, id in enumerate(("code:0", "math:0", "law:0")):
        bank.install(id, 0, make_mlp(number))
    file = bank.folder / "bank.json"
    manifest = json.loads(file.read_text())
    manifest["specialists"][2][name] = value
    file.write_text(json.dumps(manifest))
    for call in (bank.list, lambda: bank.install("new:0", 0, make_mlp(9)), lambda: bank.remove("code:0", 0)):
        with pytest.raises(ArtifactError) as caught:
            call()
        assert (caught.value.field, caught.value.got) == (f"specialists[2].{name}", value)
        assert caught.value.expected


def test_what_an_entry_says_is_what_its_file_holds(bank):
    bank.install("code:0", 0, make_mlp(0))
    file = bank.folder / "bank.json"
    file.write_text(
        file.read_text()
        .replace(f'"intermediate_size":{F}', '"intermediate_size":9')
        .replace(f'"intermediate_size": {F}', '"intermediate_size": 9')
    )
    [entry] = bank.list()
    assert entry.intermediate_size == 9
    with pytest.raises(ArtifactError, match="not the specialist"):
        bank.load(entry)


def test_a_lost_file_is_missing_when_it_is_loaded_and_gone_when_it_is_removed(bank):
    entry = bank.install("code:0", 0, make_mlp(0))
    (bank.folder / entry.file).unlink()
    with pytest.raises(MissingArtifactError):
        bank.load(entry)
    assert bank.remove("code:0", 0) == entry and bank.list() == ()


def test_no_bank_without_a_base_or_a_specialist(bank, tmp_path):
    for digest in (None, ""):
        with pytest.raises(PolicyError) as caught:
            SpecialistBank.create(tmp_path / "other", base_digest=digest)
        assert caught.value.field == "base_digest"
    with pytest.raises(PolicyError) as caught:
        bank.install("code:0", 0, None)
    assert (caught.value.field, caught.value.got) == ("specialist", "NoneType")
    (bank.folder / "bank.json").unlink()
    (bank.folder / "bank.json").mkdir()
    with pytest.raises(MissingArtifactError):
        bank.list()
