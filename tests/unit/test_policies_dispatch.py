"""What runs, on which rows, and what comes back."""

import ast
import inspect

import pytest
import torch

from moelab.errors import PolicyError
from moelab.policies import (
    AdaptiveTop1Top2Selection,
    AlwaysOnAnchorCombination,
    AnchoredTop1Selection,
    AnchorVetoTop2Selection,
    DynamicKSelection,
    EqualCombination,
    HierarchicalSelection,
    LearnedMixtureCombination,
    OverflowToAnchorCapacity,
    PromoteSurvivorsCapacity,
    ScoreSoftmaxCombination,
    SparseDispatcher,
    TopKDecision,
    UnitWeights,
    dispatch,
)

IDS = ("a:0", "a:1", "b:0")
SCORES = torch.tensor([[[3.0, 2.0, 1.0], [-1.0, 0.5, -1.0]], [[-1.0, -1.0, -1.0], [2.0, -1.0, 2.0]]])
HIDDEN = torch.arange(8.0).view(2, 2, 2)


def times(factor, seen=None):
    """An MLP that multiplies, and notes the rows that it was given."""

    def run(rows):
        if seen is not None:
            seen.append(rows.tolist())
        return rows * factor

    return run


def never(rows):
    raise AssertionError(f"ran on {rows.tolist()}")


def run(dispatcher, anchor=None, experts=None, hidden=HIDDEN, scores=SCORES, **more):
    return dispatcher.dispatch(
        hidden,
        expert_scores=scores,
        expert_ids=IDS,
        anchor_mlp=anchor or times(1),
        experts=experts or [times(10), times(100), times(1000)],
        **more,
    )


def test_every_specialist_runs_once_on_its_own_rows_in_token_order():
    seen = [[], [], [], []]
    anchor, *experts = (times(10**n, rows) for n, rows in enumerate(seen))
    result = run(SparseDispatcher(combination=EqualCombination()), anchor, experts)
    assert seen == [[[[4, 5]]], [[[0, 1], [6, 7]]], [[[0, 1], [2, 3]]], [[[6, 7]]]]
    assert result.capacity.route_arity.tolist() == [[2, 1], [0, 2]]
    assert result.output.tolist() == [[[0, 55], [200, 300]], [[4, 5], [3030, 3535]]]
    assert result.mixture_weights.tolist() == [[[0.5, 0.5], [1, 0]], [[0, 0], [0.5, 0.5]]]


def test_an_unavailable_specialist_never_runs():
    availability = torch.tensor([True, False, True])
    result = run(SparseDispatcher(), experts=[times(10), never, times(1000)], expert_availability=availability)
    assert result.capacity.route_arity.tolist() == [[1, 0], [0, 2]]
    assert result.output[0].tolist() == [[0, 10], [2, 3]]
    nothing = run(SparseDispatcher(), experts=[never] * 3, expert_availability=torch.zeros(3, dtype=torch.bool))
    assert torch.equal(nothing.output, HIDDEN)


def test_a_specialist_that_was_not_selected_never_runs():
    run(SparseDispatcher(AnchoredTop1Selection(), OverflowToAnchorCapacity()), experts=[times(10), times(100), never])


def test_an_idle_batch_is_the_dense_model_bit_by_bit():
    anchor = torch.nn.Linear(2, 2)
    result = run(SparseDispatcher(), anchor, scores=-SCORES.abs())
    assert torch.equal(result.output, anchor(HIDDEN))
    assert result.mixture_weights.tolist() == torch.zeros(2, 2, 2).tolist()


def test_the_always_on_anchor_runs_once_on_every_token():
    seen = []
    dispatcher = SparseDispatcher(combination=AlwaysOnAnchorCombination(UnitWeights()))
    result = run(dispatcher, times(1, seen))
    assert seen == [HIDDEN.tolist()]
    # x + 9x + 99x, x + 99x, x, x + 9x + 999x
    assert result.output.tolist() == [[[0, 109], [200, 300]], [[4, 5], [6054, 7063]]]
    assert result.mixture_weights.tolist() == [[[1, 1], [1, 0]], [[0, 0], [1, 1]]]
    # Specialists that give the correction itself: x + 10x + 100x, x + 100x, x, x + 10x + 1000x
    delta = run(SparseDispatcher(combination=AlwaysOnAnchorCombination(UnitWeights(), "delta")))
    assert delta.output.tolist() == [[[0, 111], [202, 303]], [[4, 5], [6066, 7077]]]


