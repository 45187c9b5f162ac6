"""The simulator: timelines worked out by hand, the fluid limits, bounds, and what it refuses."""

import numpy as np
import pytest

from moelab.errors import ContractError, GeometryError
from moelab.streaming.cache.cache import Cache
from moelab.streaming.cache.eviction import LayerLfu, Lru
from moelab.streaming.schedule.oracle import NoisyOracle, Oracle, PreviousToken
from moelab.streaming.schedule.passes import Passes
from moelab.streaming.schedule.prefetch import ISSUE, Prefetcher
from moelab.streaming.schedule.schedule import Scheduler
from moelab.streaming.simulation.simulation import share_of_possible
from moelab.streaming.simulation.simulator import simulate
from moelab.streaming.store.device import VirtualDevice


def run(
    passes, *, size=2, slots=None, policy=Lru, latency_s=1.0, bytes_per_s=1.0, compute_s=4.0, predictor=None,
    prefetch=None, **more,
):  # fmt: skip
    """Small numbers: by default a read takes 1 s of latency and 2 s on the link, and a layer computes for 4 s."""
    layers = passes.layers
    cache = Cache(
        layers=layers,
        experts=passes.experts,
        slot_bytes=[size] * layers,
        budget=size * (layers * passes.experts if slots is None else slots),
        policy=policy(),
        top_k=passes.top_k,
    )
    scheduler = Scheduler(max_inflight_bytes=10**9, p0_reserve_bytes=0)
    if prefetch is not None:
        more["prefetcher"] = Prefetcher(cache, scheduler, nbytes=[size] * layers, **prefetch)
    return simulate(
        passes,
        nbytes=[size] * layers,
        cache=cache,
        scheduler=scheduler,
        device=VirtualDevice(latency_s=latency_s, bytes_per_s=bytes_per_s),
        compute_s=compute_s,
        predictor=predictor,
        **more,
    )


# Two layers, two passes: layer 0 keeps expert 0 and exchanges 1 for 2, layer 1 keeps both of its experts.
TWO = Passes.of(np.array([[[0, 1], [0, 1]], [[0, 2], [0, 1]]], np.uint16), experts=4)
BY_HAND = dict(threads=2, before=0.5, sync_s=0.5, boundary_s=1.0)


@pytest.mark.parametrize("event_loop", [False, True])
def test_demand_only_by_hand(event_loop):
    got = run(TWO, **BY_HAND, event_loop=event_loop)
    # Layer 0 computes 2 s, then 0.5 s of sync: ids at 2.5. Two misses: link until 2.5+1+2, and 2 s more.
    # Both experts after 7.5, 1 s each: 9.5. Layer 1 the same from there. Head until 20.
    assert got.route.tolist() == [[2.5, 12.0], [22.5, 29.0]]
    assert got.ready.tolist() == [[7.5, 17.0], [25.5, 29.0]]
    # Second pass: expert 0 is computed from 22.5 to 23.5 while 2 is read until 25.5.
    assert got.consume.tolist() == [[7.5, 17.0], [25.5, 29.0]]
    assert got.exposed.tolist() == [[5.0, 5.0], [2.0, 0.0]]
    np.testing.assert_array_equal(got.issue, [[2.5, 12.0], [22.5, np.nan]])
    assert (got.start.tolist(), got.end.tolist()) == ([0.0, 20.0], [20.0, 32.0])
    assert got.busy_s.tolist() == [10.0, 3.0]
    assert got.hits.tolist() == [[0, 0], [1, 2]]
    assert got.demand_bytes.tolist() == [[4, 4], [2, 0]]
    assert not got.prefetch_bytes.any() and not got.timely.any()
    assert got.compute_s.tolist() == [10.0, 10.0]
    assert got.seconds_per_token == 16.0
    assert got.timely_recall == 3 / 8
    assert got.hidden_fraction == 1 - 12 / 13
    # Least device time: 4 reads of 3 s on two readers 6 s, but 8 s on the link; then one read, 1.5 s or 2 s.
    assert got.device_floor_s.tolist() == [8.0, 2.0]
    assert got.bound_s == 5.0 + 10.0 + 10.0
    assert got.floor_s == max(20.0 + 5.0, 2.5 + 10.0)


