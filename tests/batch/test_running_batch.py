"""Images join and leave one batch at any step, and are what each call alone generates."""

import dataclasses
import re
import subprocess
import sys
import threading

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from support.adapted import random_adapter
from support.data_sets import smooth_picture
from support.effort import examples
from support.mixtures import calls

import diffusax
from diffusax import samplers
from diffusax.batch.image import Image, prepare_images
from diffusax.batch.run import BatchRun, Lanes, Seat
from diffusax.models.adapters.low_rank import kernel_shapes
from diffusax.pipelines.plan.arguments import check_call
from diffusax.pipelines.tasks.text_cache import TextCache
from diffusax.runtime.programs.compilations import count_compilations

SECONDS = 120
TEXT = "text_encoder"
CALL = {"num_inference_steps": 4, "guidance_scale": 3.0, "output_type": "latent"}


@pytest.fixture(scope="module")
def pipes(tiny_checkpoints):
    """One pipeline for each task; those of Stable Diffusion share their components."""
    folder = tiny_checkpoints.pipeline("sd")[0]
    text = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    net = diffusax.ControlNetModel.from_pretrained(tiny_checkpoints.controlnet("sd")[0])
    edits = tiny_checkpoints.pipeline("sd-instruct")[0]
    large = tiny_checkpoints.pipeline("xl")[0]
    found = {
        "text": text,
        "image": diffusax.StableDiffusionImg2ImgPipeline.from_pipe(text),
        "inpaint": diffusax.StableDiffusionInpaintPipeline.from_pipe(text),
        "control": diffusax.StableDiffusionControlNetPipeline.from_pipe(text, controlnet=net),
        "instruct": diffusax.StableDiffusionInstructPix2PixPipeline.from_pretrained(edits),
        "xl": diffusax.StableDiffusionXLPipeline.from_pretrained(large),
    }
    for task, pipe in found.items():
        pipe.set_progress_bar_config(disable=True)
        if task in ("text", "instruct", "xl"):
            pipe.add_adapter("style", {**layers_of(pipe, "unet", 4), **layers_of(pipe, TEXT, 2)})
            pipe.add_adapter("face", layers_of(pipe, "unet", 8, seed=1))
    return found


def layers_of(pipe, component, rank, seed=0):
    """Random adapters of the attention layers of a component."""
    network = pipe.parts.networks[component]
    pattern = "_proj" if component == TEXT else "to_"
    paths = [path for path in kernel_shapes(network) if pattern in path]
    return random_adapter(network, component, rank, paths, seed).components


@pytest.fixture
def batch(pipes):
    """A batch that images join at once: a step of many costs no more than one of few."""
    with diffusax.RunningBatch(pipes["text"], smallest=8) as batch:
        yield batch


def wait_for_row(future):
    while not future.progress:
        threading.Event().wait(0.01)


def alone(pipe, sampler, given):
    own = pipe.scheduler
    if sampler is not None:
        pipe.scheduler = samplers.scheduler_from_name(sampler, own)
    try:
        return np.asarray(pipe(**given).images)
    finally:
        pipe.scheduler = own


def check_mixture(pipes, batch, mixture):
    futures = [
        batch.submit(pipe=pipes[task], sampler=sampler, **given) for task, sampler, given in mixture
    ]
    for future, (task, sampler, given) in zip(futures, mixture, strict=True):
        expected, refused = None, None
        try:
            expected = alone(pipes[task], sampler, given)
        except (ValueError, FloatingPointError) as error:
            refused = error
        if expected is None:
            with pytest.raises(type(refused), match=re.escape(str(refused))):
                future.result(SECONDS)
            continue
        found = np.asarray(future.result(SECONDS).images)
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        # Guidance multiplies the rounding of the predictions.
        assert error < 1e-5 * max(1, given["guidance_scale"]), f"{task} {sampler}: {error:.1e}"
        assert future.progress == 1


