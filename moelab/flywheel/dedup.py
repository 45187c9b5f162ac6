"""Near-identical windows: an exact shingle join, so that nothing planted slips through a hash sketch.

Texts are compared in a normal form (Unicode NFKC, case folded, white space collapsed) because a thread
re-imported from another system changes exactly those things. A shingle is `SHINGLE` consecutive tokens
of the normal form; a window is near-identical to another thread if at least `threshold` of its shingles
occur in that thread. Shingles of shared system prompts and tool schemas, which are in every thread by
design, are allow-listed and reported apart.

Source: AFN-021, Gate 2 ("deduplicate near-identical windows"). The join is exact: at the sizes a
snapshot has, an inverted index costs less than a MinHash and misses nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

SHINGLE = 8


def normal(text: str) -> str:
    """The form in which two spellings of one text are equal."""
    return re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def shingles(tokens: Sequence[int], size: int = SHINGLE) -> np.ndarray:
    """Hash of every run of `size` tokens: u64 [max(0, n - size + 1)], 1 for a shorter text that is not empty."""
    ids = np.asarray(tokens, dtype=np.uint64)
    if len(ids) == 0:
        return np.empty(0, np.uint64)
    if len(ids) < size:
        ids = np.concatenate([ids, np.full(size - len(ids), 2**32, np.uint64)])
    runs = np.lib.stride_tricks.sliding_window_view(ids, size)
    value = np.zeros(len(runs), np.uint64)
    for column in runs.T:  # polynomial hash modulo 2^64, finished by a mixing multiply
        value = value * np.uint64(6364136223846793005) + column + np.uint64(1442695040888963407)
    return (value ^ (value >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Match:
    """Window `window` of thread `thread` repeats thread `other`: `share` of its shingles occur there."""

    thread: str
    window: int
    other: str
    share: float


def near_identical(
    windows: Mapping[str, Sequence[str]],
    *,
    encode: Callable[[str], Sequence[int]],
    allowed: Sequence[str] = (),
    threshold: float = 0.5,
) -> list[Match]:
    """All (window, other thread) pairs above the threshold.

    Args:
        windows: text of each window, by thread. A window's own thread is never a match.
        encode: text → token ids.
        allowed: texts whose shingles do not count (shared system prompts, tool schemas).
    """
    allow = {int(s) for text in allowed for s in shingles(encode(normal(text)))}
    cut = {
        thread: [{int(s) for s in shingles(encode(normal(text)))} - allow for text in texts]
        for thread, texts in windows.items()
    }
    # A thread is looked up by the shingles of its whole text, so that windows need not be aligned.
    where: dict[int, set[str]] = {}
    for thread, texts in windows.items():
        for shingle in {int(s) for s in shingles(encode(normal(" ".join(texts))))} - allow:
            where.setdefault(shingle, set()).add(thread)
    matches = []
    for thread, parts in cut.items():
        for index, part in enumerate(parts):
            seen: dict[str, int] = {}
            for shingle in part:
                for other in where.get(shingle, ()):
                    if other != thread:
                        seen[other] = seen.get(other, 0) + 1
            for other, hits in sorted(seen.items()):
                if hits >= threshold * len(part):
                    matches.append(Match(thread, index, other, hits / len(part)))
    return matches


def to_drop(matches: Sequence[Match], sets: Mapping[str, str], order: Sequence[str]) -> dict[tuple[str, int], Match]:
    """Windows to remove so that no two sets share near-identical text: the set named first in `order` keeps its own."""
    rank = {name: position for position, name in enumerate(order)}
    drop: dict[tuple[str, int], Match] = {}
    for match in matches:
        if rank[sets[match.thread]] > rank[sets[match.other]]:
            key = (match.thread, match.window)
            if key not in drop or match.share > drop[key].share:
                drop[key] = match
    return drop
