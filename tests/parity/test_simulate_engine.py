"""A real streamed run and its simulation: the same hits visit by visit, the same bytes, nearly the same time."""

import numpy as np
import pytest

from moelab import models

models.activate("reference")

from moelab.errors import ContractError  # noqa: E402
from moelab.streaming.device import VirtualDevice  # noqa: E402
from moelab.streaming.engine import EngineOptions, StreamingEngine  # noqa: E402
from moelab.streaming.validation import device_of, record, resimulate  # noqa: E402

SLOT = 147456
"""Bytes of a slot of the reference models' experts, in float32."""
PROMPT, TOKENS = list(range(40, 56)), list(range(60, 84))


def engine(model, *, slots, device=None, **more):
    return StreamingEngine.load(model, EngineOptions(cache_bytes=slots * SLOT, device=device, **more))


@pytest.mark.parametrize("policy", ["lru", "layer-lfu", "expected-next-use"])
@pytest.mark.parametrize("model", ["softmax", "sigmoid"])
def test_hits_and_bytes_are_the_engines(model, policy):
    with engine(model, slots=96, policy=policy) as streamed:
        real = record(streamed, PROMPT, TOKENS)
        got = resimulate(streamed, real, VirtualDevice(latency_s=1e-4, bytes_per_s=1e9))
        assert np.array_equal(got.used - got.hits, real.missing)
        assert real.missing[1:].sum() > 0
        assert got.counters["cache"].demand_reads * streamed.store.nbytes(0) == real.read_bytes
        assert got.counters["cache"] == streamed.cache.counters()


def test_a_throttled_run_takes_the_simulated_time():
    # Reads of 4 ms of latency and 4 ms of bytes: waits are most of the time, and waking a thread is small against them.
    device = VirtualDevice(latency_s=4e-3, bytes_per_s=73728 / 4e-3)
    ratios = []
    for _ in range(3):
        with engine("softmax", slots=96, device=device.idle_copy()) as streamed:
            real = record(streamed, PROMPT, TOKENS)
            got = resimulate(streamed, real, device.idle_copy())
        ratios.append(got.seconds_per_token / real.seconds_per_token)
        if abs(ratios[-1] - 1) <= 0.1:
            return
    pytest.fail(
        f"simulated ÷ real seconds a token: {ratios}, and other work on the machine only ever slows the real run"
    )


def test_the_device_of_a_throttled_store_is_its_throttle():
    device = VirtualDevice(latency_s=3e-3, bytes_per_s=73728 / 3e-3)
    with engine("softmax", slots=96, device=device) as streamed:
        found = device_of(streamed.store, depth=4, reads=12)
    # 12 reads a thread, one start-up of the latency; bytes are rounded up to pages (6 %). Above: threads wake late.
    assert 0.6 * device.bytes_per_s < found.bytes_per_s < 1.05 * device.bytes_per_s
    assert found.latency_s + 73728 / found.bytes_per_s >= 5.9e-3


def test_a_recording_needs_a_prompt_and_tokens():
    with engine("softmax", slots=96) as streamed:
        for prompt, tokens in (([], TOKENS), (PROMPT, []), (list(range(50)) * 50, TOKENS)):
            with pytest.raises(ContractError, match="field: prompt, tokens"):
                record(streamed, prompt, tokens)
