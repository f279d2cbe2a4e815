"""Machines that change while images run: the scheduler with a device and a clock of the test's."""

import collections
import types
from concurrent.futures import Future

import numpy as np
import pytest

import diffusax
from diffusax.batch import loop, measures, programs, request, scheduler
from diffusax.batch.image import prepare_images
from diffusax.batch.request import Request
from diffusax.batch.scheduler import Scheduler
from diffusax.batch.sizes import Sizes
from diffusax.pipelines.tasks.text_cache import TextCache

QUICK = {1: 20e-3, 2: 22e-3, 4: 28e-3}
"""Seconds of a row by lanes where sharing costs little."""
SLOW = {1: 40e-3, 2: 84e-3, 4: 176e-3}
"""Those of the same machine while others take its cores: sharing gains nothing."""
ALL_ALONG = 12
"""The requests that have not ended at any time."""
CALL = {"num_inference_steps": 20, "guidance_scale": 1.0, "seed": 1, "output_type": "latent"}


class Machine:
    """A device on which rows take the seconds that a test says, with its clock."""

    def __init__(self):
        self.now = self.busy_until = 100.0
        self.seconds, self.held_up = QUICK, 0.0
        """The seconds by which the next dispatch is held up."""
        self.rows = collections.Counter()
        """The rows that were computed, by size."""

    def empty(self, entry, places, lanes, mesh):
        return programs.Batch(np.zeros((1, places)), *[None] * 7)

    def insert(self, batch, entry, place, lanes):
        return batch

    def rearrange(self, batch, places, lanes):
        return batch._replace(state=np.zeros((1, len(places))))

    def latents_at(self, state, place):
        return np.zeros((1, 16, 16, 4), np.float32)

    def advance_batch(
        self, denoiser, params, state, batch, lanes, at, stop, rows, adapters, memory
    ):
        size, rows = state.shape[1], int(rows)
        self.rows[size] += rows
        took, self.held_up = rows * self.seconds[size] + self.held_up, 0.0
        self.busy_until = max(self.busy_until, self.now) + took
        return state, Done(self, self.busy_until), None


class Done:
    """An array that is ready at its time."""

    def __init__(self, machine, at):
        self.machine, self.at = machine, at

    def is_ready(self):
        return self.machine.now >= self.at

    def block_until_ready(self):
        self.machine.now = max(self.machine.now, self.at)
        return self


class AtOnce:
    """Threads that do everything at once."""

    def submit(self, function, *given):
        function(*given)
        return Future()

    def shutdown(self, wait=True):
        pass


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    for name in ("empty", "insert", "rearrange", "latents_at", "advance_batch"):
        monkeypatch.setattr(programs, name, getattr(machine, name))
    clock = dict.fromkeys(("time", "monotonic", "perf_counter"), lambda: machine.now)
    for module in (loop, measures, request, scheduler):
        monkeypatch.setattr(module, "time", types.SimpleNamespace(**clock))
    monkeypatch.setattr(Scheduler, "_pool", lambda *given: AtOnce())
    monkeypatch.setattr("jax.default_backend", lambda: "cpu")
    return machine


class Server:
    """A scheduler whose turns the test makes, and of which as many calls are wanted all along."""

    def __init__(self, pipe, machine):
        self.machine, self.pipe, self.requests = machine, pipe, []
        first = self._request()
        self.images = prepare_images(first.c, pipe.task, first.prepare())
        self.scheduler = Scheduler(Sizes(4, 1, 0), lambda one: one.take_images(self.images, 0))
        self.seconds = self.scheduler.loop.seconds

    def _request(self):
        made = Request()
        made.take_call(self.pipe, None, ("a cat",), CALL, texts=TextCache())
        return made

    def run(self, seconds, on_turn=lambda: None):
        """Runs for some of the machine's seconds; returns the parts of its rows by size."""
        self.machine.rows.clear()
        until = self.machine.now + seconds
        while self.machine.now < until:
            self.requests = [one for one in self.requests if not one.done()]
            while len(self.requests) < ALL_ALONG:
                self.requests.append(self._request())
                self.scheduler.add(self.requests[-1])
            self.scheduler.turn()
            on_turn()
        rows = self.machine.rows
        return {size: rows[size] / rows.total() for size in sorted(rows)}

    def kinds(self):
        return {kind for kind, _, _ in self.scheduler.loop.live}


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_the_best_size_is_found_again_when_the_machine_slows_down_and_recovers(pipe, machine):
    server = Server(pipe, machine)
    server.run(4.0)
    assert server.run(4.0) == {4: 1.0}
    for seconds, best in ((SLOW, 1), (QUICK, 4), (SLOW, 1)):
        machine.seconds = seconds
        server.run(10.0)
        # Now and then a size is tried that has not run for long.
        parts = server.run(5.0)
        assert parts[best] > 0.7, (best, parts)
        (kind,) = server.kinds()
        for size in seconds:
            assert server.seconds.measured(kind, size) == pytest.approx(seconds[size], rel=0.01)


def test_dispatches_that_are_held_up_now_and_then_change_nothing(pipe, machine):
    server = Server(pipe, machine)
    server.run(4.0)
    (kind,) = server.kinds()
    turns = 0

    def hold_up():
        nonlocal turns
        turns += 1
        machine.held_up = 0.5 * (turns % 3 == 0)
        assert server.seconds.due(kind) == []
        assert server.seconds.measured(kind, 4) == pytest.approx(QUICK[4])

    assert server.run(5.0, hold_up) == {4: 1.0}
    assert turns > 9