@pytest.mark.parametrize(
    ("tasks", "few", "many"),
    [
        (("text", "image", "inpaint"), 6, 180),
        pytest.param(("control",), 2, 40, marks=pytest.mark.slow),
        pytest.param(("instruct",), 2, 40, marks=pytest.mark.slow),
        pytest.param(("xl",), 2, 40, marks=pytest.mark.slow),
    ],
)
def test_a_random_mixture_equals_each_call_alone(pipes, batch, tasks, few, many):
    @hypothesis.seed(0)
    @hypothesis.settings(max_examples=examples(few, many), deadline=None, database=None)
    @hypothesis.given(st.lists(calls(tasks), min_size=3, max_size=7))
    def check(mixture):
        check_mixture(pipes, batch, mixture)

    check()


def test_after_the_first_of_a_kind_nothing_compiles_in_any_size(pipes):
    image = {"image": smooth_picture(0), "strength": 0.7}
    masked = {**image, "mask_image": smooth_picture(1).convert("L")}
    kinds = [("text", {}), ("image", image), ("inpaint", masked)]
    for smallest in (4, 8):
        with diffusax.RunningBatch(pipes["text"], smallest=smallest) as batch:
            for scale in (1.0, 4.0):
                for task, more in kinds:
                    given = {**CALL, "guidance_scale": scale, **more}
                    batch.warm("a cat", pipe=pipes[task], **given)
        with (
            diffusax.RunningBatch(pipes["text"], smallest=smallest) as batch,
            count_compilations(every_thread=True) as compiled,
        ):
            futures = [
                batch.submit(
                    f"{i} dogs",
                    pipe=pipes[task],
                    sampler=sampler,
                    seed=i,
                    guidance_end=0.6,
                    **{**CALL, "num_inference_steps": 3 + i, "guidance_scale": float(i % 3)},
                    **more,
                )
                for i, sampler in enumerate(("euler", "heun", "dpm++2m_sde", "lcm", "unipc"))
                for task, more in kinds
            ]
            for future in futures:
                future.result(SECONDS)
        assert compiled == []


def pictures_of(pipe, *given):
    """The images of calls with the sampler euler, ready to join, encoded one by one."""
    scheduler = samplers.scheduler_from_name("euler", pipe.scheduler)
    c = dataclasses.replace(pipe.parts, scheduler=scheduler, text_cache=TextCache())
    runs = [pipe.task(c, check_call({**CALL, "prompt": "a cat", **one})) for one in given]
    return [one for run in runs for one in prepare_images(c, pipe.task, run)]


def run_at(pipe, size, *seated):
    """The latents of images in these seats, all of which begin at once."""
    run = BatchRun(pipe.parts, seated[0][0], size)
    found, where = {}, {}
    for i, (one, seat) in enumerate(seated):
        run.join(Image(None, 0, one, run.kind), seat)
        where[seat.place] = i
    while len(run):
        for place in run.advance(run.rows_until_change()):
            found[where[place]] = np.asarray(run.latents(place))
            run.leave(place)
    return [found[i] for i in range(len(seated))]


SEATS = [Seat(i, (2 * i, 2 * i + 1)) for i in range(4)]


def test_in_the_same_seat_an_image_has_the_same_bits_whoever_is_beside_it(pipes):
    pipe = pipes["text"]
    one, *others = pictures_of(
        pipe, *({"seed": i, "num_inference_steps": 5 - i, "prompt": f"{i} dogs"} for i in range(4))
    )
    (single,) = run_at(pipe, 8, (one, SEATS[1]))
    together = run_at(pipe, 8, (one, SEATS[1]), *zip(others, [SEATS[0], *SEATS[2:]]))
    assert np.array_equal(single, together[0])
    assert not np.array_equal(single, together[1])


