"""Which calls share the device, what a batch grows for, and calls that never begin."""

import time

import numpy as np
import pytest
from support.guides import Watched

import diffusax

SECONDS = 120
CALL = {"num_inference_steps": 20, "guidance_scale": 3.0, "seed": 1, "output_type": "latent"}


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def rule():
    return Watched()


@pytest.fixture
def guide(rule):
    """The rule of all calls, for which programs are compiled once."""
    rule.sizes.clear()
    yield rule
    rule.seconds = 0.0


def wait_for_row(future):
    while not future.progress:
        time.sleep(0.005)


def are_together(first, second):
    """Whether the second call begins before the first one has ended."""
    while not second.progress:
        if first.done():
            return False
        time.sleep(0.005)
    return first.progress < 1


def check(future, expected):
    found = np.asarray(future.result(SECONDS).images)
    # Guidance multiplies the rounding of the predictions.
    assert np.linalg.norm(found - expected) < 5e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("smallest", [4, 2])
def test_images_share_the_device_where_a_step_of_more_costs_no_more(pipe, guide, smallest):
    """A step of a batch costs the same with one or two images in it, until it has to grow."""
    expected, ended = np.asarray(pipe("a cat", **CALL).images), []
    with diffusax.RunningBatch(pipe, lanes=4, smallest=smallest) as batch:
        futures = [batch.submit("a cat", guide=guide, **CALL) for _ in range(3)]
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i: ended.append(i))
        assert are_together(*futures[:2]) == (smallest == 4)
        assert not are_together(*futures[1:])
    assert ended[2] == 2
    assert set(guide.sizes) == {smallest}
    for future in futures:
        check(future, expected)


def test_images_share_the_device_where_warming_measured_that_a_step_of_more_costs_little(
    pipe, guide
):
    guide.seconds = 0.3
    call = {**CALL, "num_inference_steps": 4, "guide": guide}
    call |= dict.fromkeys(("prompt_embeds", "negative_prompt_embeds"), np.ones((1, 77, 32), "f4"))
    with diffusax.RunningBatch(pipe, lanes=4, smallest=2) as batch:
        batch.warm(**call)
        assert set(guide.sizes) == {2, 4}
        assert are_together(*(batch.submit(**call) for _ in range(2)))


def test_a_batch_grows_for_short_calls_beside_a_long_one(pipe, guide):
    short = {**CALL, "num_inference_steps": 3}
    expected = np.asarray(pipe("a cat", **short).images)
    guide.seconds = 0.05
    with diffusax.RunningBatch(pipe, lanes=4, smallest=2) as batch:
        long = batch.submit("a cat", guide=guide, **{**CALL, "num_inference_steps": 60})
        wait_for_row(long)
        check(batch.submit("a cat", guide=guide, **short), expected)
        assert long.progress < 1
        assert set(guide.sizes) == {2, 4}
    assert guide.sizes[0] == guide.sizes[-1] == 2


def test_a_call_that_is_cancelled_while_it_waits_never_runs(pipe, guide):
    guide.seconds, long = 0.05, {**CALL, "num_inference_steps": 120}
    with diffusax.RunningBatch(pipe, lanes=4, smallest=4) as batch:
        full = batch.submit("a cat", guide=guide, **long, num_images_per_prompt=2)
        futures = [
            batch.submit("a cat", guide=guide, **CALL, num_images_per_prompt=2 + i)
            for i in range(2)
        ]
        wait_for_row(full)
        assert futures[0].cancel()
        assert not any(future.running() for future in futures)
        full.cancel()
        assert len(futures[1].result(SECONDS).images) == 3
    assert [future.cancelled() for future in (full, *futures)] == [True, True, False]
