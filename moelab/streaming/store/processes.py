"""What belongs to the process that opened it, and to no forked child: descriptors whose threads stay behind.

A child is told when it begins. To ask for the process at every read would show in the rate of small experts.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["left_behind"]


class Leavable(Protocol):
    def left(self) -> None:
        """This is a forked child: from now on refuse."""


_open: weakref.WeakSet[Leavable] = weakref.WeakSet()


def left_behind(owner: Leavable) -> None:
    """Have `owner.left` called in every child that this process forks, while there is such an owner."""
    _open.add(owner)


def _in_child() -> None:
    for owner in _open:
        owner.left()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
