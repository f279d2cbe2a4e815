"""Qwen-Image's pipelines against PyTorch's: every pixel, on the same weights and noise."""

import diffusers
import numpy as np
import pytest
import torch
from support.pairs import Pair, mask, picture
from support.tiny_transformers import KREA2_SIZE as SIZE
from support.tiny_transformers import qwen_image_pipeline

import diffusax

PROMPTS = ["a red apple", "an old house on a hill by the sea, and two dogs that run before it"]
GUIDED = {"negative_prompt": ["blurry, and very ugly", ""], "true_cfg_scale": 3.0}


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    made = {}

    def pair(kind="QwenImagePipeline", **options):
        key = str(options)
        if key not in made:
            folder = tmp_path_factory.mktemp("qwen-image")
            reference = qwen_image_pipeline(folder, **options)
            ours = diffusax.DiffusionPipeline.from_pretrained(folder)
            made[key] = Pair(reference, ours)
        pipes = [
            getattr(module, kind).from_pipe(pipe)
            for module, pipe in ((diffusers, made[key].reference), (diffusax, made[key].ours))
        ]
        for pipe in pipes:
            pipe.set_progress_bar_config(disable=True)
        return Pair(*pipes)

    return pair


def embeds(*lengths, seed=0, longest=72):
    """Hidden states n t d and the mask n t."""
    generator = torch.Generator().manual_seed(seed)
    read = torch.arange(longest) < torch.tensor(lengths)[:, None]
    return torch.randn(len(lengths), longest, 20, generator=generator), read


def test_text_to_image_of_prompts_of_different_lengths(pairs_of):
    pair = pairs_of()
    assert type(pair.ours) is diffusax.QwenImagePipeline
    guided = pair.check(prompt=PROMPTS, **GUIDED, **SIZE)
    plain = pair.check(prompt=PROMPTS, **SIZE)
    assert np.abs(guided - plain).max() > 0.01


def test_guidance_scale_is_another_name_where_the_true_scale_is_not_given(pairs_of):
    pair = pairs_of()
    call = {"prompt": PROMPTS[0], "seed": 1, "num_inference_steps": 2, **SIZE, "output_type": "np"}
    expected = pair.ours(negative_prompt="", true_cfg_scale=3.0, **call).images
    np.testing.assert_array_equal(pair.ours(guidance_scale=3.0, **call).images, expected)
    plain = pair.ours(guidance_scale=1.0, negative_prompt="", **call).images
    np.testing.assert_array_equal(plain, pair.ours(**call).images)
    assert np.abs(plain - expected).max() > 1e-3
    # As diffusers' examples have it.
    both = {"negative_prompt": " ", "true_cfg_scale": 4.0, "guidance_scale": 1.0}
    pair.check(prompt=PROMPTS[0], **both, **SIZE)


def test_guidance_keeps_the_norm_of_each_token(pairs_of):
    # The first step is the whole run, and its prediction a difference of latents.
    call = {"prompt": PROMPTS, "num_inference_steps": 1, "output_type": "latent", **SIZE}
    latents = torch.randn(2, 60, 16, generator=torch.Generator().manual_seed(0))
    plain, guided = (
        pairs_of(shift_terminal=None).check(**call, latents=latents, **more) - latents.numpy()
        for more in ({}, GUIDED)
    )
    norms = [np.linalg.norm(x, axis=-1) for x in (plain, guided)]
    np.testing.assert_allclose(*norms, rtol=1e-4)
    assert np.abs(plain - guided).max() > 0.1


@pytest.mark.parametrize(
    "call",
    [
        {"sigmas": [1.0, 0.7, 0.2], "num_images_per_prompt": 2, "prompt": PROMPTS[1]},
        {"height": 44, "width": 28, "seed": [3, 4], "output_type": "latent", **GUIDED},
        # The second prompt is cut off.
        {"max_sequence_length": 150},
    ],
)
def test_arguments(pairs_of, call):
    pairs_of().check(**{"prompt": PROMPTS, **SIZE, **call})


@pytest.mark.parametrize("schedule", [{"use_dynamic_shifting": False, "shift": 3.0}, {}])
def test_shifts_of_noise_levels(pairs_of, schedule):
    pairs_of(shift_terminal=None, **schedule).check(prompt=PROMPTS[0], **{**SIZE, "height": 36})


def test_image_to_image(pairs_of):
    pair = pairs_of("QwenImageImg2ImgPipeline")
    call = {"prompt": PROMPTS, "image": picture(1, 50, 30), "strength": 0.7, **SIZE}
    changed = pair.check(**call, num_inference_steps=5, **GUIDED)
    assert np.abs(changed - pair.check(**{**call, "strength": 0.4})).max() > 0.05
    pair.check(**{**call, "image": [picture(1), picture(2)]})
    # diffusers mixes up the lengths of several prompts with several images each.
    pair.check(**{**call, "prompt": PROMPTS[0], "num_images_per_prompt": 2})


def test_inpainting(pairs_of):
    pair = pairs_of("QwenImageInpaintPipeline")
    call = {"prompt": PROMPTS, "image": picture(1), "mask_image": mask(1), **SIZE}
    pair.check(**call, strength=0.8, **GUIDED)
    pair.check(**{**call, "prompt": PROMPTS[0]}, strength=1.0, seed=[3])