@pytest.mark.parametrize("event_loop", [False, True])
def test_what_threads_take_is_added_to_every_read_by_hand(event_loop):
    one = Passes.of(np.array([[[0, 1, 2]]], np.uint16), experts=4)
    plain = dict(threads=2, compute_s=0.0, latency_s=0.0, event_loop=event_loop)
    assert run(one, **plain).exposed.tolist() == [[6.0]]
    # Two readers begin half a second late and end a quarter late: 2.75 and 4.75. The third read is begun at 2.75 by
    # the first, which is awake; the link has it from 4 to 6.
    assert run(one, **plain, wake_s=0.25, start_s=0.5).exposed.tolist() == [[6.25]]
    # Of several latenesses each read has the next: 2.25, 4.5 and, begun at 2.25, 6.25.
    assert run(one, **plain, wake_s=[0.25, 0.5]).exposed.tolist() == [[6.25]]
    # A single read has both.
    single = Passes.of(np.array([[[0]]], np.uint16), experts=4)
    assert run(single, **plain, wake_s=0.25, start_s=0.5).exposed.tolist() == [[2.75]]


@pytest.mark.parametrize("event_loop", [False, True])
def test_reads_may_land_in_another_order_than_they_began_by_hand(event_loop):
    plain = dict(compute_s=0.0, latency_s=0.0, event_loop=event_loop)
    # The link has the reads until 2 and 4. The first one's thread wakes at 12, and is what the visit waits for.
    two = Passes.of(np.array([[[0, 1]]], np.uint16), experts=4)
    assert run(two, threads=2, **plain, wake_s=[10.0, 0.0]).exposed.tolist() == [[12.0]]
    # Of three, the third is begun at 4 by whoever is free, and is there at 6.
    three = Passes.of(np.array([[[0, 1, 2], [0, 1, 2]]], np.uint16), experts=4)
    got = run(three, threads=2, **plain, wake_s=[10.0, 0.0, 3.0])
    assert got.exposed[0, 0] == 12.0 and got.ready[0, 0] == 12.0


def test_the_asking_thread_begins_at_once():
    single = Passes.of(np.array([[[0, 1]]], np.uint16), experts=4)
    got = run(single, threads=1, asking_reads=True, compute_s=0.0, latency_s=0.0, wake_s=0.25, start_s=9.0)
    # The reader takes the first at once on the link, and is told 9 s later; the asking thread has the second at 4.25.
    assert got.ready.tolist() == [[11.25]]


def test_prediction_in_the_forward_by_hand():
    got = run(TWO, **BY_HAND, predictor=Oracle(TWO))
    # Layer 1's two reads begin when the readers are free, at 5.5 and 7.5, and queue on the link: 9.5 and 11.5.
    # Its ids are known at 12.0: nothing waits. Then expert 2 of layer 0 is read, from 12 to 15; its ids come at 17.5.
    assert got.route.tolist() == [[2.5, 12.0], [17.5, 22.0]]
    assert got.ready.tolist() == [[7.5, 12.0], [17.5, 22.0]]
    np.testing.assert_array_equal(got.issue, [[2.5, 5.5], [12.0, np.nan]])
    assert got.exposed.tolist() == [[5.0, 0.0], [0.0, 0.0]]
    assert got.end.tolist() == [15.0, 25.0]
    assert got.timely.tolist() == [[0, 2], [1, 0]]
    assert got.hits.tolist() == [[0, 2], [2, 2]]
    assert got.demand_bytes.tolist() == [[4, 0], [0, 0]]
    assert got.prefetch_bytes.tolist() == [[4, 2], [0, 0]]
    assert (got.useful_bytes, got.late_bytes, got.wasted_bytes) == (6, 0, 0)
    assert got.busy_s.tolist() == [12.0, 0.0]  # from 2.5 to 11.5, from 12 to 15
    assert got.timely_miss_recall == 3 / 5
    off = run(TWO, **BY_HAND)
    assert share_of_possible(off, got) == (32 - 25) / (32 - 25)


