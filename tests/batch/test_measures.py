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
    for given, mean in ((0.005, 0.005), (0.007, 0.0056), (20.0, 0.00728), (0.003, 0.003)):
        seconds.note(kind, 4, given)
        assert seconds.measured(kind, 4) == pytest.approx(mean)
    assert seconds.measured(kind, 8) is None


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
    seconds.land(kind, 4, 10, 8.0, 9.0, late=False)
    assert seconds.measured(kind, 4) != before
    # Of a size that was never measured too much is better than nothing.
    seconds.land(kind, 4, 10, 9.0, 10.0, late=True)
    seconds.land(kind, 8, 10, 9.5, 10.001, late=True)
    seconds.land(kind, 8, 10, 9.6, 11.6, late=True)
    assert seconds.measured(kind, 8) == pytest.approx(0.2)
