"""The bench times what it says it times; its figures are for reading, not for testing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moelab.policies.bench import Timing, dispatchers, names, time_arms, time_dispatch


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


class Calls(TorchDispatchMode):
    """Counts the library's calls."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("experts", [8, 256])
@pytest.mark.parametrize("name", list(dispatchers(4)))
def test_routing_one_token_takes_few_calls_of_the_library(name, experts):
    """A call costs microseconds, in decode ten, and the experts of one token some hundreds."""
    ids, dispatcher = names(experts), dispatchers(experts)[name]
    scores = torch.arange(experts).view(1, 1, -1) - 2.5
    for availability, most in ((None, 4), (torch.arange(experts) % 8 != 7, 10)):
        with Calls() as calls:
            dispatcher.route(scores, expert_ids=ids, expert_availability=availability)
        assert 0 < calls.count <= most
