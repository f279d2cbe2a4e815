"""Features against PyTorch's networks on the same weights."""

import numpy as np
import pytest
import torch
from support.data_sets import picture
from support.many_devices import run_on_devices
from transformers import CLIPTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from diffusax.evaluation import CLIP

TEXTS = ["a cat", "", "a photo of a dog on a bicycle", "x " * 200]


def unit(x):
    return (x / x.norm(dim=-1, keepdim=True)).numpy()


@torch.no_grad()
def test_clip_features_are_those_of_transformers(tiny_clip):
    folder, theirs = tiny_clip
    clip = CLIP.from_pretrained(folder, batch_size=3)
    pictures = [picture(seed, (30 + 5 * seed, 45)) for seed in range(4)]
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(pictures, return_tensors="pt")
    expected = unit(theirs.get_image_features(**pixels).pooler_output)
    np.testing.assert_allclose(clip.images(pictures), expected, atol=1e-5)

    tokenizer = CLIPTokenizer.from_pretrained(folder)
    options = {"padding": True, "truncation": True, "max_length": 77, "return_tensors": "pt"}
    expected = unit(theirs.get_text_features(**tokenizer(TEXTS, **options)).pooler_output)
    with pytest.warns(UserWarning, match="longer than 75 tokens"):
        actual = clip.texts(TEXTS)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


FOUR_DEVICES = """
import sys
import jax
import numpy as np
from support.data_sets import picture
from diffusax.evaluation import CLIP

clip = CLIP.from_pretrained(sys.argv[1], batch_size=6)
assert clip.mesh.size == 4
assert len(jax.tree.leaves(clip.model.params)[0].devices()) == 4
np.save(sys.argv[2], clip.images([picture(seed) for seed in range(7)]))
"""


@pytest.mark.slow
def test_features_over_four_devices_are_the_same(tiny_clip, tmp_path):
    folder, _ = tiny_clip
    run_on_devices("-c", FOUR_DEVICES, folder, tmp_path / "features.npy")
    expected = CLIP.from_pretrained(folder).images([picture(seed) for seed in range(7)])
    np.testing.assert_allclose(np.load(tmp_path / "features.npy"), expected, atol=1e-6)


def test_no_pictures_is_an_error(tiny_clip):
    clip = CLIP.from_pretrained(tiny_clip[0])
    with pytest.raises(ValueError, match="nothing to take the features of"):
        clip.images([])


def test_only_a_whole_clip_measures(tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline("sd")
    with pytest.raises(ValueError, match="holds a CLIPTextModel; CLIP's metrics need a CLIPModel"):
        CLIP.from_pretrained(folder / "text_encoder")
