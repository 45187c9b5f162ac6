"""Policies to JSON and back, and what is refused on the way."""

import json
import math

import pytest
import torch

from moelab.errors import PolicyError
from moelab.policies import (
    AdaptiveTop1Top2Selection,
    AlwaysOnAnchorCombination,
    AnchoredTop1Selection,
    AnchorVetoTop2Selection,
    CompatibilityIndex,
    CompatibilityTop2Selection,
    DynamicKSelection,
    EqualCombination,
    HierarchicalSelection,
    LearnedMixtureCombination,
    LoRAMergeDispatcher,
    OverflowToAnchorCapacity,
    PolicyConfig,
    PolicyManifest,
    PositiveEvidenceCombination,
    SparseDispatcher,
    UnitWeights,
    fit_mixture_head,
)
from moelab.policies.config import POLICIES

INDEX = CompatibilityIndex.from_groups(("a:0", "a:1", "b:0"), "aab")
HEAD = LearnedMixtureCombination(((0.1, 1e-30), (2.0, -3.5)), (0.0, 1.0))
CONFIGS = [
    PolicyConfig(),
    PolicyConfig(AnchoredTop1Selection(), OverflowToAnchorCapacity()),
    PolicyConfig(AnchorVetoTop2Selection(), combination=EqualCombination()),
    PolicyConfig(AdaptiveTop1Top2Selection(math.inf), combination=PositiveEvidenceCombination()),
    PolicyConfig(AdaptiveTop1Top2Selection(1), execution="parameters"),
    PolicyConfig(DynamicKSelection(7, 0.1), combination=AlwaysOnAnchorCombination(UnitWeights(), "delta")),
    PolicyConfig(CompatibilityTop2Selection(INDEX), combination=HEAD),
    PolicyConfig(HierarchicalSelection((1, 2), CompatibilityTop2Selection(INDEX), "logsumexp")),
    PolicyConfig(combination=AlwaysOnAnchorCombination(HEAD)),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config.selection).__name__)
def test_what_is_read_is_what_was_written(config):
    text = config.to_json()
    again = PolicyConfig.from_json(text)
    assert again == config and again.to_json() == text
    assert json.loads(text)["version"] == 1


def test_every_policy_is_among_them():
    text = "".join(config.to_json() for config in CONFIGS)
    assert all(f'"name": "{name}"' in text for name in POLICIES)


def test_a_fitted_head_survives_exactly():
    draw = torch.Generator().manual_seed(0)
    features, outputs = torch.randn(20, 3, generator=draw), torch.randn(20, 2, 4, generator=draw)
    head = fit_mixture_head(features, outputs, outputs[:, 0])
    assert PolicyConfig.from_json(PolicyConfig(combination=head).to_json()).combination == head


def test_a_config_builds_its_dispatcher():
    dispatcher = PolicyConfig(DynamicKSelection(3), combination=EqualCombination()).build()
    assert dispatcher == SparseDispatcher(DynamicKSelection(3), combination=EqualCombination())
    assert isinstance(PolicyConfig(execution="parameters").build(), LoRAMergeDispatcher)


def test_a_manifest_names_a_model_and_its_layers():
    manifest = PolicyManifest("sha256:1", {3: CONFIGS[0], 11: CONFIGS[5]})
    assert PolicyManifest.from_json(manifest.to_json()) == manifest


def refusal(text, reader=PolicyConfig):
    with pytest.raises(PolicyError) as error:
        reader.from_json(text if isinstance(text, str) else json.dumps(text))
    assert error.value.expected is not None
    return error.value.field, error.value.got


def changed(path, value):
    """The default config's JSON with one field changed, added, or (value ...) removed."""
    data = PolicyConfig().to_dict()
    *parents, last = path.split(".")
    place = data
    for name in parents:
        place = place[name]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return data


def test_unknown_missing_and_wrong_fields_are_refused():
    assert refusal(changed("colour", 1)) == ("policy config", ["colour"])
    assert refusal(changed("capacity", ...)) == ("policy config", ["capacity"])
    assert refusal(changed("version", 2)) == ("version", 2)
    assert refusal(changed("version", True)) == ("version", True)
    assert refusal(changed("selection.temperature", 1)) == ("adaptive_top1_top2", ["temperature"])
    assert refusal(changed("selection.mixture_threshold", ...)) == ("adaptive_top1_top2", ["mixture_threshold"])
    assert refusal(changed("selection.mixture_threshold", -1)) == ("mixture_threshold", -1)
    assert refusal(changed("selection.mixture_threshold", "0.5")) == ("mixture_threshold", "0.5")
    assert refusal(changed("selection.name", "top3")) == ("selection", "top3")
    assert refusal(changed("selection.name", ...)) == ("selection", None)
    assert refusal(changed("selection", {"name": "equal"})) == ("selection", "EqualCombination")
    assert refusal(changed("selection", "adaptive_top1_top2")) == ("selection", "str")
    assert refusal(changed("selection", {"name": "compatibility_index", "expert_ids": [], "pairs": []})) == (
        "selection",
        "CompatibilityIndex",
    )
    assert refusal(changed("capacity", {"name": "overflow_to_anchor"})) == ("capacity", "AdaptiveTop1Top2Selection")
    assert refusal(changed("execution", "tensors")) == ("execution", "tensors")
    assert refusal(changed("selection.name", ["top3"])) == ("selection", ["top3"])
    local = {"name": "anchor_veto_top2"}
    hierarchy = {"name": "hierarchical", "package_sizes": 3, "local": local, "package_evidence": "max"}
    assert refusal(changed("selection", hierarchy)) == ("package_sizes", "int")
    index = {"name": "compatibility_index", "expert_ids": ["a", "b"], "pairs": 5}
    assert refusal(changed("selection", {"name": "compatibility_top2", "index": index})) == ("pairs", "int")
    assert refusal(changed("combination", {"name": "learned_mixture", "weight": 3, "bias": [1]})) == ("weight", "int")


def test_what_is_not_strict_json_is_refused():
    text = PolicyConfig().to_json()
    assert refusal("{")[0] == "text"
    assert refusal("[" * 100_000)[0] == "text"
    with pytest.raises(PolicyError, match="text"):
        PolicyConfig.from_json(3)
    assert refusal("[]") == ("policy config", "list")
    assert refusal(text.replace("0.0", "NaN")) == ("text", "NaN")
    assert refusal(text.replace("0.0", "Infinity")) == ("text", "Infinity")
    assert refusal(text.replace('"version"', '"version": 1, "version"'))[0] == "text"


def test_bad_manifests_are_refused():
    good = json.loads(PolicyManifest("sha256:1", {3: CONFIGS[0]}).to_json())

    def read(**parts):
        return refusal({**good, **parts}, PolicyManifest)

    assert read(layers=[]) == ("layers", "list")
    assert read(layers={"03": {}}) == ("layers", "03")
    assert read(layers={"last": {}}) == ("layers", "last")
    assert read(layers={"3": {}})[0] == "policy config"
    assert read(base_digest="") == ("base_digest", "")
    assert read(version=0) == ("version", 0)
    assert read(model="x") == ("policy manifest", ["model"])
    with pytest.raises(PolicyError):
        PolicyManifest("sha256:1", {3: "anchored_top1"})
    with pytest.raises(PolicyError, match="layers"):
        PolicyManifest("sha256:1", None)
    with pytest.raises(PolicyError):
        PolicyManifest("sha256:1", {-1: CONFIGS[0]})
