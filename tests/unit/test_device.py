"""The virtual device: its rule by hand, its rate against `disk_profile.declared`, and a throttle in real time."""

import threading
import time

import pytest

from moelab.disk_profile import declared
from moelab.errors import ContractError
from moelab.streaming.store.device import Throttle, VirtualDevice

MIB = 1 << 20


def closed_loop(device, size, depth, reads):
    """Rate of `depth` readers that each ask again as soon as they are served."""
    free = [0.0] * depth
    for _ in range(reads):
        free.sort()
        _, free[0] = device.book(free[0], size)
    return reads * size / max(free)


def test_reads_wait_side_by_side_and_share_the_link_in_order():
    device = VirtualDevice(latency_s=1.0, bytes_per_s=10.0)
    assert device.book(0.0, 20) == (0.0, 3.0)  # 1 s of latency, 2 s of bytes
    assert device.book(0.0, 10) == (0.0, 4.0)  # its latency passed meanwhile, then the link is free at 3
    assert device.book(7.0, 10) == (7.0, 9.0)  # an idle device
    assert (device.reads, device.nbytes) == (3, 40)
    assert device.busy_s == 4.0 + 2.0  # the union of [0,3], [0,4] and [7,9], not their sum
    assert device.busy_by(8.0) == 4.0 + 1.0  # half of the last read is still to come
    device.reset()
    assert (device.reads, device.nbytes, device.busy_s) == (0, 0, 0.0)
    assert device.book(0.0, 20) == (0.0, 3.0)


def test_a_read_beyond_the_lanes_begins_when_the_oldest_is_done():
    device = VirtualDevice(latency_s=1.0, bytes_per_s=10.0, lanes=2)
    assert [device.book(0.0, 10) for _ in range(3)] == [(0.0, 2.0), (0.0, 3.0), (2.0, 4.0)]
    assert device.busy_s == 4.0


@pytest.mark.parametrize("depth", [1, 2, 4, 16])
@pytest.mark.parametrize("size", [256 * 1024, MIB, 4 * MIB])
def test_rate_is_that_of_a_declared_profile(size, depth):
    device = VirtualDevice(latency_s=1e-3, bytes_per_s=1e9)
    profile = declared(latency_s=1e-3, bytes_per_s=1e9, sizes=[size], depths=[depth], note="a test")
    assert device.rate(size, depth) == pytest.approx(profile.bytes_per_second(size, depth), rel=1e-12)
    # The start of 4,000 reads (one latency, before the readers are out of step) is below 1 % of the whole.
    assert closed_loop(device, size, depth, 4000) == pytest.approx(device.rate(size, depth), rel=0.01)


def test_lanes_bound_the_rate():
    device = VirtualDevice(latency_s=1e-3, bytes_per_s=1e9, lanes=4)
    assert device.rate(MIB // 16, 16) == device.rate(MIB // 16, 4) < 1e9
    # 16 readers before 4 lanes: served in order of booking, so that the rate is that of 4
    assert closed_loop(device, 64 * 1024, 16, 4000) == pytest.approx(device.rate(64 * 1024, 4), rel=0.01)


@pytest.mark.parametrize("depth", [1, 4, 16])
def test_a_device_of_two_rates_gives_them_at_one_and_at_that_depth(depth):
    profile = declared(latency_s=2e-3, bytes_per_s=1e9, note="a test")
    device = VirtualDevice.of_rates(*(profile.bytes_per_second(MIB, d) for d in (1, depth)), size=MIB)
    for d in (1, depth):
        assert device.rate(MIB, d) == pytest.approx(profile.bytes_per_second(MIB, d), rel=1e-12)


def test_a_device_that_a_queue_does_not_help_has_no_latency():
    device = VirtualDevice.of_rates(1e9, 1e9, size=MIB)
    assert (device.latency_s, device.bytes_per_s) == (0.0, pytest.approx(1e9))


@pytest.mark.parametrize(
    ("field", "figures"),
    [
        ("latency_s", {"latency_s": -1.0, "bytes_per_s": 1.0}),
        ("latency_s", {"latency_s": float("inf"), "bytes_per_s": 1.0}),
        ("bytes_per_s", {"latency_s": 0.0, "bytes_per_s": 0.0}),
        ("bytes_per_s", {"latency_s": 0.0, "bytes_per_s": float("nan")}),
        ("lanes", {"latency_s": 0.0, "bytes_per_s": 1.0, "lanes": 0}),
    ],
)
def test_impossible_devices_are_refused(field, figures):
    with pytest.raises(ContractError, match=f"field: {field}"):
        VirtualDevice(**figures)


def test_threads_together_get_one_device_and_not_one_each():
    device = VirtualDevice(latency_s=1e-3, bytes_per_s=200e6)
    throttle = Throttle(device)

    def reader():
        for _ in range(10):
            with throttle.read(MIB):
                pass

    threads = [threading.Thread(target=reader) for _ in range(4)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    assert device.reads == 40
    # 40 MiB at 200 MB/s are 0.21 s (a device each: 0.06 s). How much later threads wake is the machine's affair.
    assert device.busy_s <= took < 10 * device.busy_s
    assert device.busy_s >= 40 * MIB / 200e6


def test_a_wait_ends_after_its_time_and_soon():
    throttle = Throttle(VirtualDevice(latency_s=0.0, bytes_per_s=1.0))
    late = []
    for _ in range(20):
        until = time.perf_counter() + 2e-3
        throttle.wait(until)
        late.append(time.perf_counter() - until)
    assert min(late) >= 0
    assert sorted(late)[1] < 1e-3  # those least disturbed by other work on the machine


def test_a_slower_true_read_is_counted_as_late():
    times = iter([0.0, 5.0, 5.0, 5.5])
    throttle = Throttle(VirtualDevice(latency_s=0.0, bytes_per_s=1.0), clock=lambda: next(times))
    with throttle.read(2):
        pass
    assert (throttle.reads, throttle.late, throttle.virtual_s, throttle.overslept_s) == (1, 1, [2.0], 3.5)


def test_a_failed_read_does_not_wait():
    throttle = Throttle(VirtualDevice(latency_s=3600.0, bytes_per_s=1.0))
    with pytest.raises(OSError, match="gone"), throttle.read(1):
        raise OSError("gone")
