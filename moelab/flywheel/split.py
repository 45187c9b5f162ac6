"""Who is held out: every thread goes to one set, decided by owner before any window is cut.

Overlapping windows of one thread in two sets inflate a validation score, and so do two threads of one
owner. So whole owners are drawn first, in an order that is a hash of (seed, owner) and therefore does
not depend on what else is in the collection:

* `stress`: owners whose threads together show code, tool calls, long reasoning, other languages and odd
  lengths;
* `runtime`: owners whose decode captures are never replayed; they are kept for the last word (Gate 4);
* `validation`: owners that nothing is ever fitted on;
* of the owners that remain, the newest threads are the `temporal` holdout and the older ones `train`.

Source: AFN-021, "Split threads before creating windows".
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ContractError

SETS = ("train", "validation", "temporal", "stress", "runtime")
HOLDOUT_ORDER = ("runtime", "validation", "temporal", "stress", "train")
"""Which set keeps a near-duplicate: the first named."""

LONG_REASONING, ODD_SHORT, ODD_LONG = 120, 80, 700
"""Tokens: a reasoning block this long counts as long; a thread outside [short, long] has an odd length."""


@dataclass(frozen=True, kw_only=True)
class ThreadFacts:
    """What the split and the coverage tables know about a thread: never its text.

    Attributes:
        thread, owner: identities, the owner already in its normal spelling.
        started: ISO time of the first message, the thread's own, never the clock's.
        tokens, reasoning_tokens: lengths of the whole thread and of its reasoning.
        language, domain: the main ones.
        tool_calls: how many.
    """

    thread: str
    owner: str
    started: str
    tokens: int
    language: str
    domain: str
    tool_calls: int
    reasoning_tokens: int

    @property
    def stresses(self) -> frozenset[str]:
        found = {
            "code": self.domain == "code",
            "tool calls": self.tool_calls > 0,
            "long reasoning": self.reasoning_tokens >= LONG_REASONING,
            "multilingual": self.language != "en",
            "odd length": not ODD_SHORT <= self.tokens <= ODD_LONG,
        }
        return frozenset(name for name, true in found.items() if true)


def assign(
    facts: Sequence[ThreadFacts],
    *,
    seed: int = 0,
    validation: float = 0.2,
    runtime: float = 0.08,
    stress: float = 0.1,
    temporal: float = 0.12,
) -> dict[str, str]:
    """Set of every thread, by thread id. Fractions are of owners, `temporal` of the remaining threads.

    Raises:
        ContractError: a thread id twice, or too few owners for one owner in each of the four owner sets.
    """
    if len({fact.thread for fact in facts}) != len(facts):
        raise ContractError("a thread id appears twice", field="thread", expected="one record a thread")
    by_owner: dict[str, list[ThreadFacts]] = {}
    for fact in facts:
        by_owner.setdefault(fact.owner, []).append(fact)
    order = sorted(by_owner, key=lambda owner: hashlib.sha256(f"{seed}\0{owner}".encode()).digest())
    if len(order) < 4:
        raise ContractError("too few owners to hold any out", field="owners", got=len(order), expected="at least 4")

    def count(fraction: float) -> int:
        return max(1, round(fraction * len(order)))

    chosen: dict[str, str] = {}
    uncovered = frozenset().union(*(fact.stresses for fact in facts))
    for _ in range(count(stress)):
        # The owner who adds most of what is not covered yet; hash order breaks ties.
        free = [owner for owner in order if owner not in chosen]
        covers = {owner: frozenset().union(*(f.stresses for f in by_owner[owner])) for owner in free}
        best = max(free, key=lambda owner: (len(covers[owner] & uncovered), len(covers[owner])))
        uncovered -= covers[best]
        chosen[best] = "stress"
    for name, fraction in (("runtime", runtime), ("validation", validation)):
        free = [owner for owner in order if owner not in chosen]
        chosen.update(dict.fromkeys(free[: min(count(fraction), len(free) - 1)], name))
    rest = sorted((fact for fact in facts if fact.owner not in chosen), key=lambda fact: (fact.started, fact.thread))
    newest = {fact.thread for fact in rest[len(rest) - round(temporal * len(rest)) :]}
    return {fact.thread: chosen.get(fact.owner) or ("temporal" if fact.thread in newest else "train") for fact in facts}
