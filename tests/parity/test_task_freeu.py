"""FreeU in pipelines, against diffusers; what changes its numbers compiles nothing."""

import contextlib

import numpy as np
import pytest
from support.effort import few
from support.pairs import NEGATIVES, PROMPTS, mask, picture

from diffusax.runtime.programs.compilations import count_compilations

NUMBERS = {"s1": 0.9, "s2": 0.2, "b1": 1.2, "b2": 1.4}
OTHER = {"s1": 0.6, "s2": 0.4, "b1": 1.1, "b2": 1.2}
TWO = {"prompt": PROMPTS, "negative_prompt": NEGATIVES, "num_inference_steps": 3}
IMAGE = {**TWO, "image": picture(1), "strength": 0.7}
CASES = [
    ("StableDiffusionPipeline", "sd", TWO),
    ("StableDiffusionImg2ImgPipeline", "sd", IMAGE),
    ("StableDiffusionXLPipeline", "xl", TWO),
    ("StableDiffusionXLImg2ImgPipeline", "xl", IMAGE),
]
CONTROL = ("StableDiffusionControlNetPipeline", "sd", {**TWO, "image": picture(2)})
MORE = [
    ("StableDiffusionInpaintPipeline", "sd-inpaint", {**IMAGE, "mask_image": mask(1)}),
    ("StableDiffusionInstructPix2PixPipeline", "sd-instruct", {**TWO, "image": picture(1)}),
    ("StableDiffusionXLInpaintPipeline", "xl", {**IMAGE, "mask_image": mask(1)}),
]


@contextlib.contextmanager
def freeu(pair, numbers):
    for pipe in (pair.reference, pair.ours):
        pipe.enable_freeu(**numbers)
    try:
        yield
    finally:
        for pipe in (pair.reference, pair.ours):
            pipe.disable_freeu()


@pytest.mark.parametrize(("name", "kind", "call"), few(CASES, CASES[0]))
def test_images_with_freeu_equal_diffusers(pairs, name, kind, call):
    pair = pairs(name, kind)
    plain = pair.check(**call)
    with freeu(pair, NUMBERS):
        drawn = pair.check(**call)
    assert np.abs(drawn - plain).max() > 0.01
    with count_compilations() as compiled:
        with freeu(pair, OTHER):
            other = pair.check(**call)
        np.testing.assert_array_equal(pair.check(**call), plain)
    assert compiled == []
    assert np.abs(other - drawn).max() > 1e-3


def test_a_callback_turns_freeu_off_and_on(pairs):
    pair = pairs("StableDiffusionPipeline", "sd")

    def switch(pipe, step, timestep, tensors):
        if step % 2:
            pipe.enable_freeu(**NUMBERS)
        else:
            pipe.disable_freeu()
        return tensors

    with freeu(pair, OTHER):
        whole = pair.check(**TWO)
        pair.ours.enable_freeu(**OTHER)
        drawn = pair.check(**TWO, callback_on_step_end=switch)
    assert np.abs(drawn - whole).max() > 1e-3


@pytest.mark.slow
def test_a_controlnet_beside_a_unet_with_freeu(pairs):
    name, kind, call = CONTROL
    pair = pairs(name, kind, controls=1)
    with freeu(pair, NUMBERS):
        pair.check(**call)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "call"), MORE)
def test_other_tasks_with_freeu(pairs, name, kind, call):
    pair = pairs(name, kind)
    with freeu(pair, NUMBERS):
        pair.check(**call)