def test_waiting_until_prefetches_leave_a_slot_is_waiting():
    ids = np.array([[[3], [5]], [[1], [2]], [[1], [2]], [[5], [4]]], np.uint16)
    routes = Passes.of(ids, experts=6, thread=np.array([0, 0, 2, 2]))
    predictor = NoisyOracle(routes, recall=0.25, precision=0.5, lead=2, seed=1)
    got = run(
        routes, size=33, slots=2, latency_s=0.0, compute_s=0.0, boundary_s=0.7, threads=2, predictor=predictor,
        issue="async_boundary", patience=1.0,
    )  # fmt: skip
    # A token computes nothing and ends 0.7 s after its layers: all else is waiting for 33 s reads, or for their slots.
    assert got.end[-1] == pytest.approx(4 * 0.7 + got.exposed.sum())


def test_prediction_at_an_asynchronous_boundary_by_hand():
    got = run(TWO, **BY_HAND, predictor=Oracle(TWO, lead=2), issue="async_boundary")
    # At 20 the one missing expert (2 of layer 0) is queued: done at 23, its ids are known at 22.5: late by 0.5.
    # Expert 0 is computed until 23.5 meanwhile, so that nothing waits.
    assert got.late.tolist() == [[0, 0], [1, 0]]
    assert got.ready[1].tolist() == [23.0, 27.0]
    assert got.exposed[1].tolist() == [0.0, 0.0]
    assert got.end.tolist() == [20.0, 30.0]
    assert (got.useful_bytes, got.late_bytes) == (2, 2)
    assert got.timely_miss_recall == 0.0


def test_prediction_at_a_synchronous_boundary_by_hand():
    got = run(TWO, **BY_HAND, predictor=Oracle(TWO, lead=2), issue="step_boundary")
    assert got.end.tolist() == [23.0, 33.0]  # the read that hid above is waited for
    assert got.boundary_wait.tolist() == [3.0, 0.0]
    assert got.exposed_s == 5.0 + 5.0 + 3.0
    assert got.timely[1].tolist() == [1, 0]


def test_the_waiting_thread_reads_too():
    # One reader and the asking thread: both misses are issued at once, as with two readers.
    got = run(TWO, **{**BY_HAND, "threads": 1}, asking_reads=True)
    assert got.ready.tolist() == [[7.5, 17.0], [25.5, 29.0]]
    alone = run(TWO, **{**BY_HAND, "threads": 1})
    assert alone.ready[0, 0] == 2.5 + 3.0 + 3.0  # the second latency begins when the first read is done


def test_predictions_cost_compute():
    free = run(TWO, **BY_HAND, predictor=Oracle(TWO))
    paid = run(TWO, **BY_HAND, predictor=Oracle(TWO), predict_s=0.25)
    # The first runs while its layer waits for misses anyway; of the others each delays its layer.
    assert paid.seconds == free.seconds + 3 * 0.25
    assert paid.exposed.tolist() == [[4.75, 0.0], [0.0, 0.0]]


def test_wrong_predictions_cost_bytes_and_displace():
    wrong = lambda step, layer: [(1 - layer, 3, 0.5)]  # noqa: E731 - never selected
    got = run(TWO, **BY_HAND, predictor=wrong, slots=5)
    assert got.prefetch_bytes.sum() == got.wasted_bytes > 0
    assert got.useful_ratio == 0.0
    assert got.evicted.sum() > 0
    assert got.seconds >= run(TWO, **BY_HAND, slots=5).seconds


def test_what_a_demand_waits_behind_speculation_is_counted():
    # At the end of pass 0 a wrong expert is queued; the right miss of the next pass finds the link taken.
    wrong = lambda step, layer: [(0, 3, 0.5)] if layer == 1 else []  # noqa: E731
    got = run(TWO, threads=2, before=0.0, predictor=wrong, issue="async_boundary")
    # Expert 3 and expert 2 both issued as pass 1 begins: the link is free for expert 2 after 3 s, not after 1 s.
    assert got.behind[1].tolist() == [2.0, 0.0]


