"""What FLUX.1 has beside other families: Kontext, Fill and ControlNets."""

import numpy as np
import pytest
from support.pairs import mask, picture
from support.tiny_transformers import FLUX_FILL, FLUX_SIZE, flux_controlnet, flux_pipeline

import diffusax
from diffusax.pipelines.plan.arguments import check_call
from diffusax.pipelines.tasks.tasks import image_to_image

PROMPT = "an old house on a hill"
KEPT = {"output_type": "np", **FLUX_SIZE}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux")
    flux_pipeline(folder)
    pipe = diffusax.AutoPipelineForText2Image.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.slow
def test_a_running_batch_of_images_to_look_at(pipe):
    kontext = diffusax.FluxKontextPipeline.from_pipe(pipe)
    kontext.set_progress_bar_config(disable=True)
    own = {"max_area": 24 * 40, "_auto_resize": False, "num_inference_steps": 2}
    calls = [
        {"prompt": prompt, "image": picture(i, 30, 24), "seed": i, **own, **KEPT}
        for i, prompt in enumerate(("a red apple", PROMPT))
    ]
    with diffusax.RunningBatch(kontext) as batch:
        found = [batch.submit(**call) for call in calls]
        found = [future.result(120).images[0] for future in found]
    for image, call in zip(found, calls, strict=True):
        np.testing.assert_allclose(image, kontext(**call).images[0], atol=1e-4)


@pytest.mark.slow
def test_a_running_batch_with_a_controlnet(pipe, tmp_path):
    flux_controlnet().save_pretrained(tmp_path)
    net = diffusax.FluxControlNetModel.from_pretrained(tmp_path)
    steered = diffusax.AutoPipelineForText2Image.from_pipe(pipe, controlnet=net)
    assert type(steered) is diffusax.FluxControlNetPipeline
    steered.set_progress_bar_config(disable=True)
    guided = {"negative_prompt": "a hat", "true_cfg_scale": 2.0}
    calls = [
        {"prompt": "a red apple", "control_image": picture(1), "num_inference_steps": 3, **guided},
        {"prompt": PROMPT, "control_image": picture(2), "num_inference_steps": 2},
    ]
    with diffusax.RunningBatch(steered) as batch:
        found = [batch.submit(seed=i, **call, **KEPT) for i, call in enumerate(calls)]
        found = [future.result(120).images[0] for future in found]
    for i, (image, call) in enumerate(zip(found, calls, strict=True)):
        np.testing.assert_allclose(image, steered(seed=i, **call, **KEPT).images[0], atol=1e-4)


def test_images_to_start_from_are_resized_to_the_models_size(pipe):
    call = {"prompt": "a", "image": picture(), "strength": 0.5, "num_inference_steps": 2, "seed": 0}
    run = image_to_image(pipe.parts, check_call({**call, "max_sequence_length": 8}))
    assert run.plan.latents.shape == (1, 128, 128, 16)


def test_kontext_is_kept_for_images(pipe):
    kontext = diffusax.FluxKontextPipeline.from_pipe(pipe)
    kept = diffusax.AutoPipelineForImage2Image.from_pipe(kontext)
    assert type(kept) is diffusax.FluxKontextPipeline


def test_filling_needs_a_network_for_it(pipe):
    fill = diffusax.FluxFillPipeline.from_pipe(pipe)
    with pytest.raises(ValueError, match="filling needs a transformer with 36 input channels"):
        fill(prompt=PROMPT, image=picture(), mask_image=mask(), **KEPT)


def test_inpainting_with_a_checkpoint_for_filling_is_its_own_pipeline(tmp_path):
    flux_pipeline(tmp_path, "FluxFillPipeline", **FLUX_FILL)
    pipe = diffusax.AutoPipelineForInpainting.from_pretrained(tmp_path)
    assert type(pipe) is diffusax.FluxFillPipeline
    assert type(diffusax.AutoPipelineForInpainting.from_pipe(pipe)) is diffusax.FluxFillPipeline
    pipe.set_progress_bar_config(disable=True)
    call = {"image": picture(1, 40, 24), "mask_image": mask(2, 40, 24), "num_inference_steps": 2}
    assert np.isfinite(pipe(PROMPT, **call, **KEPT).images).all()


def test_what_flux_cannot_read_is_told(pipe):
    for name in ("ip_adapter_image", "negative_ip_adapter_image"):
        with pytest.raises(ValueError, match=f"^{name} must be None: there are no IP-Adapters"):
            pipe(PROMPT, **{name: picture(1)}, **FLUX_SIZE)
    kontext = diffusax.FluxKontextPipeline.from_pipe(pipe)
    with pytest.raises(ValueError, match=r"even height and width \(got 13x21\)"):
        kontext(np.zeros((1, 16, 13, 21), np.float32), PROMPT, max_area=24 * 40, **FLUX_SIZE)
    embeds, pooled, _ = pipe.encode_prompt(PROMPT, max_sequence_length=9)
    given = {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "negative_prompt": "a hat"}
    with pytest.raises(ValueError, match="max_sequence_length=9 reads texts of as many tokens"):
        pipe(**given, true_cfg_scale=2.0, **FLUX_SIZE)


def test_texts_of_both_encoders_and_lengths_are_encoded_first(tmp_path):
    flux_pipeline(tmp_path)
    texts = {"prompt": ["a red apple", "a"], "prompt_2": ["an apple", PROMPT]}
    texts |= {"negative_prompt": "a hat", "negative_prompt_2": "a house"}
    call = {"num_inference_steps": 2, "seed": 1, "true_cfg_scale": 2.0, **texts, **KEPT}
    entries = ["a dog", {**texts, "max_sequence_length": FLUX_SIZE["max_sequence_length"]}]
    pipes = [
        diffusax.FluxPipeline.from_pretrained(tmp_path, **more)
        for more in ({"encode_first": entries}, {})
    ]
    for one in pipes:
        one.set_progress_bar_config(disable=True)
    np.testing.assert_allclose(*(one(**call).images for one in pipes), atol=1e-5)
    first = pipes[0]
    with pytest.raises(ValueError, match=r"\('a', 'a'\) with these arguments are not among"):
        first("a", **KEPT)
    with pytest.raises(ValueError, match="max_sequence_length cannot be given after encode_first"):
        first("a dog", **{**KEPT, "max_sequence_length": 64})
    with pytest.raises(ValueError, match=r"encode_first may hold prompt, .* \(got 'height'\)"):
        diffusax.FluxPipeline.from_pretrained(tmp_path, encode_first=[{"height": 8}])
