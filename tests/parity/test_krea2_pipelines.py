"""Krea 2's pipeline against PyTorch's: every pixel, on the same weights and noise."""

import diffusers
import numpy as np
import pytest
import torch
from support.pairs import Pair
from support.tiny_transformers import KREA2_SIZE, krea2_pipeline

import diffusax

END = [*("<|im_end|>", "\n", "<|im_start|>"), *"assistant\n"]
"""The tokens after a prompt, of which there are five with words in the vocabulary."""
PROMPTS = ["a red apple", "an old house on a hill by the sea, and two dogs that run before it"]


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    made = {}

    def pair(**options):
        key = tuple(options.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("krea2")
            reference = krea2_pipeline(folder, **options)
            ours = diffusax.DiffusionPipeline.from_pretrained(folder)
            ours.set_progress_bar_config(disable=True)
            made[key] = Pair(reference, ours)
        return made[key]

    return pair


def embeds(*lengths, seed=0, longest=72):
    """Hidden states n t l d and the mask n t, whose padding stands before the last token."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(lengths), longest, dtype=torch.bool)
    for row, length in zip(mask, lengths):
        row[: length - 1] = True
        row[-1] = True
    return torch.randn(len(lengths), longest, 3, 24, generator=generator), mask


def test_text_to_image_of_prompts_of_different_lengths(pairs_of):
    pair = pairs_of()
    assert type(pair.ours) is diffusax.Krea2Pipeline
    negative = {"negative_prompt": ["blurry", ""]}
    guided = pair.check(prompt=PROMPTS, **negative, **KREA2_SIZE)
    other = pair.ours(PROMPTS, generator=7, num_inference_steps=4, output_type="np", **KREA2_SIZE)
    assert np.abs(guided - other.images).max() > 0.003


def test_guidance_needs_no_negative_prompt_and_begins_above_zero(pairs_of):
    pair = pairs_of()
    slight = pair.check(prompt=PROMPTS, guidance_scale=0.6, **KREA2_SIZE)
    plain = pair.check(prompt=PROMPTS, guidance_scale=0.0, negative_prompt="a hat", **KREA2_SIZE)
    assert np.abs(slight - plain).max() > 0.003


def test_distilled_checkpoints_have_one_shift_and_may_be_guided(pairs_of):
    pair = pairs_of(is_distilled=True)
    assert pair.ours.parts.options["is_distilled"] is True
    call = {"prompt": PROMPTS, "num_inference_steps": 3, **KREA2_SIZE}
    turbo = pair.check(**call, guidance_scale=0.0)
    assert np.abs(turbo - pairs_of().draw(**call, guidance_scale=0.0)[1]).max() > 0.01
    pair.check(**call, guidance_scale=2.0, negative_prompt="a hat")


@pytest.mark.parametrize(
    "call",
    [
        {"sigmas": [1.0, 0.7, 0.2], "num_images_per_prompt": 2, "prompt": PROMPTS[1]},
        {"prompt": PROMPTS, "height": 44, "width": 28, "seed": [3, 4], "output_type": "latent"},
        # The second prompt is cut off.
        {"prompt": PROMPTS, "max_sequence_length": 150},
    ],
)
def test_arguments(pairs_of, call):
    pairs_of().check(**{**KREA2_SIZE, **call})


@pytest.mark.parametrize("schedule", [{"use_dynamic_shifting": False, "shift": 3.0}, {}])
def test_shifts_of_noise_levels(pairs_of, schedule):
    pairs_of(**schedule).check(prompt=PROMPTS[0], **{**KREA2_SIZE, "height": 36})


def test_latents_are_tokens(pairs_of):
    latents = torch.randn(1, 60, 16, generator=torch.Generator().manual_seed(0))
    pairs_of().check(prompt=PROMPTS[0], latents=latents, guidance_scale=0.0, **KREA2_SIZE)


def test_embeddings_of_different_lengths_with_padding_inside(pairs_of):
    pair = pairs_of()
    (given, mask), (other, hidden) = embeds(7, 40), embeds(70, 3, seed=1)
    call = {"prompt_embeds": given, "prompt_embeds_mask": mask, **KREA2_SIZE}
    plain = pair.check(**call, guidance_scale=0.0)
    negative = {"negative_prompt_embeds": other, "negative_prompt_embeds_mask": hidden}
    guided = pair.check(**call, **negative)
    # The negative prompt is an empty text then, which diffusers fills up to max_sequence_length.
    given, mask = embeds(7, 40, longest=KREA2_SIZE["max_sequence_length"] + len(END) - 5)
    pair.check(**{**call, "prompt_embeds": given, "prompt_embeds_mask": mask})
    assert np.abs(guided - plain).max() > 0.05


def test_embeddings_need_their_mask(pairs_of):
    pair, (given, mask) = pairs_of(), embeds(7, 40)
    for pipe in (pair.reference, pair.ours):
        with pytest.raises(ValueError, match=r"prompt_embeds_mask"):
            pipe(prompt_embeds=given, guidance_scale=0.0, **KREA2_SIZE)
    call = {"guidance_scale": 0.0, **KREA2_SIZE}
    with pytest.raises(ValueError, match="prompt_embeds_mask must have shape"):
        pair.ours(prompt_embeds=given, prompt_embeds_mask=mask[:, 1:], **call)
    with pytest.raises(ValueError, match="prompt_embeds must have 72 numbers of each token"):
        pair.ours(prompt_embeds=given[:, :, :2], prompt_embeds_mask=mask, **call)
    with pytest.raises(ValueError, match=r"prompt_embeds must be an array of shape \(prompts, tok"):
        pair.ours(prompt_embeds=given[0, 0], prompt_embeds_mask=mask, **call)


def test_encode_prompt_returns_the_states_of_a_prompts_tokens(pairs_of):
    pair, most = pairs_of(), KREA2_SIZE["max_sequence_length"]
    expected, seen = pair.reference.encode_prompt(list(PROMPTS), max_sequence_length=most)
    actual, mask = pair.ours.encode_prompt(PROMPTS, max_sequence_length=most)
    assert actual.shape[2:] == (3, 24)
    for ours, own, theirs, read in zip(actual, mask, expected, seen, strict=True):
        found, wanted = np.asarray(ours)[np.asarray(own)], theirs[read].numpy()
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    call = {"guidance_scale": 0.0, "num_inference_steps": 2, "seed": 3, "output_type": "np"}
    call |= KREA2_SIZE
    again = pair.ours(prompt_embeds=actual, prompt_embeds_mask=mask, **call).images
    expected = pair.ours(prompt=PROMPTS, **call).images
    np.testing.assert_allclose(again, expected, atol=1e-5)
    joined = [np.asarray(x)[np.asarray(m)].reshape(-1, 72) for x, m in zip(actual, mask)]
    np.testing.assert_allclose(pair.ours(prompt_embeds=joined, **call).images, expected, atol=1e-5)


def test_a_callback_changes_the_prompts_and_turns_guidance_off(pairs_of):
    pair, call = pairs_of(), {"prompt": PROMPTS[1], "seed": 3, **KREA2_SIZE}

    # Another scale than none would change nothing in diffusers.
    def after(pipe, step, timestep, tensors):
        pipe._guidance_scale = 4.5 if step == 0 else 0.0
        return tensors

    changed = pair.check(**call, callback_on_step_end=after)
    assert np.abs(changed - pair.draw(**call)[1]).max() > 0.003

    def shift(pipe, step, timestep, tensors):
        return {"prompt_embeds": [x + 1 for x in tensors["prompt_embeds"]]}

    def shift_there(pipe, step, timestep, tensors):
        return {"prompt_embeds": tensors["prompt_embeds"] + 1}

    call = {**call, "guidance_scale": 0.0, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    call |= {"num_inference_steps": 3, "output_type": "np"}
    del call["seed"]
    own = {"generator": torch.Generator().manual_seed(3)}
    expected = pair.reference(**call, **own, callback_on_step_end=shift_there).images
    own = {"generator": torch.Generator().manual_seed(3)}
    found = pair.ours(**call, **own, callback_on_step_end=shift).images
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_sizes_that_are_no_whole_tokens_are_refused_and_other_patches_too(pairs_of):
    pair = pairs_of()
    with pytest.raises(ValueError, match="height must be divisible by 4"):
        pair.ours(PROMPTS[0], height=26, width=40)
    other = diffusax.Krea2Pipeline(**pair.ours.components, patch_size=1)
    with pytest.raises(ValueError, match="patch_size must be 2"):
        other(PROMPTS[0], **KREA2_SIZE)


def test_saved_and_read_by_diffusers_with_its_options(pairs_of, tmp_path):
    pair = pairs_of(is_distilled=True)
    pair.ours.save_pretrained(tmp_path)
    again = diffusers.Krea2Pipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert again.config.is_distilled is True
    assert tuple(again.config.text_encoder_select_layers) == (1, 3, 2)
    Pair(again, pair.ours).check(prompt=PROMPTS[1], guidance_scale=0.0, **KREA2_SIZE)


def test_auto_pipelines_and_pipelines_of_pytorch(pairs_of):
    pair = pairs_of()
    auto = diffusax.AutoPipelineForText2Image.from_pipe(pair.ours)
    assert type(auto) is diffusax.Krea2Pipeline
    converted = diffusax.DiffusionPipeline.from_torch(pair.reference)
    converted.set_progress_bar_config(disable=True)
    assert type(converted) is diffusax.Krea2Pipeline
    Pair(pair.reference, converted).check(prompt=PROMPTS[0], guidance_scale=0.0, **KREA2_SIZE)


def test_bfloat16_is_as_near_to_float32_as_pytorch_is(tmp_path):
    reference = krea2_pipeline(tmp_path)
    call = {"prompt": PROMPTS[1], "num_inference_steps": 2, "output_type": "np", **KREA2_SIZE}
    noise = torch.randn(1, 60, 16, generator=torch.Generator().manual_seed(0))
    exact = reference(**call, latents=noise).images
    half = diffusers.Krea2Pipeline.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    half.set_progress_bar_config(disable=True)
    theirs = np.abs(half(**call, latents=noise.bfloat16()).images - exact)
    ours = diffusax.DiffusionPipeline.from_pretrained(tmp_path, dtype="bfloat16")
    ours.set_progress_bar_config(disable=True)
    found = np.abs(np.asarray(ours(**call, latents=noise.numpy()).images) - exact)
    assert 0 < found.mean() < 1.2 * theirs.mean()
