"""What holds for every simulated run: bytes are conserved, time covers compute and device, more disk never hurts."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.flywheel.residency import Visits, replay
from moelab.routes import DECODED, PREFILLED
from moelab.streaming.cache.cache import Cache
from moelab.streaming.cache.eviction import ExpectedNextUse, LayerLfu, Lru
from moelab.streaming.schedule.oracle import NoisyOracle
from moelab.streaming.schedule.passes import Passes
from moelab.streaming.schedule.prefetch import ISSUE
from moelab.streaming.schedule.schedule import Scheduler
from moelab.streaming.simulation.simulator import simulate
from moelab.streaming.store.device import VirtualDevice

EXPERTS = 6
POLICIES = (Lru, LayerLfu, ExpectedNextUse)
TIMES = (
    "compute_s", "before", "sync_s", "boundary_s", "threads", "asking_reads", "predict_s", "issue", "patience",
    "wake_s", "start_s",
)  # fmt: skip
quick = settings(max_examples=60, deadline=None)


@st.composite
def cases(draw):
    """Routes with prompts in between, sizes, a device, compute times; everything small and irregular."""
    tokens, layers, top_k = draw(st.integers(1, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = rng.random((tokens, layers, EXPERTS)).argsort(-1)[..., :top_k].astype(np.uint16)
    phase = np.where(rng.random(tokens) < draw(st.sampled_from([0.0, 0.4])), PREFILLED, DECODED).astype(np.uint8)
    thread = np.sort(rng.integers(0, 3, tokens))
    return dict(
        ids=ids,
        phase=phase,
        thread=thread,
        size=int(rng.integers(1, 50)),
        slots=draw(st.integers(top_k * layers, EXPERTS * layers)),
        policy=draw(st.sampled_from(POLICIES)),
        latency_s=draw(st.sampled_from([0.0, 0.3, 5.0])),
        bytes_per_s=draw(st.floats(1.0, 100.0)),
        lanes=draw(st.sampled_from([None, 1, 3])),
        compute_s=rng.random(layers) * draw(st.sampled_from([0.0, 1.0, 10.0])),
        before=draw(st.floats(0, 1)),
        sync_s=draw(st.sampled_from([0.0, 0.1])),
        boundary_s=draw(st.sampled_from([0.0, 0.7])),
        threads=draw(st.integers(1, 4)),
        asking_reads=draw(st.booleans()),
        predicted=draw(st.none() | st.tuples(st.floats(0, 1), st.floats(0.2, 1), st.integers(1, 6))),
        predict_s=draw(st.sampled_from([0.0, 0.05])),
        wake_s=draw(st.sampled_from([0.0, 0.01, (0.0, 0.3, 0.01)])),
        start_s=draw(st.sampled_from([0.0, 0.02])),
        issue=draw(st.sampled_from(ISSUE)),
        patience=draw(st.sampled_from([0.0, 1.0])),
    )


def passes(case):
    return Passes.of(case["ids"], experts=EXPERTS, thread=case["thread"], phase=case["phase"])


def run(case, *, event_loop=False, **changes):
    case = case | changes
    routes, layers = passes(case), case["ids"].shape[1]
    device = VirtualDevice(latency_s=case["latency_s"], bytes_per_s=case["bytes_per_s"], lanes=case["lanes"])
    predictor = None
    if case["predicted"] is not None:
        recall, precision, lead = case["predicted"]
        predictor = NoisyOracle(routes, recall=recall, precision=precision, lead=lead, seed=1)
    found = simulate(
        routes,
        nbytes=[case["size"]] * layers,
        cache=Cache(
            layers=layers,
            experts=EXPERTS,
            slot_bytes=[case["size"]] * layers,
            budget=case["slots"] * case["size"],
            policy=case["policy"](),
            top_k=routes.top_k,
        ),
        scheduler=Scheduler(max_inflight_bytes=6 * case["size"], p0_reserve_bytes=case["size"]),
        device=device,
        predictor=predictor,
        event_loop=event_loop,
        **{name: case[name] for name in TIMES},
    )
    return found, device


def same(a, b):
    return all(
        np.array_equal(x, y, equal_nan=True) if isinstance(x, np.ndarray) else x == y
        for x, y in ((getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a) if f.name != "counters")
    )


@quick
@given(cases())
def test_what_holds_for_every_run(case):
    got, device = run(case)
    shape = (len(passes(case)), case["ids"].shape[1])
    assert got.route.shape == shape
    slack = 1e-9 * (1 + got.end[-1])  # sums of up to some hundred floats, in another order
    assert (got.exposed >= 0).all() and (got.boundary_wait >= 0).all() and (got.behind >= 0).all()
    # Time covers what is computed, and the device cannot have worked longer than the run took.
    assert (got.pass_s >= got.compute_s - slack).all()
    assert got.end[-1] >= got.busy_s.sum() - slack
    if device.busy_s <= got.end[-1]:  # else reads are still in flight at the end
        assert device.busy_s >= got.device_floor_s.sum() - slack
    # Nothing but compute, predictions and waits takes time.
    predictions = case["predict_s"] * (0 if case["predicted"] is None else got.route.size)
    spent = got.compute_s.sum() + predictions + got.exposed.sum() + got.boundary_wait.sum()
    assert abs(got.end[-1] - spent) <= slack
    # Order in time.
    assert (got.consume >= got.route).all() and (np.diff(got.route.ravel()) >= 0).all()
    read = ~np.isnan(got.issue)
    assert (got.issue[read] <= got.ready[read] + slack).all()
    # Bytes: every one read is a demand's or a prefetch's, and a prefetch is either used or not.
    assert got.demand_bytes.sum() + got.prefetch_bytes.sum() == device.nbytes
    assert got.useful_bytes + got.wasted_bytes == got.prefetch_bytes.sum()
    assert 0 <= got.late_bytes <= got.useful_bytes
    # Experts: what was missing was read on demand, or was already on its way.
    missing = got.used - got.hits
    assert (missing.sum() - got.late.sum()) * case["size"] == got.demand_bytes.sum()
    assert got.late.sum() * case["size"] == got.late_bytes
    assert (got.timely <= got.hits).all() and (got.hits <= got.used).all()
    told = got.counters["prefetch"]
    if told is not None:  # the prefetcher keeps books of its own
        bytes_of = told.fate_bytes
        assert bytes_of["useful"] + bytes_of["late"] == got.useful_bytes
        assert bytes_of["late"] == got.late_bytes
        assert bytes_of["wasted"] == got.wasted_bytes
        assert told.ready_by_prefetch == got.timely.sum()
    # Never more in flight than readers. (The fast path has no scheduler to ask.)
    assert got.counters["scheduler"].high_water_bytes <= (case["threads"] + case["asking_reads"]) * case["size"]
    count = got.counters["cache"]
    assert (count.hits, count.misses) == (got.hits.sum(), missing.sum())


@quick
@given(cases())
def test_a_run_can_be_repeated(case):
    assert same(run(case)[0], run(case)[0])


@quick
@given(cases())
def test_the_fast_path_is_the_event_loop(case):
    case |= {"predicted": None, "asking_reads": False}
    assert same(run(case)[0], run(case, event_loop=True)[0])


@quick
@given(cases())
def test_demand_reads_what_the_offline_replay_reads(case):
    """Hits and bytes of every visit, for experts of one size and prompts that fit."""
    case |= {"predicted": None, "phase": np.full_like(case["phase"], DECODED)}
    got, _ = run(case)
    visits = Visits.of(case["ids"], EXPERTS, case["thread"])
    sizes = np.full(case["ids"].shape[1], case["size"])
    wanted = replay(visits, sizes, budget=case["slots"] * case["size"], policy=case["policy"]())
    if case["policy"].partitioned and case["slots"] % len(sizes):
        return  # the replay leaves the remainder of an unequal division unused, the cache hands it out
    assert np.array_equal(got.hits, wanted.hits.sum(-1))
    assert np.array_equal(got.demand_bytes.sum(1), wanted.read_bytes)


@quick
@given(cases(), st.floats(1.0, 10.0))
def test_more_bandwidth_is_never_slower_for_demand(case, factor):
    case |= {"predicted": None}
    slow, fast = run(case)[0], run(case, bytes_per_s=case["bytes_per_s"] * factor)[0]
    slack = 1e-9 * (1 + slow.end[-1])
    assert (fast.end <= slow.end + slack).all()
    assert np.array_equal(fast.hits, slow.hits)


@quick
@given(cases())
def test_timely_is_what_prefetch_earned(case):
    """Without prediction nothing is timely; with it every expert so counted was read ahead."""
    off = run(case, predicted=None)[0]
    assert not off.timely.any() and not off.late.any() and not off.prefetch_bytes.any() and not off.evicted.any()
    on = run(case)[0]
    assert on.timely.sum() * case["size"] == on.useful_bytes - on.late_bytes
