"""Qwen-Image-Edit's pipelines against PyTorch's: every pixel, on the same weights and noise.

Both bring images to smaller areas than a megapixel here, and PyTorch's text encoder is told which
tokens are an image's.
"""

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support.pairs import Pair
from support.qwen_edits import EDIT, PLUS, images, make_areas_smaller, with_positions
from support.tiny_transformers import qwen_image_pipeline

import diffusax

PROMPTS = ["make it red", "an old house on a hill by the sea, and two dogs that run before it"]
GUIDED = {"negative_prompt": "blurry, and very ugly", "true_cfg_scale": 3.0}


@pytest.fixture(autouse=True)
def small_areas(monkeypatch):
    make_areas_smaller(monkeypatch.setattr)


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    made = {}

    def pair(kind, **options):
        key = kind, str(options)
        if key not in made:
            folder = tmp_path_factory.mktemp("qwen-image-edit")
            reference = with_positions(qwen_image_pipeline(folder, kind, **options))
            ours = diffusax.DiffusionPipeline.from_pretrained(folder)
            ours.set_progress_bar_config(disable=True)
            made[key] = Pair(reference, ours)
        return made[key]

    return pair


def test_an_image_is_edited(pairs_of):
    pair = pairs_of(EDIT)
    assert type(pair.ours) is diffusax.QwenImageEditPipeline
    plain = pair.check(prompt=PROMPTS[1], image=images(1)[0])
    assert plain.shape[1:3] == (96, 128)
    # In a list diffusers leaves the image for the language model as large as it is.
    one = images(1)[0]
    guided = pair.check(prompt=PROMPTS[1], image=one, **GUIDED, num_images_per_prompt=2)
    assert np.abs(guided - plain).max() > 0.01
    other = pair.check(prompt=PROMPTS[1], image=images(2)[1], height=44, width=28, seed=[3])
    assert other.shape[1:3] == (44, 28)


@pytest.mark.parametrize("still", [False, True])
def test_several_images_are_looked_at(pairs_of, still):
    pair = pairs_of(PLUS, zero_cond_t=still)
    assert type(pair.ours) is diffusax.QwenImageEditPlusPipeline
    plain = pair.check(prompt=PROMPTS[1], image=images(3))
    assert plain.shape[1:3] == (96, 96)
    other = pair.check(prompt=PROMPTS[1], image=images(3)[::-1])
    assert other.shape[1:3] == (96, 128)
    pair.check(prompt=PROMPTS[0], image=images(1)[0], **GUIDED, height=44, width=28)


def test_prompts_of_one_call_are_drawn_as_each_alone(pairs_of):
    pair = pairs_of(PLUS)
    latents = torch.randn(2, 77, 16, generator=torch.Generator().manual_seed(0))
    call = {"num_inference_steps": 3, "output_type": "np", "height": 44, "width": 28, **GUIDED}
    call |= {"image": images(2)}
    found = pair.ours(prompt=PROMPTS, latents=latents, **call).images
    for i, prompt in enumerate(PROMPTS):
        alone = pair.reference(prompt=prompt, latents=latents[i : i + 1], **call).images
        np.testing.assert_allclose(found[i], alone[0], atol=1e-4)


def test_embeddings_are_those_of_prompts_with_their_images(pairs_of):
    pair = pairs_of(PLUS)
    call = {"image": images(2), "height": 44, "width": 28}
    embeds, mask = pair.ours.encode_prompt(PROMPTS, image=images(2))
    assert embeds.shape[0] == 2
    assert not np.asarray(mask).all()
    own = {"prompt_embeds": embeds, "prompt_embeds_mask": mask, "num_inference_steps": 2}
    again = pair.ours(**own, **call, seed=0, output_type="np").images
    expected = pair.ours(
        prompt=PROMPTS, **call, seed=0, num_inference_steps=2, output_type="np"
    ).images
    np.testing.assert_allclose(again, expected, atol=1e-5)
    pair.check(prompt_embeds=torch.tensor(np.asarray(embeds[1:])), **call)


def test_other_images_of_the_same_sizes_compile_nothing(pairs_of, tmp_path):
    pipe, (first, second) = pairs_of(PLUS).ours, images(2)
    call = {"output_type": "np", "num_inference_steps": 2, "seed": 0}
    before = pipe(prompt=PROMPTS[0], image=[first, second], **call).images
    first.save(tmp_path / "first.png")
    changed = Image.fromarray(255 - np.asarray(first))
    with diffusax.count_compilations() as count:
        given = [tmp_path / "first.png", np.asarray(second)]
        again = pipe(prompt=PROMPTS[0], image=given, **call).images
        other = pipe(prompt="a blue pear", image=[changed, second], **call).images
    assert not count
    np.testing.assert_array_equal(again, before)
    assert np.abs(other - before).max() > 0.003


def test_what_does_not_fit_is_refused(pairs_of):
    edit, plus = pairs_of(EDIT).ours, pairs_of(PLUS).ours
    with pytest.raises(ValueError, match="image must be given"):
        plus(prompt=PROMPTS[0])
    with pytest.raises(ValueError, match=r"image must be one image for this checkpoint \(got 2\)"):
        edit(prompt=PROMPTS[0], image=images(2))
    with pytest.raises(ValueError, match="image must be one list of images"):
        plus(prompt=PROMPTS[0], image=[images(2), images(2)])
    with pytest.raises(ValueError, match="max_sequence_length must be at most 1024"):
        plus(prompt=PROMPTS[0], image=images(1), max_sequence_length=1025)


@pytest.mark.parametrize("kind", [EDIT, PLUS])
def test_saved_and_read_by_diffusers(pairs_of, tmp_path, kind):
    pair = pairs_of(kind)
    pair.ours.save_pretrained(tmp_path)
    processor = pair.reference.processor
    again = getattr(diffusers, kind).from_pretrained(tmp_path, processor=processor)
    again.set_progress_bar_config(disable=True)
    Pair(with_positions(again), pair.ours).check(prompt=PROMPTS[1], image=images(1)[0])


@pytest.mark.parametrize("kind", [EDIT, PLUS])
def test_auto_pipelines_and_pipelines_of_pytorch(pairs_of, tmp_path, kind):
    pair = pairs_of(kind)
    auto = diffusax.AutoPipelineForImage2Image.from_pipe(pair.ours)
    assert type(auto) is getattr(diffusax, kind)
    converted = diffusax.DiffusionPipeline.from_torch(qwen_image_pipeline(tmp_path, kind))
    converted.set_progress_bar_config(disable=True)
    assert type(converted) is getattr(diffusax, kind)
    Pair(pair.reference, converted).check(prompt=PROMPTS[0], image=images(1)[0])
