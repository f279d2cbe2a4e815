"""The processor of an autoencoder's images, beside diffusers'."""

import diffusers.image_processor
import jax
import numpy as np
import pytest
import torch
from support.pairs import mask, picture

from diffusax.image_processor import VaeImageProcessor

OPTIONS = {
    "images": {},
    "images of factor 4": {"vae_scale_factor": 4},
    "own size": {"do_resize": False},
    "control images": {"do_convert_rgb": True, "do_normalize": False},
    "masks": {"do_normalize": False, "do_binarize": True, "do_convert_grayscale": True},
}


def both(**options):
    return diffusers.image_processor.VaeImageProcessor(**options), VaeImageProcessor(**options)


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("size", [{}, {"height": 24, "width": 40}])
def test_pictures_are_prepared_as_by_diffusers(kind, size):
    if kind == "own size" and size:
        pytest.skip("no size is asked for without resizing")
    theirs, ours = both(**OPTIONS[kind])
    make = mask if kind == "masks" else picture
    for given in (make(1, 53, 37), [make(1, 53, 37), make(2, 53, 37)]):
        expected = theirs.preprocess(given, **size)
        actual = ours.preprocess(given, **size)
        assert isinstance(actual, jax.Array)
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_tensors_and_arrays_are_prepared_too():
    theirs, ours = both()
    x = torch.rand(2, 3, 20, 30)
    actual = ours.preprocess(x)
    assert isinstance(actual, torch.Tensor)
    np.testing.assert_allclose(actual, theirs.preprocess(x), atol=1e-6)
    array = x.permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(ours.preprocess(array), theirs.preprocess(array), atol=1e-6)


@pytest.mark.parametrize("output_type", ["pil", "np", "pt", "latent"])
@pytest.mark.parametrize("flags", [None, [True, False]])
def test_decoded_images_are_converted_as_by_diffusers(output_type, flags):
    theirs, ours = both()
    x = 1.5 * torch.rand(2, 3, 8, 12) - 0.2 if flags else 3 * torch.rand(2, 3, 8, 12) - 1.5
    x = x.clamp(0, 1) if flags else x
    expected = theirs.postprocess(x, output_type, flags)
    for given in (x, jax.numpy.asarray(x.numpy())):
        actual = ours.postprocess(given, output_type, flags)
        if output_type in ("pt", "latent"):
            assert type(actual) is torch.Tensor or not isinstance(given, torch.Tensor)
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_allclose(np.asarray(a, float), np.asarray(e, float), atol=1e-6)


def test_pieces_are_those_of_diffusers():
    theirs, ours = both()
    image = picture(1, 53, 37)
    assert ours.get_default_height_width(image) == theirs.get_default_height_width(image)
    assert ours.numpy_to_pil(ours.pil_to_numpy(image))[0].tobytes() == image.tobytes()
    x = np.linspace(-2, 2, 9)
    np.testing.assert_array_equal(ours.normalize(x), theirs.normalize(x))
    np.testing.assert_array_equal(ours.denormalize(x), theirs.denormalize(torch.tensor(x)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: VaeImageProcessor(resample="nearest"), "resample must be 'lanczos'"),
        (lambda: VaeImageProcessor(do_binarize=True), "do_binarize and do_convert_grayscale go"),
        (lambda: VaeImageProcessor(vae_scale_factor=0), "vae_scale_factor must be an integer of"),
        (lambda: VaeImageProcessor(vae_scale_factor="8"), r"at least 1 \(got '8'\)"),
        (lambda: VaeImageProcessor().preprocess(picture(1), "64"), r"height must be .*got '64'"),
        (
            lambda: VaeImageProcessor().preprocess(picture(1), crops_coords=(1, 2)),
            r"crops_coords must be the left, top, right and bottom .*got \(1, 2\)",
        ),
        (
            lambda: VaeImageProcessor().preprocess(picture(1), crops_coords=(9, 9, 3, 3)),
            "crops_coords must be the left",
        ),
        (
            lambda: VaeImageProcessor().postprocess(np.zeros((1, 8, 8, 3))),
            r"image must have shape \(batch, 3, height, width\) .got \(1, 8, 8, 3\).",
        ),
        (
            lambda: VaeImageProcessor().postprocess(np.zeros((1, 3, 8, 8)), "jax"),
            "output_type must be 'pil'",
        ),
        (
            lambda: VaeImageProcessor().postprocess(np.zeros((2, 3, 8, 8)), "np", [True]),
            "do_denormalize must have 2 entries",
        ),
    ],
)
def test_a_wrong_argument_is_one_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()
