"""Eviction policies: which resident expert goes when a cache is full.

The policies here know the past only, so that a running engine can use them; those that are told the future, as
bounds, are in `moelab.flywheel.foresight`. `flywheel.residency.replay` (offline) and `streaming.Cache` (live)
drive the same objects.

LRU over all layers has a cliff: layers are visited in a cycle, so with less than one token's experts in the cache
it evicts precisely what comes next and hits nothing at all. Counting uses by layer, or age in passes instead of
in lookups, removes the cliff.

What a policy is asked, and when, is said in `ranking`; `HotPin` has a module of its own.
"""

from __future__ import annotations

import bisect
from collections import defaultdict

import numpy as np

from ...errors import ContractError
from .hotpin import HotPin
from .ranking import Policy, Ranked

__all__ = [
    "DEFAULT",
    "POLICIES",
    "ExpectedNextUse",
    "HotPin",
    "LayerLfu",
    "LayerStaleness",
    "Lru",
    "Policy",
    "Ranked",
    "RecentLfu",
    "policy",
]


class Lru(Policy):
    """Evict what was used longest ago, over all layers together."""

    name = "lru"

    def begin(self, layers, experts):
        self.order: dict[int, None] = {}  # residents, least recent first

    def touch(self, visit, keys):
        order = self.order
        for key in keys:
            order.pop(key, None)
            order[key] = None

    def insert(self, key):
        self.touch(-1, [key])

    def victim(self, visit, spared):
        for key in self.order:  # what the visit used is at the end
            if key not in spared:
                del self.order[key]
                return key
        return None

    def remove(self, key):
        self.order.pop(key, None)


class LayerLfu(Ranked):
    """An equal part of the budget for each layer; in it, evict what was used least often, then longest ago.

    Uses are counted for ever, also while not resident.
    """

    name = "layer-lfu"
    partitioned = True
    decay = 1.0

    def begin(self, layers, experts):
        super().begin(layers, experts)
        self.uses: dict[int, float] = defaultdict(float)
        self.weight = 1.0  # of a use now: instead of decaying all counts, later uses weigh more
        self.stamp, self.last = 0, -1

    def touch(self, visit, keys):
        if visit != self.last:  # a visit may come in groups
            self.last = visit
            self.weight /= self.decay
            if self.weight > 1e200:
                self._rescale()
        for key in keys:
            self.uses[key] += self.weight
            self.insert(key)

    def insert(self, key):
        self.stamp += 1
        self.put(key, (self.uses[key], self.stamp))

    def _rescale(self):
        by, self.weight = 1 / self.weight, 1.0
        for key in self.uses:
            self.uses[key] *= by
        for key, (_, stamp) in list(self.rank.items()):
            self.put(key, (self.uses[key], stamp))


class RecentLfu(LayerLfu):
    """As `LayerLfu`, with counts that decay in each pass of the layer: a new subject is not held against an old one.

    The engine's default: fewer bytes than LRU on every trace and budget tried. On one prompt it reads what `LayerLfu`
    does (±1.5 %); over many threads on end, counts for ever come to lose to LRU at large budgets.

    Args:
        decay: per pass, in (0, 1].
    """

    name = "recent-lfu"

    def __init__(self, *, decay: float = 0.97):
        if not 0 < decay <= 1:
            raise ContractError("no such decay", field="decay", got=decay, expected="inside (0, 1]")
        self.decay = decay


