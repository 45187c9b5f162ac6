"""Order that any cache replay must keep, whatever the routes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.flywheel.foresight import Lookahead, Opt
from moelab.flywheel.residency import Visits, replay
from moelab.streaming.cache.eviction import ExpectedNextUse, HotPin, LayerLfu, LayerStaleness, Lru

L, E, K = 2, 6, 2


def visits(seed, tokens, skew):
    rng = np.random.default_rng(seed)
    noise = rng.gumbel(size=(tokens, L, E)) + skew * rng.normal(size=(L, E))
    return Visits.of(
        np.argsort(-noise, axis=-1)[..., :K], E, np.zeros(tokens), prefilled=np.arange(tokens) < tokens // 4
    )


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 60), skew=st.floats(0, 3), sizes=st.permutations([3, 5]))
def test_a_larger_lru_cache_holds_whatever_a_smaller_one_holds(seed, tokens, skew, sizes):
    v = visits(seed, tokens, skew)
    runs = [replay(v, np.array(sizes), budget=b, record=True) for b in (9, 14, 25, 48)]
    for small, large in zip(runs, runs[1:], strict=False):
        assert not (small.resident & ~large.resident).any()
        assert (small.read_bytes >= large.read_bytes).all()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 60), skew=st.floats(0, 3), slots=st.integers(1, 12))
def test_no_policy_beats_opt_on_equal_sizes(seed, tokens, skew, slots):
    v = visits(seed, tokens, skew)
    least = replay(v, np.ones(L, int), budget=slots, policy=Opt()).read_bytes.sum()
    for policy in (
        Lru(),
        LayerLfu(),
        LayerStaleness(),
        HotPin(hot_per_layer=2),
        ExpectedNextUse(),
        Lookahead(tokens=1),
    ):
        run = replay(v, np.ones(L, int), budget=slots, policy=policy)
        assert run.read_bytes.sum() >= least, policy.name


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 40), budget=st.integers(1, 60))
def test_the_budget_holds_after_every_visit(seed, tokens, budget):
    v = visits(seed, tokens, 1.0)
    size = np.array([3, 5])
    for policy in (Lru(), ExpectedNextUse(), Lookahead(tokens=2), Opt()):
        held = np.unpackbits(replay(v, size, budget=budget, policy=policy, record=True).resident, axis=-1, count=E)
        # What one layer finds was held after the visit before it, whose budget is for all layers together.
        assert (held.sum(-1) * size <= budget).all(), policy.name
