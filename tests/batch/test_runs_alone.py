"""Calls of a running batch that cannot join others: they run one after the other beside it."""

import threading

import jax
import numpy as np
import pytest
from support.guides import Watched

import diffusax

SECONDS = 120
CALL = {"num_inference_steps": 4, "guidance_scale": 3.0, "seed": 1, "output_type": "latent"}


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def batch(pipe):
    with diffusax.RunningBatch(pipe, lanes=4) as batch:
        yield batch


def nothing(pipe, row, timestep, tensors):
    """A callback that changes nothing."""
    return {}


def result(future):
    return np.asarray(future.result(SECONDS).images)


def test_guidance_of_a_call_reaches_no_other(pipe, batch):
    expected = {
        scale: np.asarray(
            pipe("a cat", **{**CALL, "guidance_scale": scale}, callback_on_step_end=nothing).images
        )
        for scale in (2.0, 9.0)
    }
    seen = []

    def beside(own, row, timestep, tensors):
        # Another run begins meanwhile, and the user's own pipeline is told something.
        if row == 0:
            other = batch.submit("a cat", **{**CALL, "guidance_scale": 9.0, "noise": "torch"})
            other.add_done_callback(lambda _: seen.append("torch"))
            vars(pipe)["_guidance_scale"] = 9.0
        seen.append((row, own.guidance_scale, own.num_timesteps))
        return {}

    given = {**CALL, "guidance_scale": 2.0, "callback_on_step_end": beside}
    futures = [
        batch.submit("a cat", **given),
        batch.submit("a cat", **{**given, "guidance_scale": 9.0, "callback_on_step_end": nothing}),
    ]
    for future, scale in zip(futures, expected, strict=True):
        np.testing.assert_allclose(result(future), expected[scale], atol=1e-4)
    assert np.abs(expected[2.0] - expected[9.0]).max() > 0.1
    assert [one for one in seen if one != "torch"] == [(row, 2.0, 5) for row in range(5)]


def test_a_run_leaves_the_pipeline_as_it_was(pipe, batch):
    before = pipe.guidance_scale, pipe.num_timesteps, pipe.interrupt
    given = {**CALL, "guidance_scale": 1.5, "num_inference_steps": 7}
    result(batch.submit("a cat", sampler="euler_a", noise="torch", **given))
    result(batch.submit("a cat", callback_on_step_end=nothing, **given))
    assert (pipe.guidance_scale, pipe.num_timesteps, pipe.interrupt) == before


def test_callbacks_see_the_sampler_of_their_call(pipe, batch):
    seen = set()

    def look(own, row, timestep, tensors):
        seen.add((own.scheduler.class_name, own.scheduler.order))
        return {}

    result(batch.submit("a cat", sampler="heun", callback_on_step_end=look, **CALL))
    assert seen == {("HeunDiscreteScheduler", 2)}
    assert pipe.scheduler.class_name != "HeunDiscreteScheduler"


def test_a_callback_interrupts_its_own_run(pipe, batch):
    def stop(own, row, timestep, tensors):
        rows.append(row)
        own._interrupt = row == 2
        return {}

    rows = []
    expected = np.asarray(pipe("a cat", callback_on_step_end=stop, **CALL).images)
    assert rows == [0, 1, 2]
    rows.clear()
    found = result(batch.submit("a cat", callback_on_step_end=stop, **CALL))
    assert rows == [0, 1, 2]
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_calls_that_join_need_not_wait_for_those_that_run_alone(pipe, batch):
    going = threading.Event()

    def wait(own, row, timestep, tensors):
        assert going.wait(SECONDS)
        return {}

    held = [batch.submit("a cat", callback_on_step_end=wait, **CALL) for _ in range(3)]
    torch = {**CALL, "noise": "torch", "num_images_per_prompt": 2}
    held += [batch.submit("a cat", sampler="euler_a", **torch) for _ in range(20)]
    result(batch.submit("a dog", **CALL))
    assert not any(future.done() for future in held)
    # What waits holds no more than some prepared runs, each with its latents.
    prepared = [x for x in jax.live_arrays() if x.shape == (2, 16, 16, 4)]
    # One or two more may not have been collected yet.
    assert 0 < len(prepared) < 20
    going.set()
    found = [result(future) for future in held]
    assert all(np.array_equal(one, found[3]) for one in found[4:])


def wait_for_row(future):
    while not future.progress and not future.done():
        threading.Event().wait(0.01)


LONG = {**CALL, "num_inference_steps": 999}
ALONE = ({"callback_on_step_end": nothing}, {"noise": "torch", "sampler": "euler_a"})


@pytest.mark.parametrize("given", ALONE)
def test_a_call_that_runs_alone_ends_at_the_next_step_when_it_is_cancelled(batch, given):
    guide = Watched()
    future = batch.submit("a cat", guide=guide, **LONG, **given)
    waiting = batch.submit("a cat", guide=guide, **LONG, **given)
    wait_for_row(future)
    assert future.progress < 0.5
    assert waiting.progress == 0
    assert waiting.cancel()
    assert future.cancel()
    result(batch.submit("a cat", callback_on_step_end=nothing, **CALL))
    assert 0 < len(guide.sizes) < 500


@pytest.mark.parametrize("given", ALONE)
def test_a_call_that_runs_alone_is_shown_as_it_is(batch, given):
    futures = [batch.submit(["a cat", "a dog"], **LONG, **given) for _ in range(2)]
    wait_for_row(futures[0])
    shown = futures[0].preview(SECONDS)
    assert [image.size for image in shown] == [(64, 64)] * 2
    assert np.asarray(shown[0]).std() > 5
    assert futures[0].progress < 1
    for future in futures:
        assert future.cancel()


def test_closing_with_cancel_ends_the_calls_that_run_alone(pipe):
    rows = []

    def count(own, row, timestep, tensors):
        rows.append(row)
        return {}

    with diffusax.RunningBatch(pipe, lanes=4) as batch:
        futures = [batch.submit("a cat", callback_on_step_end=count, **LONG) for _ in range(3)]
        wait_for_row(futures[0])
        batch.close(cancel=True)
    assert all(future.cancelled() for future in futures)
    assert 0 < len(rows) < 500


def test_the_older_callback_sees_what_it_does_in_a_call(pipe, batch):
    seen = ([], [])
    for call, steps in zip((pipe, batch.submit), seen, strict=True):
        given = {"callback": lambda i, t, x, steps=steps: steps.append((i, t, x.shape))}
        found = call("a cat", callback_steps=2, **given, **CALL)
    result(found)
    assert seen[0] == seen[1]
    # diffusers begins to call after the row that PNDM repeats.
    assert [i for i, *_ in seen[0]] == [2, 4]
    with pytest.raises(ValueError, match="callback_steps must be an integer"):
        batch.submit("a cat", callback=print, callback_steps=0, **CALL)