def test_an_image_that_is_not_finite_leaves_the_others_bits(pipes):
    pipe = pipes["text"]
    nothing = np.full((1, 4, 16, 16), np.nan, np.float32)
    given = [{"seed": i, "guidance_scale": 1.0 + 2 * (i % 2)} for i in range(7)]
    bad, good = pictures_of(pipe, {"latents": nothing}, given[0]), pictures_of(pipe, *given)
    seats = [Seat(i, (2 * i, 2 * i + 1)[: one.branches]) for i, one in enumerate(good)]
    expected = run_at(pipe, 16, *zip(good, seats, strict=True))
    mixed = [*good[:3], bad[0], *good[4:]]
    # The last lane is the one that an index beyond them all would be cut to.
    seats[3] = Seat(3, (14, 15))
    found = run_at(pipe, 16, *zip(mixed, seats, strict=True))
    assert np.isnan(found[3]).all()
    for i in (0, 1, 2, 4, 5, 6):
        assert np.array_equal(found[i], expected[i]), i


def test_rows_beyond_the_end_of_a_run_change_nothing(pipes):
    (one,) = pictures_of(pipes["text"], {"num_inference_steps": 3})
    (expected,) = run_at(pipes["text"], 2, (one, Seat(0, (0, 1))))
    run = BatchRun(pipes["text"].parts, one, 2)
    run.join(Image(None, 0, one, run.kind), Seat(0, (0, 1)))
    assert run.advance(5) == [0]
    assert np.array_equal(run.latents(0), expected)


def test_a_call_that_is_not_finite_fails_alone(pipes, batch):
    nothing = np.full((1, 4, 16, 16), np.nan, np.float32)
    good = [batch.submit("a cat", seed=i, **CALL) for i in range(3)]
    bad = batch.submit("a cat", latents=nothing, **CALL)
    with pytest.raises(FloatingPointError, match="the latents are not finite"):
        bad.result(SECONDS)
    assert all(np.isfinite(future.result(SECONDS).images).all() for future in good)


def test_lanes_are_kept_until_guidance_begins_and_given_back_when_it_ends(pipes):
    late, early = pictures_of(
        pipes["text"],
        {"guidance_start": 0.75, "num_inference_steps": 4},
        {"guidance_end": 0.5, "num_inference_steps": 4},
    )
    assert (late.branches, late.guided_until) == (2, 4)
    assert (early.branches, early.guided_until) == (2, 2)
    run = BatchRun(pipes["text"].parts, late, 4)
    for one in (late, early):
        seat = run.lanes.find(one.branches)
        run.join(Image(None, 0, one, run.kind), seat)
    assert run.lanes.find(1) is None
    assert run.rows_until_change() == 2
    assert run.advance(2) == []
    assert run.lanes.taken == 3
    assert sorted(run.advance(2)) == [0, 1]


def test_late_guidance_never_waits_for_ever(pipes, batch):
    given = {**CALL, "guidance_start": 0.9, "num_inference_steps": 10}
    futures = [batch.submit("a cat", seed=i, **given) for i in range(20)]
    assert all(np.isfinite(future.result(SECONDS).images).all() for future in futures)


def test_a_call_of_several_images_is_the_pipelines_own(pipes, batch):
    given = {**CALL, "seed": [3, 4, 5], "output_type": "np"}
    prompts = ["a cat", "a dog", "an owl"]
    expected = pipes["text"](prompts, **given).images
    found = batch.submit(prompts, **given).result(SECONDS).images
    np.testing.assert_allclose(found, expected, atol=1e-4)
    given = {**CALL, "num_images_per_prompt": 2, "seed": 1, "output_type": "pil"}
    found = batch.submit("a cat", **given).result(SECONDS).images
    assert [image.size for image in found] == [(64, 64)] * 2


def test_images_of_another_size_form_a_batch_of_their_own(pipes, batch):
    futures = [batch.submit("a cat", width=32 + 32 * (i % 2), seed=i, **CALL) for i in range(4)]
    assert [f.result(SECONDS).images.shape[-1] for f in futures] == [8, 16, 8, 16]


