"""The claims about times, judged on figures made by hand; and the model they are about."""

import json
import time

import numpy as np
import pytest

from moelab import models

models.activate("reference")

from moelab.models import stand_in  # noqa: E402
from moelab.streaming import EngineOptions, Issuer, StreamingEngine, VirtualDevice, open_store  # noqa: E402
from moelab.streaming.simulation.validation import RecordedDevice, record, resimulate  # noqa: E402
from moelab.studies.streaming_timing import judged  # noqa: E402


def overlap_row(arm, ratio, share, difference):
    known = None if arm == "off" else share
    return {
        "arm": arm, "ratio": ratio, "n": 3, "share": known, "share_least": known, "share_greatest": known,
        "simulated_share": known, "difference": difference, "compute": 10.0, "bound": 10.0,
        "exposed": 5.0 if arm == "off" else 5.0 * (1 - share),
    }  # fmt: skip


def check_row(prediction="none", store="declared", **changed):
    row = {
        "store": store, "prediction": prediction, "tokens": 8, "ratio": 1.0, "hits_off": [0.0], "told_off": [0.0],
        "read_bytes": 100, "simulated_bytes": 100,
    }  # fmt: skip
    return row | changed


def figures(share=0.95, difference=0.05, rate=1.0, checks=None):
    arms = ("off", "in_forward, 1 layer ahead", "in_forward, 2 layers ahead")
    return {
        "overlap": {"rows": [overlap_row(arm, ratio, share, difference) for ratio in (0.5, 1.0, 2.0) for arm in arms]},
        "check": [check_row(), check_row("perfect"), check_row(store="this disk")] if checks is None else checks,
        "throughput": [{"depth": 1, "ratio": rate, "low": rate, "high": rate, "n": 9}],
    }


@pytest.mark.parametrize(
    ("wrong", "failing"),
    [
        ({}, 0),
        ({"share": 0.89}, 9),
        ({"difference": -0.11}, 1),
        ({"rate": 0.94}, 1),
        ({"checks": [check_row(ratio=1.11)]}, 1),
        ({"checks": [check_row(store="this disk", ratio=1.11)]}, 0),
        ({"checks": [check_row(store="this disk", ratio=0.79)]}, 1),
        ({"checks": [check_row(hits_off=[0.0, 0.001, 0.001])]}, 1),
        ({"checks": [check_row("perfect", hits_off=[-0.03, 0.019, 0.018], simulated_bytes=101)]}, 0),
        ({"checks": [check_row("perfect", hits_off=[0.0, -0.021, 0.021], simulated_bytes=103)]}, 2),
    ],
)
def test_a_claim_holds_when_its_figure_does(wrong, failing):
    claims = judged(figures(**wrong))
    assert sum(not row["holds"] for row in claims) == failing
    assert len({row["claim"] for row in claims}) == len(claims)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return stand_in.write(tmp_path_factory.mktemp("stand-in"), hidden=64, width=64, layers=3, experts=8)


def test_the_stand_in_is_a_stock_checkpoint_with_quantised_experts(small):
    config = json.loads((small / "config.json").read_text())
    assert config["quantization"]["bits"] == 4
    with open_store(small) as store:
        weights = 3 * 64 * 64
        assert store.nbytes(0) == weights // 2 + 2 * weights // 64 * 4  # 4 bits, and scale and bias of 64 each
    resident = models.load(small)
    assert (resident.geometry.layers, resident.geometry.experts, resident.geometry.top_k) == (3, 8, 4)


def test_its_text_wanders_and_is_the_same_every_time(small, tmp_path):
    with StreamingEngine.load(small, EngineOptions(cache_bytes=1 << 24)) as engine:
        tokens = [int(token) for token, _ in engine.stream_tokens([9, 8, 7], max_tokens=32)]
    assert len(set(tokens)) > 10
    again = stand_in.write(tmp_path, hidden=64, width=64, layers=3, experts=8)
    assert (again / "model.safetensors").read_bytes() == (small / "model.safetensors").read_bytes()


def test_a_simulation_told_how_long_reads_took_makes_the_engines_hits(small):
    with StreamingEngine.load(small, EngineOptions(cache_bytes=1 << 17, below_cycle=True)) as engine:
        real = record(engine, [9, 8, 7], list(range(20, 44)))
        got = resimulate(engine, real, RecordedDevice(real.reads))
    assert len(real.reads) == real.missing.sum()
    assert np.array_equal(got.used - got.hits, real.missing)
    # Reads are begun a little after the wish, and the lock has a queue: a tenth of the time, and 50 us a visit.
    assert got.seconds_per_token <= 1.1 * real.seconds_per_token + 3 * 50e-6


def test_the_time_of_asking_is_simulated_once(small):
    asking_s = 2e-3

    def predictor(step, layer):
        time.sleep(asking_s)
        return [((layer + 1) % 3, 0, 1.0)]

    with StreamingEngine.load(small, EngineOptions(cache_bytes=1 << 17, below_cycle=True)) as engine:
        with Issuer(engine, predictor, compute_s=[1e-3] * 3):
            real = record(engine, [9, 8, 7], list(range(20, 44)))
        got = resimulate(engine, real, RecordedDevice(real.reads), predictor=predictor)
    assert asking_s <= real.ask_s < 2 * asking_s
    assert got.seconds_per_token > 3 * asking_s
    # As above; counted as compute too, asking would add two thirds.
    assert got.seconds_per_token <= 1.1 * real.seconds_per_token + 3 * 50e-6


def test_recorded_reads_take_their_time_in_the_order_in_which_they_begin():
    device = RecordedDevice(np.array([1.0, 0.5]))
    assert device.book(0.0, 10) == (0.0, 1.0)
    assert device.book(0.25, 10) == (0.25, 0.75)
    assert (device.reads, device.nbytes, device.busy_s) == (2, 20, 1.0)
    assert isinstance(device, VirtualDevice)
