"""The committed threads are what the design asks of them: enough, varied, owned, and planted."""

import json
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from repository import ROOT
from tokenizers import Tokenizer

from moelab.flywheel import dedup, split
from moelab.flywheel.capture import CaptureOptions, facts, select
from moelab.threads import read, render

FOLDER = ROOT / "artifacts" / "threads"


@cache
def tokenizer():
    return Tokenizer.from_file(str(ROOT / "artifacts" / "models" / "softmax" / "tokenizer.json"))


@cache
def threads():
    return read(FOLDER)


@cache
def lengths():
    return {thread.uid: len(render(thread, tokenizer()).token_ids) for thread in threads()}


def planted():
    return [json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.planted.json"))]


def test_there_are_enough_of_them_and_they_are_varied():
    found = threads()
    assert len(found) >= 150 and len({thread.owner for thread in found}) >= 60
    assert sum(lengths().values()) >= 40_000 and np.median(list(lengths().values())) >= 120
    assert len(set().union(*(thread.languages for thread in found))) >= 6
    assert {"prose", "code", "tools", "reasoning"} <= set().union(*(thread.domains for thread in found))
    assert all(thread.started is not None for thread in found)
    assert sum(any(m.tool_calls for m in thread.messages) for thread in found) >= 20
    assert sum(any(m.reasoning for m in thread.messages) for thread in found) >= 10


def test_the_reference_profile_holds_out_enough_owners():
    options = CaptureOptions.from_profile("reference")
    chosen = select(threads(), options.max_threads)

    class Words:
        def encode(self, text):
            return tokenizer().encode(text).ids

    sets = split.assign([facts(t, Words(), lengths()[t.uid]) for t in chosen], seed=options.seed)
    held = [thread for thread in chosen if sets[thread.uid] == "validation"]
    assert len(held) >= 24 and len({thread.owner for thread in held}) >= 10


def test_no_two_threads_share_more_than_a_fifth_outside_the_planted_pairs():
    prompts = {int(s) for part in planted() for text in part["system_prompts"] for s in hashes(text)}
    sets = {t.id: {int(s) for m in t.messages for s in hashes(m.body)} - prompts for t in threads()}
    pairs = {frozenset(pair) for part in planted() for pair in part["near_duplicates"]}
    for (a, left), (b, right) in combinations(sets.items(), 2):
        if frozenset((a, b)) not in pairs:
            assert len(left & right) <= 0.2 * min(len(left), len(right)), (a, b)


@pytest.mark.parametrize("part", planted(), ids=lambda part: part["near_duplicates"][0][0])
def test_plants_are_there(part):
    bodies = [m.body for t in threads() for m in t.messages if m.role == "system"]
    assert all(bodies.count(prompt) > 1 for prompt in part["system_prompts"])
    owners = {t.id: t.owner for t in threads()}
    assert len(part["near_duplicates"]) >= 5
    assert all(owners[a] != owners[b] for a, b in part["near_duplicates"])


@cache
def hashes(text):
    return tuple(dedup.shingles(tokenizer().encode(dedup.normal(text)).ids))
