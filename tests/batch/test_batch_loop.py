"""The loop of a running batch: who joins when, and whom it concerns what goes wrong."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.adapted import random_adapter

import diffusax
from diffusax.batch import programs as programs
from diffusax.batch.alone import RunsAlone
from diffusax.batch.image import prepare_images
from diffusax.batch.loop import BatchLoop, Sizes, images_of
from diffusax.batch.policies import RowSeconds, running
from diffusax.batch.request import Generation, make_request, prepare
from diffusax.batch.run import BatchRun
from diffusax.batch.scheduler import Intake
from diffusax.lora import Lora
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.pipelines.tasks.text_cache import TextCache

SECONDS = 60
CALL = {"num_inference_steps": 4, "guidance_scale": 3.0, "seed": 1, "output_type": "latent"}
FULL = "RESOURCE_EXHAUSTED: out of memory (of a test)"


class Halving(Sizes):
    """Sizes that halve where the memory is used up."""

    def begins_again(self, kind, size, error):
        self.largest = size // 2
        return FULL in str(error)


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def loop():
    """A loop whose turns the test makes."""
    with ThreadPoolExecutor(1) as threads:
        yield BatchLoop(Halving(4, 2, 16), threads)


def request_of(pipe, **given):
    given = {**CALL, **given}
    generation, texts = Generation(), TextCache()
    return make_request(pipe, None, ("a cat",), given, texts=texts, generation=generation)


def add(loop, pipe, **given):
    """Adds a call to a loop, and returns its future."""
    request = request_of(pipe, **given)
    for image in images_of(request, prepare_images(request.c, pipe.task, prepare(request))):
        loop.add(image)
    return request.generation


def finish(loop):
    while loop.has_work():
        loop.turn()


def result(future):
    return np.asarray(future.result(SECONDS).images)


def close_to(found, expected):
    # Guidance multiplies the rounding of the predictions.
    return np.linalg.norm(found - expected) < 5e-5 * np.linalg.norm(expected)


def test_a_lora_that_does_not_fit_fails_its_own_call_alone(pipe, loop):
    network = pipe.parts.networks["unet"]
    (path, *_) = [path for path in kernel_shapes(network) if path.endswith("to_q")]
    fitting = random_adapter(network, "unet", 4, [path]).components
    pipe.add_adapter("style", fitting)
    # As if another network had been assigned after it was added.
    down, up = fitting["unet"][path]
    other = Lora({"unet": {path: (np.concatenate([down, down]), up)}})
    pipe.parts.adapters._adapters["other"] = other
    try:
        expected = np.asarray(pipe("a cat", **CALL, adapters={"style": 1.0}).images)
        good = add(loop, pipe, adapters={"style": 1.0})
        loop.turn()
        bad = add(loop, pipe, adapters={"other": 1.0})
        finish(loop)
    finally:
        pipe.delete_adapters(["style", "other"])
    with pytest.raises(ValueError, match="has A of shape"):
        bad.result(SECONDS)
    assert close_to(result(good), expected)


def test_without_memory_for_one_more_all_begin_again(pipe, loop, monkeypatch):
    expected = np.asarray(pipe("a cat", **CALL).images)
    own = programs.insert

    def insert(batch, *given):
        if batch.state.shape[1] > 2:
            raise RuntimeError(FULL)
        return own(batch, *given)

    monkeypatch.setattr(programs, "insert", insert)
    first = add(loop, pipe)
    loop.turn()
    loop.turn()
    assert first.progress > 0
    second = add(loop, pipe)
    loop.turn()
    # What the device was still busy with is no progress of the new run.
    assert first.progress == 0
    finish(loop)
    assert close_to(result(first), expected)
    assert close_to(result(second), expected)


def test_without_memory_for_a_smaller_batch_it_stays_as_it_is(pipe, loop, monkeypatch):
    own, refused = BatchRun.resize, []

    def resize(run, size):
        if size < run.size:
            refused.append(size)
            raise RuntimeError(FULL)
        return own(run, size)

    monkeypatch.setattr(BatchRun, "resize", resize)
    futures = [add(loop, pipe, num_inference_steps=steps) for steps in (2, 6)]
    finish(loop)
    assert refused
    assert all(np.isfinite(result(future)).all() for future in futures)


def test_without_memory_for_a_preview_its_caller_is_told_and_the_image_goes_on(
    pipe, loop, monkeypatch
):
    future = add(loop, pipe)
    while not future.progress:
        loop.turn()
    with ThreadPoolExecutor(1) as threads:
        preview = threads.submit(future.preview, SECONDS)
        while not future.wants_preview():
            pass
        with monkeypatch.context() as patch:
            patch.setattr(BatchRun, "latents", lambda *_: (_ for _ in ()).throw(MemoryError(FULL)))
            loop.turn()
        with pytest.raises(MemoryError, match="RESOURCE_EXHAUSTED"):
            preview.result(SECONDS)
    finish(loop)
    assert np.isfinite(result(future)).all()


@pytest.fixture
def intake(loop):
    """The calls that wait for the loop."""
    alone = RunsAlone()
    yield Intake(loop, running, alone)
    alone.close()


def submit(intake, pipe, **given):
    """Has a call wait for a loop, and returns its future."""
    request = request_of(pipe, **given)
    intake.add(request)
    return request.generation


def turns(intake, loop):
    """Makes turns until all is done."""
    while intake or loop.has_work():
        intake.admit()
        loop.turn(intake.prepare)


def test_images_share_the_device_where_a_step_of_more_costs_less(pipe, loop, intake, monkeypatch):
    expected, taken = np.asarray(pipe("a cat", **CALL).images), []
    own = BatchRun.advance

    def advance(run, rows):
        taken.append(run.lanes.taken)
        return own(run, rows)

    monkeypatch.setattr(BatchRun, "advance", advance)
    for costs, most in (({2: 0.01, 4: 0.01}, 4), ({2: 0.01, 4: 0.021}, 2)):
        monkeypatch.setattr(RowSeconds, "estimate", lambda *given, c=costs: c[given[2]])
        ended = []
        futures = [submit(intake, pipe) for _ in range(3)]
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i, ended=ended: ended.append(i))
        taken.clear()
        turns(intake, loop)
        assert max(taken) == most
        for future in futures:
            assert close_to(result(future), expected)
        assert ended == [0, 1, 2]


def test_a_call_that_is_cancelled_while_it_waits_never_runs(pipe, loop, intake, monkeypatch):
    monkeypatch.setattr(RowSeconds, "estimate", lambda *given: float(given[2] ** 2))
    futures = [submit(intake, pipe, num_images_per_prompt=1 + i) for i in range(3)]
    intake.admit()
    loop.turn()
    while intake._new:
        intake.prepare()
    assert len(loop.candidates()) == 1
    assert len(list(intake.requests())) == 5
    assert futures[1].cancel()
    turns(intake, loop)
    assert [future.cancelled() for future in futures] == [False, True, False]
    assert len(futures[2].result(SECONDS).images) == 3


def test_an_error_of_the_loop_ends_those_that_wait(pipe, loop, intake):
    futures = [submit(intake, pipe) for _ in range(2)]
    intake.admit()
    for part in (intake, loop):
        part.fail(RuntimeError("an error"))
    assert not intake
    assert not loop.has_work()
    for future in futures:
        with pytest.raises(RuntimeError, match="an error"):
            future.result(0)
