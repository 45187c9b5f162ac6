"""The policies reproduce the oracle's vectors exactly, and the vectors are the oracle's."""

import itertools
import json
import math
import random
import sys
from pathlib import Path

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
    OverflowToAnchorCapacity,
    PositiveEvidenceCombination,
    PromoteSurvivorsCapacity,
    ScoreSoftmaxCombination,
    SparseDispatcher,
    UnitWeights,
)

sys.path.insert(0, str(Path(__file__).parent))
import policies_oracle as oracle  # noqa: E402

COMBINATIONS = {
    "score_softmax": ScoreSoftmaxCombination(),
    "positive_evidence": PositiveEvidenceCombination(),
    "equal": EqualCombination(),
    "unit_weights": UnitWeights(),
    "learned_mixture": LearnedMixtureCombination(tuple(map(tuple, oracle.HEAD["weight"])), tuple(oracle.HEAD["bias"])),
}


def ids_of(experts):
    return tuple(f"code:{number}" for number in range(experts))


def make_selection(policy, params, experts):
    params = {name: math.inf if value == "inf" else value for name, value in params.items()}
    if policy == "compatibility_top2":
        return CompatibilityTop2Selection(CompatibilityIndex(ids_of(experts), params["pairs"]))
    if policy == "hierarchical":
        name, inner = params["local"]
        return HierarchicalSelection(**{**params, "local": make_selection(name, inner, experts)})
    simple = {
        "anchored_top1": AnchoredTop1Selection,
        "anchor_veto_top2": AnchorVetoTop2Selection,
        "adaptive_top1_top2": AdaptiveTop1Top2Selection,
        "dynamic_k": DynamicKSelection,
    }
    return simple[policy](**params)


def make_specialist(number):
    return lambda x: x * ((number + 3) / 4) + (number - 0.5)


def run_policy(policy, params, scores, availability, hidden, package_scores):
    scores = torch.tensor(scores, dtype=torch.float32)
    experts = scores.shape[-1]
    capacity = OverflowToAnchorCapacity() if policy == "anchored_top1" else PromoteSurvivorsCapacity()
    dispatcher = SparseDispatcher(make_selection(policy, params, experts), capacity, ScoreSoftmaxCombination())
    packages = len(params.get("package_sizes", ()))
    result = dispatcher.dispatch(
        torch.tensor(hidden),
        expert_scores=scores,
        expert_ids=ids_of(experts),
        anchor_mlp=lambda x: x,
        experts=[make_specialist(number) for number in range(experts)],
        expert_availability=None if availability is None else torch.tensor(availability, dtype=torch.bool),
        package_scores=None
        if package_scores is None
        else torch.tensor(package_scores).view(*scores.shape[:2], packages),
    )
    before, after = result.capacity.decision, result.capacity.effective_routes
    tensors = {
        "selected_indices": before.slot_indices,
        "selected_scores": before.slot_scores,
        "route_arity": before.route_arity,
        "effective_indices": after.slot_indices,
        "effective_scores": after.slot_scores,
        "effective_arity": result.capacity.route_arity,
        "mixture_weights": result.mixture_weights,
        "output": result.output,
    }
    assert torch.equal(after.anchor_mask, result.capacity.route_arity == 0)
    return {name: value.tolist() for name, value in tensors.items()}


def read(name):
    return json.loads((oracle.FOLDER / f"{name}.json").read_text())


@pytest.mark.parametrize("policy", list(oracle.SELECTIONS))
def test_policy_reproduces_its_vectors(policy):
    vectors = read(policy)
    assert len(vectors) > 30
    for case in vectors:
        given = [case[key] for key in ("params", "scores", "availability", "hidden", "package_scores")]
        if "refused" in case:
            with pytest.raises(PolicyError) as refused:
                run_policy(policy, *given)
            assert refused.value.field == case["refused"]
        else:
            assert run_policy(policy, *given) == case["expected"], (case["name"], case["params"])


@pytest.mark.parametrize("policy", list(oracle.SELECTIONS))
def test_policy_reproduces_its_vectors_token_by_token(policy):
    """A single token takes a path of its own."""
    for case in read(policy):
        if "refused" in case:
            continue
        per_token = case["availability"] and isinstance(case["availability"][0], list)
        for b, part in enumerate(case["scores"]):
            for t, token in enumerate(part):
                allowed = [[case["availability"][b][t]]] if per_token else case["availability"]
                packages = None if case["package_scores"] is None else [[case["package_scores"][b][t]]]
                got = run_policy(policy, case["params"], [[token]], allowed, [[case["hidden"][b][t]]], packages)
                assert got == {name: [[value[b][t]]] for name, value in case["expected"].items()}, case["name"]


