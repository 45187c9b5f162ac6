"""Staged slots: which set serves which pass, what fills them, and what becomes of ids that they lack."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from switch_world import DIM, E, K, World, inputs, routes

from moelab.errors import ContractError, GeometryError, ParameterError
from moelab.routes import DECODED, PREFILLED
from moelab.streaming.layer.options import LayerOptions
from moelab.streaming.layer.stack import Stack

X = inputs((1, 1))
SET = [0, 2, 5, 7]
IDS = np.array([[[5, 0, 7, 2]]], np.uint32)
OTHER = np.array([[[1, 3, 4, 6]]], np.uint32)
MIXED = np.array([[[5, 1, 7, 3]]], np.uint32)


def options(**own):
    return LayerOptions(**{"staged": True, "staged_n": K, "staged_trigger": K, **own})


def world(**own):
    kept = {
        name: own.pop(name) for name in ("layers", "cache_slots", "threads", "policy_name", "anchor") if name in own
    }
    return World(options(**own), **kept)


def one(made, layer=0):
    return made.switches[layer], made.switches[layer].staged


# ---------------------------------------------------------------- which set serves which pass


def test_nothing_staged_is_exact_and_counted():
    with world() as made:
        switch, staged = one(made)
        np.testing.assert_array_equal(made.decode(X, mx.array(IDS)), made.expected(X, IDS))
        assert staged.counters.fallback == 1 and staged.counters.used == 0
        made.prefill(X, mx.array(IDS))
        assert staged.counters.fallback == 1  # staged slots are for decode


def test_the_phase_decides_and_not_the_number_of_indices():
    with world() as made:
        switch, staged = one(made)
        staged.stage(SET)
        made.prefill(X, mx.array(IDS))  # as many indices as `staged_trigger`
        assert staged.counters.used == 0
        staged.stage(SET)
        made.decode(inputs((3, 1)), mx.array(np.repeat(IDS, 3, axis=0)))  # three times as many
        assert staged.counters.used == 3 * K


def test_a_set_named_in_the_middle_of_a_pass_serves_the_next_one():
    with world(layers=2) as made:
        switch, staged = one(made, 1)
        staged.stage(SET)
        made.forward.begin(DECODED)
        first = made.switches[0](X, mx.array(IDS))
        staged.stage([1, 3, 4, 6])  # before the layer's own turn in this pass
        assert staged.ids == tuple(SET)
        second = switch(X, mx.array(IDS))
        assert staged.ids == tuple(SET)
        made.forward.end(first, second)
        np.testing.assert_array_equal(np.array(second), made.expected(X, IDS, 1))
        assert staged.counters.used == K and staged.ids == (1, 3, 4, 6)
        made.forward.begin(DECODED)
        out = switch(X, mx.array(OTHER))
        made.forward.end(out)
        np.testing.assert_array_equal(np.array(out), made.expected(X, OTHER, 1))
        assert staged.counters.used == 2 * K and staged.counters.unserved == staged.counters.exact == 0


def test_the_set_of_a_pass_keeps_its_slots_whatever_is_named_for_the_next():
    with world(staged_n=2, staged_trigger=2, layers=2) as made:
        switch, staged = one(made, 1)
        staged.stage([0, 2])
        made.forward.begin(DECODED)
        staged.stage([1, 3])
        staged.stage([4, 6])  # no slot is left but those of 1 and 3, and of the set that this pass will use
        out = switch(X, np.array([[[2, 0]]]))
        made.forward.end(out)
        np.testing.assert_array_equal(np.array(out), made.expected(X, np.array([[[2, 0]]]), 1))
        assert (staged.counters.used, staged.counters.unserved, staged.counters.exact) == (2, 1, 0)


def test_the_next_set_is_filled_beside_the_active_one():
    with world(staged_sync=False) as made:
        switch, staged = one(made)
        staged.stage(SET)
        np.testing.assert_array_equal(made.decode(X, mx.array(IDS)), made.expected(X, IDS))
        active = staged.serving()
        made.store.gate.clear()
        staged.stage([1, 3, 4, 6])
        assert staged.serving() is active
        made.store.gate.set()
        staged.swap()
        now = staged.serving()
        assert now.ids == (1, 3, 4, 6) and not set(now.slots) & set(active.slots)
        np.testing.assert_array_equal(made.decode(X, mx.array(OTHER)), made.expected(X, OTHER))
        staged.swap()  # nothing was asked for
        assert staged.serving() is now


def test_table_on_the_host_and_on_the_device():
    with world() as made:
        _, staged = one(made)
        staged.stage([7, 0, 5])
        staged.swap()
        rows = staged.serving()
        assert rows.slots.dtype == rows.table.dtype == np.int32 and rows.table.shape == (E,)
        assert rows.table[[7, 0, 5]].tolist() == rows.slots.tolist()
        assert (np.delete(rows.table, [7, 0, 5]) == -1).all()
        np.testing.assert_array_equal(np.array(rows.device), rows.table)


@pytest.mark.parametrize("history, on_missing, lasts", [
    (True, "exact", True), (False, "exact", False), (True, "zero", False), (True, "raise", False),
])  # fmt: skip
def test_history_keeps_a_set_in_service_where_nothing_can_be_lost(history, on_missing, lasts):
    with world(history_prefetch=history, on_missing=on_missing) as made:
        _, staged = one(made)
        staged.stage(SET)
        for _ in range(2):
            np.testing.assert_array_equal(made.decode(X, mx.array(IDS)), made.expected(X, IDS))
        assert (staged.counters.used, staged.counters.fallback) == ((2 * K, 0) if lasts else (K, 1))


def test_a_route_serves_one_pass():
    with world(staged_replace=True) as made:
        switch, staged = one(made)
        assert staged.ids is None
        with pytest.raises(ContractError, match="nothing is staged"):
            made.decode(X, None)
        staged.stage([7, 0, 5, 2])
        assert staged.ids == (7, 0, 5, 2)
        want = made.expected(X, np.array([[[7, 0, 5, 2]]]))
        np.testing.assert_array_equal(made.decode(X, None), want)
        assert staged.ids is None
        with pytest.raises(ContractError, match="nothing is staged"):
            made.decode(X, None)  # yesterday's route is none
        np.testing.assert_array_equal(made.decode(X, mx.array(IDS)), made.expected(X, IDS))
    with world() as made:
        one(made)[1].stage(SET)
        with pytest.raises(ParameterError, match="staged_replace"):
            made.decode(X, None)


def test_a_new_request_finds_nothing_staged_and_equals_a_cold_one():
    steps = [(inputs((1, 1), seed), routes((1, 1), seed)) for seed in range(6)]

    def request(made):
        made.switches[0].reset()
        made.memory.reset_request()
        outs = [made.prefill(inputs((1, 9), 50), mx.array(routes((1, 9), 50)))]
        for x, ids in steps:
            outs.append(made.decode(x, mx.array(ids)))
            made.switches[0].staged.stage(routes((1,), 1000 + len(outs))[0])
        return outs

    with world() as made:
        cold = request(made)
    with world() as made:
        made.switches[0].staged.stage(SET)
        made.switches[0].predicted_experts = [1, 2]
        made.decode(X, mx.array(IDS))
        made.switches[0].staged.stage([1, 3, 4, 6])
        fallback = made.switches[0].staged.counters.fallback
        warm = request(made)
        assert made.switches[0].staged.counters.fallback == fallback + 1  # its first token, as in the cold one
        assert made.switches[0].predicted_experts == frozenset()
    for left, right in zip(cold, warm, strict=True):
        np.testing.assert_array_equal(left, right)


# ---------------------------------------------------------------- ids that are asked for


def test_more_ids_than_slots_are_kept_by_weight_or_refused():
    with world() as made:
        _, staged = one(made)
        with pytest.raises(ParameterError, match="more experts than staged slots"):
            staged.stage([0, 1, 2, 3, 4, 5])
        staged.stage([0, 1, 2, 3, 4, 5], weights=[0.1, 0.3, 0.05, 0.1, 0.2, 0.3])
        assert staged.counters.overflow == 2
        assert staged.stack.counters.read == K
        staged.swap()
        assert staged.serving().ids == (0, 1, 4, 5)  # 3 weighs as much as 0, and was named later


@pytest.mark.parametrize("ids, weights, field", [
    ([0, 0], None, "ids"), ([E], None, "ids"), ([-1], None, "ids"), ([0, 1], [1.0], "weights"),
    ([0], [float("nan")], "weights"),
])  # fmt: skip
def test_ids_that_are_none_are_refused(ids, weights, field):
    with world() as made, pytest.raises(GeometryError) as caught:
        one(made)[1].stage(ids, weights=weights)
    assert caught.value.field == field


def test_slots_that_change_in_place_are_filled_between_passes():
    with world(incr_stack=True) as made:
        switch, staged = one(made)
        made.forward.begin(DECODED)
        with pytest.raises(ContractError, match="between passes"):
            staged.stage(SET)
        made.forward.abort()
        staged.stage(SET)
        assert staged.stack.slab.slots == K
    with world() as made:
        assert one(made)[1].stack.slab.slots == 2 * K
        assert one(made)[1].stack.nbytes == (2 * K + 1) * made.store.layouts[0].slot_bytes


# ---------------------------------------------------------------- where experts come from


@pytest.mark.parametrize("own", [{}, {"incr_stack": True}, {"staged_sync": False}], ids=str)
def test_only_slots_that_change_are_written(own):
    with world(**own) as made:
        _, staged = one(made)
        for ids, read in ((SET, SET), (SET, []), ([7, 2, 1, 5], [1]), ([0, 7, 2, 5], [0] if own == {} else None)):
            made.store.log.clear()
            staged.stage(ids)
            staged.swap()
            if read is not None and "incr_stack" not in own:
                assert {e for _, e in made.store.log} <= set(read)
            np.testing.assert_array_equal(
                made.decode(X, mx.array(np.array([[ids]], np.uint32))), made.expected(X, np.array([[ids]]))
            )
        counted = staged.stack.counters
        assert counted.kept >= 3 * K - 2 and counted.kept + counted.copied + counted.read == 4 * K


def test_residents_are_copied_and_not_read_again():
    with world() as made:
        made.decode(X, mx.array(IDS))
        reads = len(made.store.log)
        _, staged = one(made)
        staged.stage(SET)
        assert len(made.store.log) == reads and staged.stack.counters.copied == K
        np.testing.assert_array_equal(made.decode(X, mx.array(IDS)), made.expected(X, IDS))


@pytest.mark.parametrize("back", [False, True])
def test_what_is_staged_enters_the_cache_when_read_or_when_it_leaves(back):
    with world(incr_stack=True, incr_writeback=back) as made:
        _, staged = one(made)
        staged.stage(SET)
        assert made.cache.resident() == ([] if back else SET)
        staged.stage([0, 2, 1, 3])
        assert set(made.cache.resident()) >= ({5, 7} if back else {1, 3})
        for key in made.cache.resident():  # what was copied is that expert
            found = made.store.layouts[0].arrays(made.memory.slab(0).host[made.cache.slot(key)])
            for name, array in found.items():
                np.testing.assert_array_equal(array, made.store.parameters[0][name][key])


@pytest.mark.parametrize("together", [False, True])
def test_reads_of_a_fill_are_asked_for_at_once_or_one_by_one(together):
    with world(warm_willneed=together, threads=3) as made:
        made.store.delay = 0.02
        one(made)[1].stage(SET)
        assert (made.store.most > 1) == together


def test_a_set_that_another_replaces_while_filled_is_counted_and_harmless():
    with world(staged_sync=False) as made:
        _, staged = one(made)
        made.store.gate.clear()
        staged.stage(SET)
        threading.Timer(0.05, made.store.gate.set).start()
        staged.stage([1, 3, 4, 6])
        assert staged.counters.superseded == 1
        np.testing.assert_array_equal(made.decode(X, mx.array(OTHER)), made.expected(X, OTHER))
        assert staged.counters.used == K and not made.memory.outside and not made.memory.scheduler.pending


@pytest.mark.parametrize("own", [{}, {"incr_stack": True}, {"staged_sync": False}], ids=str)
def test_a_read_that_fails_is_raised_and_leaves_nothing_staged(own):
    with world(**own) as made:
        _, staged = one(made)
        made.store.fails = {(0, 5)}
        with pytest.raises(OSError, match="Input/output"):
            staged.stage(SET)
            staged.wait()
        assert staged.ids is None and staged.serving() is None
        made.store.fails = set()
        np.testing.assert_array_equal(made.decode(X, mx.array(IDS)), made.expected(X, IDS))
        assert staged.counters.fallback == 1
        staged.stage(SET)
        np.testing.assert_array_equal(made.decode(X, mx.array(IDS)), made.expected(X, IDS))
        assert (
            staged.counters.used == K and len(staged.stack._empty) + len(staged.stack._slot) == staged.stack.slab.slots
        )


@pytest.mark.parametrize("own", [{}, {"incr_stack": True, "warm_willneed": True}, {"staged_sync": False}], ids=str)
def test_an_interrupted_fill_gives_no_slot_away_and_can_be_repeated(own):
    with world(threads=0, **own) as made:  # the waiting thread reads, and is interrupted
        _, staged = one(made)
        made.store.fails, made.store.error = {(0, 2)}, KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            staged.stage(SET)
            staged.wait()
        assert staged.ids is None and not made.memory.outside and not made.memory.scheduler.pending
        made.store.fails = set()
        staged.stage(SET)
        np.testing.assert_array_equal(made.decode(X, mx.array(IDS)), made.expected(X, IDS))
        assert len(staged.stack._empty) + len(staged.stack._slot) == staged.stack.slab.slots


def test_a_refused_request_leaves_the_one_before():
    with world() as made:
        _, staged = one(made)
        staged.stage(SET)
        for wrong, error in (([0, 0], GeometryError), ([0, 1, 2, 3, 4], ParameterError)):
            with pytest.raises(error):
                staged.stage(wrong)
        assert staged.ids == tuple(SET)
        made.memory.close()
        with pytest.raises(ContractError, match="closed"):
            staged.stage([1, 3, 4, 6])
        assert len(staged.stack._empty) + len(staged.stack._slot) == staged.stack.slab.slots


def test_a_read_whose_deadline_passed_in_the_queue_is_read_when_it_is_waited_for():
    with world(staged_sync=False, threads=0) as made:
        _, staged = one(made)
        staged.stage(SET, deadline=made.memory.clock() - 1)
        made.memory.scheduler.next(made.memory.clock())  # a reader looks, and drops what is overdue
        assert made.memory.scheduler.counters.expired >= 1
        np.testing.assert_array_equal(made.decode(X, mx.array(IDS)), made.expected(X, IDS))
        assert staged.counters.used == K


# ---------------------------------------------------------------- ids that are not staged


def test_missing_ids_are_computed_exactly_and_counted():
    with world() as made:
        _, staged = one(made)
        staged.stage(SET)
        np.testing.assert_array_equal(made.decode(X, mx.array(MIXED)), made.expected(X, MIXED))
        assert (staged.counters.used, staged.counters.exact, staged.counters.dropped) == (2, 2, 0)


def test_missing_ids_raise_where_asked():
    with world(on_missing="raise") as made:
        one(made)[1].stage(SET)
        with pytest.raises(ContractError, match=r"layer 0.*\[1, 3\]"):
            made.decode(X, mx.array(MIXED))


def test_missing_ids_give_zeros_and_are_counted_at_the_end_of_the_pass():
    with world(on_missing="zero", layers=2) as made:
        for _, staged in (one(made, 0), one(made, 1)):
            staged.stack.slab.host[:] = 0xFF  # NaN: a slot that is not staged must not show
            staged.stage(SET)
        made.forward.begin(DECODED)
        outs = [switch(X, mx.array(MIXED)) for switch in made.switches]
        assert all(switch.staged.counters.dropped == 0 for switch in made.switches)  # nobody knows yet
        made.forward.end(*outs)
        for layer, out in enumerate(outs):
            want = made.expected(X, MIXED, layer)
            want[..., [1, 3], :] = 0
            np.testing.assert_array_equal(np.array(out), want)
            counters = made.switches[layer].staged.counters
            assert (counters.used, counters.zeroed, counters.exact) == (2, 2, 0)
        assert made.forward.timeline.layer == []  # no synchronisation in the pass


def test_the_anchor_stands_in_with_the_weight_of_the_id():
    weight = mx.random.normal((DIM, DIM), key=mx.random.key(3))
    with world(on_missing="anchor", anchor=lambda x: x @ weight) as made:
        _, staged = one(made)
        staged.stage(SET)
        out = made.decode(X, mx.array(MIXED))
        want = made.expected(X, MIXED)
        want[..., [1, 3], :] = np.array(X @ weight)[..., None, :]
        np.testing.assert_array_equal(out, want)
        assert (staged.counters.used, staged.counters.anchored, staged.counters.dropped) == (2, 2, 2)
        scores = np.array([0.4, 0.3, 0.2, 0.1], np.float32)
        mixed = (out[0, 0] * scores[:, None]).sum(0)
        own = (made.expected(X, MIXED)[0, 0] * scores[:, None])[[0, 2]].sum(0)
        np.testing.assert_allclose(mixed, own + 0.4 * np.array(X @ weight)[0, 0], atol=1e-5)  # 0.3 + 0.1; f32 sums
    with pytest.raises(ParameterError, match="no expert stands in"):
        world(on_missing="anchor")


def test_an_aborted_pass_counts_nothing():
    with world(on_missing="zero") as made:
        switch, staged = one(made)
        staged.stage(SET)
        made.forward.begin(DECODED)
        switch(X, mx.array(MIXED))
        made.forward.abort()
        assert staged.counters.used == staged.counters.zeroed == 0


def test_a_route_known_on_the_host_needs_no_synchronisation():
    with world(layers=3) as made:
        for layer in range(3):
            one(made, layer)[1].stage(SET)
        outs = made.run(DECODED, *[(X, IDS)] * 3)
        assert made.forward.timeline.layer == []
        for layer, out in enumerate(outs):
            np.testing.assert_array_equal(out, made.expected(X, IDS, layer))
            one(made, layer)[1].stage(SET)
        made.run(DECODED, (X, IDS), (X, MIXED), (X, IDS))
        assert made.forward.timeline.layer == [1]  # its missing ids are read


@pytest.mark.parametrize("own, call", [
    ({}, mx.array(IDS)), ({}, IDS), ({}, mx.array(MIXED)), ({}, mx.array(OTHER)),
    ({"on_missing": "zero"}, mx.array(MIXED)), ({"staged_replace": True}, None),
    ({"full_layer_prefill": True}, mx.array(MIXED)),
])  # fmt: skip
@pytest.mark.parametrize("phase", [DECODED, PREFILLED])
def test_every_route_is_told_to_listeners_once(own, call, phase):
    if call is None and phase == PREFILLED:
        call = mx.array(IDS)

    class Ear:
        heard = []

        def routed(self, *, step, layer, ids, x, now):
            self.heard.append((step, layer, np.array(ids).tolist(), x.shape))

        def ended(self, *, step):
            self.heard.append(step)

    with world(**own) as made:
        made.forward.listeners, Ear.heard = [Ear()], []
        one(made)[1].stage(SET)
        made._alone(phase, X, call, 0)
        want = [[SET]] if call is None else np.array(call).tolist()
        assert Ear.heard == [(0, 0, want, X.shape), 0]


@pytest.mark.parametrize("ids", [[[[E, 0, 1, 2]]], [[[-1, 0, 1, 2]]], [[0, 1, 2, 3]], [[[0, 1]], [[2, 3]]]])
def test_a_route_that_is_none_is_refused(ids):
    with world() as made:
        one(made)[1].stage(SET)
        with pytest.raises(GeometryError, match="indices"):
            made.decode(X, np.array(ids))


# ---------------------------------------------------------------- the lazy hazard


def test_slots_of_a_graph_that_waits_are_not_filled_again():
    with world(staged_n=K) as made:
        staged = one(made)[1]
        staged.stack = Stack(made.memory, 0, K)  # room for one set only
        staged.stage(SET)
        made.forward.begin(DECODED)
        out = made.switches[0](X, IDS)
        staged._active = None  # out of service, and yet in use
        with pytest.raises(ContractError, match="has not returned"):
            staged.stage([1, 3, 4, 6])
        made.forward.end(out)
        np.testing.assert_array_equal(np.array(out), made.expected(X, IDS))
        staged.stage([1, 3, 4, 6])  # the evaluation has returned
        np.testing.assert_array_equal(made.decode(X, OTHER), made.expected(X, OTHER))


def test_without_that_rule_a_delayed_evaluation_computes_with_the_new_experts(monkeypatch):
    monkeypatch.setattr(Stack, "hold", lambda self, rows: None)
    with world(staged_n=K) as made:
        staged = one(made)[1]
        staged.stack = Stack(made.memory, 0, K)
        staged.stage(SET)
        made.forward.begin(DECODED)
        out = made.switches[0](X, IDS)
        staged._active = None
        staged.stage([1, 3, 4, 6])
        made.forward.end(out)
        assert np.abs(np.array(out) - made.expected(X, IDS)).max() > 0.01  # silently wrong: why the rule is there


# ---------------------------------------------------------------- predictions and windows


@pytest.mark.parametrize("hot, predicted, then, at_last", [
    (0, [6], {4, 6}, {5, 7}),  # nothing is pinned: by age
    (1, [], {0, 6}, {5, 7}),  # 0, used most, is pinned
    (1, [6], {4, 6}, {6, 7}),  # the bonus of 2 makes 6, used once, hotter than 0: 6 is pinned
])  # fmt: skip
def test_predictions_change_which_expert_is_pinned(hot, predicted, then, at_last):
    with world(hot_per_layer=hot, hot_update_interval=3, policy_name="hot-pin", cache_slots=6) as made:
        switch, _ = one(made)

        def turn(*ids):
            made.decode(X, mx.array(np.array([[ids]], np.uint32)))
            return set(made.cache.resident()) - set(ids)

        turn(0, 1, 2, 3), turn(0, 1, 2, 3)
        switch.predicted_experts = predicted
        turn(0, 1, 4, 6)
        assert turn(5, 7, 2, 3) == then
        assert turn(0, 1, 2, 3) == at_last


def test_uses_of_staged_slots_count_where_hot_experts_are_chosen():
    with world(hot_per_layer=1, hot_update_interval=1, policy_name="hot-pin", cache_slots=5) as made:
        for other in (0, 2, 4):
            one(made)[1].stage([7])
            made.decode(X, np.array([[[other, 7]]], np.uint32))  # 7 from its slot
        assert made.switches[0].staged.counters.used == 3
        made.decode(X, np.array([[[1, 3, 5, 6]]], np.uint32))
        assert 7 in made.cache.resident()  # three of 0, 2, 4 and 7 had to go


def test_a_turn_has_one_row_in_the_timeline_if_it_synchronised():
    with world(staged_sync=False) as made:
        _, staged = one(made)
        made.store.gate.clear()
        staged.stage(SET)
        threading.Timer(0.1, made.store.gate.set).start()
        made.decode(X, mx.array(MIXED))
        rows = made.forward.timeline.arrays()
        assert (rows["experts"].tolist(), rows["missing"].tolist()) == ([4], [2])
        assert rows["blocked"][0] > 0.05 > rows["compute"][0]  # waiting for a fill is no computing


def test_predictions_protect_from_eviction_until_their_turn_is_over():
    with world(cache_slots=6) as made:
        switch, _ = one(made)
        made.decode(X, mx.array(IDS))
        switch.predicted_experts = [0]
        switch.predicted_experts = [5]  # in place of the first
        made.decode(X, mx.array(OTHER))
        assert 5 in made.cache.resident() and 0 not in made.cache.resident()
        with pytest.raises(GeometryError, match="predicted_experts"):
            switch.predicted_experts = [E]


def test_the_hot_window_takes_the_most_used_and_those_predicted():
    with world(prefill_hot=2, hot_update_interval=1, pin_bonus=3.0) as made:
        switch, _ = one(made)
        ids = np.array([[[3, 6, 0, 1]]], np.uint32)
        np.testing.assert_array_equal(made.prefill(X, mx.array(ids)), made.expected(X, ids))  # none is hot yet
        assert made.window.take(0) is not None
        made.window.reset()
        for used in ([3, 6, 0, 1], [3, 6, 2, 4]):
            made.decode(X, mx.array(np.array([[used]], np.uint32)))
        assert made.window.hot.hot[0] == {3, 6}
        switch.predicted_experts = [7]
        made.decode(X, mx.array(np.array([[[3, 6, 2, 5]]], np.uint32)))
        assert 7 in made.window.hot.hot[0]
        x, route = inputs((1, 30), 4), routes((1, 30), 4)
        np.testing.assert_array_equal(made.prefill(x, mx.array(route)), made.expected(x, route))


@pytest.mark.parametrize("full_layers, windowed", [(0, 3), (2, 2)])
def test_whole_layers_are_read_one_ahead(full_layers, windowed):
    own = {"full_layer_prefill": True, "prefill_full_layers": full_layers, "staged": False}
    with world(layers=3, **own) as made:
        x, ids = inputs((1, 12)), routes((1, 12))
        for _ in range(2):
            made.store.log.clear()
            outs = made.run(PREFILLED, *[(x, mx.array(ids))] * 3)
            for layer, out in enumerate(outs):
                np.testing.assert_array_equal(out, made.expected(x, ids, layer))
        (stack,) = made.window.stacks.values()
        counted = stack.counters
        assert counted.read + counted.copied + counted.kept == 2 * windowed * E and stack.slab.slots == 2 * E


@pytest.mark.parametrize("reset", [False, True])
def test_a_window_cut_short_leaves_the_next_pass_whole(reset):
    with world(layers=3, full_layer_prefill=True) as made:
        x, ids = inputs((1, 12)), routes((1, 12))
        made.forward.begin(PREFILLED)
        for switch in made.switches[:2]:
            switch(x, mx.array(ids))
        made.forward.abort()  # the window of the third layer is on its way
        if reset:
            made.switches[0].reset()
        for layer, out in enumerate(made.run(PREFILLED, *[(x, mx.array(ids))] * 3)):
            np.testing.assert_array_equal(out, made.expected(x, ids, layer))


# ---------------------------------------------------------------- churn

sets = st.lists(st.integers(0, E - 1), min_size=1, max_size=K, unique=True)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("stage"), sets), st.tuples(st.just("decode"), st.integers(0, 99)),
        st.tuples(st.just("swap"), st.none()), st.tuples(st.just("reset"), st.none()),
        st.tuples(st.just("prefill"), st.integers(0, 99)),
    ),
    min_size=1, max_size=25,
)  # fmt: skip


@pytest.mark.parametrize("own", [
    {}, {"incr_stack": True}, {"incr_stack": True, "incr_writeback": True, "warm_willneed": True},
    {"staged_sync": False}, {"history_prefetch": False},
], ids=str)  # fmt: skip
@settings(max_examples=60, deadline=None)
@given(moves=moves)
def test_slots_and_tables_under_churn_against_a_dictionary(own, moves):
    with World(options(**own), cache_slots=K) as made:
        switch, staged = one(made)
        active = following = None  # sets as a dictionary would hold them: (ids, pass)
        step = 0
        for move, value in moves:
            if move == "stage":
                if following and following[1] <= step - 1:
                    active, following = following, None
                active, following = None if own.get("incr_stack") else active, (tuple(value), step)
                staged.stage(value)
            elif move == "swap":
                active, following = following or active, None
                staged.swap()
            elif move == "reset":
                active = following = None
                switch.reset()
            else:
                x, ids = inputs((1, 1), value), routes((1, 1), value)
                used = staged.counters.used
                got = (made.decode if move == "decode" else made.prefill)(x, mx.array(ids))
                np.testing.assert_array_equal(got, made.expected(x, ids))
                if move == "decode":
                    if following:
                        active, following = following, None
                    lasts = own.get("history_prefetch", True)
                    serving = active[0] if active and (lasts or active[1] == step) else ()
                    assert staged.counters.used - used == len(set(serving) & set(ids.reshape(-1).tolist()))
                step += 1
            if active and staged._active is not None:
                rows = staged._active
                assert rows.ids == active[0]
                for expert, slot in zip(rows.ids, rows.slots, strict=True):
                    assert rows.table[expert] == slot
                    for name, array in made.store.layouts[0].arrays(staged.stack.slab.host[slot]).items():
                        np.testing.assert_array_equal(array, made.store.parameters[0][name][expert])
        assert not made.memory.outside or not own.get("staged_sync", True)
        assert not made.cache._holds.keys


@pytest.mark.parametrize("own", [{}, {"incr_stack": True}, {"staged_sync": False}], ids=str)
def test_200_steps_with_slots_churning_and_a_cache_smaller_than_the_set(own):
    rng = np.random.default_rng(7)
    with World(options(**own), layers=2, cache_slots=2) as made:
        for step in range(200):
            x, ids = inputs((1, 1), step), [rng.permutation(E)[None, None, :K].astype(np.uint32) for _ in range(2)]
            for switch, route in zip(made.switches, ids, strict=True):
                switch.staged.stage(route.reshape(-1) if step % 3 else rng.permutation(E)[:K])
            outs = made.run(DECODED, *[(x, mx.array(route)) for route in ids])
            for layer, (out, route) in enumerate(zip(outs, ids, strict=True)):
                np.testing.assert_array_equal(out, made.expected(x, route, layer))
        counters = made.switches[0].staged.counters
        assert counters.used + counters.exact == 200 * K and counters.fallback == counters.dropped == 0