def test_inpainting_of_a_part(pairs_of):
    pair = pairs_of("QwenImageInpaintPipeline")
    call = {"prompt": PROMPTS[0], "image": picture(1), "mask_image": mask(1), **SIZE}
    call |= {"padding_mask_crop": 4, "strength": 0.8, "output_type": "pil"}
    expected, actual = pair.draw(**call)
    assert np.abs(expected - actual).max() <= 1


def test_embeddings_of_different_lengths(pairs_of):
    pair = pairs_of()
    (given, read), (other, seen) = embeds(7, 40), embeds(70, 3, seed=1)
    call = {"prompt_embeds": given, "prompt_embeds_mask": read, **SIZE}
    plain = pair.check(**call)
    negative = {"negative_prompt_embeds": other, "negative_prompt_embeds_mask": seen}
    guided = pair.check(**call, **negative)
    assert np.abs(guided - plain).max() > 0.05
    # Longer ones are cut, and without a mask all count.
    cut = {**call, **negative, "max_sequence_length": 32, "prompt_embeds_mask": None}
    assert np.abs(pair.check(**cut) - guided).max() > 0.01


def test_encode_prompt_returns_the_states_of_a_prompts_tokens(pairs_of):
    pair, most = pairs_of(), SIZE["max_sequence_length"]
    expected, seen = pair.reference.encode_prompt(list(PROMPTS), max_sequence_length=most)
    actual, mask = pair.ours.encode_prompt(PROMPTS, max_sequence_length=most)
    np.testing.assert_array_equal(mask, seen.numpy().astype(bool))
    np.testing.assert_allclose(actual, expected.numpy() * seen.numpy()[..., None], atol=1e-4)
    call = {"num_inference_steps": 2, "seed": 3, "output_type": "np", **SIZE}
    again = pair.ours(prompt_embeds=actual, prompt_embeds_mask=mask, **call).images
    np.testing.assert_allclose(again, pair.ours(prompt=PROMPTS, **call).images, atol=1e-5)
    _, alone = pair.ours.encode_prompt(PROMPTS[0])
    assert alone is None


def test_a_callback_changes_the_prompts(pairs_of):
    pair = pairs_of()

    def shift(pipe, step, timestep, tensors):
        return {"prompt_embeds": [x + 1 for x in tensors["prompt_embeds"]]}

    def shift_there(pipe, step, timestep, tensors):
        return {"prompt_embeds": tensors["prompt_embeds"] + 1}

    call = {"prompt": PROMPTS[1], "callback_on_step_end_tensor_inputs": ["prompt_embeds"], **SIZE}
    call |= {"num_inference_steps": 3, "output_type": "np"}
    images = []
    for pipe, after in ((pair.reference, shift_there), (pair.ours, shift)):
        own = {"generator": torch.Generator().manual_seed(3)}
        images.append(pipe(**call, **own, callback_on_step_end=after).images)
    np.testing.assert_allclose(*images, atol=1e-4)


def test_what_does_not_fit_is_refused(pairs_of):
    pair = pairs_of()
    with pytest.raises(ValueError, match="height must be divisible by 4"):
        pair.ours(PROMPTS[0], height=26, width=40)
    with pytest.raises(ValueError, match="max_sequence_length must be at most 1024"):
        pair.ours(PROMPTS[0], **{**SIZE, "max_sequence_length": 1025})


def test_saved_and_read_by_diffusers(pairs_of, tmp_path):
    pair = pairs_of()
    pair.ours.save_pretrained(tmp_path)
    again = diffusers.QwenImagePipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    Pair(again, pair.ours).check(prompt=PROMPTS[1], **SIZE)


def test_auto_pipelines_and_pipelines_of_pytorch(pairs_of):
    pair = pairs_of()
    for auto, kind in (
        (diffusax.AutoPipelineForText2Image, diffusax.QwenImagePipeline),
        (diffusax.AutoPipelineForImage2Image, diffusax.QwenImageImg2ImgPipeline),
        (diffusax.AutoPipelineForInpainting, diffusax.QwenImageInpaintPipeline),
    ):
        assert type(auto.from_pipe(pair.ours)) is kind
    converted = diffusax.DiffusionPipeline.from_torch(pair.reference)
    converted.set_progress_bar_config(disable=True)
    assert type(converted) is diffusax.QwenImagePipeline
    Pair(pair.reference, converted).check(prompt=PROMPTS[0], **SIZE)


def test_bfloat16_is_as_near_to_float32_as_pytorch_is(tmp_path):
    reference = qwen_image_pipeline(tmp_path)
    call = {"prompt": PROMPTS[1], "num_inference_steps": 2, "output_type": "np", **SIZE}
    noise = torch.randn(1, 60, 16, generator=torch.Generator().manual_seed(0))
    exact = reference(**call, latents=noise).images
    half = diffusers.QwenImagePipeline.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    half.set_progress_bar_config(disable=True)
    theirs = np.abs(half(**call, latents=noise.bfloat16()).images - exact)
    ours = diffusax.DiffusionPipeline.from_pretrained(tmp_path, dtype="bfloat16")
    ours.set_progress_bar_config(disable=True)
    found = np.abs(np.asarray(ours(**call, latents=noise.numpy()).images) - exact)
    assert 0 < found.mean() < 1.2 * theirs.mean()
