"""Advice that is worked out on the host is what the heads say in mlx, and never a route."""

import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import prerouter_world as world
import pytest

from moelab.models.families import RoutingFamily
from moelab.prerouter import HeadBank, PrerouterHead, SharedHead, Source, install_prerouter
from moelab.prerouter.advice import SLACK, Advice, HostHead, chooser, gelu
from moelab.prerouter.calls import Features, HeadCalls

H, E, K, D = 24, 32, 4, 40
SOFTMAX = RoutingFamily(top_k=K, score="softmax", normalise=True, keeps="last")
GROUPS = RoutingFamily(top_k=K, score="sigmoid", normalise=True, scale=2.5, groups=8, kept_groups=4)
PROMPT = [23, 99, 41, 7, 150]
HEADS = {"qwen": 3, "bail": 2}
ENGINES = world.Engines()


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    ENGINES.close()


def drawn(rng, *shape, dtype=mx.float16):
    return mx.array((rng.normal(size=shape) / math.sqrt(shape[-1])).astype(np.float32)).astype(dtype)


def bank(form, *, precision="float32", seed=0):
    rng, features = np.random.default_rng(seed), H + 2 * E
    if form == "full":
        made = [(drawn(rng, D, features), drawn(rng, E, D), drawn(rng, E, features)) for _ in range(2)]
        return HeadBank({3 + i: PrerouterHead(*parts, precision=precision) for i, parts in enumerate(made)})
    trunk = drawn(rng, 5, features)
    made = [(trunk, drawn(rng, 5) * 8, drawn(rng, E, 5)) for _ in range(2)]
    return HeadBank({3 + i: SharedHead(*parts, precision=precision) for i, parts in enumerate(made)})


def seen(seed, *, previous=True, dtype=mx.float32):
    """Features of a layer at a token, at the scale of what experts read."""
    rng = np.random.default_rng(seed)
    ids = [mx.array(rng.choice(E, K, replace=False).astype(np.uint32)).reshape(1, 1, K) for _ in range(2)]
    return Features(drawn(rng, 1, 1, H, dtype=dtype) * 4, ids[0], ids[1] if previous else None)


def test_gelu_is_the_exact_one():
    x = np.linspace(-9, 9, 100_001).astype(np.float32)
    exact = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()]
    assert (np.abs(gelu(x) - exact) <= 3e-7 * np.abs(x)).all() and gelu(x).dtype == np.float32


@pytest.mark.parametrize("form", ["full", "shared"])
@pytest.mark.parametrize("previous", [True, False])
def test_a_head_on_the_host_is_the_head(form, previous):
    heads = bank(form)
    for seed, owner in enumerate(heads.owners):
        f = seen(seed, previous=previous)
        want = np.array(heads.head(owner)(f.hidden, f.current, f.previous)).reshape(-1)
        host = HostHead(heads.head(owner))
        ids = [None if a is None else np.array(a).reshape(-1) for a in (f.current, f.previous)]
        got = host(np.array(f.hidden).reshape(-1), *ids)
        # float32 sums of some hundred terms near 1, in another order; beside it gelu's 3e-7
        np.testing.assert_allclose(got, want, atol=5e-6, rtol=0)
        assert got.dtype == np.float32 and np.abs(want).max() > 0.1


def test_the_host_reads_the_heads_own_memory():
    heads = bank("full")
    for owner in heads.owners:
        head = heads.head(owner)
        for name, array in HostHead(head)._arrays.items():
            assert array.ctypes.data == np.asarray(head.arrays[name]).ctypes.data
            assert array.base is not None and array.shape == head.arrays[name].shape


@pytest.mark.parametrize("family", [SOFTMAX, GROUPS])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_advice_is_what_mlx_says(family, biased, dtype):
    heads, names, pairs = bank("full"), {0: 3, 1: 4}, {3: (1.5, -0.5), 4: (0.5, 0.25)}
    biases = {owner: drawn(np.random.default_rng(9), E, dtype=mx.float32) * 2 for owner in names} if biased else {}
    advice = Advice(heads, names, pairs, family, biases, extra=3)
    calls = HeadCalls(heads, names, pairs)
    for seed in range(20):
        owner, f = seed % 2, seen(seed, previous=seed % 3 > 0, dtype=dtype)
        more = replace(family, top_k=K + 3)
        calls.ask([owner], f, lambda logits, more=more, owner=owner: more.select(logits, biases.get(owner)))
        [(_, want)] = calls.answer(K)
        got = advice(owner, f, "advise", 0.5)
        assert (got.ids, got.extra, got.weights) == (want.ids, want.extra, None) and len(got.extra) == 3
        np.testing.assert_allclose(got.scores, want.scores, atol=5e-6)  # as of the logits above
        np.testing.assert_allclose(got.probabilities, want.probabilities, atol=5e-6)
        np.testing.assert_allclose(np.array(got.logits).reshape(-1), np.array(want.logits).reshape(-1), atol=5e-6)
        assert got.confidence == pytest.approx(want.confidence, abs=SLACK / 100)


