"""ControlNet against diffusers, all weights random, those of its zero convolutions too."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.effort import first
from support.tiny import randomize

from diffusax.boundary.config import config_from_dict
from diffusax.models import ControlNetConfig
from diffusax.models.unet.controlnet import guess_scales, scale_residuals
from diffusax.networks import load_network

CONTEXT = 24
SD1 = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": CONTEXT,
    "norm_num_groups": 8,
    "attention_head_dim": 4,
    "layers_per_block": 1,
    "conditioning_embedding_out_channels": (8, 16, 24, 32),
}
SDXL = {
    **SD1,
    "block_out_channels": (32, 64, 64),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (1, 2, 4),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 8 * 6 + 5,
}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def nhwc(x):
    return np.asarray(x).transpose(0, 2, 3, 1)


def both(folder, config, *, size=(8, 8), conditions=None, guess_mode=False, scale=0.7):
    """All residuals, scaled, of diffusers' ControlNet and of ours from the same file."""
    conditions = conditions or {}
    reference = randomize(diffusers.ControlNetModel(**config))
    reference.save_pretrained(folder)
    network = load_network(folder, dtype="float32")
    x, context = normal(2, network.config.in_channels, *size), normal(2, 7, CONTEXT, seed=1)
    factor = network.config.downsampling
    picture = np.abs(normal(2, 3, *(factor * side for side in size), seed=2))
    with torch.no_grad():
        upstream = jax.tree.map(torch.tensor, conditions)
        if "added_cond" in upstream:
            upstream["added_cond_kwargs"] = upstream.pop("added_cond")
        down, mid = reference(
            torch.tensor(x),
            torch.tensor(37),
            torch.tensor(context),
            torch.tensor(picture),
            conditioning_scale=scale,
            guess_mode=guess_mode,
            return_dict=False,
            **upstream,
        )

    @jax.jit
    def run(params, x, picture, context):
        cond = network.apply(params, picture, method="embed_condition")
        return network.apply(params, x, np.float32(37), context, cond_embedding=cond, **conditions)

    residuals = run(network.params, nhwc(x), nhwc(picture), context)
    guesses = guess_mode and not network.config.global_pool_conditions
    scales = scale * guess_scales(len(residuals[0]) + 1) if guesses else scale
    ours = scale_residuals(network.config, residuals, scales)
    return [*ours[0], ours[1]], [nhwc(r) for r in (*down, mid)]


