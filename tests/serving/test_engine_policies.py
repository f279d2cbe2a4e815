"""The queue's order, the policies and what is counted, without a device."""

import numpy as np
import pytest

from diffusax.pipelines import policies
from diffusax.pipelines.policies import Candidate, Device
from diffusax.serving.admission import FairQueue
from diffusax.serving.drawing import Drawing
from diffusax.serving.errors import Busy, Failed
from diffusax.serving.jobs import Job
from diffusax.serving.metrics import Histogram, Metrics
from diffusax.serving.parts import Part, is_out_of_memory, refusal
from diffusax.serving.previews import expected_latents
from diffusax.serving.sizes import KindSizes

LINEAR = {1: 6e-3, 2: 12e-3, 4: 24e-3, 8: 48e-3}
"""Seconds of a row by lanes where sharing gains nothing."""
SHARED = {1: 7e-3, 2: 11.5e-3, 4: 18e-3, 8: 33e-3}
"""Those of two cores."""
FLAT = {1: 50e-3, 2: 52e-3, 4: 60e-3, 8: 80e-3}
"""Those of a large accelerator."""


class Kind:
    """A kind of batch."""


KIND = Kind()


def part(client="", priority=0):
    job = Job(Drawing(seed=0), client=client, priority=priority)
    return Part(job, 0, on_change=lambda: None, on_rows=lambda part, rows: None)


def drawn(rows, lanes=2, settings=None, kind=KIND):
    return Candidate(part(), kind, lanes, rows, settings)


def device(seconds, arrivals=0.0):
    return Device(lambda kind, lanes: seconds[lanes], lambda kind: 8, arrivals)


def test_clients_have_equal_shares_however_many_jobs_they_send():
    queue = FairQueue()
    many = [part("many") for _ in range(6)]
    for one in many:
        queue.add(one, 1.0)
    few = [part("few") for _ in range(2)]
    for one in few:
        queue.add(one, 1.0)
    order = []
    while len(queue):
        order.append(queue.ordered()[0])
        queue.remove(order[-1], served=True)
    clients = [one.job.client for one in order]
    assert clients[:4].count("few") == 2
    assert [one for one in order if one in many] == many


def test_a_client_that_comes_late_has_no_claim_to_what_it_missed():
    queue = FairQueue()
    early = [part("early") for _ in range(6)]
    for one in early:
        queue.add(one, 1.0)
    for one in early[:3]:
        queue.remove(one, served=True)
    late = [part("late") for _ in range(6)]
    for one in late:
        queue.add(one, 1.0)
    clients = [one.job.client for one in queue.ordered()]
    assert clients[:6].count("late") == 3


def test_higher_priorities_come_first_and_others_in_their_order():
    queue = FairQueue()
    parts = [part(priority=priority) for priority in (0, 1, 0, 1)]
    for one in parts:
        queue.add(one, 1.0)
    assert queue.ordered() == [parts[1], parts[3], parts[0], parts[2]]


def test_one_at_a_time_and_whole_batches():
    waiting = [drawn(9, settings="a"), drawn(9, settings="b"), *(drawn(9, settings="a"),) * 5]
    waiting = [drawn(one.rows, settings=one.settings) for one in waiting]
    assert policies.one([], waiting, device(LINEAR)) == waiting[:1]
    assert policies.one(waiting[:1], waiting[1:], device(LINEAR)) == []
    together = policies.whole([], waiting, device(LINEAR))
    assert together == [waiting[0], *waiting[2:5]]
    assert policies.whole(together, waiting, device(LINEAR)) == []


def test_images_share_a_device_where_that_is_worth_it_and_have_lanes():
    waiting = [drawn(20) for _ in range(10)]
    assert policies.running([], waiting, device(LINEAR)) == waiting[:1]
    assert policies.running(waiting[:1], waiting[1:], device(LINEAR)) == []
    assert policies.running([], waiting, device(FLAT)) == waiting[:4]
    # One after the other, two images wait 0.2 and 0.4 s; a tenth less is worth it.
    for seconds, together in ((13e-3, 2), (14e-3, 1)):
        known = device({2: 10e-3, 4: seconds})
        assert len(policies.running([], waiting[:2], known)) == together
    other = drawn(20, kind=Kind())
    assert policies.running(waiting[:4], [*waiting[4:], other], device(FLAT)) in ([], [other])


def test_a_guided_image_is_not_overtaken_for_ever_by_those_that_take_one_lane():
    present, waiting = [drawn(20) for _ in range(3)] + [drawn(20, 1)], [drawn(9), drawn(9, 1)]
    assert policies.running(present, waiting, device(FLAT)) == []
    assert policies.running(present, waiting[1:], device(FLAT)) == waiting[1:]


