"""Pictures that requests bring: masks on layers, long thin ones, and too many pixels."""

import base64
import contextvars
import io

import numpy as np
import pytest
from PIL import Image, ImageDraw
from support.running_server import picture, running, sent

from diffusax.images.masks import mask_of
from diffusax.serving.requests.errors import Busy, Refused
from diffusax.serving.web.bodies import PixelBudget, take_pixels


@pytest.fixture(scope="module")
def server():
    with running(most_request_pixels=20_000) as found:
        yield found


def layer(colour, mode="RGBA"):
    """A mask as a drawing program saves it: paint on a transparent layer, at the left."""
    image = Image.new("RGBA", (64, 64))
    ImageDraw.Draw(image).rectangle((0, 0, 31, 63), colour)
    return image.quantize(8) if mode == "P" else image.convert(mode)


def left_half(mask):
    grey = np.asarray(mask.convert("L"))
    return (grey[:, :32] == 255).all() and (grey[:, 32:] == 0).all()


@pytest.mark.parametrize("colour", ["black", "red", "white"])
@pytest.mark.parametrize("mode", ["RGBA", "P", "LA"])
def test_paint_on_a_transparent_layer_is_the_mask_whatever_its_colour(colour, mode):
    assert left_half(mask_of(layer(colour, mode)))


def test_masks_without_transparency_are_their_greys():
    greys = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    for value in (greys, greys.convert("RGBA"), greys.convert("RGB"), greys.convert("P")):
        np.testing.assert_array_equal(mask_of(value), greys)
    half = Image.new("RGBA", (2, 1), (255, 255, 255, 128))
    half.putpixel((1, 0), (0, 0, 0, 129))
    assert list(mask_of(half).tobytes()) == [0, 255]


def drawing_of(server, ask):
    """Asks for images, and returns it without waiting for its images."""
    before = {job.id for job in server.engine.jobs()}
    answer = ask()
    (job,) = (job for job in server.engine.jobs() if job.id not in before)
    job.cancel()
    assert answer.status < 300, answer.body
    return job.generation


def test_every_api_reads_a_layer_as_a_mask(server):
    fields = {"prompt": "a", "strength": 1.0, "num_inference_steps": 1}
    pictures = {"image": sent(picture()), "mask_image": sent(layer("black"))}
    generation = drawing_of(server, lambda: server.post("/jobs", {**fields, **pictures}))
    assert left_half(generation.mask_image)
    pictures = {"init_images": [sent(picture())], "mask": sent(layer("red"))}
    options = {"steps": 1, "denoising_strength": 1.0, "inpainting_fill": 1}
    options |= {"width": 64, "height": 64, "mask_blur": 0}
    for invert in (0, 1):
        given = {**pictures, **options, "inpainting_mask_invert": invert}
        generation = drawing_of(server, lambda: server.post("/sdapi/v1/img2img", given))  # noqa: B023
        assert left_half(generation.mask_image) != invert


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [(1, 3000), (3000, 1)])
def test_long_thin_pictures_are_drawn_over_in_every_mode(server, mode, size):
    fields = {"init_images": [sent(picture(*size))], "steps": 2, "denoising_strength": 1.0}
    fields |= {"width": 64, "height": 64, "resize_mode": mode}
    generation = drawing_of(server, lambda: server.post("/sdapi/v1/img2img", fields))
    assert generation.image.size == (64, 64)


def test_greys_of_16_bits_keep_their_shades_in_every_api(server):
    greys = Image.fromarray((np.arange(4096, dtype=np.uint16) * 16).reshape(64, 64))
    file = io.BytesIO()
    greys.save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    fields = {"init_images": [text], "steps": 2, "denoising_strength": 1.0}
    fields |= {"width": 64, "height": 64}
    generation = drawing_of(server, lambda: server.post("/sdapi/v1/img2img", fields))
    assert 100 < np.asarray(generation.image).mean() < 150


def test_the_pixels_of_a_request_are_counted_before_they_are_decoded(server):
    large = sent(picture(100, 90))
    fields = {"init_images": [large] * 3, "steps": 1}
    answer = server.post("/sdapi/v1/img2img", fields)
    assert answer.status == 413
    assert (
        "at most 20000 pixels together (init_images[2] makes them 27000)" in answer.json["detail"]
    )
    controls = [{"model": "edges", "image": large}] * 2
    answer = server.post("/jobs", {"prompt": "a", "image": large, "controls": controls})
    assert (answer.status, answer.json["error"]["code"]) == (413, "picture_too_large")
    # What a request held is free again once it was answered.
    assert server.service.pixels.taken == 0


def test_further_pictures_come_with_a_first_one_that_a_model_looks_at(server):
    small = sent(picture(32, 32))

    def refusal(**fields):
        answer = server.post("/jobs", {"prompt": "a", **fields})
        assert answer.status in (413, 422)
        assert answer.json["error"]["param"].startswith(("more_images", "image"))
        return answer.json["error"]["message"]

    assert refusal(more_images=[small]) == "more_images needs image; give both, or neither"
    assert refusal(image=small, more_images=[small, "x"]).startswith("more_images[1] must be an im")
    for value in ([3], [small] * 16, small):
        told = "more_images must be a list of at most 15 images in base64"
        assert refusal(image=small, more_images=value).startswith(told)
    told = "image must be given at most 1 times for 'emoji' together (got 3)"
    assert refusal(image=small, more_images=[small, small]) == told
    large = sent(picture(100, 90))
    assert "(more_images[1] makes them 27000)" in refusal(image=large, more_images=[large, large])


def test_the_pixels_of_all_requests_together_are_bounded():
    budget = PixelBudget(100, 150)

    def other():
        with budget.request():
            take_pixels(60, "image")

    with budget.request():
        take_pixels(50, "image")
        take_pixels(50, "mask_image")
        with pytest.raises(Refused, match="at most 100 pixels together"):
            take_pixels(1, "image")
        with pytest.raises(Busy, match="have 100 pixels, and with image more than 150") as busy:
            contextvars.Context().run(other)
        assert (busy.value.status, busy.value.retry_after) == (429, 2.0)
    contextvars.Context().run(other)
    assert budget.taken == 0