def test_torch_numbers_and_callbacks_run_alone(pipes, batch):
    rows = []

    def on_row(pipe, row, timestep, tensors):
        rows.append(row)
        return {}

    torch = {**CALL, "noise": "torch", "seed": 1}
    futures = [
        batch.submit("a cat", sampler="euler_a", **torch),
        batch.submit("a cat", sampler="euler", **torch),
        batch.submit("a cat", callback_on_step_end=on_row, **CALL),
    ]
    found = [np.asarray(future.result(SECONDS).images) for future in futures]
    assert rows == [0, 1, 2, 3, 4]
    for sampler, one in zip(("euler_a", "euler"), found):
        expected = alone(pipes["text"], sampler, {"prompt": "a cat", **torch})
        np.testing.assert_allclose(one, expected, atol=1e-4)


def test_a_cancelled_call_frees_its_lanes(pipes, batch):
    long = {**CALL, "num_inference_steps": 999}
    futures = [batch.submit("a cat", seed=i, **long) for i in range(4)]
    waiting = batch.submit("a dog", **CALL)
    wait_for_row(futures[0])
    assert 0 < futures[0].progress < 1
    assert futures[0].cancel()
    assert waiting.result(SECONDS) is not None
    assert not futures[1].done()
    for future in futures[1:]:
        assert future.cancel()
        assert future.cancelled()


def test_a_preview_shows_the_image_as_it_is(pipes, batch):
    future = batch.submit("a cat", **{**CALL, "num_inference_steps": 999})
    wait_for_row(future)
    (image,) = future.preview(SECONDS)
    assert image.size == (64, 64)
    assert np.asarray(image).std() > 5
    future.cancel()
    assert future.preview(SECONDS) == []


def test_the_components_are_those_at_the_time_of_the_call(pipes, batch):
    pipe = pipes["text"]
    before = pipe.params
    expected = alone(pipe, None, {"prompt": "a cat", "seed": 1, **CALL})
    first = batch.submit("a cat", seed=1, **CALL)
    try:
        pipe.params = jax.tree.map(lambda x: x * 1.1, before)
        other = alone(pipe, None, {"prompt": "a cat", "seed": 1, **CALL})
        second = batch.submit("a cat", seed=1, **CALL)
    finally:
        pipe.params = before
    scale = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(first.result(SECONDS).images, expected, atol=scale)
    np.testing.assert_allclose(second.result(SECONDS).images, other, atol=scale)
    assert np.abs(expected - other).max() > 100 * scale


def test_mistakes_are_one_sentence(pipes, batch):
    with pytest.raises(ValueError, match="num_inference_steps must be"):
        batch.submit("a cat", num_inference_steps=0)
    with pytest.raises(ValueError, match="unknown sampler"):
        batch.submit("a cat", sampler="nothing")
    for sampler in (5, samplers.EulerDiscreteScheduler):
        with pytest.raises(ValueError, match="sampler must be"):
            batch.submit("a cat", sampler=sampler)
    with pytest.raises(ValueError, match=r"pipe must be a pipeline, as.*'x'"):
        batch.submit("a cat", pipe="x")
    with pytest.raises(ValueError, match="pipe must be a pipeline"):
        diffusax.RunningBatch("x")
    for name, value in (("lanes", 8.0), ("lanes", "8"), ("smallest", True), ("adapter_rank", 1.5)):
        with pytest.raises(ValueError, match=f"{name} must be an integer"):
            diffusax.RunningBatch(pipes["text"], **{name: value})
    with pytest.raises(TypeError, match="propmt"):
        batch.submit(propmt="a cat")
    with pytest.raises(ValueError, match="height must be divisible by 4"):
        batch.submit("a cat", height=65).result(SECONDS)
    for lanes in (0, 3, 6):
        with pytest.raises(ValueError, match="lanes must be a power of two, at least 4"):
            diffusax.RunningBatch(pipes["text"], lanes=lanes)
    with pytest.raises(ValueError, match=r"smallest must be.*\(got 16\)"):
        diffusax.RunningBatch(pipes["text"], smallest=16)
    batch.close()
    with pytest.raises(RuntimeError, match="is closed"):
        batch.submit("a cat")