def test_ends_are_foreseen():
    present, waiting = [drawn(10)], [drawn(5), drawn(20)]
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
            waiting.append((coming, drawn(*work[coming])))
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
        left = [(i, Candidate(d.owner, d.kind, d.lanes, d.rows - rows)) for i, d in present]
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


def test_a_listener_hears_the_state_first_and_the_end_once():
    job, heard = Job(Drawing(seed=5, num_images=2, num_inference_steps=4)), []
    stop = job.listen(lambda event: heard.append((event.kind, event.index)))
    job.set_state("running")
    job.set_fraction(0, 0.5)
    assert (job.steps, job.steps_done, job.seeds) == (8, 2, [5, 6])
    job.set_preview(0, "preview")
    job.set_image(1, "second")
    job.set_image(0, "first")
    assert not job.cancel()
    assert job.state == job.wait(0) == "done"
    kinds = [("state", 0), ("state", 0), ("progress", 0), ("image", 1), ("image", 0), ("end", 0)]
    assert heard == kinds
    stop()
    late = []
    job.listen(lambda event: late.append(event.kind))
    assert late == ["state", "end"]


def test_a_listener_that_fails_or_has_gone_harms_nobody():
    job, heard = Job(Drawing(seed=0)), []

    def fail(event):
        if event.kind != "state":
            raise RuntimeError("a listener")

    job.listen(fail)
    stop = job.listen(heard.append, previews=True)
    assert job.wants_preview()
    stop()
    assert not job.wants_preview()
    job.want_preview()
    assert job.wants_preview()
    job.set_preview(0, "preview")
    assert not job.wants_preview()
    assert job.end("failed", Busy("later"))
    assert [event.kind for event in heard] == ["state"]


def test_memory_that_is_used_up_halves_a_kind_of_batch_for_good():
    sizes, kind = KindSizes(8, 1, 64), Kind()
    for size in (2, 4, 8):
        sizes.set_ready(kind, size)
    assert (sizes.smallest_of(kind), sizes.largest_of(kind)) == (2, 8)
    full = MemoryError("RESOURCE_EXHAUSTED: out of memory")
    assert not sizes.begins_again(kind, 8, ValueError("another error"))
    assert sizes.begins_again(kind, 8, full)
    assert sizes.largest_of(kind) == sizes.cap(kind) == 4
    assert sizes.begins_again(kind, 4, full)
    assert not sizes.begins_again(kind, 2, full)
    assert sizes.largest_of(Kind()) == 1


def test_a_batch_grows_no_further_than_the_memory_by_the_compilers_figures():
    sizes, kind = KindSizes(8, 1, 64, memory=2**50), Kind()
    for size in (2, 4):
        sizes.set_ready(kind, size, arrays=size, temporaries=2**40)
    sizes.set_ready(kind, 8, arrays=8, temporaries=2**50)
    assert sizes.largest_of(kind) == 4
    assert sizes.has_room(kind, 4)
    assert not sizes.has_room(kind, 8)


def test_errors_are_told_to_clients_without_what_is_inside():
    full = refusal(RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes"))
    assert (full.status, full.code) == (507, "out_of_memory")
    assert is_out_of_memory(MemoryError())
    inside = refusal(KeyError("/secret/path"))
    assert isinstance(inside, Failed)
    assert "secret" not in str(inside)
    assert refusal(ValueError("strength must be less")).status == 422


def test_two_latents_with_the_same_noise_tell_the_clean_image():
    random = np.random.default_rng(0)
    clean, noise = random.standard_normal((2, 1, 4, 4, 4)).astype(np.float32)
    levels = np.array([[0.2, 0.98], [0.6, 0.8], [1.0, 0.0]])
    first, second = (signal * clean + level * noise for signal, level in levels[:2])
    found = expected_latents(levels, (second, 1), (first, 0))
    np.testing.assert_allclose(found, clean, atol=1e-5)
    alone = expected_latents(levels, (second, 1), None)
    assert np.abs(alone - clean).mean() < np.abs(second - clean).mean()
    np.testing.assert_allclose(expected_latents(levels, (clean, 2), (clean, 2)), clean, atol=1e-6)


def test_histograms_count_up_to_their_bounds():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 3), (float("inf"), 4)]
    assert histogram.sum == 12.0


def test_a_gap_is_counted_only_while_there_is_work(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    metrics = Metrics()
    for at in (1.0, 1.5, 3.5):
        now[0] = at
        metrics.count_rows(2)
    metrics.pause()
    now[0] = 100.0
    metrics.count_rows(2)
    assert metrics.longest_gap() == 2.0
    assert metrics.rows_per_second(10.0) == 0.2
    names = {sample.name for sample in metrics.samples()}
    assert {"to_image_seconds", "jobs_total", "longest_gap_seconds"} <= names
