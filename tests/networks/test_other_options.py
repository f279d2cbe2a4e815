"""Networks that are loaded with options of another shape, beside diffusers' own."""

import logging

import diffusers
import numpy as np
import pytest
import torch

import diffusax
from diffusax.checkpoints.tree import params_to_tensors

GUIDE = {"in_channels": 9, "low_cpu_mem_usage": False, "ignore_mismatched_sizes": True}
"""How diffusers' guide to training inpainting makes a UNet of one for text to image."""


@pytest.fixture(scope="module")
def folder(tiny_checkpoints):
    return tiny_checkpoints.pipeline("sd")[0]


def loaded(folder, **options):
    """Our tensors by name, and diffusers'."""
    ours = diffusax.UNet2DConditionModel.from_pretrained(folder, subfolder="unet", **options)
    theirs = diffusers.UNet2DConditionModel.from_pretrained(folder, subfolder="unet", **options)
    return ours, params_to_tensors(ours.params), dict(theirs.state_dict())


def test_a_unet_with_more_channels_keeps_all_else(folder, caplog):
    with caplog.at_level(logging.WARNING, "diffusax"):
        unet, ours, theirs = loaded(folder, **GUIDE)
    assert "drawn anew, to be trained: conv_in.weight (has (32, 4, 3, 3))" in caplog.text
    assert {name: x.shape for name, x in ours.items()} == {
        n: (*x.shape,) for n, x in theirs.items()
    }
    for name, tensor in theirs.items():
        if name != "conv_in.weight":
            assert np.array_equal(ours[name], tensor), name
    assert (unet.config["in_channels"], unet.config.in_channels) == (9, 9)
    # PyTorch's first values: uniform within 1 / sqrt(fan-in). diffusers 0.42 itself leaves memory
    # without values there, and inits layers in `from_config` alone.
    bound = (9 * 3 * 3) ** -0.5
    for weight in (ours["conv_in.weight"], torch.nn.Conv2d(9, 32, 3).weight.detach().numpy()):
        assert 0.98 * bound < np.abs(weight).max() <= bound
        assert abs(weight.std() - bound / np.sqrt(3)) < 0.05 * bound


def test_what_is_missing_begins_as_pytorch_has_it(folder, caplog):
    with caplog.at_level(logging.WARNING, "diffusax"):
        _, ours, theirs = loaded(folder, **{**GUIDE, "num_class_embeds": 700})
    assert "class_embedding.weight (missing)" in caplog.text
    for table in (ours["class_embedding.weight"], torch.nn.Embedding(700, 128).weight.detach()):
        assert table.shape == theirs["class_embedding.weight"].shape
        assert abs(table.std() - 1) < 0.02


def test_without_the_flag_the_error_names_what_differs(folder):
    with pytest.raises(
        ValueError,
        match=r"in_channels=9 .ignore_mismatched_sizes=True draws .*"
        r"1 misshapen: conv_in.weight .has \(32, 4, 3, 3\), the config asks for"
        r" \(32, 9, 3, 3\)",
    ):
        diffusax.UNet2DConditionModel.from_pretrained(folder, subfolder="unet", in_channels=9)
    with pytest.raises((ValueError, RuntimeError), match=r"conv_in\.weight"):
        diffusers.UNet2DConditionModel.from_pretrained(
            folder, subfolder="unet", in_channels=9, low_cpu_mem_usage=False
        )


def test_kernels_that_are_drawn_may_be_of_eight_bits(folder):
    options = {**GUIDE, "cross_attention_dim": 48}
    unet = diffusax.UNet2DConditionModel.from_pretrained(
        folder, subfolder="unet", weights="int8", **options
    )
    x, context = np.ones((1, 9, 16, 16), np.float32), np.ones((1, 5, 48), np.float32)
    assert np.isfinite(unet(x, 3, context).sample).all()


def test_a_unet_for_inpainting_made_so_is_saved_for_diffusers(folder, tmp_path):
    ours, _, _ = loaded(folder, **GUIDE)
    ours.save_pretrained(tmp_path)
    theirs = diffusers.UNet2DConditionModel.from_pretrained(tmp_path)
    x, context = torch.randn(1, 9, 16, 16), torch.randn(1, 5, theirs.config.cross_attention_dim)
    with torch.no_grad():
        expected = theirs(x, 3, context).sample
    actual = ours(x.numpy(), 3, context.numpy()).sample
    np.testing.assert_allclose(actual, expected, atol=1e-4)
