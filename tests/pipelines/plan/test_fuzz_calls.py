"""Random calls, good and bad: pictures or a clear error, never anything from the depths."""

import contextlib
import inspect
import random
import resource
import signal

import numpy as np
import pytest
import torch
from support.effort import first
from support.pairs import mask, picture

import diffusax
from diffusax.pipelines.plan.arguments import Call

CASES, CHUNK = 500, 50
SECONDS = 300
NAMES = {
    "StableDiffusionPipeline": "sd",
    "StableDiffusionImg2ImgPipeline": "sd",
    "StableDiffusionInpaintPipeline": "sd-inpaint",
    "StableDiffusionInstructPix2PixPipeline": "sd-instruct",
    "StableDiffusionControlNetPipeline": "sd",
    "LatentConsistencyModelPipeline": "lcm",
}
NAN, INF = float("nan"), float("inf")
NUMBERS = (0, 1, 2, -1, 0.5, 1.0, 2.5, -0.5, NAN, INF, -INF, 1e-300, 1e300, 2**31, 2**63, 10**30)
THINGS = (
    None, True, False, "", "a cat", "1", "é\u2028\x00", "a\ud800", b"bytes", 1j, object(),
    lambda *a: None, [], [1], [[]], ["a", 1], [None], (), (1, 2), {}, {"a": 1}, {1}, range(3),
    float, NotImplemented,
    np.float32(0.5), np.int64(3), np.bool_(True), np.array(2), np.array([NAN]), np.zeros((2, 2)),
    np.zeros((1, 3, 64, 64)), np.array(["a"]), torch.zeros(3), torch.tensor(2.0), "x" * 300,
)  # fmt: skip
SPECIFIC = {
    "prompt": ("a cat", ["a", "b"], "(a:1.5)", "(" * 300, ["a", 2], ["", "b"]),
    "negative_prompt": ("a dog", ["a", "b"], [""]),
    "num_images_per_prompt": (1, 2, 5000, 10**6, 10**9),
    "num_inference_steps": (1, 2, 3, 4, 1001, 10**9),
    "height": (64, 65, 10**9, 2**40),
    "width": (64, 60.0, "64", 10**9),
    "image": (picture(1), [picture(1), picture(2)], "nothing.png", picture(1, 1, 1)),
    "mask_image": (mask(1), picture(2), np.ones((64, 64)), "none.png"),
    "generator": (0, 7, [1, 2], torch.Generator().manual_seed(3), [torch.Generator()], "7", -3),
    "seed": (0, 2**32, -1, [1, 2], "3"),
    "latents": (np.zeros((1, 4, 16, 16)), np.full((1, 4, 16, 16), NAN), torch.zeros(1, 4, 16, 16)),
    "prompt_embeds": (np.zeros((1, 77, 32)), np.full((1, 77, 32), NAN), np.zeros((1, 5, 32))),
    "output_type": ("np", "pil", "latent", "pt", "jax", "svg"),
    "timesteps": ([900, 500, 100], [100, 500], [-5], [10**9], ["a"], [NAN]),
    "sigmas": ([10.0, 1.0], [-1.0], [NAN], [INF, 1.0]),
    "clip_skip": (0, 1, 2, 3, 100),
    "callback_on_step_end": (lambda *a: {}, lambda *a: None, lambda *a: {"latents": 1}),
    "callback_on_step_end_tensor_inputs": (["latents"], ["prompt_embeds"], ["unknown"], "latents"),
    "cross_attention_kwargs": ({"scale": 0.5}, {"x": 1}),
    "ip_adapter_image": (picture(1),),
    "control_guidance_start": (0.2, [0.0], [0.0, 0.5], 2.0),
}  # fmt: skip
# Numbers that are right but long: what they draw is no business of this test.
TOO_LONG = {"num_inference_steps": 20, "original_inference_steps": 1000}
ALLOWED = (ValueError, FloatingPointError)


@pytest.fixture(scope="module")
def pipes(tiny_checkpoints):
    made = {}
    for name, kind in NAMES.items():
        folder, _ = tiny_checkpoints.pipeline(kind)
        components = {}
        if "ControlNet" in name:
            network = tiny_checkpoints.controlnet("sd")[0]
            components["controlnet"] = diffusax.ControlNetModel.from_pretrained(network)
        pipe = getattr(diffusax, name).from_pretrained(folder, **components)
        pipe.set_progress_bar_config(disable=True)
        made[name] = pipe
    return made


def arguments(rng, name, known):
    """A good call in which one to three arguments are anything."""
    call = {"prompt": "a cat", "num_inference_steps": 2, "output_type": "np"}
    if "image" in known:
        call["image"] = picture(1)
    if "mask_image" in known:
        call["mask_image"] = mask(1)
    if "Img2Img" in name or "Inpaint" in name:
        call["num_inference_steps"] = 3
    for argument in rng.sample(known, rng.choice((1, 1, 2, 3))):
        pools = [THINGS, NUMBERS, SPECIFIC.get(argument, NUMBERS), SPECIFIC.get(argument, NUMBERS)]
        value = rng.choice(rng.choice(pools))
        limit = TOO_LONG.get(argument)
        if limit and isinstance(value, int) and limit < value <= 1000:
            value = limit
        call[argument] = value
    if call.get("prompt_embeds") is not None and rng.random() < 0.7:
        call["prompt"] = None
    return call


@contextlib.contextmanager
def time_limit():
    def ring(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    previous = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def shown(call):
    return {k: repr(v)[:80] for k, v in call.items()}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", first(range(CASES // CHUNK)))
@pytest.mark.filterwarnings("ignore")
def test_random_calls_give_pictures_or_clear_errors(pipes, chunk):
    rng, failures, drawn = random.Random(chunk), [], 0
    for _ in range(CHUNK):
        name = rng.choice(list(NAMES))
        pipe = pipes[name]
        known = [k for k in call_arguments(pipe) if k != "return_dict"]
        call = arguments(rng, name, known)
        try:
            with time_limit():
                images = pipe(**call).images
            assert len(images)
            if isinstance(images, np.ndarray):
                assert np.isfinite(images).all()
            drawn += 1
        except ALLOWED as error:
            sentence = str(error)
            if not sentence or "\n" in sentence or len(sentence) > 600:
                failures.append((name, shown(call), repr(error)))
        except Exception as error:
            failures.append((name, shown(call), repr(error)[:200]))
    assert not failures
    assert 0 < drawn < CHUNK


def call_arguments(pipe):
    return list(inspect.signature(type(pipe).__call__).parameters)[1:]


def test_memory_stays_bounded(pipes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for value in (1000, 4096, 10**6, 10**9, 2**63):
        with contextlib.suppress(ValueError):
            pipes["StableDiffusionPipeline"]("a", num_images_per_prompt=value, height=2**15)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < 2**20


def test_every_argument_is_among_those_that_are_checked(pipes):
    elsewhere = {"generator", "cross_attention_kwargs", "callback", "callback_steps"}
    for pipe in pipes.values():
        assert set(call_arguments(pipe)) <= set(Call.__dataclass_fields__) | elsewhere


@pytest.mark.parametrize(
    "value",
    ["euler", 3, object(), {"_class_name": "DDIMScheduler"}, [], diffusax.DDIMScheduler],
)
def test_what_is_no_scheduler_is_refused_when_it_is_set(pipes, value):
    pipe = pipes["StableDiffusionPipeline"]
    before = pipe.scheduler
    with pytest.raises(ValueError, match="scheduler"):
        pipe.scheduler = value
    assert pipe.scheduler is before
