"""What must hold of the routing policies whatever the scores are."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

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
    PositiveEvidenceCombination,
    PromoteSurvivorsCapacity,
    ScoreSoftmaxCombination,
    SparseDispatcher,
    UnitWeights,
    expert_load,
    expert_overflow,
    regret,
)

# The first call in a process may take long; nothing here is about time.
quick = settings(deadline=None, max_examples=40, derandomize=True)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NAMES = ("top1", "veto", "adaptive", "dynamic", "hierarchical", "compatibility")


def ids(experts):
    return tuple(f"a:{number}" for number in range(experts))


def make(name, experts):
    """A policy of that name over so many specialists."""
    return {
        "top1": AnchoredTop1Selection,
        "veto": AnchorVetoTop2Selection,
        "adaptive": lambda: AdaptiveTop1Top2Selection(0.5),
        "dynamic": lambda: DynamicKSelection(max(1, experts - 1), 0.25),
        "hierarchical": lambda: HierarchicalSelection(
            ((experts + 1) // 2, experts // 2) if experts > 1 else (1,) * experts, AdaptiveTop1Top2Selection()
        ),
        "compatibility": lambda: CompatibilityTop2Selection(
            CompatibilityIndex.from_groups(ids(experts), [number % 2 for number in range(experts)])
        ),
    }[name]()


# Quarters from -2 to 3: exact in every dtype, with many ties at zero and above it.
QUARTERS = st.integers(-8, 12).map(lambda number: number / 4)


@st.composite
def scores(draw, least=1, most=6, dtypes=DTYPES, values=QUARTERS):
    batch, tokens, experts = draw(st.integers(0, 2)), draw(st.integers(0, 4)), draw(st.integers(least, most))
    count = batch * tokens * experts
    flat = draw(st.lists(values, min_size=count, max_size=count))
    return torch.tensor(flat, dtype=draw(st.sampled_from(dtypes))).view(batch, tokens, experts)


@st.composite
def availability_for(draw, values):
    batch, tokens, experts = values.shape
    shape = draw(st.sampled_from([(experts,), (batch, tokens, experts)]))
    flat = draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(flat, dtype=torch.bool).view(shape)


def chosen(decision):
    """`[B, T, N]` which specialists each token runs."""
    indices = decision.slot_indices
    runs = torch.zeros(*indices.shape[:2], len(decision.expert_ids) + 1, dtype=torch.bool)
    return runs.scatter(-1, indices, True)[..., 1:]


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_decisions_are_well_formed(name, data):
    values = data.draw(scores())
    decision = make(name, values.shape[-1])(values, expert_ids=ids(values.shape[-1]))
    indices, mask = decision.slot_indices, decision.slot_mask
    assert indices.dtype == torch.int64 and decision.slot_scores.dtype == values.dtype
    assert (decision.slot_scores[mask] > 0).all(), "a specialist runs on strictly positive evidence"
    assert not decision.slot_scores[~mask].any() and not indices[~mask].any()
    assert not (mask[..., 1:] & ~mask[..., :-1]).any(), "active slots come first"
    bank = torch.cat((torch.zeros_like(values[..., :1]), values), -1)
    assert torch.equal(bank.gather(-1, indices), decision.slot_scores)
    assert torch.equal(decision.anchor_mask, decision.route_arity == 0)
    assert torch.equal(chosen(decision).sum(-1), decision.route_arity), "no specialist twice"
    for slot in range(1, indices.shape[-1]):
        before, after = indices[..., slot - 1], indices[..., slot]
        high, low = decision.slot_scores[..., slot - 1], decision.slot_scores[..., slot]
        assert ((after == 0) | (high > low) | ((high == low) & (before < after))).all()


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_the_anchor_answers_without_positive_evidence(name, data):
    values = data.draw(scores(values=st.integers(-8, 0).map(lambda number: number / 4)))
    assert make(name, values.shape[-1])(values, expert_ids=ids(values.shape[-1])).anchor_mask.all()


@pytest.mark.parametrize("name", ["top1", "veto", "adaptive", "dynamic"])
@quick
@given(data=st.data())
def test_raising_a_chosen_specialists_score_never_removes_it(name, data):
    values = data.draw(scores())
    experts = values.shape[-1]
    policy, raised = make(name, experts), data.draw(st.integers(0, experts - 1))
    higher = values.clone()
    higher[..., raised] += data.draw(st.sampled_from([0.25, 1.0, 4.0]))
    before = chosen(policy(values, expert_ids=ids(experts)))[..., raised]
    after = chosen(policy(higher, expert_ids=ids(experts)))[..., raised]
    assert not (before & ~after).any()


@pytest.mark.parametrize("name", ["hierarchical", "compatibility"])
@quick
@given(data=st.data())
def test_constrained_policies_are_monotone_too(name, data):
    values = data.draw(scores(least=2))
    experts = values.shape[-1]
    policy, raised = make(name, experts), data.draw(st.integers(0, experts - 1))
    higher = values.clone()
    higher[..., raised] += 1.0
    before = chosen(policy(values, expert_ids=ids(experts)))[..., raised]
    after = chosen(policy(higher, expert_ids=ids(experts)))[..., raised]
    assert not (before & ~after).any()


@pytest.mark.parametrize("name", ["top1", "veto", "adaptive", "dynamic"])
@quick
@given(data=st.data())
def test_permuting_specialists_permutes_the_choice_when_nothing_ties(name, data):
    experts = data.draw(st.integers(1, 6))
    distinct = data.draw(st.lists(st.integers(-8, 12), min_size=experts, max_size=experts, unique=True))
    values = torch.tensor(distinct).view(1, 1, experts) / 4
    order = torch.tensor(data.draw(st.permutations(range(experts))), dtype=torch.int64)
    policy = make(name, experts)
    plain = policy(values, expert_ids=ids(experts))
    permuted = policy(values[..., order], expert_ids=ids(experts))
    assert torch.equal(chosen(permuted), chosen(plain)[..., order])
    assert torch.equal(permuted.selected_scores, plain.selected_scores)


@pytest.mark.parametrize("name", ["top1", "veto", "adaptive"])
@quick
@given(data=st.data())
def test_permuting_tied_specialists_keeps_the_scores(name, data):
    values = data.draw(scores())
    experts = values.shape[-1]
    order = torch.tensor(data.draw(st.permutations(range(experts))), dtype=torch.int64)
    policy = make(name, experts)
    plain = policy(values, expert_ids=ids(experts))
    permuted = policy(values[..., order], expert_ids=ids(experts))
    assert torch.equal(permuted.selected_scores, plain.selected_scores)


@pytest.mark.parametrize("name", ["top1", "veto", "adaptive"])
@quick
@given(data=st.data())
def test_appending_a_specialist_without_positive_evidence_changes_nothing(name, data):
    values = data.draw(scores(least=0))
    experts = values.shape[-1]
    longer = torch.cat((values, values.new_full((*values.shape[:2], 1), data.draw(st.sampled_from([0.0, -0.25])))), -1)
    policy = make(name, experts)
    before = policy(values, expert_ids=ids(experts))
    after = policy(longer, expert_ids=ids(experts + 1))
    assert torch.equal(before.selected_indices, after.selected_indices)
    assert torch.equal(before.selected_scores, after.selected_scores)


@quick
@given(scores(), st.sampled_from([0.0, 0.25, 1.0]))
def test_appending_to_dynamic_k_and_to_a_new_package_changes_nothing(values, threshold):
    experts = values.shape[-1]
    longer = torch.cat((values, values.new_full((*values.shape[:2], 1), -1.0)), -1)
    for before, after in (
        (DynamicKSelection(experts, threshold), DynamicKSelection(experts, threshold)),
        (HierarchicalSelection((experts,)), HierarchicalSelection((experts, 1))),
    ):
        old, new = before(values, expert_ids=ids(experts)), after(longer, expert_ids=ids(experts + 1))
        assert torch.equal(old.selected_indices, new.selected_indices)


@quick
@given(scores())
def test_adaptive_at_an_infinite_threshold_is_top1(values):
    names = ids(values.shape[-1])
    adaptive = AdaptiveTop1Top2Selection(math.inf)(values, expert_ids=names)
    top1 = AnchoredTop1Selection()(values, expert_ids=names)
    assert torch.equal(adaptive.selected_indices[..., 0], top1.selected_indices)
    assert not adaptive.selected_indices[..., 1].any()


@quick
@given(scores())
def test_adaptive_pairs_at_threshold_zero_are_the_vetos(values):
    names = ids(values.shape[-1])
    adaptive = AdaptiveTop1Top2Selection(0.0)(values, expert_ids=names)
    veto = AnchorVetoTop2Selection()(values, expert_ids=names)
    assert torch.equal(adaptive.expert_pair_mask, veto.expert_pair_mask)
    pairs = veto.expert_pair_mask
    assert torch.equal(adaptive.selected_indices[pairs], veto.selected_indices[pairs])


@quick
@given(scores(least=2))
def test_dynamic_k_of_two_is_adaptive_at_zero_and_one_group_or_package_is_the_veto(values):
    names = ids(values.shape[-1])
    adaptive = AdaptiveTop1Top2Selection(0.0)(values, expert_ids=names)
    assert torch.equal(adaptive.selected_indices, DynamicKSelection(2)(values, expert_ids=names).selected_indices)
    veto = AnchorVetoTop2Selection()(values, expert_ids=names).selected_indices
    grouped = CompatibilityTop2Selection(CompatibilityIndex.from_groups(names, [0] * len(names)))
    assert torch.equal(grouped(values, expert_ids=names).selected_indices, veto)
    packaged = HierarchicalSelection((len(names),))
    assert torch.equal(packaged(values, expert_ids=names).selected_indices, veto)


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_capacity_only_takes_away(name, data):
    values = data.draw(scores())
    decision = make(name, values.shape[-1])(values, expert_ids=ids(values.shape[-1]))
    availability = data.draw(availability_for(values))
    result = PromoteSurvivorsCapacity()(decision, expert_availability=availability)
    wanted, got = chosen(decision), chosen(result.effective_routes)
    assert torch.equal(got, wanted & availability), "exactly the available ones that were chosen"
    assert result.effective_routes.selected_indices.shape == decision.selected_indices.shape
    scores_left = result.effective_routes.slot_scores
    assert (scores_left[..., 1:] <= scores_left[..., :-1]).all(), "the order stays"
    assert torch.equal(expert_overflow(result), (wanted & ~got).sum((0, 1)))
    assert torch.equal(expert_load(result.effective_routes), got.sum((0, 1)))
    assert torch.equal(regret(result) > 0, (wanted & ~got).any(-1)) and (regret(result) >= 0).all()


@quick
@given(
    st.sampled_from([ScoreSoftmaxCombination(), EqualCombination(), PositiveEvidenceCombination()]),
    st.sampled_from(DTYPES),
    st.integers(1, 5).flatmap(
        lambda slots: st.lists(
            st.lists(st.floats(2**-10, 2**10, width=16), min_size=slots, max_size=slots), min_size=1, max_size=4
        )
    ),
)
def test_weights_are_a_distribution(combination, dtype, rows):
    selected = torch.tensor(rows, dtype=dtype)
    weights = combination.weigh(selected)
    assert weights.dtype == torch.float32 and (weights >= 0).all()
    # Each weight is rounded once to float32, and there are at most five.
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(rows)), atol=3e-7, rtol=0)
    order = selected.sort(dim=-1, stable=True).indices
    assert (weights.gather(-1, order).diff(dim=-1) >= 0).all(), "more evidence never weighs less"


@st.composite
def policies(draw, experts):
    """Any policy over so many specialists: uneven packages, any evidence, any pairs, cliques that overlap."""
    cuts = sorted(draw(st.sets(st.integers(1, experts - 1)))) if experts > 1 else []
    sizes = [stop - first for first, stop in itertools.pairwise([0, *cuts, experts])] if experts else []
    every = list(itertools.combinations(range(experts), 2))
    pairs = sorted(draw(st.sets(st.sampled_from(every)))) if every else []
    threshold = draw(st.sampled_from([0.0, 0.3, 1.0, math.inf]))
    flat = [AnchorVetoTop2Selection(), AdaptiveTop1Top2Selection(threshold)]
    flat += [DynamicKSelection(draw(st.integers(1, experts)), threshold)] if experts else []
    flat += [CompatibilityTop2Selection(CompatibilityIndex(ids(experts), pairs))]
    evidence = draw(st.sampled_from(["given", "max", "logsumexp"]))
    return draw(
        st.sampled_from(
            [AnchoredTop1Selection(), *flat, HierarchicalSelection(sizes, draw(st.sampled_from(flat)), evidence)]
        )
    )


@settings(quick, max_examples=120)
@given(data=st.data())
def test_a_single_token_is_decided_as_it_is_in_a_batch(data):
    values = data.draw(scores(least=0, values=st.one_of(QUARTERS, st.floats(-4, 4, width=16))))
    batch, tokens, experts = values.shape
    assume(batch * tokens > 1)
    policy, availability = data.draw(policies(experts)), data.draw(availability_for(values))
    given = getattr(policy, "package_evidence", None) == "given"
    packages = values.new_tensor(0.0).expand(batch, tokens, len(policy.package_sizes)) if given else None
    if given and experts:
        packages = torch.stack([part.sum(-1) for part in values.split(policy.package_sizes, -1)], -1)
    fields = (
        "selected_indices",
        "selected_scores",
        *(("package_indices",) if isinstance(policy, HierarchicalSelection) else ()),
    )

    def decide(part):
        own = None if packages is None else packages[part]
        decision = policy(values[part], expert_ids=ids(experts), package_scores=own)
        allowed = availability if availability.dim() == 1 else availability[part]
        return PromoteSurvivorsCapacity()(decision, expert_availability=allowed)

    whole = decide((slice(None), slice(None)))
    for b, t in itertools.product(range(batch), range(tokens)):
        one = decide((slice(b, b + 1), slice(t, t + 1)))
        for kind in ("decision", "effective_routes"):
            for name in fields:
                got, want = (getattr(getattr(result, kind), name) for result in (one, whole))
                assert got.dtype == want.dtype and torch.equal(got, want[b : b + 1, t : t + 1]), (kind, name)


def elementwise(number):
    """A specialist whose result for a token cannot depend on the other tokens."""
    return lambda rows: rows * (0.5 + number) + number


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_a_batch_equals_its_tokens_one_by_one(name, data):
    values = data.draw(scores())
    batch, tokens, experts = values.shape
    availability = data.draw(availability_for(values))
    combination = data.draw(
        st.sampled_from(
            [
                ScoreSoftmaxCombination(),
                EqualCombination(),
                PositiveEvidenceCombination(),
                AlwaysOnAnchorCombination(),
                AlwaysOnAnchorCombination(UnitWeights()),
            ]
        )
    )
    dispatcher = SparseDispatcher(make(name, experts), combination=combination)
    hidden = torch.randn(batch, tokens, 3, generator=torch.Generator().manual_seed(0)).to(values.dtype)

    def run(part, allowed):
        return dispatcher.dispatch(
            hidden[part],
            expert_scores=values[part],
            expert_ids=ids(experts),
            anchor_mlp=elementwise(-1),
            experts=[elementwise(number) for number in range(experts)],
            expert_availability=allowed,
        )

    whole = run((slice(None), slice(None)), availability)
    assert whole.output.shape == hidden.shape and whole.output.dtype == hidden.dtype
    idle = whole.capacity.effective_routes.anchor_mask
    assert torch.equal(whole.output[idle], elementwise(-1)(hidden)[idle]), "the anchor's own, bit by bit"
    for b in range(batch):
        for t in range(tokens):
            part = (slice(b, b + 1), slice(t, t + 1))
            one = run(part, availability if availability.dim() == 1 else availability[part])
            assert torch.equal(one.output, whole.output[part])
            assert torch.equal(one.mixture_weights, whole.mixture_weights[part])
            assert torch.equal(one.capacity.route_arity, whole.capacity.route_arity[part])


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_specialists_run_on_exactly_the_effective_routes(name, data):
    values = data.draw(scores())
    batch, tokens, experts = values.shape
    availability = data.draw(availability_for(values))
    ran = torch.zeros(batch * tokens, experts + 1, dtype=torch.bool)

    def note(candidate):
        def run(rows):
            assert not ran[rows.flatten().long(), candidate].any(), "a row runs once"
            ran[rows.flatten().long(), candidate] = True
            return rows

        return run

    result = SparseDispatcher(make(name, experts)).dispatch(
        torch.arange(batch * tokens, dtype=torch.float32).view(batch, tokens, 1),
        expert_scores=values,
        expert_ids=ids(experts),
        anchor_mlp=note(0),
        experts=[note(candidate) for candidate in range(1, experts + 1)],
        expert_availability=availability,
    )
    routes = result.capacity.effective_routes
    assert torch.equal(ran[:, 1:], chosen(routes).flatten(0, 1))
    assert torch.equal(ran[:, 0], routes.anchor_mask.flatten())
    assert not (ran[:, 1:].view(batch, tokens, experts) & ~availability).any()


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_no_gradient_through_the_choice(name, data):
    values = data.draw(scores(dtypes=(torch.float32,))).requires_grad_()
    decision = make(name, values.shape[-1])(values, expert_ids=ids(values.shape[-1]))
    assert not decision.selected_indices.requires_grad and not decision.slot_mask.requires_grad
    [gradient] = torch.autograd.grad(decision.selected_scores.sum(), values)
    assert torch.equal(gradient != 0, chosen(decision)), "only the selected scores carry one"


@pytest.mark.parametrize("name", NAMES)
@quick
@given(data=st.data())
def test_gradients_of_a_single_token_reach_what_is_left_of_its_choice(name, data):
    values = torch.tensor(data.draw(st.lists(QUARTERS, min_size=4, max_size=4))).view(1, 1, 4).requires_grad_()
    decision = make(name, 4)(values, expert_ids=ids(4))
    availability = data.draw(availability_for(values))
    result = PromoteSurvivorsCapacity()(decision, expert_availability=availability)
    for routes in (result.decision, result.effective_routes):
        assert not routes.selected_indices.requires_grad
        [gradient] = torch.autograd.grad(routes.selected_scores.sum(), values, retain_graph=True)
        assert torch.equal(gradient != 0, chosen(routes))
