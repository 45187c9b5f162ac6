"""The break-even contour against its closed form, a plain loop, and a disk that serves reads one by one."""

import numpy as np
import pytest

from moelab.errors import ContractError
from moelab.flywheel.bounds import overlap
from moelab.flywheel.breakeven import NEVER, break_even


@pytest.mark.parametrize(("c", "d", "h", "lead"), [(2.0, 3.0, 0.0, 1), (2.0, 3.0, 0.4, 1), (4.0, 1.0, 0.1, 0.5)])
def test_uniform_visits_have_a_closed_form(c, d, h, lead):
    got = break_even(d, c, lead=lead, overhead_s=h, recall=(0.5, 0.8, 1.0))
    a = min(1, lead) * c
    np.testing.assert_allclose(got.waste_at, (a - h) / (got.recall * d), rtol=1e-9)
    np.testing.assert_allclose(got.precision_needed, got.recall * d / (got.recall * d + a - h), rtol=1e-9)


def test_a_hand_worked_visit():
    # c = 2, d = 3, half of the misses fetched, one useless for each useful: q = 3, of which 2 hide.
    got = break_even(3.0, 2.0, lead=1, recall=(0.5,), waste=(0.0, 1.0))
    assert got.speedup.tolist() == [[5 / (2 + 1.5), 5 / (2 + 1.5 + 1)]]


def test_perfect_prefetch_reaches_the_overlap_bound_and_no_more():
    for c, d in ((3.0, 1.0), (1.0, 3.0), (2.0, 2.0)):
        got = break_even(d, c, lead=1, recall=(1.0,), waste=(0.0,))
        assert got.speedup[0, 0] == pytest.approx(overlap(compute_s=c, io_s=d).speedup)
    assert break_even(2.0, 2.0, lead=0.5, recall=(1.0,), waste=(0.0,)).speedup[0, 0] == pytest.approx(4 / 3)


def loop(io_s, c, lead, h, kappa, r, w):
    """The module's formula, layer by layer."""
    step, total = max(1, int(lead)), 0.0
    for row in io_s:
        for first in range(0, len(row), step):
            block = row[first : first + step]
            q = sum(r * (d + w * io_s.mean()) for d in block)
            a = min(1, lead) * c * len(block)
            total += sum(c + h + (1 - r) * d for d in block) + kappa * min(q, a) + max(0, q - a)
    return total


@pytest.mark.parametrize("lead", [0.5, 1, 2, 3, 5, 9])
def test_visits_of_different_size_against_a_loop(lead):
    io_s = np.random.default_rng(0).integers(0, 4, (20, 5)) * 1.5
    got = break_even(io_s, 2.0, lead=lead, overhead_s=0.05, contention=0.1, recall=(0.3, 0.9), waste=(0.0, 0.5, 3.0))
    off = io_s.sum() + 2.0 * io_s.size
    for i, r in enumerate(got.recall):
        for j, w in enumerate(got.waste):
            assert got.speedup[i, j] == pytest.approx(off / loop(io_s, 2.0, lead, 0.05, 0.1, r, w))
        assert loop(io_s, 2.0, lead, 0.05, 0.1, r, got.waste_at[i]) == pytest.approx(off, rel=1e-9)


def test_uneven_visits_win_less_and_lead_evens_them_out():
    io_s = np.tile([0.0, 0.0, 0.0, 8.0], (10, 1))
    even, uneven, ahead = (
        break_even(d, 2.0, lead=lead, recall=(1.0,), waste=(0.0,)).speedup[0, 0]
        for d, lead in ((np.full((10, 4), 2.0), 1), (io_s, 1), (io_s, 4))
    )
    assert uneven < even
    assert ahead == pytest.approx(even) == pytest.approx(2.0)


def test_where_nothing_pays_no_precision_is_enough():
    assert break_even(1.0, 5.0, lead=1, overhead_s=1.5, recall=(0.5, 1.0)).precision_needed.tolist() == [NEVER, NEVER]
    assert break_even(np.zeros((3, 2)), 5.0, lead=1, recall=(1.0,)).precision_needed.tolist() == [NEVER]
    nothing_hides = break_even(3.0, 0.0, lead=1, recall=(1.0,))
    assert nothing_hides.precision_needed.tolist() == pytest.approx([1.0])
    assert np.isnan(break_even(1.0, 5.0, lead=1, overhead_s=1.5, recall=(1.0,)).waste_at).all()


def test_more_waste_is_never_faster_and_more_recall_without_waste_never_slower():
    io_s = np.random.default_rng(1).integers(0, 4, (20, 5))
    got = break_even(io_s, 1.0, lead=1)
    assert (np.diff(got.speedup, axis=1) <= 1e-12).all()
    assert (np.diff(got.speedup[:, 0]) >= -1e-12).all()
    assert got.speedup.shape == (20, 33)


def test_a_disk_that_serves_reads_in_turn_agrees_with_the_fluid():
    """One layer ahead, uniform visits: reads of 1/100 d each, prefetches queued, demand first."""
    c, d, r, w = 2.0, 3.0, 0.6, 0.5
    clock = done = 0.0
    for _ in range(200):  # done: when the prefetches for this visit, queued at the last one, are all read
        clock = max(clock, done)
        clock += (1 - r) * d  # demand
        done = clock + r * d * (1 + w)  # queued for the next visit as this one begins to compute
        clock += c
    assert clock / 200 == pytest.approx(
        (c + d) / break_even(d, c, lead=1, recall=(r,), waste=(w,)).speedup[0, 0], rel=0.01
    )


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("io_s", dict(io_s=-1.0)),
        ("io_s", dict(io_s=np.zeros((0, 3)))),
        ("compute_s", dict(compute_s=-1.0)),
        ("takes time", dict(io_s=0.0, compute_s=0.0)),
        ("lead", dict(lead=0)),
        ("overhead_s", dict(overhead_s=-0.1)),
        ("contention", dict(contention=1.5)),
        ("recall", dict(recall=(0.0, 0.5))),
        ("waste", dict(waste=(-1.0,))),
    ],
)
def test_bad_arguments_are_refused(field, arguments):
    with pytest.raises(ContractError, match=field):
        break_even(**dict(io_s=1.0, compute_s=1.0, lead=1) | arguments)