def assert_close(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        assert np.abs(a - e).max() <= 1e-5 * np.abs(e).max()


@pytest.mark.parametrize(
    ("config", "size"),
    first(
        [
            ({}, (8, 8)),
            ({}, (9, 7)),
            ({"controlnet_conditioning_channel_order": "bgr"}, (8, 4)),
            ({"global_pool_conditions": True}, (8, 8)),
            ({"conditioning_embedding_out_channels": (8, 16), "in_channels": 9}, (6, 10)),
            (
                {
                    "mid_block_type": "UNetMidBlock2D",
                    "resnet_time_scale_shift": "scale_shift",
                    "downsample_padding": 0,
                    "flip_sin_to_cos": False,
                    "freq_shift": 1,
                    "mid_block_scale_factor": 1.5,
                },
                (8, 8),
            ),
            ({"only_cross_attention": True, "attention_head_dim": (2, 4)}, (8, 8)),
            # As in diffusers' own tests: the first level has fewer channels than heads.
            (
                {
                    "block_out_channels": (4, 8),
                    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
                    "norm_num_groups": 2,
                    "attention_head_dim": 8,
                    "conditioning_embedding_out_channels": (2, 4),
                },
                (8, 8),
            ),
        ],
        2,
    ),
)
def test_controlnet_equals_diffusers(tmp_path, config, size):
    assert_close(*both(tmp_path, {**SD1, **config}, size=size))


@pytest.mark.parametrize("pool", [False, True])
def test_guess_mode_equals_diffusers(tmp_path, pool):
    config = {**SD1, "global_pool_conditions": pool}
    assert_close(*both(tmp_path, config, guess_mode=True))


@pytest.mark.parametrize("size", [(8, 8), pytest.param((9, 6), marks=pytest.mark.slow)])
def test_controlnet_of_sdxl_equals_diffusers(tmp_path, size):
    added = {"text_embeds": normal(2, 5), "time_ids": 100 * np.abs(normal(2, 6, seed=2))}
    assert_close(*both(tmp_path, SDXL, size=size, conditions={"added_cond": added}))


@pytest.mark.parametrize(
    ("config", "labels"),
    first(
        [
            ({"num_class_embeds": 10}, np.array([3, 5])),
            ({"class_embed_type": "timestep"}, np.array([3.0, 5.0], np.float32)),
            ({"class_embed_type": "identity"}, normal(2, 128)),
            (
                {"class_embed_type": "projection", "projection_class_embeddings_input_dim": 12},
                normal(2, 12),
            ),
        ]
    ),
)
def test_class_embeddings_of_controlnet_equal_diffusers(tmp_path, config, labels):
    assert_close(*both(tmp_path, {**SD1, **config}, conditions={"class_labels": labels}))


def test_residuals_fit_the_unet_that_they_steer(tmp_path):
    unet_config = {
        **{k: v for k, v in SD1.items() if k != "conditioning_embedding_out_channels"},
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    unet = randomize(diffusers.UNet2DConditionModel(**unet_config), seed=1)
    control = randomize(diffusers.ControlNetModel(**SD1))
    unet.save_pretrained(tmp_path / "unet")
    control.save_pretrained(tmp_path / "control")
    x, context, picture = normal(1, 4, 9, 7), normal(1, 7, CONTEXT), normal(1, 3, 72, 56)
    with torch.no_grad():
        args = [torch.tensor(x), torch.tensor(5), torch.tensor(context)]
        down, mid = control(*args, torch.tensor(picture), return_dict=False)
        expected = unet(
            *args, down_block_additional_residuals=down, mid_block_additional_residual=mid
        ).sample
    ours, theirs = load_network(tmp_path / "control"), load_network(tmp_path / "unet")

    @jax.jit
    def run(control_params, unet_params, x, picture, context):
        args = x, np.float32(5), context
        cond = ours.apply(control_params, picture, method="embed_condition")
        down, mid = ours.apply(control_params, *args, cond_embedding=cond)
        return theirs.apply(
            unet_params,
            *args,
            down_block_additional_residuals=down,
            mid_block_additional_residual=mid,
        )

    actual = run(ours.params, theirs.params, nhwc(x), nhwc(picture), context)
    assert_close([actual], [nhwc(expected)])


def test_guess_scales_rise_to_one():
    np.testing.assert_allclose(guess_scales(13), torch.logspace(-1, 0, 13).numpy(), rtol=1e-6)


def test_scales_are_not_rounded_to_the_residuals_type():
    residuals = (
        (jnp.full((1, 2, 2, 1), 9, jnp.bfloat16),),
        jnp.full((1, 1, 1, 1), 9, jnp.bfloat16),
    )
    (down,), mid = scale_residuals(ControlNetConfig(), residuals, 0.7)
    expected = (torch.tensor(9, dtype=torch.bfloat16) * 0.7).float().item()
    assert down.dtype == mid.dtype == jnp.bfloat16
    assert float(down.max()) == float(mid.max()) == expected


def test_each_image_may_have_its_own_scales():
    residuals = ((jnp.ones((2, 2, 2, 1)),), jnp.ones((2, 1, 1, 1)))
    (down,), mid = scale_residuals(ControlNetConfig(), residuals, [[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(down[:, 0, 0, 0], [1, 2])
    np.testing.assert_array_equal(mid[:, 0, 0, 0], [3, 4])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("controlnet_conditioning_channel_order", "rbg"),
        ("conditioning_embedding_out_channels", []),
        ("class_embed_type", "simple_projection"),
        ("mid_block_type", None),
        ("encoder_hid_dim", 768),
        ("up_block_types", ["UpBlock2D"] * 4),
    ],
)
def test_unsupported_options_are_errors_that_name_them(option, value):
    with pytest.raises(ValueError, match=option):
        config_from_dict(ControlNetConfig, {option: value})
