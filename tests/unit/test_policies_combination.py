"""Weights, mixtures, the always-on anchor, and the learned head with its fit."""

import math

import pytest
import torch

from moelab.errors import PolicyError
from moelab.policies import (
    AlwaysOnAnchorCombination,
    EqualCombination,
    LearnedMixtureCombination,
    PositiveEvidenceCombination,
    ScoreSoftmaxCombination,
    UnitWeights,
    fit_mixture_head,
)

SCORES = torch.tensor([[3.0, 1.0], [0.5, 0.5]])
OUTPUTS = torch.tensor([[[1.0, 0.0, 2.0], [0.0, 4.0, 2.0]], [[2.0, 2.0, 2.0], [4.0, 0.0, 2.0]]])
HEAD = LearnedMixtureCombination(weight=((1.0, 0.0), (0.0, 1.0)), bias=(0.0, 0.0))
WEIGHTINGS = (ScoreSoftmaxCombination(), EqualCombination(), PositiveEvidenceCombination())


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_weights():
    e = 1 / (1 + math.exp(-2))
    assert ScoreSoftmaxCombination().weigh(SCORES).tolist() == [pytest.approx([e, 1 - e]), [0.5, 0.5]]
    assert PositiveEvidenceCombination().weigh(SCORES).tolist() == [[0.75, 0.25], [0.5, 0.5]]
    assert EqualCombination().weigh(SCORES).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert UnitWeights().weigh(SCORES).tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize("combination", [*WEIGHTINGS, UnitWeights()], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("score", [1e-38, 0.1, 7.0, 3e38])
def test_a_lone_specialist_has_weight_exactly_one(combination, score):
    assert combination.weigh(torch.tensor([[score]])).tolist() == [[1.0]]


def test_positive_evidence_neither_overflows_nor_vanishes():
    extreme = torch.tensor([[3e38, 3e38], [1e-45, 1e-45]])
    assert PositiveEvidenceCombination().weigh(extreme).tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_mixture_is_the_weighted_sum():
    mixture = PositiveEvidenceCombination()(OUTPUTS, selected_scores=SCORES)
    assert mixture.output.tolist() == [[0.75, 1.0, 2.0], [3.0, 1.0, 2.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_outputs_keep_their_dtype_and_weights_are_at_least_float32(dtype):
    mixture = ScoreSoftmaxCombination()(OUTPUTS.to(dtype), selected_scores=SCORES.to(dtype))
    assert mixture.output.dtype == dtype
    assert mixture.weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_always_on_anchor_with_weights_that_sum_to_one_is_the_plain_mixture():
    anchor = rand(2, 3)
    for weighting in WEIGHTINGS:
        plain = weighting(OUTPUTS, selected_scores=SCORES).output
        corrected = AlwaysOnAnchorCombination(weighting)(OUTPUTS, selected_scores=SCORES, anchor_output=anchor)
        # The same sum in another order: a few float32 roundings of numbers below 8.
        torch.testing.assert_close(corrected.output, plain, atol=4e-6, rtol=0)


def test_always_on_anchor_with_unit_weights_adds_every_correction_whole():
    anchor = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    combination = AlwaysOnAnchorCombination(UnitWeights())
    corrected = combination(OUTPUTS, selected_scores=SCORES, anchor_output=anchor)
    assert corrected.output.tolist() == [[0.0, 3.0, 3.0], [6.0, 2.0, 4.0]]
    assert corrected.weights.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_delta_specialists_are_corrections_already():
    anchor = rand(2, 3)
    complete = AlwaysOnAnchorCombination()(
        OUTPUTS + anchor.unsqueeze(1), selected_scores=SCORES, anchor_output=anchor
    ).output
    delta = AlwaysOnAnchorCombination(expert_outputs="delta")(OUTPUTS, selected_scores=SCORES, anchor_output=anchor)
    # Adding the anchor and taking it away again rounds twice.
    torch.testing.assert_close(delta.output, complete, atol=2e-6, rtol=0)


def test_gradient_reaches_scores_only_where_the_weights_depend_on_them():
    for combination, flows in zip(WEIGHTINGS, (True, False, True), strict=True):
        scores, outputs = SCORES.clone().requires_grad_(), OUTPUTS.clone().requires_grad_()
        combination(outputs, selected_scores=scores).output.square().sum().backward()
        assert outputs.grad.abs().sum() > 0
        assert (scores.grad is not None and bool(scores.grad.abs().sum() > 0)) == flows
    scores, outputs, features = (rand(*s).requires_grad_() for s in ((2, 2), (2, 2, 3), (2, 2)))
    HEAD(outputs, selected_scores=scores, features=features).output.sum().backward()
    assert scores.grad is None and features.grad is None and outputs.grad is not None


def test_gradients_of_the_weights_are_right():
    scores = SCORES.double().requires_grad_()
    outputs = OUTPUTS.double().requires_grad_()
    for combination in (ScoreSoftmaxCombination(), PositiveEvidenceCombination()):
        assert torch.autograd.gradcheck(lambda y, s, c=combination: c(y, selected_scores=s).output, (outputs, scores))


def test_learned_head_weighs_by_features_and_not_by_scores():
    features = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    weights = HEAD.weigh(SCORES, features=features)
    assert weights.tolist() == [[0.5, 0.5], pytest.approx([0.75, 0.25])]
    assert torch.equal(HEAD.weigh(SCORES.flip(-1), features=features), weights)
    assert HEAD.weigh(SCORES[:, :1], features=features).tolist() == [[1.0], [1.0]]


def test_fit_recovers_a_head():
    features, outputs = rand(400, 3), rand(400, 2, 8, seed=1)
    truth = LearnedMixtureCombination(weight=((1.0, -0.5, 0.0), (0.0, 0.0, 0.5)), bias=(0.3, 0.0))
    scores = torch.ones(400, 2)
    targets = truth(outputs, selected_scores=scores, features=features).output
    head = fit_mixture_head(features, outputs, targets, l2=0.0)
    # Noise-free targets: what is left is float32 rounding of the targets and the solver's tolerance.
    torch.testing.assert_close(
        head.weigh(scores, features=features), truth.weigh(scores, features=features), atol=1e-4, rtol=0
    )
    assert fit_mixture_head(features, outputs, targets, l2=0.0) == head, "the fit is deterministic"


def test_fit_with_a_heavy_penalty_is_near_equal_weights_and_beats_them_with_a_light_one():
    features, outputs = rand(100, 3), rand(100, 2, 8, seed=1)
    targets = torch.where(features[:, :1] > 0, outputs[:, 0], outputs[:, 1])
    scores = torch.ones(100, 2)
    heavy = fit_mixture_head(features, outputs, targets, l2=1e6).weigh(scores, features=features)
    assert (heavy - 0.5).abs().max() < 0.1
    mixed = fit_mixture_head(features, outputs, targets)(outputs, selected_scores=scores, features=features)
    equal = EqualCombination()(outputs, selected_scores=scores)
    assert (mixed.output - targets).square().mean() < 0.2 * (equal.output - targets).square().mean()


def test_fit_trains_the_head_alone():
    features, outputs, targets = (rand(*s).requires_grad_() for s in ((9, 2), (9, 2, 3), (9, 3)))
    with torch.no_grad():
        head = fit_mixture_head(features, outputs, targets)
    assert features.grad is None and outputs.grad is None and targets.grad is None
    assert isinstance(head.weight[0][0], float)
    with pytest.raises(AttributeError):
        head.bias = (0.0, 0.0)


def refusal(call):
    with pytest.raises(PolicyError) as error:
        call()
    assert error.value.expected is not None
    return error.value.field, error.value.got


@pytest.mark.parametrize("combination", [*WEIGHTINGS, UnitWeights()], ids=lambda c: type(c).__name__)
def test_bad_input_is_refused(combination):
    def call(outputs, scores, **extra):
        return refusal(lambda: combination(outputs, selected_scores=scores, **extra))

    assert call(OUTPUTS, SCORES.long()) == ("selected_scores", "int64")
    assert call(OUTPUTS, SCORES[0]) == ("selected_scores", [2])
    assert call(OUTPUTS, SCORES * math.inf) == ("selected_scores", "inf at [0, 0]")
    assert call(OUTPUTS, SCORES * math.nan) == ("selected_scores", "nan at [0, 0]")
    assert call(OUTPUTS[0], SCORES) == ("ranked_outputs", [2, 3])
    assert call(OUTPUTS[:1], SCORES) == ("ranked_outputs", [1, 2, 3])
    assert call(OUTPUTS.long(), SCORES) == ("ranked_outputs", "int64")
    assert call(OUTPUTS, SCORES, features=SCORES) == ("features", "Tensor")


def test_other_bad_input_is_refused():
    assert refusal(lambda: PositiveEvidenceCombination().weigh(torch.tensor([[1.0, 0.0]]))) == ("selected_scores", 0.0)
    assert refusal(lambda: HEAD.weigh(SCORES)) == ("features", None)
    assert refusal(lambda: HEAD.weigh(SCORES, features=SCORES[:, :1])) == ("features", [2, 1])
    assert refusal(lambda: HEAD.weigh(SCORES, features=SCORES * math.nan)) == ("features", "nan at [0, 0]")
    assert refusal(lambda: HEAD.weigh(torch.ones(2, 3), features=SCORES)) == ("selected_scores", 3)
    assert refusal(lambda: LearnedMixtureCombination(((1.0,), (1.0, 2.0)), (0.0, 0.0))) == ("weight", [1, 2])
    assert refusal(lambda: LearnedMixtureCombination(((1.0,),), (0.0, 0.0))) == ("weight", [1])
    assert refusal(lambda: LearnedMixtureCombination(((1.0,),), (math.inf,))) == ("bias", math.inf)
    assert refusal(lambda: LearnedMixtureCombination((("1",),), (0.0,))) == ("weight", "1")
    assert refusal(lambda: AlwaysOnAnchorCombination(expert_outputs="partial")) == ("expert_outputs", "partial")
    nested = AlwaysOnAnchorCombination()
    assert refusal(lambda: AlwaysOnAnchorCombination(nested)) == ("weighting", "AlwaysOnAnchorCombination")
    call = AlwaysOnAnchorCombination()
    anchor = torch.ones(2, 3)
    assert refusal(lambda: call(OUTPUTS, selected_scores=SCORES, anchor_output=anchor[:1])) == ("anchor_output", [1, 3])
    assert refusal(lambda: call(OUTPUTS, selected_scores=SCORES, anchor_output=anchor.double())) == (
        "anchor_output",
        "float64",
    )
    features, targets = torch.ones(2, 4), torch.ones(2, 3)
    assert refusal(lambda: fit_mixture_head(features[:1], OUTPUTS, targets)) == ("ranked_outputs", [2, 2, 3])
    assert refusal(lambda: fit_mixture_head(features, OUTPUTS, targets[:, :2])) == ("targets", [2, 2])
    assert refusal(lambda: fit_mixture_head(features, OUTPUTS, targets, l2=-1.0)) == ("l2", -1.0)
    assert refusal(lambda: fit_mixture_head(features[:0], OUTPUTS[:0], targets[:0])) == ("features", 0)
    assert refusal(lambda: fit_mixture_head(features, OUTPUTS, targets * math.nan)) == ("targets", "nan at [0, 0]")