def test_any_arity_is_dispatched():
    result = run(SparseDispatcher(DynamicKSelection(3), combination=EqualCombination()))
    assert result.capacity.route_arity.tolist() == [[3, 1], [0, 2]]
    assert result.output.tolist() == [[[0, 370], [200, 300]], [[4, 5], [3030, 3535]]]
    assert result.mixture_weights.shape == (2, 2, 3)


@pytest.mark.parametrize("combination", [ScoreSoftmaxCombination(), AlwaysOnAnchorCombination()])
@pytest.mark.parametrize("at_once", [1, 2])
def test_outputs_may_be_combined_a_few_tokens_at_a_time(monkeypatch, at_once, combination):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 7, 2, generator=generator)
    scores = torch.randn(2, 7, 3, generator=generator) - 0.5
    dispatcher = SparseDispatcher(DynamicKSelection(3), PromoteSurvivorsCapacity(), combination)
    whole = run(dispatcher, hidden=hidden, scores=scores)
    assert whole.capacity.route_arity.unique().tolist() == [0, 1, 2, 3]
    monkeypatch.setattr(dispatch, "AT_ONCE", at_once)
    parts = run(dispatcher, hidden=hidden, scores=scores)
    assert torch.equal(parts.output, whole.output) and torch.equal(parts.mixture_weights, whole.mixture_weights)


def test_gradients_reach_the_scores_of_every_arity():
    scores = (torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0)) - 0.5).requires_grad_()
    hidden = torch.randn(2, 7, 2, generator=torch.Generator().manual_seed(1))
    result = run(SparseDispatcher(DynamicKSelection(3)), hidden=hidden, scores=scores)
    result.output.sum().backward()
    arity = result.capacity.route_arity
    assert arity.unique().tolist() == [0, 1, 2, 3]
    assert (scores.grad[arity >= 2] != 0).any(-1).all() and not scores.grad[arity < 2].any()


def test_ragged_packages_are_dispatched():
    dispatcher = SparseDispatcher(HierarchicalSelection((2, 1), AdaptiveTop1Top2Selection(), "given"))
    packages = torch.tensor([[[1.0, 2.0], [1.0, -1.0]], [[1.0, 1.0], [0.0, 0.0]]])
    result = run(dispatcher, package_scores=packages)
    assert result.capacity.decision.selected_indices.tolist() == [[[3, 0], [2, 0]], [[0, 0], [0, 0]]]


def test_token_arguments_follow_their_tokens():
    position = torch.tensor([[0, 1], [2, 3]])
    table = torch.arange(12.0).view(2, 2, 3)
    seen = {}

    def mlp(name):
        def run(rows, *, position, table):
            seen[name] = position.tolist()
            return rows + table[..., :2]

        return run

    result = run(
        SparseDispatcher(),
        mlp("anchor"),
        [mlp("a:0"), mlp("a:1"), mlp("b:0")],
        token_args={"position": position, "table": table},
    )
    assert seen == {"anchor": [2], "a:0": [0, 3], "a:1": [0, 1], "b:0": [3]}
    torch.testing.assert_close(result.output, HIDDEN + table[..., :2])
    dense = run(
        SparseDispatcher(),
        mlp("anchor"),
        [never] * 3,
        scores=-SCORES.abs(),
        token_args={"position": position, "table": table},
    )
    assert seen["anchor"] == position.tolist() and torch.equal(dense.output, HIDDEN + table[..., :2])


def test_features_reach_a_learned_head():
    head = LearnedMixtureCombination(((1.0,), (0.0,)), (0.0, 0.0))
    features = torch.tensor([[[0.0], [9.0]], [[9.0], [200.0]]])
    result = run(SparseDispatcher(combination=head), mixture_features=features)
    assert result.mixture_weights.tolist() == [[[0.5, 0.5], [1, 0]], [[0, 0], [1, 0]]]
    both = run(SparseDispatcher(combination=AlwaysOnAnchorCombination(head)), mixture_features=features)
    assert both.mixture_weights.tolist() == result.mixture_weights.tolist()


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_an_empty_batch(shape):
    result = run(SparseDispatcher(), hidden=torch.empty(*shape, 2), scores=torch.empty(*shape, 3))
    assert result.output.shape == (*shape, 2) and result.mixture_weights.shape == (*shape, 2)


