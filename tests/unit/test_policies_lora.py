"""Merging updates before one execution equals building every merged matrix."""

import copy

import pytest
import torch
from torch import nn

from moelab.errors import PolicyError
from moelab.policies import (
    AdaptiveTop1Top2Selection,
    AlwaysOnAnchorCombination,
    DynamicKSelection,
    EqualCombination,
    LoRAMergeDispatcher,
    LoRASpecialist,
    LoRAUpdate,
    PositiveEvidenceCombination,
    SparseDispatcher,
)
from moelab.specialists import GatedMlp

H, F, R = 6, 10, 2
IDS = ("a:0", "b:0", "c:0")
SHAPES = {"gate_proj": (F, H), "up_proj": (F, H), "down_proj": (H, F)}


def make_lora(seed, names=tuple(SHAPES)):
    draw = torch.Generator().manual_seed(seed)
    return LoRASpecialist(
        {
            name: LoRAUpdate(
                torch.randn(R, SHAPES[name][1], generator=draw), torch.randn(SHAPES[name][0], R, generator=draw), 0.3
            )
            for name in names
        }
    )


@pytest.fixture
def anchor():
    torch.manual_seed(0)
    return GatedMlp(H, F).requires_grad_(False)


@pytest.fixture
def batch():
    draw = torch.Generator().manual_seed(5)
    return torch.randn(2, 7, H, generator=draw), torch.randn(2, 7, 3, generator=draw)


def merge(anchor, specialists, weights):
    """The anchor with the weighted updates really added to its matrices."""
    merged = copy.deepcopy(anchor)
    for specialist, weight in zip(specialists, weights, strict=True):
        for name, update in specialist.updates.items():
            merged.get_submodule(name).weight += weight * update.scale * update.up @ update.down
    return merged


def run(dispatcher, anchor, experts, hidden, scores, **more):
    return dispatcher.dispatch(hidden, expert_scores=scores, expert_ids=IDS, anchor_mlp=anchor, experts=experts, **more)


@pytest.mark.parametrize("selection", [AdaptiveTop1Top2Selection(), DynamicKSelection(3)])
def test_merging_equals_materialised_matrices(anchor, batch, selection):
    # The second specialist updates one projection only.
    experts = [make_lora(1), make_lora(2, ("up_proj",)), make_lora(3)]
    dispatcher = LoRAMergeDispatcher(selection, combination=PositiveEvidenceCombination())
    availability = torch.tensor([True, True, False])
    for available in (None, availability):
        result = run(dispatcher, anchor, experts, *batch, expert_availability=available)
        routes = result.capacity.effective_routes
        assert {0, 1, 2} <= set(routes.route_arity.flatten().tolist())
        for b in range(2):
            for t in range(7):
                active = [i for i in routes.selected_indices[b, t].tolist() if i]
                weights = result.mixture_weights[b, t, : len(active)]
                if active:
                    torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
                token = merge(anchor, [experts[i - 1] for i in active], weights)(batch[0][b, t])
                # The same sums in another order, in float32, of numbers up to about 10.
                torch.testing.assert_close(result.output[b, t], token, atol=2e-5, rtol=1e-5)


def test_one_specialist_and_identical_ones_agree_with_mixing_outputs_and_others_do_not(anchor, batch):
    def compare(loras):
        complete = [merge(anchor, [lora], [1.0]) for lora in loras]
        merged = run(LoRAMergeDispatcher(), anchor, loras, *batch).output
        mixed = run(SparseDispatcher(), anchor, complete, *batch)
        return (merged - mixed.output).abs().amax(-1), mixed.capacity.route_arity

    gap, arity = compare([make_lora(1)] * 3)
    assert gap.max() < 2e-5
    gap, arity = compare([make_lora(1), make_lora(2), make_lora(3)])
    assert gap[arity < 2].max() < 2e-5
    assert gap[arity == 2].min() > 1e-3


def test_the_anchor_runs_once_for_all_merged_tokens_and_is_left_alone(anchor, batch):
    before = copy.deepcopy(anchor.state_dict())
    calls = []
    handle = anchor.register_forward_hook(lambda module, inputs, output: calls.append(len(inputs[0])))
    result = run(LoRAMergeDispatcher(), anchor, [make_lora(n) for n in range(3)], *batch)
    handle.remove()
    idle = int(result.capacity.effective_routes.anchor_mask.sum())
    assert calls == [idle, 14 - idle]
    assert all(torch.equal(before[name], value) for name, value in anchor.state_dict().items())
    assert not any(layer._forward_hooks for layer in anchor.modules())


def test_hooks_go_even_when_the_anchor_fails(anchor, batch):
    hidden, scores = batch
    anchor.down_proj.forward = lambda x: 1 / 0
    with pytest.raises(ZeroDivisionError):
        # Every token has a specialist, so what fails is the merged run.
        run(LoRAMergeDispatcher(), anchor, [make_lora(n) for n in range(3)], hidden, scores.abs())
    assert not any(layer._forward_hooks for layer in anchor.modules())


def test_tokens_without_a_specialist_are_the_anchors(anchor, batch):
    hidden, scores = batch
    experts = [make_lora(n) for n in range(3)]
    idle = run(LoRAMergeDispatcher(), anchor, experts, hidden, -scores.abs())
    assert torch.equal(idle.output, anchor(hidden)) and not idle.mixture_weights.any()
    result = run(LoRAMergeDispatcher(), anchor, experts, hidden, scores)
    mask = result.capacity.effective_routes.anchor_mask
    assert mask.any() and torch.equal(result.output[mask], anchor(hidden[mask]))


def test_gradients_reach_scores_and_updates(anchor, batch):
    hidden, scores = batch[0], batch[1].clone().requires_grad_()
    experts = [make_lora(n) for n in range(3)]
    for expert in experts:
        for update in expert.updates.values():
            update.up.requires_grad_()
    run(LoRAMergeDispatcher(), anchor, experts, hidden, scores).output.sum().backward()
    assert scores.grad.abs().sum() > 0 and experts[0].updates["gate_proj"].up.grad.abs().sum() > 0


def test_bad_input_is_refused(anchor, batch):
    def refusal(call):
        with pytest.raises(PolicyError) as error:
            call()
        assert error.value.expected is not None
        return error.value.field, error.value.got

    good = make_lora(1)
    update = good.updates["gate_proj"]
    field = "experts['b:0'].updates['gate_proj']"

    def dispatch(second):
        return refusal(lambda: run(LoRAMergeDispatcher(), anchor, [good, second, good], *batch))

    assert dispatch(nn.Linear(H, H)) == ("experts['b:0']", "Linear")
    assert dispatch(LoRASpecialist({"lm_head": update})) == ("experts['b:0'].updates['lm_head']", "lm_head")
    half = LoRAUpdate(update.down.half(), update.up.half())
    assert dispatch(LoRASpecialist({"gate_proj": half})) == (f"{field}.down", "float16")
    assert dispatch(LoRASpecialist({"gate_proj": good.updates["down_proj"]})) == (f"{field}.down", [R, F])
    assert refusal(lambda: LoRAUpdate(update.down, update.up.T)) == ("up", [R, F])
    assert refusal(lambda: LoRAUpdate(update.down, update.up, float("inf"))) == ("scale", float("inf"))
    assert refusal(lambda: LoRAUpdate(update.down, update.up, "1")) == ("scale", "1")
    always_on = AlwaysOnAnchorCombination(EqualCombination())
    assert refusal(lambda: LoRAMergeDispatcher(combination=always_on)) == ("combination", "AlwaysOnAnchorCombination")
