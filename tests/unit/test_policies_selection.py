"""Which candidates each selection policy keeps, and what it refuses."""

import copy
import dataclasses
import itertools
import math
import pickle

import pytest
import torch

from moelab.errors import PolicyError
from moelab.policies import (
    AdaptiveTop1Top2Selection,
    AnchoredTop1Selection,
    AnchorVetoTop2Selection,
    CompatibilityIndex,
    CompatibilityTop2Selection,
    DynamicKSelection,
    HierarchicalSelection,
    OverflowToAnchorCapacity,
)
from moelab.policies import compatibility as compatibility_module
from moelab.policies._validate import check_ids
from moelab.policies.decisions import SORT_AT_MOST, rank
from moelab.policies.selection import Selection

IDS = ("a:0", "a:1", "b:0", "b:1")
GROUPED = CompatibilityTop2Selection(CompatibilityIndex.from_groups(IDS, ("a", "a", "b", "b")))
EVERY = (
    AnchoredTop1Selection(),
    AnchorVetoTop2Selection(),
    AdaptiveTop1Top2Selection(0.5),
    DynamicKSelection(3),
    HierarchicalSelection((2, 2)),
    GROUPED,
)


def decide(selection, *tokens, ids=IDS, **extra):
    decision = selection(torch.tensor([tokens]), expert_ids=ids, **extra)
    return decision.selected_indices[0].tolist()


def refused(call, field, got=None):
    with pytest.raises(PolicyError) as error:
        call()
    assert error.value.field == field
    assert error.value.expected is not None
    assert f"field: {field}" in str(error.value) and "expected: " in str(error.value)
    if got is not None:
        assert error.value.got == got


@pytest.mark.parametrize("selection", EVERY, ids=lambda selection: type(selection).__name__)
def test_scores_tied_at_zero_go_to_the_anchor(selection):
    decision = selection(torch.zeros(2, 3, 4), expert_ids=IDS)
    assert decision.anchor_mask.all() and not decision.slot_mask.any()
    assert not selection(torch.full((2, 3, 4), -0.0), expert_ids=IDS).slot_mask.any()


def test_ties_do_not_follow_the_library(monkeypatch):
    # Some topk forms return the last of two tied entries; a tied row here must give the first.
    monkeypatch.setattr(torch, "topk", lambda *_, **__: pytest.fail("topk has no tie order"))
    monkeypatch.setattr(torch.Tensor, "topk", lambda *_, **__: pytest.fail("topk has no tie order"))
    bank = torch.zeros(1, 1, 64)
    bank[..., [5, 9, 20, 33]] = 1.0
    assert rank(bank, 6)[0, 0].tolist() == [5, 9, 20, 33, 0, 1]


def test_rank_of_a_short_bank_is_padded():
    assert rank(torch.zeros(1, 1, 1), 3).tolist() == [[[0, 0, 0]]]
    assert rank(torch.tensor([[[0.0, 2.0]]]), 3).tolist() == [[[1, 0, 0]]]


def test_one_strong_specialist_is_not_enough_for_a_pair():
    assert decide(AnchorVetoTop2Selection(), [9.0, 0.0, -1.0, -1.0], [1.0, 0.1, 0.0, 2.0]) == [[0, 0], [4, 1]]


def test_adaptive_arity_follows_the_evidence():
    tokens = [[0.0, -1.0, -1.0, -1.0], [0.2, 0.5, -1.0, 0.0], [0.2, 0.5, 0.6, 0.0], [0.7, 0.5, 0.6, 0.0]]
    assert decide(AdaptiveTop1Top2Selection(0.5), *tokens) == [[0, 0], [2, 0], [3, 0], [1, 3]]