def test_vectors_have_every_kind_of_case():
    """Ties at zero and above it, all negative, no, one, two and many specialists; all, none, one, some a token."""
    for policy in oracle.SELECTIONS:
        cases = read(policy)
        assert {len(case["scores"][0][0]) for case in cases} == {0, 1, 2, 5, 19}
        for available in ("all", "none", "one", "per token"):
            mine = [case for case in cases if case["name"].endswith(f", {available} available")]
            tokens = [token for case in mine for part in case["scores"] for token in part if token]
            assert any(max(token) == 0 and token.count(0) > 1 for token in tokens), (policy, available)
            assert any(max(token) > 0 and token.count(max(token)) > 1 for token in tokens), (policy, available)
            assert any(max(token) < 0 for token in tokens), (policy, available)
    assert {case["combination"] for case in read("combination")} == set(COMBINATIONS)


def test_combinations_reproduce_their_vectors():
    for case in read("combination"):
        combination, slots = COMBINATIONS[case["combination"]], case["slots"]
        scores = torch.tensor(case["scores"]).view(-1, slots)
        outputs, anchor = torch.tensor(case["outputs"]).view(-1, slots, 3), torch.tensor(case["anchor"]).view(-1, 3)
        given = {"features": torch.tensor(case["features"]).view(-1, 2)} if case["features"] is not None else {}
        mixture = combination(outputs, selected_scores=scores, **given)
        assert mixture.weights.tolist() == case["expected"]["weights"]
        assert mixture.output.tolist() == case["expected"]["output"]
        for kind in ("complete", "delta"):
            always_on = AlwaysOnAnchorCombination(combination, expert_outputs=kind)
            corrected = always_on(outputs, selected_scores=scores, anchor_output=anchor, **given)
            assert corrected.output.tolist() == case["expected"][f"always_on_{kind}"]


def test_vectors_are_what_the_oracle_says():
    documents = oracle.documents()
    assert {path.name for path in oracle.FOLDER.iterdir()} == set(documents)
    for name, text in documents.items():
        assert (oracle.FOLDER / name).read_text() == text, f"{name} is stale: run {Path(oracle.__file__).name}"


@pytest.mark.parametrize("policy", list(oracle.SELECTIONS))
def test_policy_equals_the_oracle_on_many_random_tokens(policy):
    draw = random.Random(23)
    for _ in range(12):
        experts = draw.randrange(5, 12)
        scores = [[[draw.randrange(-4, 7) / 8 for _ in range(experts)] for _ in range(9)] for _ in range(2)]
        hidden = [[[draw.gauss(0, 1)] for _ in part] for part in scores]
        hidden = [[[float(torch.tensor(x[0]))] for x in part] for part in hidden]
        availability = [[[draw.random() < 0.7 for _ in token] for token in part] for part in scores]
        every = [(i, j) for j in range(experts) for i in range(j)]
        params = {
            "adaptive_top1_top2": {"mixture_threshold": 0.25},
            "dynamic_k": {"k_max": 5, "threshold": 0.125},
            "compatibility_top2": {"pairs": sorted(draw.sample(every, 6))},
            "hierarchical": {
                "package_sizes": [1, experts - 4, 3],
                "package_evidence": draw.choice(["max", "logsumexp"]),
                "local": ("adaptive_top1_top2", {"mixture_threshold": 0.25}),
            },
        }.get(policy, {})
        given = (params, scores, availability, hidden, None)
        assert run_policy(policy, *given) == oracle.run_case(policy, *given)


@pytest.mark.parametrize("experts", [64, 256])
def test_a_single_token_of_a_large_bank_equals_the_oracle(experts):
    """With many ties: scores are eighths, in some tokens of two values only, in some never positive."""
    draw = random.Random(experts)
    every = list(itertools.combinations(range(experts), 2))
    sizes = [1, experts // 4, experts // 2, experts // 4 - 1]
    policies = [
        ("anchored_top1", {}),
        ("anchor_veto_top2", {}),
        ("adaptive_top1_top2", {"mixture_threshold": 0.25}),
        ("dynamic_k", {"k_max": 4, "threshold": 0.125}),
        ("compatibility_top2", {"pairs": [(i, j) for i, j in every if 4 * i // experts == 4 * j // experts]}),
        ("compatibility_top2", {"pairs": [(i, j) for i, j in every if i % 4 == j % 4]}),
        ("compatibility_top2", {"pairs": sorted(draw.sample(every, experts))}),
        *(
            ("hierarchical", {"package_sizes": sizes, "package_evidence": "max", "local": local})
            for local in (("anchor_veto_top2", {}), ("dynamic_k", {"k_max": 3, "threshold": 0.5}))
        ),
    ]
    for (low, high), (policy, params) in itertools.product(((-6, 7), (-6, 200), (0, 2), (-6, 1)), policies):
        token = [draw.randrange(low, high) / 8 for _ in range(experts)]
        availability = [draw.random() < 0.7 for _ in token]
        given = (params, [[token]], availability, [[[0.5]]], None)
        assert run_policy(policy, *given) == oracle.run_case(policy, *given), (policy, low, high)
