"""The queue's order, jobs and what is counted, without a device."""

import collections
import threading
import types

import numpy as np
import pytest
from PIL import Image

from diffusax.batch.compiling import Compiler
from diffusax.batch.sizes import KindSizes
from diffusax.runtime.devices.memory import is_out_of_memory
from diffusax.serving.engine.engine import Engine, EngineSettings
from diffusax.serving.engine.jobs import Job
from diffusax.serving.engine.metrics import Histogram, Metrics
from diffusax.serving.engine.previews import expected_latents
from diffusax.serving.requests.errors import Busy, Failed, Refused, refusal
from diffusax.serving.requests.generation import Generation


class Kind:
    """A kind of batch."""

    devices = 1


KIND = Kind()


def test_a_listener_hears_the_state_first_and_the_end_once():
    job, heard = Job(Generation(seed=5, num_images=2, num_inference_steps=4)), []
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
    job, heard = Job(Generation(seed=0)), []

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


def test_a_smaller_size_that_cannot_be_compiled_bounds_nothing_and_is_asked_for_once():
    sizes, kind = KindSizes(8, 1, 64), Kind()
    nothing = dict.fromkeys(("is_busy", "is_wanted", "on_ready", "on_error"), lambda *_: False)
    compiler = Compiler(sizes, collections.Counter(), **nothing)
    compiler.close()
    request = types.SimpleNamespace(c=types.SimpleNamespace(mesh=None), warms=False)
    prepared = types.SimpleNamespace(branches=1)
    image = types.SimpleNamespace(kind=kind, request=request, prepared=prepared)
    sizes.set_ready(kind, 2)
    assert sizes.give_up(kind, 1, ValueError("no such program"))
    assert sizes.cap(kind) == 8
    compiler.want(image, 1)
    assert not compiler.waiting
    assert sizes.give_up(kind, 4, ValueError("no such program"))
    assert sizes.cap(kind) == 2
    sizes.forget(kind)
    assert not sizes.give_up(kind, 1, ValueError("no such program"))
    compiler.want(image, 1)
    assert compiler.waiting == 1


class Idle:
    """A catalogue whose models take for ever to load."""

    def __init__(self):
        self.end = threading.Event()

    def check(self, generation):
        return generation

    def entry(self, name):
        return types.SimpleNamespace(loaded=True)

    def acquire(self, generation):
        self.end.wait()
        raise Refused("there is no model")


def test_pictures_of_those_that_wait_take_bounded_memory():
    catalogue, large = Idle(), Generation(image=Image.new("RGB", (1000, 1000)))
    with Engine(catalogue, EngineSettings(most_live_bytes=7_000_000)) as engine:
        jobs = [engine.submit(large) for _ in range(2)]
        full = "images of 2 jobs under way take 6 MB and this one 3, more than 7 in all"
        with pytest.raises(Busy, match=full):
            engine.submit(large)
        # Without pictures there is room; one that is too large beside others is let in alone.
        for job in [*jobs, engine.submit(Generation())]:
            job.cancel()
        engine.submit(Generation(image=Image.new("RGB", (2000, 2000))))
        catalogue.end.set()


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


def test_quick_steps_push_no_gap_out_of_the_last_five_minutes(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    metrics = Metrics()
    metrics.count_rows(1)
    now[0] = 2.0
    for _ in range(6000):
        metrics.count_rows(1)
        now[0] += 2**-7
    assert metrics.longest_gap() == 2.0
    assert metrics.rows_per_second() == pytest.approx(128, rel=0.01)
    now[0] += 301.0
    assert metrics.longest_gap() == metrics.rows_per_second() == 0.0