def test_a_lone_specialist_needs_no_second():
    assert decide(AdaptiveTop1Top2Selection(), [1.0], [-1.0], ids=("a:0",)) == [[1, 0], [0, 0]]
    assert decide(AnchorVetoTop2Selection(), [1.0], ids=("a:0",)) == [[0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_score_equal_to_the_threshold_in_its_own_dtype_is_not_above_it(dtype):
    scores = torch.tensor([[[1.0, 0.3], [1.0, 0.31]]], dtype=dtype)
    ids = ("a:0", "a:1")
    assert AdaptiveTop1Top2Selection(0.3)(scores, expert_ids=ids).route_arity.tolist() == [[1, 2]]
    assert DynamicKSelection(2, 0.3)(scores, expert_ids=ids).route_arity.tolist() == [[1, 2]]
    for token, arity in enumerate((1, 2)):  # a single token, in plain numbers
        one = scores[:, token : token + 1]
        assert AdaptiveTop1Top2Selection(0.3)(one, expert_ids=ids).route_arity.tolist() == [[arity]]
        assert DynamicKSelection(2, 0.3)(one, expert_ids=ids).route_arity.tolist() == [[arity]]


def test_dynamic_k_keeps_a_capped_prefix():
    tokens = [[1.0, 2.0, 3.0, 4.0], [1.0, 0.5, -1.0, 0.0], [0.4, 0.5, -1.0, 0.0]]
    assert decide(DynamicKSelection(3), *tokens) == [[4, 3, 2], [1, 2, 0], [2, 1, 0]]
    assert decide(DynamicKSelection(3, 0.5), *tokens) == [[4, 3, 2], [1, 0, 0], [0, 0, 0]]


def test_compatibility_never_crosses_groups():
    # The two best, a:0 and b:0, must not run together; the best pair inside a group is in b.
    assert decide(GROUPED, [5.0, 0.1, 4.0, 2.0]) == [[3, 4]]
    assert decide(GROUPED, [5.0, 0.0, 4.0, -2.0]) == [[0, 0]]
    assert decide(GROUPED, [1.0, 2.0, 2.0, 1.0]) == [[2, 1]], "equal sums keep the pair's append order"


def test_compatibility_in_parts_equals_compatibility_at_once(monkeypatch):
    scores = torch.randn(2, 33, 4, generator=torch.Generator().manual_seed(0))
    whole = GROUPED(scores, expert_ids=IDS).selected_indices
    monkeypatch.setattr(compatibility_module, "_SCORES_AT_ONCE", 7)
    assert torch.equal(GROUPED(scores, expert_ids=IDS).selected_indices, whole)
    assert GROUPED(scores[:, :0], expert_ids=IDS).selected_indices.shape == (2, 0, 2)


def test_a_later_clique_may_hold_an_equal_pair_of_earlier_append_order():
    index = CompatibilityIndex(IDS, [(0, 1), (0, 2), (0, 3), (1, 2)])
    assert index.cliques == ((0, 3), (0, 1, 2))
    ring = CompatibilityTop2Selection(index)
    # Twice the best score of the second clique is the sum of the first: no larger, but its pair comes first.
    assert decide(ring, [1.0, 1.0, 1.0, 1.0]) == [[1, 2]]
    assert decide(ring, [1.0, 0.5, 1.0, 1.0]) == [[1, 3]]
    assert decide(ring, [1.0, 0.5, 0.75, 1.0]) == [[1, 4]]
    assert decide(ring, [-1.0, 0.5, 0.5, 2.0]) == [[2, 3]], "a clique without a pair bounds nothing"


def test_compatibility_without_pairs_is_the_anchor():
    alone = CompatibilityTop2Selection(CompatibilityIndex(IDS, ()))
    assert decide(alone, [1.0, 2.0, 3.0, 4.0]) == [[0, 0]]


def test_hierarchical_stays_inside_the_winning_package():
    ids = ("a:0", "b:0", "b:1", "b:2")
    ragged = HierarchicalSelection((1, 3), AdaptiveTop1Top2Selection())
    assert decide(ragged, [3.0, 2.0, 2.5, 1.0], [2.0, 2.0, 2.5, 1.0], ids=ids) == [[1, 0], [3, 2]]
    veto = HierarchicalSelection((1, 3))
    decision = veto(torch.tensor([[[3.0, 2.0, 2.5, 1.0]]]), expert_ids=ids)
    assert decision.package_indices.tolist() == [[1]] and decision.anchor_mask.tolist() == [[True]]


def test_package_evidence_is_a_named_choice():
    token = [1.0, -9.0, 0.9, 0.9]
    local = AdaptiveTop1Top2Selection()
    assert decide(HierarchicalSelection((2, 2), local, "max"), token) == [[1, 0]]
    assert decide(HierarchicalSelection((2, 2), local, "logsumexp"), token) == [[3, 4]]
    given = HierarchicalSelection((2, 2), local, "given")
    assert decide(given, token, package_scores=torch.tensor([[[0.0, 0.0]]])) == [[0, 0]]
    assert decide(given, token, package_scores=torch.tensor([[[0.5, 0.5]]])) == [[1, 0]]
    assert decide(given, token, package_scores=torch.tensor([[[-1.0, 0.1]]])) == [[3, 4]]


def test_decisions_cannot_be_changed():
    decision = AnchoredTop1Selection()(torch.ones(1, 1, 4), expert_ids=IDS)
    with pytest.raises(AttributeError):
        decision.selected_indices = None
    with pytest.raises(AttributeError):
        AdaptiveTop1Top2Selection().mixture_threshold = 1.0


@pytest.mark.parametrize("selection", EVERY, ids=lambda selection: type(selection).__name__)
def test_bad_scores_are_refused(selection):
    good = torch.ones(1, 2, 4)

    def call(scores, ids=IDS):
        return lambda: selection(scores, expert_ids=ids)

    for value in (math.nan, math.inf, -math.inf):
        bad = good.clone()
        bad[0, 1, 2] = value
        refused(call(bad), "scores", f"{value} at [0, 1, 2]")
        refused(call(bad[:, 1:]), "scores", f"{value} at [0, 0, 2]")
    refused(call(good[0]), "scores", [2, 4])
    refused(call(good[..., :3]), "scores", [1, 2, 3])
    refused(call(good.long()), "scores", "int64")
    refused(call(good.tolist()), "scores", "list")
    refused(call(good, ("a:0", "a:1", "a:0", "b:1")), "expert_ids", "a:0")
    refused(call(good, "a:00"), "expert_ids", "str")
    refused(call(good, ("a:0", "a:1", "b:0", "")), "expert_ids", "")
    refused(call(good, ("a:0", "a:1", "b:0", 3)), "expert_ids", 3)


@pytest.mark.parametrize("value", [-0.1, math.nan, "0.5", True, None])
def test_bad_thresholds_are_refused(value):
    refused(lambda: AdaptiveTop1Top2Selection(value), "mixture_threshold")
    refused(lambda: DynamicKSelection(2, value), "threshold")


def test_bad_counts_are_refused():
    for value in (0, -1, 2.0, True, "2"):
        refused(lambda value=value: DynamicKSelection(value), "k_max", value)
        refused(lambda value=value: HierarchicalSelection((2, value)), "package_sizes", value)
    refused(lambda: DynamicKSelection(5)(torch.ones(1, 1, 4), expert_ids=IDS), "k_max", 5)


def test_bad_hierarchies_are_refused():
    ones = torch.ones(1, 1, 4)
    for sizes in ((2, 3), (2, 1), ()):
        refused(lambda sizes=sizes: HierarchicalSelection(sizes)(ones, expert_ids=IDS), "package_sizes", sizes)
    refused(lambda: HierarchicalSelection((2, 2), package_evidence="mean"), "package_evidence", "mean")
    refused(lambda: HierarchicalSelection((2, 2), AnchoredTop1Selection()), "local", "AnchoredTop1Selection")
    refused(lambda: HierarchicalSelection((2, 2), HierarchicalSelection((2, 2))), "local", "HierarchicalSelection")
    refused(lambda: HierarchicalSelection((2, 2), "veto"), "local", "str")
    refused(lambda: HierarchicalSelection((2, 2), DynamicKSelection(5))(ones, expert_ids=IDS), "k_max", 5)
    given = HierarchicalSelection((2, 2), package_evidence="given")
    refused(lambda: given(ones, expert_ids=IDS), "package_scores")
    refused(lambda: given(ones, expert_ids=IDS, package_scores=ones), "package_scores", [1, 1, 4])
    nan = torch.full((1, 1, 2), math.nan)
    refused(lambda: given(ones, expert_ids=IDS, package_scores=nan), "package_scores", "nan at [0, 0, 0]")
    by_max = HierarchicalSelection((2, 2))
    refused(lambda: by_max(ones, expert_ids=IDS, package_scores=ones[..., :2]), "package_scores", "Tensor")


def test_bad_indices_are_refused():
    for pairs in ([(1, 0)], [(0, 0)], [(0, 4)], [(-1, 2)], [(0, 1, 2)], [(0, 1.0)]):
        refused(lambda pairs=pairs: CompatibilityIndex(IDS, pairs), "pairs", tuple(pairs[0]))
    refused(lambda: CompatibilityIndex(IDS, [(0, 2), (0, 1)]), "pairs", ((0, 2), (0, 1)))
    refused(lambda: CompatibilityIndex(IDS, [(0, 1), (0, 1)]), "pairs", ((0, 1), (0, 1)))
    refused(lambda: CompatibilityIndex(("a:0", "a:0"), []), "expert_ids", "a:0")
    refused(lambda: CompatibilityIndex.from_groups(IDS, tuple("abc")), "groups", 3)
    refused(lambda: CompatibilityTop2Selection({"a:0": "a"}), "index", "dict")
    moved = IDS[::-1]
    refused(lambda: GROUPED(torch.ones(1, 1, 4), expert_ids=moved), "index", IDS)


def test_what_should_be_a_sequence_is_named():
    refused(lambda: HierarchicalSelection(3), "package_sizes", "int")
    refused(lambda: HierarchicalSelection("12"), "package_sizes", "str")
    for pairs, got in ((None, "NoneType"), ([1, 2], "int"), (["ab"], "str")):
        refused(lambda p=pairs: CompatibilityIndex(IDS, p), "pairs", got)
    refused(lambda: CompatibilityIndex.from_groups(IDS, None), "groups", "NoneType")
    refused(lambda: CompatibilityIndex.from_groups(IDS, dict.fromkeys(IDS, 1)), "groups", "dict")


@pytest.mark.parametrize("groups", ["aabb", "abab", "aaaa", "abcd"])
def test_cliques_cover_the_pairs_and_nothing_else(groups):
    index = CompatibilityIndex.from_groups(IDS, tuple(groups))
    assert sorted(pair for clique in index.cliques for pair in itertools.combinations(clique, 2)) == [*index.pairs]
    ring = CompatibilityIndex(IDS, [(0, 1), (0, 2), (0, 3), (1, 2)])
    assert ring.cliques == ((0, 3), (0, 1, 2))


def test_top1_overflow_is_for_top1_only():
    pair = AnchorVetoTop2Selection()(torch.ones(1, 1, 4), expert_ids=IDS)
    refused(lambda: OverflowToAnchorCapacity()(pair, expert_availability=None), "decision", "TopKDecision")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_small_and_large_banks_rank_alike(dtype):
    # Quarters tie often; the large bank takes the pass for every slot, its rows one by one the stable sort.
    bank = torch.randint(-8, 8, (1, 200, 65), generator=torch.Generator().manual_seed(0)).to(dtype) / 4
    bank[..., 0] = 0
    assert bank.numel() > SORT_AT_MOST >= bank[:, :1].numel()
    for slots in (1, 2, 5):
        rows = torch.cat([rank(bank[:, t : t + 1], slots) for t in range(200)], dim=1)
        assert torch.equal(rank(bank, slots), rows)


def test_what_is_ruled_out_never_runs():
    for tokens in (1, 200):  # a small and a large bank
        bank = torch.full((1, tokens, 65), -torch.inf)
        bank[..., 0] = 0
        bank[..., 3] = 1
        for policy in (AnchoredTop1Selection(), AdaptiveTop1Top2Selection(), DynamicKSelection(4)):
            chosen = policy.choose(bank).view(tokens, -1)
            assert (chosen[:, 0] == 3).all() and not chosen[:, 1:].any()
        assert not AnchorVetoTop2Selection().choose(bank).any()


def test_large_finite_scores_are_finite():
    for dtype, value in ((torch.float16, 60000.0), (torch.float64, 1.7e308)):  # their sum is not
        for tokens in (1, 2):
            scores = torch.full((1, tokens, 4), value, dtype=dtype)
            assert AnchoredTop1Selection()(scores, expert_ids=tuple("abcd")).selected_indices.tolist() == [[1] * tokens]


def test_packages_are_for_hierarchies():
    for selection in (AnchoredTop1Selection(), GROUPED):
        refused(
            lambda s=selection: s(torch.ones(1, 1, 4), expert_ids=IDS, package_scores=torch.ones(1, 1, 2)),
            "package_scores",
            "Tensor",
        )


def test_equal_ids_are_one_tuple():
    mine, equal = (tuple(f"equal:{n}" for n in range(3)) for _ in range(2))
    assert (
        mine is not equal and check_ids(mine) is check_ids(equal) is check_ids(list(mine)) is check_ids(equal) is mine
    )
    assert check_ids(mine[::-1]) == mine[::-1]
    for n in range(70):  # more than are remembered
        check_ids((f"bank:{n}",))
    assert check_ids(equal) == equal
    index = CompatibilityIndex.from_groups(mine, "aab")
    assert CompatibilityTop2Selection(index)(torch.ones(1, 1, 3), expert_ids=equal).selected_indices.tolist() == [
        [[1, 2]]
    ]
    refused(lambda: CompatibilityTop2Selection(index)(torch.ones(1, 1, 2), expert_ids=mine[:2]), "index")


@pytest.mark.parametrize("evidence", ["given", "max", "logsumexp"])
def test_evidence_of_packages_carries_no_gradient(evidence):
    scores = torch.tensor([[[1.0, 0.5, 2.0, 0.25]]], requires_grad=True)
    given = torch.ones(1, 1, 2, requires_grad=True) if evidence == "given" else None
    policy = HierarchicalSelection((2, 2), AdaptiveTop1Top2Selection(), evidence)
    assert not policy.evidence(scores, given).requires_grad
    assert not HierarchicalSelection((), package_evidence=evidence).evidence(scores[..., :0], given).requires_grad
    for tokens in (1, 2):
        decision = policy(
            scores.expand(1, tokens, 4),
            expert_ids=IDS,
            package_scores=given if given is None else given.expand(1, tokens, 2),
        )
        assert not decision.package_indices.requires_grad and decision.selected_scores.requires_grad


def test_ids_that_were_right_once_are_checked_again():
    scores = torch.zeros(1, 1, 2)
    AnchoredTop1Selection()(scores, expert_ids=("a", "b"))
    for ids in (("a", "a"), ("a", ["b"]), ("a", 1)):
        for _ in range(2):
            with pytest.raises(PolicyError, match="expert_ids"):
                AnchoredTop1Selection()(scores, expert_ids=ids)


@pytest.mark.parametrize("policy", EVERY, ids=lambda policy: type(policy).__name__)
def test_a_decision_about_one_token_is_one_like_any_other(policy):
    """Its tensors are made when they are looked at: nobody else can tell."""
    decision = policy(torch.tensor([[[3.0, 1.0, 2.0, -1.0]]]), expert_ids=IDS)
    names = [field.name for field in dataclasses.fields(decision)]
    for other in (copy.deepcopy(decision), pickle.loads(pickle.dumps(decision)), dataclasses.replace(decision)):
        for name in names:
            got, want = getattr(other, name), getattr(decision, name)
            assert got == want if name == "expert_ids" else torch.equal(got, want)
    assert decision.selected_indices is decision.selected_indices
    assert decision.tokens == tuple(decision.route_arity.shape) == (1, 1)
    assert "selected_scores=tensor" in repr(decision)
    with pytest.raises(AttributeError, match="'no_field'"):
        _ = decision.no_field


def test_a_rule_for_batches_is_enough_for_a_policy_of_ones_own():
    class BestThree(Selection):
        def choose(self, bank):
            ranked = rank(bank, 3)
            return ranked * (bank.gather(-1, ranked) > 0)

    scores = torch.tensor([[[3.0, 1.0, 2.0, -1.0]], [[-1.0, -2.0, 0.5, 0.25]]])
    batch = BestThree()(scores, expert_ids=IDS)
    assert batch.selected_indices.tolist() == [[[1, 3, 2]], [[3, 4, 0]]]
    for row, want in zip(scores.split(1), batch.selected_indices.split(1), strict=True):
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(BestThree()(row.to(dtype), expert_ids=IDS).selected_indices, want)


def test_a_decision_about_one_token_keeps_nothing_of_a_batch_alive():
    scores = torch.rand(10_000, 1, 4)
    decision = AnchorVetoTop2Selection()(scores[:1], expert_ids=IDS)
    assert len(pickle.dumps(decision)) < 2000