# ---------------------------------------------------------------- the fluid limits


def fresh(layers, passes, top_k=2, experts=64):
    """Every pass uses experts that were last used so long ago that no cache of three cycles holds them."""
    ids = (np.arange(passes)[:, None, None] * top_k + np.arange(top_k)) % experts + np.zeros((1, layers, 1), int)
    return Passes.of(ids.astype(np.uint16), experts=experts)


def fluid(layers, *, ratio=1.0, predictor=False, lead=1, passes=20, **more):
    """Compute 1 s a layer, all of it after the ids; reads of a layer take `ratio`; no latency."""
    routes = fresh(layers, passes)
    return run(
        routes,
        size=100,
        slots=3 * 2 * layers,
        latency_s=0.0,
        bytes_per_s=200 / ratio,
        compute_s=1.0,
        before=0.0,
        predictor=Oracle(routes, lead=lead) if predictor else None,
        **more,
    )


@pytest.mark.parametrize("layers", [8, 48])
@pytest.mark.parametrize(
    ("issue", "expected"),
    [
        ("step_boundary", lambda layers: 2.0),  # all reads, then all compute
        ("async_boundary", lambda layers: 1 + 1 / layers),  # the first layer's reads are exposed: 1.125, 1.021
        ("in_forward", lambda layers: 1.0),
    ],
)
def test_fluid_limits_of_the_three_issue_points(layers, issue, expected):
    got = fluid(layers, predictor=True, lead=1 if issue == "in_forward" else layers, issue=issue)
    # Each read is 1/K of a layer, and the last pass predicts nothing: only passes in the middle are steady. Times
    # are sums of multiples of 1/2, so that only rounding (1e-9) separates them from the fluid figures.
    assert got.pass_s[2:-1] / layers == pytest.approx(expected(layers), rel=1e-9)
    assert fluid(layers).pass_s / layers == pytest.approx(2.0, rel=1e-9)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_a_perfect_oracle_in_the_forward_hides_what_can_be_hidden(ratio):
    off, on = fluid(8, ratio=ratio), fluid(8, ratio=ratio, predictor=True)
    assert share_of_possible(off, on) >= 0.9
    assert on.seconds >= off.floor_s
    assert on.bytes_per_token == off.bytes_per_token


def test_prefetch_that_always_comes_late_earns_nothing():
    """A public report: 0 of 725 preloads in time, and 14 % slower."""
    routes = fresh(layers=6, passes=121, top_k=1)  # 726 visits; all but the first are predicted
    slow = dict(size=100, slots=24, latency_s=0.0, bytes_per_s=10.0, compute_s=1.0, before=0.0)
    off = run(routes, **slow)
    oracle = Oracle(routes)

    def half_wrong(step, layer):
        return [c for at, e, _ in oracle(step, layer) for c in ((at, e, 0.6), (at, (e + 31) % 64, 0.4))]

    # A read takes ten times as long as a layer computes, so that none can come in time; half of them are wrong.
    on = run(routes, **slow, predictor=half_wrong)
    assert on.late.sum() == 725 and on.timely.sum() == 0
    assert on.timely_recall == on.timely_miss_recall == 0.0
    assert on.late_bytes == on.useful_bytes == 72500
    assert on.seconds > off.seconds
    assert share_of_possible(off, on) < 0.0


def test_expired_predictions_are_not_read():
    routes = fresh(layers=6, passes=20, top_k=1)
    slow = dict(size=100, slots=18, latency_s=0.0, bytes_per_s=10.0, compute_s=1.0, before=0.0)
    on = run(routes, **slow, predictor=Oracle(routes), patience=0.0, threads=1)
    assert on.counters["scheduler"].expired > 0
    assert on.seconds == run(routes, **slow, threads=1).seconds


