"""Freed bytes that mlx keeps for reuse: one limit for the process, which must not outlive what asked for it."""

from __future__ import annotations

from typing import ClassVar

import mlx.core as mx

__all__ = ["CacheLimit"]


class CacheLimit:
    """mlx keeps at most `nbytes` while this is open.

    Several may be open, and be closed in any order: the youngest open one rules, and when the last has been closed the
    limit is what it was before the first.
    """

    _opened: ClassVar[list[CacheLimit]] = []
    _before: ClassVar[int] = 0

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        before = mx.set_cache_limit(nbytes)
        if not CacheLimit._opened:
            CacheLimit._before = before
        CacheLimit._opened.append(self)

    def close(self) -> None:
        """Safe to call twice."""
        if self in CacheLimit._opened:
            CacheLimit._opened.remove(self)
            mx.set_cache_limit(CacheLimit._opened[-1].nbytes if CacheLimit._opened else CacheLimit._before)
