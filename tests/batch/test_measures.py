"""What a running batch measures of the device and of those who come."""

import gc
import weakref

import pytest

from diffusax.batch import measures
from diffusax.batch.measures import Arrivals, RowSeconds


class Kind:
    """A kind of batch."""


def noted(seconds, kind, size, *given):
    # The first one is left out.
    for value in (99.0, *given):
        seconds.note(kind, size, value)


def test_what_a_size_costs_to_compile_is_no_cost_of_its_rows():
    seconds, kind = RowSeconds(), Kind()
    seconds.note(kind, 4, 20.0)
    assert seconds.measured(kind, 4) is None
    # Of a few the quickest was held up least; later the middle one of those that do not depart.
    for given, middle in ((0.02, 0.02), (0.005, 0.005), (20.0, 0.005), (0.003, 0.003)):
        seconds.note(kind, 4, given)
        assert seconds.measured(kind, 4) == middle
    assert seconds.measured(kind, 8) is None


@pytest.fixture
def clock(monkeypatch):
    """The time, as a list of one number."""
    now = [100.0]
    monkeypatch.setattr(measures.time, "monotonic", lambda: now[0])
    return now


def note(seconds, clock, kind, size, *given):
    for value in given:
        clock[0] += 0.4
        seconds.note(kind, size, value)


def test_what_departs_for_long_says_that_the_machine_has_changed(clock):
    seconds, kind, other = RowSeconds(), Kind(), Kind()
    for own in (kind, other):
        for size in (1, 2, 4):
            noted(seconds, own, size, *[0.01 * size] * 5)
    note(seconds, clock, kind, 2, *[0.04] * 4)
    assert (seconds.measured(kind, 2), seconds.due(kind)) == (0.02, [])
    note(seconds, clock, kind, 2, 0.04)
    assert seconds.measured(kind, 2) == 0.04
    assert (seconds.due(kind), seconds.due(other)) == ([1, 4], [1, 2, 4])
    # What was measured before is not believed, and the next size is tried after the one before.
    assert seconds.estimate(kind, 4, 1) == pytest.approx(0.04 * 2**0.85)
    assert (seconds.reach(kind, 1), seconds.reach(other, 1)) == (4, 1)
    note(seconds, clock, kind, 4, 0.09)
    assert (seconds.measured(kind, 4), seconds.due(kind)) == (0.09, [1])
    seconds.forget(kind, 1)
    assert seconds.due(kind) == []


@pytest.mark.parametrize(
    "given",
    [
        pytest.param([0.5, 0.02, 0.5, 0.02] * 5, id="single"),
        pytest.param([*[0.5] * 4, 0.02] * 5, id="four in a row"),
        pytest.param([0.5, 0.001] * 10, id="to both sides"),
        pytest.param([0.024, 0.016] * 10, id="little"),
    ],
)
def test_what_departs_now_and_then_changes_nothing(clock, given):
    seconds, kind = RowSeconds(), Kind()
    for size in (1, 2):
        noted(seconds, kind, size, *[0.01 * size] * 5)
    for value in given:
        note(seconds, clock, kind, 2, value)
        assert seconds.measured(kind, 2) == pytest.approx(0.02, rel=0.21)
        assert seconds.due(kind) == []


def test_what_departs_for_a_moment_changes_nothing_and_its_own_spread_is_no_change(clock):
    seconds, kind = RowSeconds(), Kind()
    noted(seconds, kind, 2, *[0.02] * 5)
    noted(seconds, kind, 4, *[0.04] * 5)
    for _ in range(20):
        clock[0] += 0.01
        seconds.note(kind, 2, 0.05)
    assert seconds.due(kind) == []
    # The latest are spread from 0.035 to 0.045.
    note(seconds, clock, kind, 4, *[0.035, 0.04, 0.045] * 3)
    note(seconds, clock, kind, 4, *[0.058] * 9)
    assert seconds.due(kind) == []


