"""The bench times what it says it times; its figures are for reading, not for testing."""

import pytest

from moelab.policies.bench import Timing, time_arms, time_dispatch


def test_arms_take_turns_in_an_order_that_is_reversed():
    calls = []
    timings = time_arms({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert all(timing.n == 3 and timing.spread >= 0 for timing in timings.values())


@pytest.mark.parametrize("tokens", [1, 5])
def test_every_arm_runs(tokens):
    timings = time_dispatch(experts=4, tokens=tokens, hidden=4, intermediate=8, rounds=2)
    assert set(timings) == {"grouped", "loop", "dense", "batched", "route", "share"}
    assert 0 < timings["share"].median < 1 and timings["route"].median < timings["grouped"].median
    assert all(isinstance(timing, Timing) and timing.n == 2 and timing.median > 0 for timing in timings.values())
