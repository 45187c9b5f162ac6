"""Availability from a cache: resident, or arriving in time, and nothing is touched by asking."""

import math

import numpy as np
import pytest
import torch

from moelab.errors import GeometryError, PolicyError
from moelab.policies import AnchoredTop1Selection, OverflowToAnchorCapacity
from moelab.specialists import CacheAvailability, available_by_token, available_now
from moelab.streaming.cache.cache import Cache
from moelab.streaming.cache.eviction import Lru
from moelab.streaming.store.device import VirtualDevice


class Held:
    """A cache that only knows what it holds, and counts how it is asked."""

    def __init__(self, *keys):
        self.keys, self.asked = set(keys), []

    def slot(self, key):
        self.asked.append(key)
        return 7 if key in self.keys else None


def test_resident_or_in_time():
    cache = Held(4, 6, 1)  # layer 1 of 4 experts: keys 4 to 7
    assert available_now(cache, 1, 4).tolist() == [True, False, True, False]
    assert cache.asked == [4, 5, 6, 7]
    arrivals = {5: 2.0, 7: 2.0000001, 9: 0.0, 3: 0.0}
    assert available_now(cache, 1, 4, arrivals=arrivals, deadline=2.0).tolist() == [True, True, True, False]
    assert available_now(cache, 1, 4, arrivals=arrivals).tolist() == [True, False, True, False], "no deadline, no wait"


def test_slot_zero_is_resident():
    class First:
        def slot(self, key):
            return 0

    assert available_now(First(), 0, 2).all()


def test_by_token_equals_one_cache_a_token():
    generator = np.random.default_rng(0)
    resident = generator.random((20, 5)) < 0.5
    done = np.where(generator.random((20, 5)) < 0.5, generator.integers(0, 4, (20, 5)), np.inf)
    deadline = generator.integers(0, 4, 20).astype(float)
    found = available_by_token(resident, done, deadline)
    assert found.shape == (1, 20, 5) and found.dtype == torch.bool
    for token in range(20):
        cache = Held(*np.flatnonzero(resident[token]).tolist())
        arrivals = dict(enumerate(done[token].tolist()))
        expected = available_now(cache, 0, 5, arrivals=arrivals, deadline=deadline[token])
        assert torch.equal(found[0, token], expected)
    assert torch.equal(available_by_token(resident, done, math.inf)[0], torch.ones(20, 5, dtype=torch.bool))


def test_it_feeds_a_policy():
    ask = CacheAvailability(Held(2), 2, layers={7: 1}, arrivals=lambda: {3: 1.0}, deadline=lambda layer: 0.5)
    ids = ("code:0", "math:0")
    decision = AnchoredTop1Selection()(torch.tensor([[[0.1, 0.9], [0.9, 0.1]]]), expert_ids=ids)
    routes = OverflowToAnchorCapacity()(decision, expert_availability=ask(7, ids)).effective_routes
    assert routes.selected_indices.tolist() == [[0, 1]]


def test_a_streaming_cache_answers():
    cache = Cache(layers=2, experts=4, slot_bytes=(64, 64), budget=512, policy=Lru(), top_k=2)
    for key in (5, 7):  # of layer 1
        cache.reserve(key, speculative=False)
    cache.settle(7)
    before = cache.counters()
    assert available_now(cache, 1, 4).tolist() == [False, False, False, True], "in flight is not there yet"
    assert available_now(cache, 1, 4, arrivals={5: 1.0}, deadline=1.0).tolist() == [False, True, False, True]
    assert CacheAvailability(cache, 4)(0, tuple("abcd")).tolist() == [False] * 4
    assert cache.counters() == before, "asking is not using"


def test_arrivals_as_a_device_books_them():
    device = VirtualDevice(latency_s=0.5, bytes_per_s=100.0)
    arrivals = {key: device.book(0.0, 100)[1] for key in (4, 6)}
    assert arrivals == {4: 1.5, 6: 2.5}
    assert available_now(Held(), 1, 4, arrivals=arrivals, deadline=2.0).tolist() == [True, False, False, False]


def test_bad_input_is_named():
    with pytest.raises(PolicyError, match="deadline"):
        available_now(Held(), 0, 2, deadline=math.nan)
    with pytest.raises(PolicyError, match=r"arrivals\[1\]"):
        available_now(Held(), 0, 2, arrivals={1: math.nan}, deadline=1.0)
    with pytest.raises(GeometryError, match="experts"):
        CacheAvailability(Held(), 3)(0, ("a", "b"))
    with pytest.raises(GeometryError, match="done"):
        available_by_token(np.zeros((2, 3), bool), np.zeros((3, 2)), 0.0)
    with pytest.raises(GeometryError, match="deadline"):
        available_by_token(np.zeros((2, 3), bool), np.zeros((2, 3)), np.zeros(3))
    with pytest.raises(PolicyError, match="done"):
        available_by_token(np.zeros((2, 3), bool), np.full((2, 3), math.nan), 0.0)
