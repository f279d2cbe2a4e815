"""The engine with the embedded model: images, and what may go wrong with them."""

import dataclasses
import shutil
import tempfile
import time

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from support.compiled_programs import forget_executables

from diffusax.batch.executables import Executables
from diffusax.batch.run import BatchRun
from diffusax.images.clips import Clip
from diffusax.runtime.programs.program import PROGRAMS, Program
from diffusax.samplers import scheduler_from_name
from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.engine.engine import Engine, EngineSettings, count_bytes
from diffusax.serving.requests.errors import Busy, Closing, NotFound, Refused
from diffusax.serving.requests.generation import Generation

APPLE = Generation(
    prompt="a red apple", seed=1, num_inference_steps=6, guidance_scale=2.0, sampler="euler"
)
LONG = dataclasses.replace(APPLE, num_inference_steps=900)
SECONDS = 60
LAYER = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of models with a LoRA that fits the embedded model, and one that does not."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "Lora").mkdir()
    random = np.random.default_rng(0)

    def lora(name, width):
        matrices = random.standard_normal((2, 4, width)).astype(np.float32)
        down, up = matrices[0], np.ascontiguousarray(matrices[1].T)
        tensors = {f"{LAYER}.lora_A.weight": down, f"{LAYER}.lora_B.weight": up}
        save_file(tensors, folder / "Lora" / f"{name}.safetensors")

    lora("style", 96)
    lora("foreign", 32)
    return folder


class Poisoned(Catalogue):
    """A catalogue, some of whose pictures are not finite."""

    def acquire(self, generation):
        pipe, arguments = super().acquire(generation)
        if generation.prompt == "poison":
            arguments["latents"] = np.full((1, 8, 8, 8), np.nan, np.float32)
        return pipe, arguments