def test_no_specialists_at_all():
    result = SparseDispatcher().dispatch(
        HIDDEN, expert_scores=torch.empty(2, 2, 0), expert_ids=(), anchor_mlp=times(3), experts=()
    )
    assert torch.equal(result.output, 3 * HIDDEN) and result.capacity.route_arity.sum() == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_precisions(dtype):
    result = run(SparseDispatcher(), hidden=HIDDEN.to(dtype), scores=SCORES.to(dtype))
    assert result.output.dtype == dtype and result.output[0, 1].tolist() == [200, 300]
    mixed = run(SparseDispatcher(), hidden=HIDDEN.to(dtype), scores=SCORES.float())
    assert mixed.output.dtype == dtype and mixed.mixture_weights.dtype == torch.float32


def test_gradients_flow_through_what_ran():
    hidden, scores = HIDDEN.clone().requires_grad_(), SCORES.clone().requires_grad_()
    layers = [torch.nn.Linear(2, 2) for _ in range(4)]
    result = run(SparseDispatcher(AnchorVetoTop2Selection()), layers[0], layers[1:], hidden=hidden, scores=scores)
    result.output.square().sum().backward()
    assert all(layer.weight.grad is not None for layer in layers)
    assert (hidden.grad != 0).any(-1).all()
    # The pair of the first token and of the last; no other score has a say.
    assert (scores.grad != 0).tolist() == [[[True, True, False], [False] * 3], [[False] * 3, [True, False, True]]]
    assert not result.capacity.decision.selected_indices.requires_grad


def test_inputs_are_not_written_to():
    hidden, scores = HIDDEN.clone(), SCORES.clone()
    result = run(SparseDispatcher(combination=AlwaysOnAnchorCombination()), lambda rows: rows, hidden=hidden)
    assert torch.equal(hidden, HIDDEN) and torch.equal(scores, SCORES)
    assert result.output.data_ptr() != hidden.data_ptr()


@pytest.mark.parametrize("row", [0, 1, 2])
@pytest.mark.parametrize("combination", ["softmax", "always on", "learned"])
def test_one_token_is_run_as_tensors_are(combination, row):
    """By plain numbers, as in decode, and by a decision of tensors: both get all that a token brings."""
    head = LearnedMixtureCombination(((0.1,), (0.0,)), (0.0, 0.0))
    combination = {"softmax": ScoreSoftmaxCombination(), "learned": head}.get(combination, AlwaysOnAnchorCombination())
    dispatcher = SparseDispatcher(combination=combination)
    scores = SCORES.flatten(0, 1)[row].view(1, 1, 3)
    fast = dispatcher.route(scores, expert_ids=IDS)
    tensors = {name: getattr(fast.decision, name) for name in ("selected_indices", "selected_scores")}
    decision = TopKDecision(**tensors, expert_ids=IDS)
    slow = PromoteSurvivorsCapacity()(decision, expert_availability=None)
    assert fast.effective_routes.plain is not None and slow.effective_routes.plain is None
    seen = []

    def mlp(factor):
        def run(rows, *, position):
            seen.append((factor, rows.tolist(), position.tolist()))
            rows *= factor  # what an expert does to its rows is nobody else's business
            return rows

        return run

    hidden = HIDDEN[:1, 1:].clone()
    results = []
    for routes in (slow, fast):
        results.append(
            dispatcher.execute(
                routes,
                hidden,
                anchor_mlp=lambda rows, *, position: rows + 1,
                experts=[mlp(10), mlp(100), mlp(1000)],
                mixture_features=torch.ones(1, 1, 1) if combination is head else None,
                token_args={"position": torch.tensor([[7]])},
            )
        )
    want, got = results
    half = len(seen) // 2
    assert seen[half:] == sorted(seen[half:]) == sorted(seen[:half])
    assert torch.equal(got.output, want.output) and got.output.dtype == want.output.dtype
    assert torch.equal(got.mixture_weights, want.mixture_weights)
    assert got.mixture_weights.dtype == want.mixture_weights.dtype
    assert torch.equal(hidden, HIDDEN[:1, 1:])


def test_dispatch_records_nothing():
    imported = {
        alias.name for node in ast.walk(ast.parse(inspect.getsource(dispatch))) for alias in getattr(node, "names", ())
    }
    assert not any("telemetry" in name or "logging" in name or "time" in name for name in imported)


