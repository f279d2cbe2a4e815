"""Calls that wait for a running batch, and who of them joins when."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import diffusax
from diffusax.pipelines.batch_loop import BatchLoop, Sizes
from diffusax.pipelines.generation import Generation
from diffusax.pipelines.intake import Intake
from diffusax.pipelines.measures import RowSeconds
from diffusax.pipelines.policies import running
from diffusax.pipelines.requests import make_request
from diffusax.pipelines.text_cache import TextCache

SECONDS = 60
CALL = {"num_inference_steps": 4, "guidance_scale": 3.0, "seed": 1, "output_type": "latent"}


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def intake():
    """The calls that wait for a loop, whose turns the test makes."""
    with ThreadPoolExecutor(1) as threads:
        loop = BatchLoop(Sizes(8, 4, 16), threads)
        yield Intake(loop, running, threads), loop


def submit(intake, pipe, **given):
    given = {**CALL, **given}
    generation, texts = Generation(), TextCache()
    intake.add(make_request(pipe, None, ("a cat",), given, texts=texts, generation=generation))
    return generation


def turns(intake, loop):
    """Makes turns until all is done, and returns the lanes that were in use after each."""
    found = []
    while intake or loop.has_work():
        intake.admit()
        loop.turn(intake.prepare)
        found += [taken for _, _, taken in loop.live]
    return found


def test_images_share_the_device_where_a_step_of_more_costs_less(intake, pipe, monkeypatch):
    intake, loop = intake
    expected = np.asarray(pipe("a cat", **CALL).images)
    for costs, most in (({4: 0.01, 8: 0.01}, 8), ({4: 0.01, 8: 0.021}, 4)):
        monkeypatch.setattr(RowSeconds, "estimate", lambda *_, c=costs: c[max(4, _[2])])
        ended = []
        futures = [submit(intake, pipe) for _ in range(4)]
        for i, future in enumerate(futures):
            future.add_done_callback(lambda _, i=i, ended=ended: ended.append(i))
        assert max(turns(intake, loop)) == most
        for future in futures:
            found = np.asarray(future.result(SECONDS).images)
            assert np.linalg.norm(found - expected) < 5e-5 * np.linalg.norm(expected)
        assert ended == [0, 1, 2, 3]


def test_a_call_that_is_cancelled_while_it_waits_never_runs(intake, pipe, monkeypatch):
    intake, loop = intake
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


def test_an_error_of_the_loop_ends_those_that_wait(intake, pipe):
    intake, loop = intake
    futures = [submit(intake, pipe) for _ in range(2)]
    intake.admit()
    for part in (intake, loop):
        part.fail(RuntimeError("an error"))
    assert not intake
    assert not loop.has_work()
    for future in futures:
        with pytest.raises(RuntimeError, match="an error"):
            future.result(0)