def test_costs_of_other_sizes_are_estimated_from_the_nearest(monkeypatch):
    seconds, kind = RowSeconds(), Kind()
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    assert seconds.estimate(kind, 4, 1) == pytest.approx(0.05 * 4**0.85)
    noted(seconds, kind, 2, 0.01)
    noted(seconds, kind, 8, 0.03)
    assert seconds.estimate(kind, 1, 2) == seconds.estimate(kind, 2, 1) == 0.01
    assert seconds.estimate(kind, 5, 1) == 0.03
    assert seconds.estimate(kind, 16, 1) == pytest.approx(0.03 * 2**0.85)
    # Sizes of three devices.
    assert seconds.estimate(kind, 7, 3) == pytest.approx(0.03 * 1.5**0.85)
    noted(seconds, kind, 4, 0.05)
    assert seconds.estimate(kind, 8, 1) == 0.05
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert seconds.estimate(kind, 16, 1) == pytest.approx(0.03 * 2**0.4)


def test_costs_of_a_size_that_has_not_run_for_long_are_estimated_anew(monkeypatch):
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    seconds, kind = RowSeconds(), Kind()
    now = 100.0
    monkeypatch.setattr(measures.time, "monotonic", lambda: now)
    noted(seconds, kind, 1, 0.09)
    noted(seconds, kind, 2, 0.1)
    now = 109.0
    seconds.note(kind, 2, 0.1)
    assert seconds.estimate(kind, 1, 1) == 0.09
    now = 111.0
    seconds.note(kind, 2, 0.1)
    assert seconds.estimate(kind, 1, 1) == pytest.approx(0.1 * 0.5**0.85)
    assert seconds.measured(kind, 1) == 0.09
    seconds.note(kind, 1, 0.09)
    assert seconds.estimate(kind, 1, 1) == 0.09


def test_costs_outlive_the_images_of_their_kind_but_not_for_ever():
    seconds, kinds = RowSeconds(), [Kind() for _ in range(40)]
    for kind in kinds:
        noted(seconds, kind, 1, 0.01)
    alive = [weakref.ref(kind) for kind in kinds]
    del kinds, kind
    gc.collect()
    assert [one() is not None for one in alive] == [False] * 8 + [True] * 32


def test_the_rate_of_arrivals_counts_the_time_since_the_last(monkeypatch):
    arrivals = Arrivals()
    monkeypatch.setattr(measures.time, "time", lambda: 8.0)
    for at, rate in ((0.0, 0.0), (1.0, 0.0), (4.0, 0.25), (8.0, 0.375)):
        arrivals.note(at)
        assert arrivals.rate() == rate


def test_the_next_size_is_tried_once_the_one_before_is_measured():
    seconds, kind = RowSeconds(), Kind()
    assert seconds.reach(kind, 2) == 2
    seconds.note(kind, 2, 9.0)
    assert seconds.reach(kind, 2) == 2
    seconds.note(kind, 2, 0.01)
    assert seconds.reach(kind, 2) == 4
    noted(seconds, kind, 8, 0.01)
    assert seconds.reach(kind, 2) == 16


def test_rows_whose_beginning_was_not_seen_are_not_measured():
    seconds, kind = RowSeconds(), Kind()
    # Two dispatches of ten rows of 0.1 s, of which the first compiles; the second waits for it.
    seconds.land(kind, 4, 10, 0.0, 3.0, late=False)
    seconds.land(kind, 4, 10, 1.0, 4.0, late=False)
    assert seconds.measured(kind, 4) == pytest.approx(0.1)
    # Nobody looked until both had ended: the second seems to take no time.
    seconds.land(kind, 4, 10, 4.0, 7.0, late=True)
    before = seconds.measured(kind, 4)
    seconds.land(kind, 4, 10, 4.5, 7.001, late=True)
    assert seconds.measured(kind, 4) == before
    # The device was idle: its beginning is known again.
    seconds.land(kind, 4, 10, 8.0, 8.5, late=False)
    assert seconds.measured(kind, 4) == pytest.approx(0.05)
    # Of a size that was never measured too much is better than nothing.
    seconds.land(kind, 4, 10, 9.0, 10.0, late=True)
    seconds.land(kind, 8, 10, 9.5, 10.001, late=True)
    seconds.land(kind, 8, 10, 9.6, 11.6, late=True)
    assert seconds.measured(kind, 8) == pytest.approx(0.2)
