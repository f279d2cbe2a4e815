"""FreeU: filter, UNet and switch, against diffusers."""

import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers.utils.torch_utils import apply_freeu as reference
from support.effort import first
from support.tiny import UNET, randomize

from diffusax.models.adapters.freeu import apply_freeu, check_freeu, of_level
from diffusax.networks import load_network
from diffusax.runtime.programs.compilations import count_compilations

NUMBERS = {"s1": 0.9, "s2": 0.2, "b1": 1.3, "b2": 1.4}
CONTEXT = 24
CONFIG = {
    **UNET["sd1"],
    "block_out_channels": (16, 32, 48),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": CONTEXT,
}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def nchw(x):
    return torch.tensor(np.asarray(x).transpose(0, 3, 1, 2).copy())


def nhwc(x):
    return x.numpy().transpose(0, 2, 3, 1)


@pytest.mark.parametrize("size", [(8, 8), (16, 8), (7, 5), (2, 3), (1, 4), (6, 1), (1, 1)])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_what_a_level_is_given_equals_diffusers(size, level):
    x, skip = normal(2, *size, 5), normal(2, *size, 4, seed=1)
    expected = reference(level, nchw(x), nchw(skip), **NUMBERS)
    numbers = of_level(np.float32(check_freeu(**NUMBERS)), level)
    actual = (x, skip) if numbers is None else apply_freeu(x, skip, numbers)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, nhwc(theirs), atol=2e-6)
    assert level == 2 or np.abs(np.asarray(actual[1]) - skip).max() > 1e-3


def test_each_image_may_have_numbers_of_its_own():
    x, skip = normal(2, 4, 4, 6), normal(2, 4, 4, 3, seed=1)
    rows = np.array([[0.5, 1.5], [1.2, 0.7]], np.float32)
    together = apply_freeu(x, skip, rows)
    for i, row in enumerate(rows):
        alone = apply_freeu(x[i : i + 1], skip[i : i + 1], row)
        for a, b in zip(together, alone, strict=True):
            np.testing.assert_allclose(a[i], b[0], atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "size"),
    first(
        [
            ({}, (8, 8)),
            ({"use_linear_projection": True, "layers_per_block": 2}, (12, 20)),
            # diffusers scales the last map on the way down in its place among the skip connections.
            ({"mid_block_type": None}, (8, 12)),
        ]
    ),
)
def test_a_unet_with_freeu_equals_diffusers(tmp_path, changes, size):
    unet = randomize(diffusers.UNet2DConditionModel(**{**CONFIG, **changes}))
    unet.save_pretrained(tmp_path)
    model = load_network(tmp_path, dtype="float32")
    x, context = normal(2, *size, 4), normal(2, 7, CONTEXT, seed=1)

    def check():
        with torch.no_grad():
            expected = nhwc(unet(nchw(x), torch.tensor(37), torch.tensor(context)).sample)
        actual = np.asarray(model.run(x, np.float32(37), context))
        assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()
        return actual

    plain = check()
    drawn = []
    for numbers in (NUMBERS, {"s1": 0.6, "s2": 0.4, "b1": 1.1, "b2": 1.2}):
        unet.enable_freeu(**numbers)
        model.enable_freeu(**numbers)
        drawn.append(check())
    assert np.abs(drawn[0] - plain).max() > 1e-3
    assert np.abs(drawn[0] - drawn[1]).max() > 1e-3
    with count_compilations() as compiled:
        model.enable_freeu(1, 2, 3, 4)
        model.run(x, np.float32(37), context)
        unet.disable_freeu()
        model.disable_freeu()
        np.testing.assert_array_equal(check(), plain)
    assert compiled == []


@pytest.mark.slow
def test_gradients_with_checkpointing_are_the_same(tmp_path):
    randomize(diffusers.UNet2DConditionModel(**CONFIG)).save_pretrained(tmp_path)
    model = load_network(tmp_path, dtype="float32")
    x, context = normal(1, 8, 8, 4), normal(1, 7, CONTEXT, seed=1)

    def loss(numbers, how):
        given = {"freeu": numbers, "gradient_checkpointing": how}
        return (model.apply(model.params, x, np.float32(3), context, **given) ** 2).mean()

    numbers = np.float32(check_freeu(**NUMBERS))
    plain, full = (jax.grad(loss)(numbers, how) for how in ("none", "full"))
    np.testing.assert_allclose(full, plain, rtol=1e-4)
    assert np.abs(plain).min() > 0


def test_numbers_that_cannot_be():
    assert check_freeu(1, 2, 3, 4) == (1.0, 2.0, 3.0, 4.0)
    assert check_freeu(0, 2, 3, 4) is None
    with pytest.raises(ValueError, match=r"b1 must be finite \(got nan\)"):
        check_freeu(1, 2, float("nan"), 4)
    with pytest.raises(ValueError, match=r"s2 must be a number \(got '0.2'\)"):
        check_freeu(1, "0.2", 3, 4)


def test_other_networks_have_no_freeu(tmp_path):
    randomize(diffusers.AutoencoderTiny()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="FreeU is for a UNet2DConditionModel, not for a Autoenc"):
        load_network(tmp_path).enable_freeu(**NUMBERS)