def test_what_is_predicted_is_not_evicted_before_its_visit():
    """A perfect oracle of the whole next pass: its reads must not displace what it names as well."""
    rng = np.random.default_rng(0)
    routes = Passes.of(rng.random((40, 4, 16)).argsort(-1)[..., :4].astype(np.uint16), experts=16)
    tight = dict(slots=4 * 6, policy=LayerLfu, compute_s=9.0, predictor=Oracle(routes, lead=4), issue="async_boundary")
    kept, lost = (run(routes, **tight, prefetch=dict(byte_budget=10**9, protect=p)) for p in (True, False))
    assert kept.timely_recall > lost.timely_recall
    assert kept.bytes_per_token < lost.bytes_per_token
    assert kept.seconds < lost.seconds


def test_a_byte_budget_and_a_threshold_hold_in_every_pass():
    routes = fresh(layers=3, passes=9)
    given = dict(predictor=Oracle(routes), slots=30, compute_s=50.0)
    assert run(routes, **given, prefetch=dict(byte_budget=4)).prefetch_bytes.sum(1).tolist() == [4] * 9
    assert run(routes, **given, prefetch=dict(byte_budget=0)).prefetch_bytes.sum() == 0
    unsure = NoisyOracle(routes, recall=1.0, precision=0.5)
    assert not run(routes, slots=30, predictor=unsure, prefetch=dict(byte_budget=99, threshold=0.6)).timely.any()
    with pytest.raises(ContractError, match="prefetcher"):
        run(routes, prefetch=dict(byte_budget=4))


# ---------------------------------------------------------------- prompts, small caches, refusals


def test_a_prompt_is_one_pass_and_counts_for_nothing_but_the_cache():
    ids = np.array([[[0, 1], [0, 1]], [[2, 1], [3, 1]], [[2, 1], [3, 0]]], np.uint16)
    routes = Passes.of(ids, experts=4, phase=np.array([0, 0, 1], np.uint8))
    assert routes.keys == [[[0, 2, 1], [4, 7, 5]], [[2, 1], [7, 4]]]
    got = run(routes, **BY_HAND)
    assert got.tokens == 1
    assert got.hits[1].tolist() == [2, 2]
    assert got.seconds == got.pass_s[1] == got.compute_s[1]
    assert got.bound_s == got.compute_s[1]


def test_a_prompt_that_does_not_fit_is_read_in_groups():
    ids = np.arange(8, dtype=np.uint16).reshape(4, 1, 2)
    routes = Passes.of(ids, experts=8, phase=np.zeros(4, np.uint8))
    got = run(routes, slots=3, **BY_HAND)
    assert got.used.tolist() == [[8]] and got.hits.tolist() == [[0]]
    assert got.demand_bytes.sum() == 16


def test_order_of_a_visit():
    ids = np.array([[[3, 1]], [[1, 2]], [[3, 0]]], np.uint16)
    prompt = dict(experts=4, phase=np.zeros(3, np.uint8))
    assert Passes.of(ids, **prompt).keys == [[[1, 2, 3, 0]]]  # the last mention counts
    assert Passes.of(ids, **prompt, order="sorted").keys == [[[0, 1, 2, 3]]]
    mask = np.array([[[True, False]], [[False, False]], [[False, True]]])
    assert Passes.of(ids, **prompt, mask=mask).keys == [[[3, 0]]]
    with pytest.raises(ContractError, match="field: order"):
        Passes.of(ids, experts=4, order="random")
    with pytest.raises(GeometryError, match="field: ids"):
        Passes.of(ids, experts=3)
    with pytest.raises(GeometryError, match="field: mask"):
        Passes.of(ids, experts=4, mask=mask[:1])


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("issue", {"issue": "sometimes"}),
        ("compute_s", {"compute_s": -1.0}),
        ("before", {"before": 1.5}),
        ("sync_s", {"sync_s": -1.0}),
        ("threads", {"threads": 0}),
        ("patience", {"patience": -1.0}),
    ],
)
def test_impossible_arguments_are_refused(field, arguments):
    with pytest.raises(ContractError, match=field):
        run(TWO, **arguments)


