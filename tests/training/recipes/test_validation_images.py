"""Validation images, which are those of a pipeline's call."""

import numpy as np
import pytest
from support.ip_adapters import EMBED, write_ip_adapters
from support.pairs import mask, picture

import diffusax
from diffusax.pipelines.plan.arguments import check_call
from diffusax.training.recipes.base_model import draw_images

CALL = {"prompt": "a cat", "num_inference_steps": 2, "seed": 1}


def assert_alike(pipe, **call):
    drawn = draw_images(pipe.parts, pipe.task, check_call({**CALL, **call}))
    expected = pipe(**CALL, **call).images
    assert [image.size for image in drawn] == [image.size for image in expected]
    np.testing.assert_array_equal(np.stack(drawn), np.stack(expected))


@pytest.fixture
def checkpoint(tiny_checkpoints):
    return tiny_checkpoints.pipeline("sd")


def test_validation_images_see_the_images_of_ip_adapters(checkpoint, tmp_path):
    write_ip_adapters(tmp_path, checkpoint[1].unet)
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(checkpoint[0])
    pipe.load_ip_adapter(tmp_path / "plain.safetensors")
    embeds = np.random.default_rng(0).standard_normal((2, 1, EMBED)).astype(np.float32)
    assert_alike(pipe, ip_adapter_image_embeds=[embeds], guidance_scale=3.0)


def test_validation_images_are_put_back_into_the_image_that_they_are_a_part_of(checkpoint):
    pipe = diffusax.StableDiffusionInpaintPipeline.from_pretrained(checkpoint[0])
    whole, part = picture(1).resize((96, 80)), mask(2).resize((96, 80))
    assert_alike(pipe, image=whole, mask_image=part, padding_mask_crop=4, height=40, width=24)
