"""Training of reference models: the losses against plain loops, resumption to the bit, and what is refused."""

import dataclasses

import numpy as np
import pytest
import torch

from moelab.errors import IdentityError, MoelabError, ParameterError
from moelab.reference import training
from moelab.reference.recipe import Recipe, make_network
from moelab.reference.routers import RouterTap, balance_loss, move_bias

SMALL = dict(hidden=32, layers=2, heads=1, kv_heads=1, experts=8, top_k=2, expert_width=8, groups=4, kept_groups=2)
VOCABULARY = 97


@pytest.fixture(autouse=True)
def one_thread():
    # Bit equality is asked for below, and the order of additions depends on the number of threads.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recipe(family="softmax", **other):
    return Recipe(family=family, **{**SMALL, "steps": 12, "batch": 4, "window": 16, "warmup": 2, **other})


@pytest.fixture(scope="module")
def streams():
    draw = np.random.default_rng(0)
    # Each token is one of two that may follow the last: there is something to learn.
    text = np.cumsum(draw.integers(1, 3, size=3000)) % VOCABULARY
    return {"a": text[:1000].astype(np.int32), "b": text[1000:].astype(np.int32)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"family": "hash"}, "unknown family"),
        ({"heads": 3, "kv_heads": 2}, "field: heads"),
        ({"experts": 9}, "field: experts"),
        ({"groups": 2, "kept_groups": 3}, "field: groups"),
        ({"family": "sigmoid", "groups": 8, "kept_groups": 1}, "field: kept_groups"),
    ],
)
def test_counts_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ParameterError, match=words):
        recipe(**change)


def test_the_rate_rises_stays_and_falls_to_zero():
    made = recipe(steps=100, warmup=10, decay=0.4, peak_rate=1.0)
    rates = [made.rate(step) for step in range(100)]
    assert rates[0] == 0.1 and rates[9:61] == [1.0] * 52
    np.testing.assert_allclose(np.diff(rates[60:]), -1 / 40)
    assert 0 < rates[99] < 0.03
    assert [made.decaying(step) for step in (59, 60)] == [False, True]


@pytest.mark.parametrize("sigmoid", [False, True])
def test_balance_loss_is_the_formula(sigmoid):
    torch.manual_seed(0)
    logits = [torch.randn(20, 6) for _ in range(3)]
    ids = [layer.topk(2).indices for layer in logits]
    total = 0.0
    for layer, chosen in zip(logits, ids, strict=True):
        for expert in range(6):
            share = sum(int(e) == expert for row in chosen for e in row) / (20 * 2)
            score = layer.sigmoid() if sigmoid else layer.exp()
            probability = sum(float(score[n, expert] / score[n].sum()) for n in range(20)) / 20
            total += 6 * share * probability / 3
    # float32 sums of 20 terms
    assert float(balance_loss(logits, ids, sigmoid=sigmoid)) == pytest.approx(total, rel=1e-5)


def test_balance_is_asked_of_each_layer_by_itself():
    even = [torch.zeros(4, 2)] * 2
    assert float(balance_loss(even, [torch.tensor([[0], [0], [1], [1]])] * 2, sigmoid=False)) == 1.0
    # Two layers that collapse on different experts look even when they are counted together.
    collapsed = [torch.tensor([[20.0, -20.0]]).repeat(4, 1), torch.tensor([[-20.0, 20.0]]).repeat(4, 1)]
    ids = [layer.argmax(-1, keepdim=True) for layer in collapsed]
    assert float(balance_loss(collapsed, ids, sigmoid=False)) == pytest.approx(2.0)


def test_the_bias_rises_where_too_few_choices_fell():
    network = make_network(recipe("sigmoid"), VOCABULARY)
    ids = [torch.tensor([[0, 1], [0, 1], [0, 2], [0, 3]])] * 2
    move_bias(network, ids, 0.5)
    bias = network.model.layers[1].mlp.gate.e_score_correction_bias
    # 8 choices over 8 experts: one each is the mean, so experts 2 and 3 stay where they are.
    assert bias.tolist() == [-0.5, -0.5, 0.0, 0.0, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("family", ["softmax", "sigmoid"])
def test_the_tap_sees_what_each_gate_returned(family):
    network = make_network(recipe(family), VOCABULARY).eval()
    tokens = torch.arange(10).reshape(2, 5)
    with torch.no_grad():
        plain = network(input_ids=tokens).logits
        with RouterTap(network) as tap:
            tapped = network(input_ids=tokens).logits
    assert torch.equal(plain, tapped)
    assert [tuple(part.shape) for part in (tap.logits[1], tap.weights[1], tap.ids[1])] == [(10, 8), (10, 2), (10, 2)]
    assert not any(layer.mlp.gate._forward_hooks for layer in network.model.layers)


def test_the_same_seed_gives_the_same_network_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    one, two, other = (make_network(recipe(seed=seed), VOCABULARY).lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


def test_next_token_loss_is_minus_the_log_probability():
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 4, 5), torch.randint(5, (2, 4))
    expected = [[-float(logits[b, t].log_softmax(-1)[tokens[b, t + 1]]) for t in range(3)] for b in range(2)]
    np.testing.assert_allclose(training.next_token_loss(logits, tokens), expected, rtol=1e-5)


@pytest.mark.parametrize("family", ["softmax", "sigmoid"])
def test_training_learns(family, streams):
    trained = training.train(recipe(family, steps=60, peak_rate=1e-2), streams, VOCABULARY)
    assert trained.loss.shape == trained.balance.shape == (60,)
    assert trained.loss[:3].mean() == pytest.approx(np.log(VOCABULARY), rel=0.05)
    assert trained.loss[-5:].mean() < 0.8 * trained.loss[0]
    figures = training.evaluate(trained.network, streams, window=16, limit=5)
    assert {domain: n for domain, (_, n) in figures.items()} == {"a": 75, "b": 75}
    assert all(nats < 0.8 * trained.loss[0] for nats, _ in figures.values())
    if family == "sigmoid":
        biases = [layer.mlp.gate.e_score_correction_bias for layer in trained.network.model.layers]
        assert all(float(bias.abs().max()) > 0 for bias in biases)


@pytest.mark.parametrize("family", ["softmax", "sigmoid"])
def test_resumed_training_equals_training_that_was_never_stopped(family, streams, tmp_path):
    whole = training.train(recipe(family), streams, VOCABULARY)
    for _ in range(3):
        parts = training.train(recipe(family), streams, VOCABULARY, folder=tmp_path, save_every=2, stop_after=5)
    np.testing.assert_array_equal(whole.loss, parts.loss)
    for (name, a), (_, b) in zip(whole.network.state_dict().items(), parts.network.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


def test_the_state_of_another_recipe_or_text_is_refused(streams, tmp_path):
    training.train(recipe(), streams, VOCABULARY, folder=tmp_path, stop_after=2)
    other = {"a": streams["a"]}
    for made, text in ((dataclasses.replace(recipe(), seed=1), streams), (recipe(), other)):
        with pytest.raises(IdentityError, match="another recipe or text"):
            training.train(made, text, VOCABULARY, folder=tmp_path)


def test_a_loss_that_is_not_finite_ends_training(streams, monkeypatch):
    def diverged(logits, tokens):
        return (logits * float("nan")).sum((1, 2))

    monkeypatch.setattr(training, "next_token_loss", diverged)
    with pytest.raises(MoelabError, match="diverged at step 0"):
        training.train(recipe(), streams, VOCABULARY)