@pytest.mark.parametrize("more", [{}, {"callback_on_step_end": lambda *_: {}}, {"width": 65}])
def test_the_callback_of_a_future_may_close_the_batch(pipes, more):
    others, closed = set(threading.enumerate()), threading.Event()
    batch = diffusax.RunningBatch(pipes["text"], lanes=4)
    own = set(threading.enumerate()) - others

    def close(_):
        batch.close()
        closed.set()

    batch.submit("a cat", **CALL, **more).add_done_callback(close)
    assert closed.wait(SECONDS)
    batch.close()
    assert len(own) == 2
    assert not any(thread.is_alive() for thread in own)


EXIT = """
import atexit, sys, threading
import diffusax
pipe = diffusax.StableDiffusionPipeline.from_pretrained(sys.argv[1])
others = set(threading.enumerate())
# What is registered first is called last.
atexit.register(lambda: print([thread.is_alive() for thread in own]))
batch = diffusax.RunningBatch(pipe, lanes=4)
own = set(threading.enumerate()) - others
call = {"num_inference_steps": 999, "width": 32, "height": 32}
futures = [batch.submit("a cat", **call), batch.submit("a dog", noise="torch", eta=1.0, **call)]
while not futures[0].progress:
    pass
"""


@pytest.mark.slow
def test_a_process_that_does_not_close_its_batch_ends_without_its_threads(tiny_checkpoints):
    folder = tiny_checkpoints.pipeline("sd")[0]
    ended = subprocess.run(
        [sys.executable, "-c", EXIT, str(folder)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().endswith("[False, False]")


def test_an_error_of_a_step_ends_its_calls_and_not_the_batch(pipes, batch):
    def broken(predictions, step):
        raise MemoryError("full")

    futures = [batch.submit("a cat", seed=i, guide=broken, **CALL) for i in range(2)]
    for future in futures:
        with pytest.raises(MemoryError, match="full"):
            future.result(SECONDS)
    assert batch.submit("a cat", **CALL).result(SECONDS)


def test_lanes_of_a_mesh_stay_on_their_device():
    lanes = Lanes(16, 2, devices=4)
    seats = []
    for count in (2, 1, 2, 2, 2, 1):
        seats.append(lanes.find(count))
        lanes.take(seats[-1])
    for seat in seats:
        assert {seat.place // 4} == {lane // 4 for lane in seat.lanes}
    assert [seat.place // 4 for seat in seats[:4]] == [0, 1, 2, 3]
    indices = lanes.indices()
    assert indices.owner.max() < 4
    for seat in seats:
        local = indices.lanes[seat.place]
        assert list(local[: len(seat.lanes)]) == [lane % 4 for lane in seat.lanes]
        assert (local[len(seat.lanes) :] == 4).all()
    smaller, places, from_lanes = lanes.compacted(32, devices=4)
    assert smaller.taken == lanes.taken
    moved = smaller.moved(places)
    for seat in seats:
        new = smaller.seats[moved[seat.place]]
        assert tuple(from_lanes[list(new.lanes)]) == seat.lanes
    with pytest.raises(ValueError, match="do not fit"):
        lanes.compacted(4, devices=4)


def test_an_images_conditions_reach_only_its_lanes(pipes):
    pipe = pipes["text"]
    both = pictures_of(pipe, {"prompt": "a cat"}, {"prompt": "a dog"})
    seats = (Seat(2, (5, 1)), Seat(0, (4, 3)))
    found = run_at(pipe, 8, *zip(both, seats))
    for one, latents in zip(both, found):
        (expected,) = run_at(pipe, 8, (one, SEATS[0]))
        assert np.linalg.norm(latents - expected) < 1e-5 * np.linalg.norm(expected)
    assert np.linalg.norm(found[0] - found[1]) > 0.1 * np.linalg.norm(found[0])
