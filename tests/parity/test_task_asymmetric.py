"""Inpainting with an AsymmetricAutoencoderKL, whose decoder sees what the mask keeps."""

import contextlib

import numpy as np
import pytest
import torch
from support.compiled_programs import compiled_programs, forget_executables
from support.pairs import NEGATIVES, PROMPTS, mask, picture
from support.tiny import build_asymmetric

import diffusax
from diffusax.models.autoencoders import tiling
from diffusax.pipelines.pipeline import ahead
from diffusax.pipelines.pipeline.ahead_of_time import compile_all
from diffusax.pipelines.run import autoencoding
from diffusax.runtime.programs.compilations import count_compilations

TWO = {"prompt": PROMPTS, "negative_prompt": NEGATIVES, "num_inference_steps": 3}
INPAINT = {
    **TWO,
    "image": [picture(1), picture(2)],
    "mask_image": [mask(1), mask(2)],
    "strength": 0.8,
    "num_inference_steps": 4,
}
SD = "StableDiffusionInpaintPipeline"


@pytest.fixture(scope="module")
def vaes(tmp_path_factory):
    """The same network of diffusers and of ours."""
    folder = tmp_path_factory.mktemp("asymmetric")
    return build_asymmetric(folder), diffusax.AsymmetricAutoencoderKL.from_pretrained(folder)


@contextlib.contextmanager
def with_vaes(pair, vaes):
    """Both pipelines with these autoencoders in the place of their own."""
    own = pair.reference.vae, pair.ours.vae
    pair.reference.vae, pair.ours.vae = vaes
    try:
        yield
    finally:
        pair.reference.vae, pair.ours.vae = own


@pytest.mark.parametrize("kind", ["sd", "sd-inpaint"])
def test_inpainting_shows_the_decoder_picture_and_mask(pairs, vaes, kind):
    pair = pairs(SD, kind)
    with with_vaes(pair, vaes):
        drawn = pair.check(**INPAINT)
        with count_compilations() as compiled:
            other = pair.check(**{**INPAINT, "mask_image": [mask(3), mask(4)]})
        assert compiled == []
        latents = pair.check(**INPAINT, output_type="latent")
        with torch.no_grad():
            alone = vaes[0].decode(torch.tensor(latents) / 0.18215).sample
    assert np.abs(drawn - other).max() > 0.01
    alone = (alone.numpy().transpose(0, 2, 3, 1) / 2 + 0.5).clip(0, 1)
    assert np.abs(drawn - alone).max() > 0.01


CASES = [
    ("StableDiffusionPipeline", "sd", 0, TWO),
    pytest.param("StableDiffusionXLInpaintPipeline", "xl", 0, INPAINT, marks=pytest.mark.slow),
    pytest.param(
        "StableDiffusionControlNetInpaintPipeline",
        "sd",
        1,
        {**INPAINT, "control_image": [picture(5), picture(6)]},
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("name", "kind", "controls", "call"), CASES)
def test_other_pipelines_decode_latents_alone(pairs, vaes, name, kind, controls, call):
    pair = pairs(name, kind, controls=controls)
    with with_vaes(pair, vaes):
        pair.check(**call)


@pytest.fixture
def pipe(tiny_checkpoints, vaes):
    folder, _ = tiny_checkpoints.pipeline("sd")
    pipe = diffusax.StableDiffusionInpaintPipeline.from_pretrained(folder, vae=vaes[1])
    pipe.set_progress_bar_config(disable=True)
    return pipe


CALL = {**INPAINT, "output_type": "np", "seed": 3}


@pytest.mark.slow
def test_the_whole_call_as_a_function_tiles_and_programs_made_ahead(pipe, monkeypatch):
    expected = pipe(**CALL).images
    given = {k: v for k, v in CALL.items() if k != "output_type"}
    inputs = pipe.prepare_inputs(**given)
    images = pipe.generate_fn(pipe.params, inputs)
    np.testing.assert_allclose(images, expected, atol=1e-4)

    call = ahead.example_call(pipe, 1, None, given)
    found = {r.program.name: r for r in ahead.requests(pipe.parts, pipe.task, call)}
    try:
        compile_all([found["decode"]], None)
        with compiled_programs() as compiled:
            np.testing.assert_allclose(pipe(**CALL).images, expected, atol=1e-4)
        assert "decode" not in compiled
    finally:
        forget_executables()

    kept = []
    decode = autoencoding.decode_pixels

    def note(vae, params, latents, shown, **options):
        kept.append((latents.shape, shown.image.shape, shown.mask.shape))
        return decode(vae, params, latents, shown, **options)

    monkeypatch.setattr(autoencoding, "decode_pixels", note)
    monkeypatch.setattr(tiling, "OVERLAP", 0.5)
    pipe.enable_vae_tiling()
    tiles = pipe(**CALL).images
    pipe.disable_vae_tiling()
    assert tiles.shape == expected.shape
    assert len(kept) > 4
    assert all(image[1] == 4 * z[1] and cover[2] == 4 * z[2] for z, image, cover in kept)


def test_latents_in_the_place_of_the_picture(pipe):
    latents = np.zeros((2, 4, 16, 16), np.float32)
    with pytest.raises(ValueError, match="image must be pixels, not latents, where vae is an"):
        pipe(**{**CALL, "image": latents})
