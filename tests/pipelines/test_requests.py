"""Requests of running batches: calls as they were when they were submitted."""

import numpy as np
import PIL.Image
import pytest

import diffusax
from diffusax.pipelines.generation import Generation
from diffusax.pipelines.requests import make_request
from diffusax.pipelines.text_cache import TextCache

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    return diffusax.StableDiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd")[0])


def request_of(pipe, **given):
    return make_request(pipe, None, ("a cat",), given, texts=TextCache(), generation=Generation())


def test_what_a_caller_changes_later_changes_nothing_of_its_call(pipe):
    repaint = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    array, tensor = np.ones((1, 4, 16, 16), np.float32), torch.ones((1, 4, 16, 16))
    weights, canvas, pictures = {}, PIL.Image.new("RGB", (64, 64), "white"), [array]
    calls = {
        name: request_of(repaint, image=image).call
        for name, image in (("canvas", canvas), ("pictures", pictures), ("tensor", tensor))
    }
    other = request_of(pipe, latents=array, adapters=weights).call
    canvas.paste((0, 0, 0), (0, 0, 64, 64))
    array[:], tensor[:], weights["style"] = 0, 0, -3.0
    pictures.clear()
    assert np.asarray(calls["canvas"].image).min() == 255
    assert calls["pictures"].image[0].min() == calls["tensor"].image.min() == 1
    assert other.latents.min() == 1
    assert other.adapters == {}


def test_a_picture_that_cannot_be_read_is_an_error_of_the_result(pipe, tmp_path):
    repaint, path = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe), tmp_path / "half.png"
    PIL.Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:500])
    with (
        PIL.Image.open(path) as image,
        diffusax.RunningBatch(pipe, lanes=4) as batch,
        pytest.raises(ValueError, match=r"half\.png.*truncated"),
    ):
        batch.submit("a cat", pipe=repaint, image=image, num_inference_steps=2).result(60)