class LayerStaleness(Policy):
    """Evict first what its layer has not used for the most passes; of those, the layer whose turn is farthest off.

    An expert last used at visit u is, at visit v, s = (v - u) // L passes of its layer stale. All of one layer's
    experts of equal s were used in the same visit; among layers, the one visited most recently comes round last.
    So the experts fall into windows of L visits counted back from now: the oldest window goes first, and in it the
    most recent visit, in the order the visit named them. Age in passes is what SpecMD's "Least-Stale"
    (arXiv 2602.03921) and Hebrus's layer-staleness go by, the first to tell this pass's experts from older ones,
    the second to break ties; the definition above is this module's own.
    """

    name = "layer-staleness"

    def begin(self, layers, experts):
        self.layers, self.experts = layers, experts
        self.used: dict[int, int] = {}  # resident -> visit of its last use
        self.at: dict[int, dict[int, None]] = {}  # visit -> residents last used there, in order
        self.visits: list[int] = []  # keys of `at`, ascending
        self.now = -1

    def touch(self, visit, keys):
        self.now = visit
        for key in keys:
            self._put(key, visit)

    def insert(self, key):
        # As if used in its layer's latest turn: a prediction is worth a use until the layer's next turn has come.
        layer = key // self.experts
        self._put(key, self.now - (self.now - layer) % self.layers)

    def _put(self, key, visit):
        self.remove(key)
        self.used[key] = visit
        if visit not in self.at:
            self.at[visit] = {}
            bisect.insort(self.visits, visit)
        self.at[visit][key] = None

    def victim(self, visit, spared):
        top = 0
        while top < len(self.visits):
            oldest = self.visits[top]
            start = visit - ((visit - oldest) // self.layers) * self.layers  # last visit of the window
            stop, bottom = bisect.bisect_right(self.visits, start), top
            for used in reversed(self.visits[bottom:stop]):
                for key in self.at[used]:
                    if key not in spared:
                        self.remove(key)
                        return key
            top = stop
        return None

    def remove(self, key):
        used = self.used.pop(key, None)
        if used is not None:
            del self.at[used][key]
            if not self.at[used]:
                del self.at[used]
                del self.visits[bisect.bisect_left(self.visits, used)]


class ExpectedNextUse(Policy):
    """Evict what is expected to be used last: visits to its layer's turn + L·(1-p)/p.

    p is the decayed share of the layer's passes that used the expert, and (1-p)/p the mean number of passes
    without it. Residents are ordered at the first eviction of a visit; what is prefetched later in the same
    visit goes only if nothing else is left.

    Args:
        decay: per pass, in (0, 1).
    """

    name = "expected-next-use"

    def __init__(self, *, decay: float = 0.9):
        if not 0 < decay < 1:
            raise ContractError("no such decay", field="decay", got=decay, expected="inside (0, 1)")
        self.decay = decay

    def begin(self, layers, experts):
        self.layers, self.experts = layers, experts
        self.share = np.zeros(layers * experts)
        self.held = np.zeros(layers * experts, bool)
        self.turn = np.repeat(np.arange(layers), experts)
        self.decayed = [-1] * layers  # visit of each layer's last decay
        self.order: list[int] = []  # residents, last to go first
        self.ordered = -1

    def touch(self, visit, keys):
        layer = visit % self.layers
        if self.decayed[layer] != visit:  # a visit may come in groups
            self.decayed[layer] = visit
            self.share[layer * self.experts : (layer + 1) * self.experts] *= self.decay
        self.share[keys] += 1 - self.decay
        self.held[keys] = True

    def insert(self, key):
        self.held[key] = True

    def victim(self, visit, spared):
        if self.ordered == visit:
            key = self._next(spared)
            if key is not None:
                return key
        self._sort(visit)
        return self._next(spared)

    def _next(self, spared):
        for at in range(len(self.order) - 1, -1, -1):
            key = self.order[at]
            if self.held[key] and key not in spared:
                del self.order[at]
                self.held[key] = False
                return key
        return None

    def _sort(self, visit):
        self.ordered = visit
        keys = np.flatnonzero(self.held)
        wait = (self.turn[keys] - visit - 1) % self.layers + 1
        share = np.maximum(self.share[keys], 1e-6)  # finite, and still longer than any thread
        expected = wait + self.layers * (1 - share) / share
        self.order = keys[np.argsort(-expected, kind="stable")][::-1].tolist()

    def remove(self, key):
        self.held[key] = False


POLICIES = {policy.name: policy for policy in (Lru, LayerLfu, RecentLfu, LayerStaleness, ExpectedNextUse, HotPin)}
"""Name -> class."""

DEFAULT = RecentLfu.name
"""What the engine uses unless told otherwise."""


def policy(name: str, **options: float) -> Policy:
    """A policy by name. Raises ContractError for an unknown name or option."""
    if name not in POLICIES:
        raise ContractError("no such eviction policy", field="policy", got=name, expected=sorted(POLICIES))
    try:
        return POLICIES[name](**options)
    except TypeError as error:
        raise ContractError(
            "no such option of this policy", field=name, got=sorted(options), expected=str(error)
        ) from None
