"""How many lookups a second the cache itself can do: it must be far from what a disk or a layer takes."""

from __future__ import annotations

import time

import numpy as np

from ..routes import DECODED
from .cache import Cache
from .eviction import policy

__all__ = ["cache_lookups_per_second"]


def cache_lookups_per_second(
    name: str = "lru", *, layers: int = 48, experts: int = 128, top_k: int = 8, tokens: int = 200, share: float = 0.25
) -> tuple[float, float]:
    """Visits, leases, reads and releases of skewed routes, without any I/O.

    Args:
        name: eviction policy.
        share: of all experts, what the budget holds.

    Returns:
        Lookups a second of CPU time, and the hit rate they had.
    """
    rng = np.random.default_rng(0)
    taste = 1.5 * rng.normal(size=(layers, experts))
    noise = rng.gumbel(size=(tokens, layers, experts)) + taste
    ids = np.argpartition(-noise, top_k, axis=-1)[..., :top_k] + np.arange(layers)[:, None] * experts
    routes = ids.tolist()
    cache = Cache(
        layers=layers, experts=experts, slot_bytes=[1] * layers, budget=int(share * layers * experts),
        policy=policy(name), top_k=top_k,
    )  # fmt: skip
    began = time.process_time()
    for token in routes:
        for layer, keys in enumerate(token):
            for key, hit in zip(keys, cache.visit(layer, keys, phase=DECODED), strict=True):
                if not hit:
                    cache.reserve(key, speculative=False)
                    cache.settle(key)
            cache.release(keys)
    return tokens * layers * top_k / (time.process_time() - began), cache.counters().hit_rate
