"""The bench times what it says it times; its figures are for reading, not for testing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moelab.policies import SparseDispatcher
from moelab.policies.bench import Bank, Timing, dispatchers, judged, measure, names, time_arms, time_dispatch


def test_arms_take_turns_in_an_order_that_is_reversed():
    calls = []
    timings = time_arms({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert calls == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert all(timing.n == 3 and timing.spread >= 0 for timing in timings.values())


def test_long_arms_take_fewer_turns_and_none_before():
    calls = []
    arms = {name: lambda name=name: calls.append(name) for name in ("grouped", "loop")}
    timings = time_arms(arms, rounds=3, loop=2)
    assert calls == ["grouped", "grouped", "loop", "loop", "grouped", "grouped"]
    assert (timings["grouped"].n, timings["loop"].n) == (3, 2)


def test_an_arm_that_there_is_not_is_refused():
    with pytest.raises(TypeError, match="ruonds"):
        time_dispatch(Bank(4, hidden=4, intermediate=8), tokens=1, ruonds=3)


@pytest.mark.parametrize("tokens", [1, 5])
def test_every_arm_runs(tokens):
    timings = time_dispatch(Bank(4, hidden=4, intermediate=8), tokens=tokens, rounds=2)
    assert set(timings) == {"grouped", "loop", "dense", "batched", "route", "share"}
    assert 0 < timings["share"].median < 1 and timings["route"].median < timings["grouped"].median
    assert all(isinstance(timing, Timing) and timing.n == 2 and timing.median > 0 for timing in timings.values())


def test_every_policy_is_measured_and_the_default_one_beside_all_arms():
    rows = list(measure([4, 8], [1, 3], hidden=4, rounds=1))
    shares = [(row["experts"], row["tokens"], row["policy"], row["n"]) for row in rows if row["arm"] == "share"]
    every = [*dict.fromkeys([*dispatchers(4), "all arms"])]
    assert [share[:3] for share in shares] == [(n, t, policy) for n in (4, 8) for t in (1, 3) for policy in every]
    assert {share[3] for share in shares if share[1] == 1} == {200, 40}
    assert {row["n"] for row in rows if row["arm"] == "dense" and row["tokens"] == 1} == {5}
    many = {(row["arm"], row["n"]) for row in rows if row["policy"] == "all arms" and row["tokens"] == 3}
    assert many == {("dense", 1), *((arm, 3) for arm in ("grouped", "route", "share", "loop", "batched"))}


def test_every_policy_may_be_left_to_few_tokens():
    rows = list(measure([4], [1, 3], hidden=4, rounds=1, each_policy=[1]))
    assert len({row["policy"] for row in rows if row["tokens"] == 1}) == 7
    assert {row["policy"] for row in rows if row["tokens"] == 3} == {"all arms"}
    assert [row["who"] for row in judged(rows, hidden=4)][1] == "adaptive top-1/2, beside all arms"
    assert isinstance(dispatchers(4)["adaptive top-1/2"].selection, type(SparseDispatcher().selection))


def cells(experts, tokens, **medians):
    """Rows of one cell: shares of two policies, and the arms of the default one."""
    cell = {"experts": experts, "tokens": tokens, "n": 9, "spread": 0.0}
    rows = [cell | {"policy": name, "arm": "share", "median": medians[name]} for name in ("quick", "slow")]
    arms = {name: medians[name] for name in ("grouped", "loop", "batched")}
    return rows + [cell | {"policy": "all arms", "arm": arm, "median": median} for arm, median in arms.items()]


def test_claims_take_the_policy_with_most_routing_and_hold_at_the_bound():
    rows = cells(64, 4096, quick=0.01, slow=0.05, grouped=1.0, loop=10.0, batched=0.5)
    assert [(r["measured"], r["who"], r["holds"]) for r in judged(rows, hidden=512)] == [
        (0.05, "slow", True), (10.0, "", True), (2.0, "", True),
    ]  # fmt: skip
    rows = cells(64, 4096, quick=0.06, slow=0.05, grouped=1.0, loop=9.9, batched=0.4)
    assert [r["holds"] for r in judged(rows, hidden=512)] == [False] * 3
    assert [r["holds"] for r in judged(rows, hidden=256)] == [None] * 3  # asked of wide models
    beside = rows + [rows[0] | {"policy": "all arms", "median": 0.07}]  # the default policy, after a dense run
    assert judged(beside, hidden=512)[0]["measured"] == 0.07
    assert judged(beside, hidden=512)[0]["who"] == "adaptive top-1/2, beside all arms"
    assert len(judged(cells(8, 1, quick=0.1, slow=0.2, grouped=1.0, loop=1.0, batched=1.0), hidden=512)) == 1
    assert len(judged(cells(64, 1, quick=0.1, slow=0.2, grouped=1.0, loop=1.0, batched=1.0), hidden=512)) == 2
    assert len(judged(cells(8, 4096, quick=0.1, slow=0.2, grouped=1.0, loop=1.0, batched=1.0), hidden=512)) == 2


class Calls(TorchDispatchMode):
    """Counts the library's calls."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("experts", [8, 256])
@pytest.mark.parametrize("name", list(dispatchers(4)))
def test_routing_one_token_takes_hardly_a_call_of_the_library(name, experts):
    """A call costs microseconds, in decode ten, and the experts of one token some hundreds."""
    ids, dispatcher = names(experts), dispatchers(experts)[name]
    scores = 2.5 - torch.arange(experts).view(1, 1, -1)
    for availability in (None, torch.arange(experts) % 8 != 7):
        with Calls() as calls:
            routes = dispatcher.route(scores, expert_ids=ids, expert_availability=availability).effective_routes
            assert calls.count <= 2  # scores and availability as arrays
            assert (routes.selected_indices > 0).any()
            assert calls.count > 2  # its tensors are made when they are looked at