@pytest.mark.parametrize("worth", ["top2", "max"])
@pytest.mark.parametrize("dropped", [0.0, -math.inf])
@pytest.mark.parametrize("family", [SOFTMAX, GROUPS])
def test_a_row_is_scored_as_the_family_scores_it(family, worth, dropped):
    family, rng = replace(family, group_score=worth, dropped=dropped), np.random.default_rng(0)
    for bias in (None, rng.normal(size=E).astype(np.float32)):
        for _ in range(50):
            logits = rng.integers(-3, 4, E).astype(np.float32)  # with many ties, of groups as well
            given = logits.copy()
            np.testing.assert_array_equal(chooser(family, logits, bias), family.selection(logits, bias)[0])
            np.testing.assert_array_equal(logits, given)


def test_equally_likely_experts_come_by_number():
    zero = [mx.zeros(shape) for shape in ((D, H + 2 * E), (E, D), (E, H + 2 * E))]
    advice = Advice({3: PrerouterHead(*zero)}, {0: 3}, None, GROUPS, {})
    assert advice(0, seen(0), "advise", 0.5).ids == (0, 1, 2, 3)


def test_what_may_be_a_route_is_not_the_hosts():
    heads, pairs, f = bank("full"), {3: (1.0, 0.0), 4: (1.0, 0.0)}, seen(0)
    advice = Advice(heads, {0: 3, 1: 4}, pairs, SOFTMAX, {}, extra=2)
    sure = advice(0, f, "advise", 0.0).confidence
    assert advice(0, f, "gated", sure + 2 * SLACK).extra == ()  # candidates beyond K are for advise alone
    for threshold in (sure - 2 * SLACK, sure, sure + SLACK / 2):
        assert advice(0, f, "gated", threshold) is None
    assert advice(0, f, "replace", 1.0) is advice(0, f, "replace_true_weights", 1.0) is None
    stored = Advice(bank("full", precision="stored"), {0: 3, 1: 4}, pairs, SOFTMAX, {})
    assert stored(0, f, "advise", 0.5) is None


# ---------------------------------------------------------------- at work


@pytest.fixture(scope="module", params=["qwen3_5_moe", "bailing_hybrid"])
def model(request, tmp_path_factory):
    return world.tiny_model(request.param, tmp_path_factory.mktemp(request.param), num_hidden_layers=4)


def told(model, monkeypatch, *, on_host, **options):
    """Tokens, routes' sources, every prediction by pass and layer, and how often heads were asked in mlx."""
    streamed, asked, predictions = ENGINES(model), [], {}
    spec = world.spec_for(streamed)
    heads = world.each(world.heads_for(streamed, spec))
    ask = HeadCalls.ask
    with monkeypatch.context() as patch:
        patch.setattr(HeadCalls, "ask", lambda self, owners, *rest: (asked.extend(owners), ask(self, owners, *rest))[1])
        if not on_host:
            patch.setattr(Advice, "__call__", lambda self, *given: None)
        with install_prerouter(streamed.loaded, spec, streamed, heads=heads, **options) as prerouter:
            fill, first = prerouter.fill.ask, streamed.forward.step

            def noting(layer, prediction, **when):
                predictions[streamed.forward.step - first, layer] = prediction
                fill(layer, prediction, **when)

            prerouter.fill.ask = noting
            out = world.tokens(streamed, PROMPT, 10)
            return out, prerouter.supply.map, predictions, len(asked)


def calibration(model):
    streamed = ENGINES(model)
    return {owner: (0.5, -0.5) for owner in world.heads_for(streamed, world.spec_for(streamed)).owners}


@pytest.mark.parametrize("issue", ["in_forward", "async_boundary"])
def test_advice_asks_for_the_same_experts(model, monkeypatch, issue):
    own = {"mode": "advise", "issue": issue, "extra": 2}
    plain, _, want, calls = told(model, monkeypatch, on_host=False, **own)
    out, _, got, none = told(model, monkeypatch, on_host=True, **own)
    world.same(out, plain)
    assert none == 0 and calls == len(got) == 11 * HEADS[model.name[:4]] and got.keys() == want.keys()
    assert all((got[at].ids, got[at].extra) == (want[at].ids, want[at].extra) for at in got)


@pytest.mark.parametrize("issue", ["in_forward", "async_boundary"])
def test_gated_routes_are_mlxs_and_have_its_bits(model, monkeypatch, issue):
    own = {"mode": "gated", "issue": issue, "calibration": calibration(model), "threshold": 0.0}
    *_, want, _ = told(model, monkeypatch, on_host=False, **own)
    own["threshold"] = float(np.median([p.confidence for p in want.values()]))
    plain, sources, want, calls = told(model, monkeypatch, on_host=False, **own)
    out, same, got, fewer = told(model, monkeypatch, on_host=True, **own)
    world.same(out, plain)
    np.testing.assert_array_equal(same, sources)
    assert {Source.PREDICTION, Source.DECLINED} <= set(same.reshape(-1).tolist()) and 0 < fewer < calls
    assert all(got[at].ids == want[at].ids for at in want)
