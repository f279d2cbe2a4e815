"""Qwen-Image 2.1's pipeline against PyTorch's: every pixel, on the same weights and noise."""

import diffusers
import numpy as np
import pytest
import torch
from peft.utils import get_peft_model_state_dict
from PIL import Image
from support.lora import add_lora
from support.pairs import Pair, picture
from support.tiny_transformers import qwen_image21_pipeline

import diffusax

PROMPTS = ["a red apple", "an old house on a hill by the sea, and two dogs that run before it"]
SIZE = {"height": 64, "width": 96}
"""Of 4x6 tokens."""


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    made = {}

    def pair(**options):
        key = str(options)
        if key not in made:
            folder = tmp_path_factory.mktemp("qwen-image21")
            reference = qwen_image21_pipeline(folder, **options)
            ours = diffusax.DiffusionPipeline.from_pretrained(folder)
            ours.set_progress_bar_config(disable=True)
            made[key] = Pair(reference, ours)
        return made[key]

    return pair


def test_text_to_image(pairs_of):
    pair = pairs_of()
    assert type(pair.ours) is diffusax.QwenImage21Pipeline
    plain = pair.check(prompt=PROMPTS[1], **SIZE)
    assert plain.shape == (1, 64, 96, 4)
    guided = pair.check(prompt=PROMPTS[1], negative_prompt="hat", true_cfg_scale=3.0, **SIZE)
    assert np.abs(guided - plain).max() > 0.05


def test_prompts_of_different_lengths_are_drawn_as_each_alone(pairs_of):
    pair = pairs_of()
    latents = torch.randn(2, 24, 6, generator=torch.Generator().manual_seed(0))
    call = {"num_inference_steps": 4, "output_type": "np", "true_cfg_scale": 2.0, **SIZE}
    call |= {"negative_prompt": "blurry"}
    found = pair.ours(PROMPTS, latents=latents, **call).images
    for i, prompt in enumerate(PROMPTS):
        alone = pair.reference(prompt, latents=latents[i : i + 1], **call).images
        np.testing.assert_allclose(found[i], alone[0], atol=1e-4)


@pytest.mark.parametrize(
    "call",
    [
        {"sigmas": [1.0, 0.7, 0.2], "num_images_per_prompt": 2},
        {"height": 96, "width": 64, "seed": [3], "output_type": "latent"},
        {"prompt": "", "negative_prompt": "", "true_cfg_scale": 2.0},
    ],
)
def test_arguments(pairs_of, call):
    pairs_of().check(**{"prompt": PROMPTS[0], **SIZE, **call})


def test_sigmas_of_the_checkpoint_come_before_the_number_of_steps(pairs_of):
    pair = pairs_of(sigmas=[1.0, 0.6, 0.3])
    own = pair.check(prompt=PROMPTS[0], **SIZE)
    np.testing.assert_array_equal(own, pair.check(prompt=PROMPTS[0], num_inference_steps=9, **SIZE))
    given = pair.check(prompt=PROMPTS[0], sigmas=[1.0, 0.5], **SIZE)
    assert np.abs(given - own).max() > 0.01


@pytest.mark.parametrize("schedule", [{"use_dynamic_shifting": False, "shift": 3.0}])
def test_shifts_of_noise_levels(pairs_of, schedule):
    pairs_of(**schedule).check(prompt=PROMPTS[0], **SIZE)


def test_encode_prompt_returns_the_states_of_a_prompts_tokens(pairs_of):
    pair = pairs_of()
    expected, seen, _ = pair.reference.encode_prompt(list(PROMPTS))
    actual, mask, _ = pair.ours.encode_prompt(PROMPTS)
    for ours, own, theirs, read in zip(actual, mask, expected, seen, strict=True):
        found, wanted = np.asarray(ours)[np.asarray(own)], theirs[read.bool()].numpy()
        assert found.shape == wanted.shape
        assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    call = {"num_inference_steps": 2, "seed": 3, "output_type": "np", **SIZE}
    again = pair.ours(prompt_embeds=actual, prompt_embeds_mask=mask, **call).images
    np.testing.assert_allclose(again, pair.ours(prompt=PROMPTS, **call).images, atol=1e-5)
    assert pair.ours.encode_prompt(PROMPTS[:1])[1] is None


def test_pictures_have_an_opacity(pairs_of):
    (image,) = pairs_of().ours(PROMPTS[0], num_inference_steps=1, **SIZE).images
    assert image.mode == "RGBA"
    assert image.size == (96, 64)


def test_saved_it_opens_in_diffusers(pairs_of, tmp_path):
    pair = pairs_of(sigmas=[1.0, 0.6, 0.3])
    pair.ours.save_pretrained(tmp_path)
    again = diffusers.QwenImage21Pipeline.from_pretrained(
        tmp_path, processor=pair.reference.processor
    )
    again.set_progress_bar_config(disable=True)
    assert list(again.config.sample_sigmas) == [1.0, 0.6, 0.3]
    Pair(again, pair.ours).check(prompt=PROMPTS[0], image=images(1), output_resolution=64)


def test_sizes_that_are_no_pairs_of_tokens_are_refused(pairs_of):
    with pytest.raises(ValueError, match="height must be divisible by 32"):
        pairs_of().ours(PROMPTS[0], height=80, width=96)