def test_bad_input_is_refused():
    def refusal(**wrong):
        given = {"expert_scores": SCORES, "expert_ids": IDS, "anchor_mlp": times(1), "experts": [times(1)] * 3}
        hidden = wrong.pop("hidden_states", HIDDEN)
        with pytest.raises(PolicyError) as error:
            SparseDispatcher().dispatch(hidden, **{**given, **wrong})
        assert error.value.expected is not None
        return error.value.field, error.value.got

    nan = SCORES * float("nan")
    assert refusal(hidden_states=HIDDEN[0]) == ("hidden_states", [2, 2])
    assert refusal(hidden_states=HIDDEN.long()) == ("hidden_states", "int64")
    assert refusal(expert_scores=SCORES[:, :1]) == ("expert_scores", [2, 1, 3])
    assert refusal(expert_scores=nan) == ("expert_scores", "nan at [0, 0, 0]")
    assert refusal(expert_ids=IDS[:2]) == ("expert_scores", [2, 2, 3])
    assert refusal(expert_ids=("a:0", "a:0", "b:0")) == ("expert_ids", "a:0")
    assert refusal(experts=[times(1)] * 2) == ("experts", 2)
    assert refusal(experts=None) == ("experts", "NoneType")
    assert refusal(experts=dict.fromkeys(range(3), times(1))) == ("experts", "dict")
    assert refusal(experts=[1, 2, 3]) == ("experts['a:0']", "int")
    assert refusal(anchor_mlp=None) == ("anchor_mlp", "NoneType")
    assert refusal(anchor_mlp=None, expert_scores=-SCORES.abs()) == ("anchor_mlp", "NoneType")
    assert refusal(expert_ids=None) == ("expert_ids", "NoneType")
    assert refusal(token_args=[HIDDEN]) == ("token_args", "list")
    assert refusal(package_scores=SCORES) == ("package_scores", "Tensor")
    assert refusal(expert_availability=torch.ones(2, dtype=torch.bool)) == ("expert_availability", [2])
    assert refusal(token_args={"position": torch.ones(4)}) == ("token_args['position']", [4])
    assert refusal(token_args={"position": [0, 1]}) == ("token_args['position']", "list")
    assert refusal(mixture_features=torch.ones(2, 2, 1)) == ("mixture_features", [2, 2, 1])
    assert refusal(anchor_mlp=lambda rows: rows[:, :1]) == ("anchor_mlp", [1, 1])
    assert refusal(experts=[times(1), lambda rows: rows.double(), times(1)]) == ("experts['a:1']", "float64")
    assert refusal(experts=[times(1), lambda rows: rows[:1], times(1)]) == ("experts['a:1']", [1, 2])
    head = SparseDispatcher(combination=LearnedMixtureCombination(((1.0,), (0.0,)), (0.0, 0.0)))
    with pytest.raises(PolicyError, match="mixture_features") as error:
        run(head)
    assert error.value.field == "mixture_features"


def test_a_dispatcher_is_made_of_policies():
    for name, wrong in (
        ("selection", None),
        ("selection", AnchoredTop1Selection),
        ("capacity", AnchoredTop1Selection()),
        ("combination", "equal"),
    ):
        with pytest.raises(PolicyError) as error:
            SparseDispatcher(**{name: wrong})
        assert error.value.field == name and error.value.expected == name.capitalize()


def test_a_module_list_is_a_list_of_experts():
    experts = torch.nn.ModuleList([torch.nn.Identity() for _ in IDS])
    assert torch.equal(run(SparseDispatcher(combination=EqualCombination()), experts=experts).output, HIDDEN)


def test_routes_decided_before_run_as_they_do_at_once():
    availability = torch.tensor([True, False, True])
    dispatcher, experts = SparseDispatcher(), [times(10), times(100), times(1000)]
    routes = dispatcher.route(SCORES, expert_ids=IDS, expert_availability=availability)
    apart = dispatcher.execute(routes, HIDDEN, anchor_mlp=times(1), experts=experts)
    assert torch.equal(apart.output, run(dispatcher, expert_availability=availability).output)
    with pytest.raises(PolicyError, match="expert_scores"):
        dispatcher.route(SCORES, tokens=(2, 3), expert_ids=IDS)
