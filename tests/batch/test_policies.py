"""Which images join a running batch, by what the rows of larger batches cost."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from diffusax.batch import policies
from diffusax.batch.policies import Device, FairQueue
from diffusax.batch.request import Request

LINEAR = {1: 6e-3, 2: 12e-3, 4: 24e-3, 8: 48e-3}
"""Seconds of a row by lanes where sharing gains nothing."""
SHARED = {1: 7e-3, 2: 11.5e-3, 4: 18e-3, 8: 33e-3}
"""Those of two cores."""
FLAT = {1: 50e-3, 2: 52e-3, 4: 60e-3, 8: 80e-3}
"""Those of a large accelerator."""


class Kind:
    """A kind of batch."""


KIND = Kind()


@dataclasses.dataclass(eq=False)
class Image:
    """What policies look at of an image."""

    rows: int
    lanes: int = 2
    settings: Any = None
    kind: Any = KIND


def device(seconds, arrivals=0.0, reach=8):
    return Device(lambda kind, lanes: seconds[lanes], lambda kind: 8, arrivals, lambda kind: reach)


def test_one_at_a_time_and_whole_batches():
    waiting = [Image(9, settings="a"), Image(9, settings="b"), *(Image(9, settings="a"),) * 5]
    waiting = [Image(one.rows, settings=one.settings) for one in waiting]
    assert policies.one([], waiting, device(LINEAR)) == waiting[:1]
    assert policies.one(waiting[:1], waiting[1:], device(LINEAR)) == []
    together = policies.whole([], waiting, device(LINEAR))
    assert together == [waiting[0], *waiting[2:5]]
    assert policies.whole(together, waiting, device(LINEAR)) == []


def test_images_share_a_device_where_that_is_worth_it_and_have_lanes():
    waiting = [Image(20) for _ in range(10)]
    assert policies.running([], waiting, device(LINEAR)) == waiting[:1]
    assert policies.running(waiting[:1], waiting[1:], device(LINEAR)) == []
    assert policies.running([], waiting, device(FLAT)) == waiting[:4]
    # One after the other, two images wait 0.2 and 0.4 s; a tenth less is worth it.
    for seconds, together in ((13e-3, 2), (14e-3, 1)):
        known = device({2: 10e-3, 4: seconds})
        assert len(policies.running([], waiting[:2], known)) == together
    other = Image(20, kind=Kind())
    assert policies.running(waiting[:4], [*waiting[4:], other], device(FLAT)) in ([], [other])


def test_a_guided_image_is_not_overtaken_for_ever_by_those_that_take_one_lane():
    present, waiting = [Image(20) for _ in range(3)] + [Image(20, 1)], [Image(9), Image(9, 1)]
    assert policies.running(present, waiting, device(FLAT)) == []
    assert policies.running(present, waiting[1:], device(FLAT)) == waiting[1:]


def test_no_more_images_join_than_fit_the_next_size_that_is_to_be_measured():
    waiting = [Image(20) for _ in range(10)]
    for reach, count in ((1, 1), (2, 1), (4, 2), (8, 4)):
        assert policies.running([], waiting, device(FLAT, reach=reach)) == waiting[:count]
    assert policies.running(waiting[:1], waiting[1:], device(FLAT, reach=2)) == []


def test_ends_are_foreseen():
    present, waiting = [Image(10)], [Image(5), Image(20)]
    found = policies.finish_times(present, waiting, 2, device(LINEAR))
    ends = [(one.rows, round(end, 3)) for one, end in found]
    assert ends == [(5, 0.12), (10, 0.24), (20, 0.42)]


def poisson(policy, seconds, load, seed):
    """The seconds until each of 60 mixed images is done, and the images a second."""
    random = np.random.default_rng(seed)
    work = [(int(random.integers(4, 31)), int(random.choice([1, 2, 2]))) for _ in range(60)]
    mean = np.mean([rows * seconds[lanes] for rows, lanes in work])
    arrivals = np.cumsum(random.exponential(mean / load, len(work)))
    known = device(seconds, load / mean)
    now, coming, waiting, present, waits = 0.0, 0, [], [], {}
    while len(waits) < len(work):
        while coming < len(work) and arrivals[coming] <= now:
            waiting.append((coming, Image(*work[coming])))
            coming += 1
        ready = [one for _, one in waiting]
        for one in policy([one for _, one in present], ready, known):
            present += [entry for entry in waiting if entry[1] is one]
            waiting = [entry for entry in waiting if entry[1] is not one]
        if not present:
            now = max(now, arrivals[coming])
            continue
        cycle = seconds[policies.batch_size(sum(one.lanes for _, one in present))]
        rows = max(1, min(int(0.05 / cycle), *(one.rows for _, one in present)))
        now += rows * cycle
        left = [(i, Image(one.rows - rows, one.lanes)) for i, one in present]
        waits |= {i: now - arrivals[i] for i, one in left if one.rows <= 0}
        present = [entry for entry in left if entry[1].rows > 0]
    return list(waits.values()), len(work) / now


@pytest.mark.parametrize(("seconds", "gain"), [(LINEAR, 0.97), (SHARED, 1.2), (FLAT, 1.3)])
def test_sharing_is_never_worse_than_one_at_a_time(seconds, gain):
    """p50 and p99 of the seconds to an image, and images a second at 150%."""
    for load in (0.5, 0.8, 1.5):
        found = {}
        for name in ("one", "running"):
            runs = [poisson(policies.POLICIES[name], seconds, load, seed) for seed in range(3)]
            waits = [wait for run, _ in runs for wait in run]
            speed = np.mean([speed for _, speed in runs])
            found[name] = *np.percentile(waits, (50, 99)), speed
        (p50, p99, speed), (old_p50, old_p99, old_speed) = found["running"], found["one"]
        # The times of a step's rows are rounded alike, so that only the last bits differ.
        assert p50 <= 1.03 * old_p50, (load, found)
        assert p99 <= 1.03 * old_p99, (load, found)
        if load > 1:
            assert speed >= gain * old_speed, (load, found)


def added(queue, key="", priority=0):
    """Adds a request to a queue, and returns it."""
    request = Request(key=key, priority=priority)
    queue.add(request)
    return request


def test_keys_have_equal_shares_however_many_requests_they_send():
    queue = FairQueue()
    many = [added(queue, "many") for _ in range(6)]
    for _ in range(2):
        added(queue, "few")
    order = []
    while len(queue):
        order.append(next(iter(queue)))
        queue.begin(order[-1])
        queue.remove(order[-1])
    assert [one.key for one in order[:4]].count("few") == 2
    assert [one for one in order if one in many] == many


@pytest.mark.parametrize("ended", [True, False])
def test_who_comes_late_has_no_claim_to_what_it_missed(ended):
    queue = FairQueue()
    early = [added(queue, "early") for _ in range(6)]
    for one in early[:3]:
        queue.begin(one)
        if ended:
            queue.remove(one)
    for _ in range(6):
        added(queue, "late")
    keys = [one.key for one in queue if one not in early[:3]]
    assert keys[:6].count("late") == 3


def test_higher_priorities_come_first_and_others_in_their_order():
    queue = FairQueue()
    found = [added(queue, priority=priority) for priority in (0, 1, 0, 1)]
    assert list(queue) == [found[1], found[3], found[0], found[2]]
