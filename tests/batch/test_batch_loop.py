"""The loop of a running batch: who joins when, and whom it concerns what goes wrong."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.adapted import random_adapter

import diffusax
from diffusax.batch import programs as programs
from diffusax.batch.image import Status, prepare_images
from diffusax.batch.loop import BatchLoop
from diffusax.batch.request import Request
from diffusax.batch.run import BatchRun
from diffusax.batch.scheduler import Scheduler
from diffusax.batch.sizes import Sizes
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
        yield BatchLoop(Halving(4, 2, 16), threads, threads)


def prepare(request):
    images = prepare_images(request.c, request.pipe.task, request.prepare())
    request.take_images(images, 16)


def request_of(pipe, **given):
    request = Request()
    request.take_call(pipe, None, ("a cat",), {**CALL, **given}, texts=TextCache())
    return request


def add(loop, pipe, **given):
    """Seats the image of a call, and returns its future."""
    request = request_of(pipe, **given)
    prepare(request)
    for image in request.images:
        loop.seat(image)
    return request


def finish(loop, *requests):
    """Makes turns until all is done; images that begin again take their seats anew."""
    waiting = [image for request in requests for image in request.images]
    while loop.has_work() or any(image.status is Status.READY for image in waiting):
        for image in waiting:
            if image.status is Status.READY:
                loop.seat(image)
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
        with pytest.raises(ValueError, match="has A of shape"):
            add(loop, pipe, adapters={"other": 1.0})
        finish(loop)
    finally:
        pipe.delete_adapters(["style", "other"])
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
    finish(loop, first, second)
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


def test_an_error_of_the_scheduler_ends_the_calls_that_it_has_begun(pipe, caplog):
    def fails(present, ready, device):
        if len(ready) == 2:
            raise RuntimeError("an error")
        return []

    scheduler = Scheduler(Halving(4, 2, 16), prepare, policy=fails)
    requests = [request_of(pipe) for _ in range(2)]
    for request in requests:
        scheduler.add(request)
    scheduler.start()
    for request in requests:
        with pytest.raises(RuntimeError, match="an error"):
            request.result(SECONDS)
    scheduler.close()
    assert "the scheduler failed" in caplog.text
