"""The split by owner: no owner in two sets, whatever the collection, in whatever order."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.errors import ContractError
from moelab.flywheel.split import SETS, ThreadFacts, assign


def fact(thread, owner, started="2026-01-01T00:00:00+00:00", **changes):
    plain = dict(tokens=200, language="en", domain="talk", tool_calls=0, reasoning_tokens=0)
    return ThreadFacts(thread=thread, owner=owner, started=started, **plain | changes)


@st.composite
def collections(draw):
    """Threads of 4 to 30 owners, 1 to 5 each, of any kind and any day."""
    facts = []
    for owner in range(draw(st.integers(4, 30))):
        for _ in range(draw(st.integers(1, 5))):
            facts.append(
                fact(
                    f"t{len(facts)}",
                    f"o{owner}",
                    draw(st.sampled_from(["", "2026-01-01", "2026-02-01", "2026-03-01"])),
                    tokens=draw(st.sampled_from([20, 200, 2000])),
                    language=draw(st.sampled_from(["en", "en", "de"])),
                    domain=draw(st.sampled_from(["talk", "code"])),
                    tool_calls=draw(st.integers(0, 1)),
                    reasoning_tokens=draw(st.sampled_from([0, 500])),
                )
            )
    return facts, draw(st.integers(0, 5))


@settings(max_examples=150, deadline=None)
@given(collections())
def test_no_owner_is_in_two_sets(made):
    """Train and temporal hold the same people at other times: they count as one side."""
    facts, seed = made
    sets = assign(facts, seed=seed)
    assert set(sets) == {f.thread for f in facts} and set(sets.values()) <= set(SETS)
    owners = {}
    for f in facts:
        side = sets[f.thread]
        owners.setdefault(f.owner, set()).add("train" if side == "temporal" else side)
    assert all(len(sides) == 1 for sides in owners.values())
    assert {"stress", "runtime", "validation"} <= set(sets.values()), "each set of owners has one"
    assert {"train", "temporal"} & set(sets.values()), "somebody is left to learn from"
    shuffled = facts.copy()
    random.Random(seed).shuffle(shuffled)
    assert assign(shuffled, seed=seed) == sets, "the order of the collection decides nothing"


@settings(max_examples=100, deadline=None)
@given(collections())
def test_the_temporal_holdout_is_the_newest_of_what_remains(made):
    facts, seed = made
    sets = assign(facts, seed=seed)
    new = [f.started for f in facts if sets[f.thread] == "temporal"]
    old = [f.started for f in facts if sets[f.thread] == "train"]
    assert not new or not old or min(new) >= max(old)
    assert len(new) == round(0.12 * (len(new) + len(old)))


def test_stress_takes_the_owner_who_covers_most():
    facts = [fact(f"t{i}", f"o{i}") for i in range(12)]
    facts.append(fact("hard", "o-hard", domain="code", tool_calls=2, language="fi"))
    assert assign(facts)["hard"] == "stress"
    assert facts[-1].stresses == {"code", "tool calls", "multilingual"}


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"domain": "code"}, "code"),
        ({"tool_calls": 1}, "tool calls"),
        ({"reasoning_tokens": 120}, "long reasoning"),
        ({"language": "de"}, "multilingual"),
        ({"tokens": 79}, "odd length"),
        ({"tokens": 701}, "odd length"),
    ],
)
def test_what_stresses(changes, name):
    assert fact("t", "o", **changes).stresses == {name}
    assert fact("t", "o", tokens=80).stresses == fact("t", "o", tokens=700, reasoning_tokens=119).stresses == set()


def test_another_seed_is_another_split():
    facts = [fact(f"t{i}", f"o{i}") for i in range(40)]
    assert assign(facts, seed=0) != assign(facts, seed=1)


def test_owners_who_stay_keep_their_order_when_others_come():
    """A set drawn by hash does not reshuffle everybody when the collection grows."""
    facts = [fact(f"t{i}", f"o{i}") for i in range(40)]
    before, after = assign(facts), assign([*facts, *(fact(f"n{i}", f"n{i}") for i in range(4))])
    assert sum(before[f.thread] != after[f.thread] for f in facts) < 15


def test_refusals():
    with pytest.raises(ContractError, match="twice") as caught:
        assign([fact("t", "a"), fact("t", "b"), fact("u", "c"), fact("v", "d")])
    assert caught.value.field == "thread"
    with pytest.raises(ContractError, match="too few owners") as caught:
        assign([fact(f"t{i}", f"o{i % 3}") for i in range(9)])
    assert (caught.value.field, caught.value.got) == ("owners", 3)