def test_times_of_another_geometry_are_refused():
    with pytest.raises(GeometryError, match="compute_s"):
        run(TWO, compute_s=np.ones(3))


def test_shares_are_of_the_same_passes_and_of_a_run_without_prefetch():
    off, on = run(TWO), run(TWO, predictor=Oracle(TWO))
    with pytest.raises(ContractError, match="has prefetched"):
        share_of_possible(on, off)
    with pytest.raises(ContractError, match="other passes"):
        share_of_possible(off, run(fresh(2, 3)))


# ---------------------------------------------------------------- predictors


def test_oracles():
    assert Oracle(TWO)(0, 0) == [(1, 0, 1.0), (1, 1, 1.0)]
    assert Oracle(TWO, lead=2)(0, 0) == [(0, 0, 1.0), (0, 2, 1.0)]
    assert Oracle(TWO)(1, 1) == []
    assert PreviousToken(TWO, confidence=0.3)(0, 1) == [(1, 0, 0.3), (1, 1, 0.3)]
    with pytest.raises(ContractError, match="lead"):
        Oracle(TWO, lead=0)
    with pytest.raises(ContractError, match="precision"):
        NoisyOracle(TWO, recall=0.5, precision=0.0)


def test_a_noisy_oracle_is_as_good_as_it_is_told_to_be():
    routes = fresh(layers=8, passes=60, top_k=4)
    noisy = NoisyOracle(routes, recall=0.7, precision=0.5, seed=3)
    right = wrong = wanted = 0
    for step in range(59):
        for layer in range(8):
            candidates = noisy(step, layer)
            assert candidates == noisy(step, layer)
            truth = {expert for _, expert, _ in Oracle(routes)(step, layer)}
            right += sum(expert in truth for _, expert, _ in candidates)
            wrong += sum(expert not in truth for _, expert, _ in candidates)
            wanted += len(truth)
    # 1,888 experts: standard errors .011 of the recall and about .01 of the precision; four of them.
    assert right / wanted == pytest.approx(0.7, abs=0.045)
    assert right / (right + wrong) == pytest.approx(0.5, abs=0.04)


def test_a_token_and_a_layer_ahead():
    """A prerouter's horizon: layer l at token t names layer l+1 at token t+1, not that of token t."""
    routes = fresh(layers=2, passes=4)
    got = run(routes, predictor=Oracle(routes, lead=3), tokens_ahead=1, size=1, compute_s=10.0)
    assert got.timely[2:].sum() == got.used[2:].sum()
    assert set(ISSUE) == {"in_forward", "async_boundary", "step_boundary"}


@pytest.mark.parametrize(("tokens_ahead", "wait"), [(0, 4.0), (1, 12.0)])
def test_deadlines_are_on_the_compute_only_timeline(tokens_ahead, wait, monkeypatch):
    """The next layer's ids are 4 s of compute away, those a pass later 12 s, however long this layer waits."""
    routes, seen, plain = fresh(layers=2, passes=4), [], Prefetcher.tickets

    def tickets(self, candidates, now, *, due, passes_ahead):
        seen.append((due(candidates[0][0]) - now, passes_ahead))
        return plain(self, candidates, now, due=due, passes_ahead=passes_ahead)

    monkeypatch.setattr(Prefetcher, "tickets", tickets)
    run(routes, predictor=Oracle(routes, lead=1 + 2 * tokens_ahead), tokens_ahead=tokens_ahead, patience=0.0)
    assert seen == [(pytest.approx(wait), tokens_ahead)] * len(seen) and len(seen) >= 5


def test_predictions_whose_visit_has_come_are_withdrawn():
    """One slow reader, and more wrong candidates than it can read before their layer's turn."""
    routes = fresh(layers=2, passes=4)
    wrong = lambda step, layer: [(1 - layer, expert, 0.5) for expert in range(40, 60)]  # noqa: E731
    got = run(routes, predictor=wrong, threads=1, patience=99.0)
    counters = got.counters["scheduler"]
    assert counters.cancelled > 50 and counters.expired == 0
    assert counters.started[1] < 20