@pytest.fixture(scope="module")
def catalogue(folder):
    return Poisoned("emoji", folder)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The folder of executables, from which later engines read what the first has compiled."""
    return tmp_path_factory.mktemp("programs")


@pytest.fixture
def start(catalogue, programs):
    """Starts engines, and stops them in the end."""
    engines = []

    def start(**settings):
        given = {"lanes": 4, "smallest": 4, "executables": programs, **settings}
        engines.append(Engine(catalogue, EngineSettings(**given)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def test_images_are_those_of_the_pipeline_and_each_can_be_drawn_again(start, catalogue):
    engine, events = start(), []
    job = engine.submit(dataclasses.replace(APPLE, num_images=3))
    job.listen(lambda event: events.append((event.kind, event.job.state)))
    other = engine.submit(dataclasses.replace(APPLE, sampler="dpm++2m", num_inference_steps=4))
    assert job.wait(SECONDS) == other.wait(SECONDS) == "done", job.error
    assert job.seeds == [1, 2, 3]
    pipe, arguments = catalogue.acquire(job.generation)
    own, pipe.scheduler = pipe.scheduler, scheduler_from_name("euler", pipe.scheduler)
    for image, seed in zip(job.images, job.seeds):
        expected = pipe(**arguments, seed=seed).images[0]
        # A batch rounds sums in another order, which may change a pixel's last bit.
        assert np.abs(np.asarray(image, int) - np.asarray(expected, int)).max() <= 1
    pipe.scheduler = own
    catalogue.release(pipe)
    again = engine.submit(dataclasses.replace(APPLE, seed=3))
    again.wait(SECONDS)
    difference = np.asarray(again.images[0], int) - np.asarray(job.images[2], int)
    assert np.abs(difference).max() <= 1
    assert events[0] == ("state", "queued")
    assert ("state", "compiling") in events
    assert events[-1] == ("end", "done")
    assert [kind for kind, _ in events].count("image") == 3
    assert ("progress", "running") in events
    assert job.created <= job.started <= job.first_step <= job.ended


def test_a_preview_shows_the_image_that_comes(start):
    engine, seen = start(), []
    job = engine.submit(dataclasses.replace(APPLE, num_inference_steps=60))
    job.listen(lambda event: event.kind == "preview" and seen.append(event.image), previews=True)
    assert job.wait(SECONDS) == "done"
    assert seen
    assert seen[-1].size == (64, 64)
    small = [np.asarray(image.resize((8, 8)), float).ravel() for image in (seen[-1], *job.images)]
    assert np.corrcoef(small)[0, 1] > 0.8


def test_a_cancelled_job_frees_its_lanes_for_others(start):
    engine = start(policy="whole")
    long = [engine.submit(LONG) for _ in range(2)]
    waiting = engine.submit(APPLE)
    until = time.monotonic() + SECONDS
    # Positions are set by the next turn of the scheduler.
    while (long[0].first_step is None or waiting.position) and time.monotonic() < until:
        time.sleep(0.01)
    assert waiting.position == 0
    state = engine.state()
    assert (state.lanes_live, state.queued) == (4, 1)
    for job in long:
        assert job.cancel()
        assert not job.cancel()
    assert waiting.wait(SECONDS) == "done"
    assert {job.state for job in long} == {"cancelled"}
    waits = [engine.submit(LONG), engine.submit(LONG)]
    assert waits[1].cancel()
    waits[0].cancel()
    until = time.monotonic() + SECONDS
    while engine.state().lanes_live and time.monotonic() < until:
        time.sleep(0.01)
    assert engine.state().lanes_live == 0


def test_a_picture_that_is_not_finite_fails_alone(start):
    engine = start()
    good = engine.submit(APPLE)
    bad = engine.submit(dataclasses.replace(APPLE, prompt="poison"))
    last = engine.submit(APPLE)
    assert (bad.wait(SECONDS), bad.error.code) == ("failed", "not_finite")
    assert good.wait(SECONDS) == last.wait(SECONDS) == "done"


@pytest.mark.slow
def test_loras_are_loaded_when_a_drawing_names_them_and_a_bad_one_fails_alone(start):
    engine = start()
    plain = engine.submit(APPLE)
    named = engine.submit(dataclasses.replace(APPLE, adapters={"style": 0.5}))
    tagged = engine.submit(dataclasses.replace(APPLE, prompt="a red apple<lora:style:0.5>"))
    foreign = engine.submit(dataclasses.replace(APPLE, adapters={"foreign": 1.0}))
    with pytest.raises(NotFound, match="nothing"):
        engine.submit(dataclasses.replace(APPLE, adapters={"nothing": 1.0}))
    assert foreign.wait(SECONDS) == "failed"
    assert foreign.error.param == "adapters"
    assert {job.wait(SECONDS) for job in (plain, named, tagged)} == {"done"}
    images = [np.asarray(job.images[0], int) for job in (plain, named, tagged)]
    assert np.abs(images[1] - images[2]).max() <= 1
    assert np.abs(images[0] - images[1]).mean() > 2


@pytest.mark.slow
def test_where_memory_is_used_up_the_batch_halves_and_its_images_begin_again(start, monkeypatch):
    engine = start(lanes=4, smallest=2, policy="whole")
    engine.warm([APPLE])
    own, sizes = BatchRun.advance, []

    def advance(run, rows):
        sizes.append(run.size)
        if run.size > 2:
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory (of a test)")
        return own(run, rows)

    monkeypatch.setattr(BatchRun, "advance", advance)
    jobs = [engine.submit(dataclasses.replace(APPLE, seed=seed)) for seed in range(3)]
    assert [job.wait(SECONDS) for job in jobs] == ["done"] * 3
    # The larger batch is tried once.
    assert sizes.count(4) == 1
    assert set(sizes) == {2, 4}
    monkeypatch.setattr(BatchRun, "advance", lambda *_: 1 / 0)
    failed = engine.submit(APPLE)
    assert (failed.wait(SECONDS), failed.error.status) == ("failed", 500)
    monkeypatch.undo()
    assert engine.submit(APPLE).wait(SECONDS) == "done"


def test_deadlines_and_full_queues(start):
    engine = start(policy="one", most_queued=2, most_per_client=2, deadline=500.0)
    running = engine.submit(LONG, client="a")
    while running.first_step is None:
        time.sleep(0.01)
    late = engine.submit(APPLE, client="a", deadline=0.01)
    assert late.deadline < time.time() + 1
    with pytest.raises(Busy, match="this client has 2 jobs") as refused:
        engine.submit(APPLE, client="a")
    assert refused.value.retry_after >= 1
    assert late.wait(SECONDS) == "failed"
    assert late.error.status == 504
    for _ in range(2):
        patient = engine.submit(APPLE, client="b", deadline=1e6)
        assert patient.deadline == pytest.approx(patient.created + 500, abs=1)
    with pytest.raises(Busy, match="the queue is full with 2 jobs"):
        engine.submit(APPLE, client="c")
    assert engine.metrics.jobs["refused"] == 2


def test_draining_finishes_what_has_begun(start):
    engine = start(policy="one")
    begun = engine.submit(dataclasses.replace(APPLE, num_inference_steps=60))
    waiting = engine.submit(APPLE)
    while begun.first_step is None:
        time.sleep(0.01)
    assert engine.drain(SECONDS)
    assert begun.state == "done"
    assert (waiting.state, waiting.error.status) == ("failed", 503)
    with pytest.raises(Closing, match="about to end"):
        engine.submit(APPLE)


def test_as_many_results_are_kept_as_there_is_room_for(start):
    size = 64 * 64 * 3
    engine = start(most_kept=3, most_kept_bytes=2 * size)
    jobs = [engine.submit(dataclasses.replace(APPLE, seed=i), client=f"{i % 2}") for i in range(3)]
    assert {job.wait(SECONDS) for job in jobs} == {"done"}
    first = min(jobs, key=lambda job: job.ended)
    with pytest.raises(NotFound, match="there is no job"):
        engine.job(first.id)
    assert engine.state().kept == 2
    assert len(engine.jobs()) == 2
    assert all(job.client == "0" for job in engine.jobs("0"))


def test_all_that_a_request_brings_takes_memory():
    picture = Image.new("RGB", (8, 4))
    clip = Clip((picture,) * 3, 16.0)
    brought = {"image": picture, "last_image": picture, "video": clip, "mask_video": clip}
    assert count_bytes(Generation(prompt="a")) == 0
    assert count_bytes(Generation(prompt="a", **brought), [picture]) == (2 + 6 + 1) * 8 * 4 * 3
    for name in brought:
        assert count_bytes(Generation(prompt="a", **{name: brought[name]})) > 0


def test_another_engine_reads_the_programs_and_compiles_none(start):
    first = start()
    assert first.submit(APPLE).wait(SECONDS) == "done"
    first.close()
    forget_executables()
    engine = start()
    job = engine.submit(APPLE)
    assert job.wait(SECONDS) == "done"
    assert engine.metrics.compiled["file"] >= 3
    assert not engine.metrics.compiled["here"] + engine.metrics.compiled["process"]


@pytest.mark.parametrize("trouble", ["before", "later", "everywhere"])
def test_executables_that_cannot_be_kept_are_one_warning(tmp_path, caplog, monkeypatch, trouble):
    folder = tmp_path / "programs"
    if trouble == "before":
        folder.touch()
    if trouble == "everywhere":
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    executables = Executables(folder)
    double = Program(double_it, shape_of="x")

    def ready(length):
        request = double.request(np.ones(length, np.float32))
        executables.make_ready(request)
        # The next call reads what the first has kept, if there is a place to keep it.
        double.forget_all()
        where = executables.make_ready(request)
        np.testing.assert_array_equal(double(*request.dynamic), np.full(length, 2.0))
        return where

    assert ready(1) == "file"
    if trouble != "before":
        shutil.rmtree(folder)
        folder.touch()
    assert ready(2) == ready(3) == ("here" if trouble == "everywhere" else "file")
    executables.close()
    PROGRAMS.pop(double.name)
    about = [one.getMessage() for one in caplog.records if str(folder) in one.getMessage()]
    assert len(about) == 1


def double_it(x):
    return x * 2


@pytest.mark.slow
def test_another_size_is_compiled_in_another_process_while_steps_go_on(start, tmp_path):
    engine = start(executables=tmp_path, smallest=2, lanes=2)
    running = [engine.submit(LONG)]
    while running[0].first_step is None:
        time.sleep(0.01)
    began = time.perf_counter()
    other = engine.submit(dataclasses.replace(APPLE, width=80))
    while not other.is_over:
        if running[-1].is_over:
            running.append(engine.submit(LONG))
        time.sleep(0.05)
    assert other.state == "done", other.error
    assert engine.metrics.compiled["process"] >= 2
    # Compiled by the engine's thread it would be nearly all of the time.
    seconds = time.perf_counter() - began
    assert engine.metrics.longest_gap(seconds) < seconds / 4


def test_a_refused_drawing_says_why_at_once(start):
    engine = start()
    with pytest.raises(Refused, match="width must be divisible") as refused:
        engine.submit(dataclasses.replace(APPLE, width=65))
    assert refused.value.param == "width"
    with pytest.raises(NotFound, match="there is no job"):
        engine.job("../secret")