def test_found_by_the_task_and_made_of_pytorchs(pairs_of, tmp_path):
    pair = pairs_of()
    pair.ours.save_pretrained(tmp_path)
    auto = diffusax.AutoPipelineForText2Image.from_pretrained(tmp_path)
    assert type(auto) is diffusax.QwenImage21Pipeline


def test_loras_of_diffusers(tmp_path):
    (tmp_path / "model").mkdir()
    reference = qwen_image21_pipeline(tmp_path / "model")
    add_lora(reference.transformer, "style", 3)
    layers = get_peft_model_state_dict(reference.transformer, adapter_name="style")
    type(reference).save_lora_weights(tmp_path, transformer_lora_layers=layers)
    reference.transformer.delete_adapters("style")
    ours = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "model")
    ours.set_progress_bar_config(disable=True)
    pair = Pair(reference, ours)
    plain = pair.check(prompt=PROMPTS[0], **SIZE)
    for pipe in (reference, ours):
        pipe.load_lora_weights(tmp_path, weight_name="pytorch_lora_weights.safetensors")
    assert np.abs(pair.check(prompt=PROMPTS[0], **SIZE) - plain).max() > 0.05
    pair.check(prompt=PROMPTS[0], image=images(1), output_resolution=64)


def test_other_prompts_steps_and_seeds_compile_nothing(pairs_of):
    pipe = pairs_of().ours
    call = {"output_type": "np", "negative_prompt": "hat", "true_cfg_scale": 2.0, **SIZE}
    pipe(PROMPTS[0], num_inference_steps=3, seed=0, **call)
    with diffusax.count_compilations() as count:
        pipe("a blue pear", num_inference_steps=2, seed=1, **call)
        pipe(PROMPTS[0], num_inference_steps=3, seed=2, **{**call, "true_cfg_scale": 4.0})
    assert not count


def images(count):
    """Images of odd sizes, of which the second has an opacity."""
    found = [picture(i, *size) for i, size in enumerate([(70, 50), (40, 90), (33, 33)])][:count]
    if count > 1:
        found[1].putalpha(picture(9, 40, 90).convert("L"))
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_images_to_look_at(pairs_of, count):
    pair = pairs_of()
    given = {"image": images(count), "output_resolution": 64}
    plain = pair.check(prompt=PROMPTS[1], **given)
    options = {"negative_prompt": "hat", "true_cfg_scale": 3.0, "num_images_per_prompt": 2}
    guided = pair.check(prompt=PROMPTS[0], **options, **SIZE, **given)
    assert guided.shape == (2, 64, 96, 4)
    other = pair.check(prompt=PROMPTS[1], image=images(count)[::-1], output_resolution=64)
    assert count == 1 or np.abs(other - plain).max() > 0.01


def test_prompts_with_images_are_drawn_as_each_alone(pairs_of):
    pair = pairs_of()
    latents = torch.randn(2, 24, 6, generator=torch.Generator().manual_seed(0))
    call = {"num_inference_steps": 3, "output_type": "np", "true_cfg_scale": 2.0, **SIZE}
    call |= {"negative_prompt": "blurry", "image": images(2), "output_resolution": 64}
    found = pair.ours(PROMPTS, latents=latents, **call).images
    for i, prompt in enumerate(PROMPTS):
        alone = pair.reference(prompt, latents=latents[i : i + 1], **call).images
        np.testing.assert_allclose(found[i], alone[0], atol=1e-4)


def test_other_images_of_the_same_sizes_compile_nothing(pairs_of, tmp_path):
    pipe, (first, second) = pairs_of().ours, images(2)
    call = {"output_type": "np", "output_resolution": 64, "num_inference_steps": 2, "seed": 0}
    before = pipe(PROMPTS[0], image=[first, second], **call).images
    first.save(tmp_path / "first.png")
    changed = Image.fromarray(255 - np.asarray(first))
    with diffusax.count_compilations() as count:
        again = pipe(PROMPTS[0], image=[tmp_path / "first.png", np.asarray(second)], **call).images
        other = pipe("a blue pear", image=[changed, second], **call).images
    assert not count
    np.testing.assert_array_equal(again, before)
    assert np.abs(other - before).max() > 0.01


def test_what_knows_nothing_of_the_images_is_refused(pairs_of, tmp_path):
    pair = pairs_of()
    call = {"image": images(1), "output_resolution": 64, "num_inference_steps": 1}
    with pytest.raises(ValueError, match="image must be one list of images"):
        pair.ours(PROMPTS[0], **{**call, "image": [images(2), images(2)]})
    embeds = pair.ours.encode_prompt(PROMPTS[0])[0]
    with pytest.raises(ValueError, match="prompt_embeds must be left out with image"):
        pair.ours(prompt_embeds=embeds, **call)
    pair.ours.save_pretrained(tmp_path)
    first = diffusax.QwenImage21Pipeline.from_pretrained(tmp_path, encode_first=PROMPTS)
    with pytest.raises(ValueError, match="image cannot be given after encode_first"):
        first(PROMPTS[0], **call)
    (tmp_path / "processor" / "preprocessor_config.json").unlink()
    without = diffusax.QwenImage21Pipeline.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the processor has no preprocessor_config\.json"):
        without(PROMPTS[0], **call)
