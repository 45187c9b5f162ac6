"""Near-identical windows: the join finds every planted pair, and nothing by design."""

import json
import random
import unicodedata

import numpy as np
import pytest
from tokenizers import Tokenizer

from moelab.artifacts import root
from moelab.flywheel.dedup import SHINGLE, Match, near_identical, normal, shingles, to_drop
from moelab.threads import read

WINDOW = 64


def encode(text):
    return [ord(c) for c in text]


def slow(windows, allowed=(), threshold=0.5):
    """The same join with strings and sets, one pair at a time."""

    def cut(text):
        text = normal(text)
        return {text[i : i + SHINGLE] for i in range(max(1, len(text) - SHINGLE + 1))} if text else set()

    allow = set().union(*(cut(text) for text in allowed)) if allowed else set()
    found = []
    for thread, parts in windows.items():
        for index, part in enumerate(parts):
            mine = cut(part) - allow
            for other in sorted(windows):
                hits = len(mine & (cut(" ".join(windows[other])) - allow))
                if other != thread and hits and hits >= threshold * len(mine):
                    found.append((thread, index, other, hits / len(mine)))
    return sorted(found)


def fast(windows, **options):
    found = near_identical(windows, encode=encode, **options)
    return sorted((m.thread, m.window, m.other, m.share) for m in found)


@pytest.mark.parametrize("seed", range(6))
def test_join_equals_the_slow_one(seed):
    rng = random.Random(seed)
    words = ["alpha ", "beta ", "gamma ", "delta ", "epsilon ", "zeta "]
    windows = {f"t{i}": ["".join(rng.choices(words, k=rng.randint(0, 5))) for _ in range(3)] for i in range(5)}
    for threshold in (0.3, 0.5, 1.0):
        assert fast(windows, threshold=threshold) == slow(windows, threshold=threshold)
    allowed = ["alpha beta gamma ", "zeta zeta zeta"]
    assert fast(windows, allowed=allowed) == slow(windows, allowed=allowed)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(root() / "artifacts" / "models" / "softmax" / "tokenizer.json"))


@pytest.fixture(scope="module")
def committed(tokenizer):
    """Committed threads as windows of 64 raw tokens over their full text, the planted pairs, the system prompts."""
    threads = read(root() / "artifacts" / "threads")
    windows = {}
    for thread in threads:
        ids = tokenizer.encode("\n".join(m.body for m in thread.messages)).ids
        windows[thread.id] = [tokenizer.decode(ids[i : i + WINDOW]) for i in range(0, len(ids), WINDOW)]
    files = sorted((root() / "artifacts" / "threads").glob("*.planted.json"))
    planted = [json.loads(path.read_text()) for path in files]
    assert len(windows) == len(threads) and len(planted) == 3
    pairs = [tuple(pair) for p in planted for pair in p["near_duplicates"]]
    prompts = [prompt for p in planted for prompt in p["system_prompts"]]
    return windows, pairs, prompts


@pytest.fixture(scope="module")
def matches(committed, tokenizer):
    windows, _, prompts = committed
    return near_identical(windows, encode=lambda text: tokenizer.encode(text).ids, allowed=prompts)


def test_every_planted_pair_is_found_and_nothing_else(committed, matches):
    _, planted, _ = committed
    found = {tuple(sorted((m.thread, m.other))) for m in matches}
    assert len(planted) == 15
    assert found == {tuple(sorted(pair)) for pair in planted}


def test_without_the_allow_list_shared_system_prompts_are_found_as_well(committed, matches, tokenizer):
    windows, planted, prompts = committed
    bare = near_identical(windows, encode=lambda text: tokenizer.encode(text).ids, threshold=0.25)
    allowed = near_identical(windows, encode=lambda text: tokenizer.encode(text).ids, threshold=0.25, allowed=prompts)
    extra = {(m.thread, m.other) for m in bare} - {(m.thread, m.other) for m in allowed}
    assert extra and {m.window for m in bare if (m.thread, m.other) in extra} == {0}, "prompts stand in first windows"
    assert {tuple(sorted(p)) for p in planted} <= {tuple(sorted((m.thread, m.other))) for m in bare}


def test_a_thread_imported_again_under_a_new_id_is_found():
    """Other case, other spaces, other Unicode form, one word edited: still the same text."""
    text = "Où est passé le café que j’avais laissé près de l’évier hier soir, et qui l’a bu sans rien dire ?"
    again = unicodedata.normalize("NFD", text.upper()).replace(" ", "\n  ").replace("HIER", "CE")
    found = fast({"first": [text], "again": [again], "other": ["Something else altogether, said by someone else."]})
    assert [(a, c) for a, _, c, _ in found] == [("again", "first"), ("first", "again")]
    assert min(share for *_, share in found) > 0.8


def test_a_window_need_not_be_aligned():
    text = "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=120))
    windows = {"a": [text[:40], text[40:80], text[80:]], "b": ["x" * 33 + text[:7], text[7:47], text[47:87]]}
    assert {(m.thread, m.window) for m in near_identical(windows, encode=encode)} >= {("b", 1), ("b", 2), ("a", 0)}


def test_shingles():
    ids = np.random.default_rng(0).integers(0, 2**31, 300)
    once = shingles(ids)
    assert once.dtype == np.uint64 and once.shape == (293,) and len(set(once.tolist())) == 293
    assert (shingles(ids[5:40]) == once[5 : 5 + 28]).all(), "a shingle is its tokens, wherever they stand"
    assert shingles([]).shape == (0,) and shingles([1, 2]).shape == (1,)
    assert shingles([1, 2])[0] not in (shingles([2, 1])[0], shingles([1, 2, 0])[0], shingles([1])[0])


def test_empty_windows_and_wholly_allowed_ones_match_nothing():
    assert fast({"a": ["", "be brief, please"], "b": ["be brief, please", ""]}, allowed=["Be brief,  PLEASE"]) == []
    assert len(fast({"a": ["", "be brief, please"], "b": ["be brief, please", ""]})) == 2


def test_the_better_protected_set_keeps_its_own():
    matches = [
        Match("t", 0, "v", 0.6),
        Match("t", 0, "r", 0.9),
        Match("v", 3, "t", 0.6),
        Match("r", 1, "t", 0.9),
        Match("v", 2, "r", 1.0),
        Match("t", 5, "u", 1.0),
    ]
    sets = {"t": "train", "u": "train", "v": "validation", "r": "runtime"}
    drop = to_drop(matches, sets, ("runtime", "validation", "train"))
    assert drop == {("t", 0): matches[1], ("v", 2): matches[4]}, "within a set nothing is dropped"
