import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.effort import first
from support.tiny import randomize

from diffusax.boundary.config import config_from_dict
from diffusax.models import UNet2DConditionConfig
from diffusax.networks import load_network

CONTEXT = 24
BASE = {
    "block_out_channels": (32, 64),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": CONTEXT,
    "norm_num_groups": 8,
    "attention_head_dim": 4,
    "layers_per_block": 1,
}
THREE_LEVELS = {
    "block_out_channels": (32, 64, 96),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": (1, 2, 1),
    "cross_attention_dim": (CONTEXT,) * 3,
}
# As in diffusers' own tests: the first level has fewer channels than heads, and does not attend.
FEW_CHANNELS = {
    "block_out_channels": (4, 8),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 2,
    "attention_head_dim": 8,
}
TEXT_TIME = {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 8 * 6 + 5,
}


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def both(folder, config, *, size=(8, 8), inputs=None, upstream=None):
    """The outputs of diffusers' UNet and of ours from the same file; inputs as numpy arrays."""
    unet = randomize(diffusers.UNet2DConditionModel(**{**BASE, **config}))
    unet.save_pretrained(folder)
    network = load_network(folder, dtype="float32")
    x = normal(2, network.config.in_channels, *size)
    context = normal(2, 7, CONTEXT, seed=1)
    with torch.no_grad():
        expected = unet(
            torch.tensor(x), torch.tensor(37), torch.tensor(context), **(upstream or {})
        ).sample
    apply = jax.jit(network.apply)
    actual = apply(
        network.params, x.transpose(0, 2, 3, 1), np.float32(37), context, **(inputs or {})
    )
    return np.asarray(actual).transpose(0, 3, 1, 2), expected.numpy()


def assert_close(actual, expected, tolerance=1e-5):
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    ("config", "size"),
    first(
        [
            ({}, (8, 8)),
            ({"use_linear_projection": True, "attention_head_dim": (2, 4)}, (9, 7)),
            ({"only_cross_attention": True, "mid_block_type": None}, (6, 10)),
            (
                {
                    "resnet_time_scale_shift": "scale_shift",
                    "mid_block_scale_factor": 1.5,
                    "downsample_padding": 0,
                    "flip_sin_to_cos": False,
                    "freq_shift": 1,
                },
                (8, 8),
            ),
            (
                {
                    "mid_block_type": "UNetMidBlock2D",
                    "upcast_attention": True,
                    "transformer_layers_per_block": (2, 1),
                    "in_channels": 9,
                    "center_input_sample": True,
                },
                (8, 8),
            ),
            (
                {**THREE_LEVELS, "only_cross_attention": (True, False, True), "in_channels": 8},
                (12, 8),
            ),
            (
                {
                    **THREE_LEVELS,
                    "transformer_layers_per_block": ((1,), (1, 2), (2,)),
                    "reverse_transformer_layers_per_block": ((2, 1), (1, 1, 2), (1, 1)),
                },
                (8, 8),
            ),
            (
                {
                    **THREE_LEVELS,
                    "transformer_layers_per_block": (1, 2, 3),
                    "conv_in_kernel": 5,
                    "conv_out_kernel": 1,
                    "time_embedding_dim": 48,
                },
                (8, 12),
            ),
            (FEW_CHANNELS, (8, 8)),
        ],
        3,
    ),
)
def test_unet_equals_diffusers(tmp_path, config, size):
    assert_close(*both(tmp_path, config, size=size))


@pytest.mark.parametrize(
    ("config", "labels"),
    first(
        [
            ({"num_class_embeds": 10}, np.array([3, 5])),
            ({"class_embed_type": "timestep"}, np.array([3.0, 5.0], np.float32)),
            ({"class_embed_type": "identity"}, normal(2, 128)),
            (
                {
                    "class_embed_type": "projection",
                    "projection_class_embeddings_input_dim": 12,
                    "class_embeddings_concat": True,
                },
                normal(2, 12),
            ),
            (
                {
                    "class_embed_type": "simple_projection",
                    "projection_class_embeddings_input_dim": 12,
                },
                normal(2, 12),
            ),
        ]
    ),
)
def test_class_embeddings_equal_diffusers(tmp_path, config, labels):
    inputs, upstream = {"class_labels": labels}, {"class_labels": torch.tensor(labels)}
    assert_close(*both(tmp_path, config, inputs=inputs, upstream=upstream))


@pytest.mark.slow
def test_guidance_embedding_of_distilled_models_equals_diffusers(tmp_path):
    cond = normal(2, 8)
    inputs, upstream = {"timestep_cond": cond}, {"timestep_cond": torch.tensor(cond)}
    assert_close(*both(tmp_path, {"time_cond_proj_dim": 8}, inputs=inputs, upstream=upstream))


SDXL = {
    "block_out_channels": (32, 64, 96),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 1, 2),
    "attention_head_dim": (2, 4, 6),
    "use_linear_projection": True,
    **TEXT_TIME,
}
REFINER = {
    **SDXL,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": 2,
    "projection_class_embeddings_input_dim": 8 * 5 + 5,
}


@pytest.mark.parametrize(
    ("config", "numbers", "size"),
    first(
        [
            (SDXL, 6, (8, 8)),
            (REFINER, 5, (8, 12)),
            ({**SDXL, "in_channels": 8}, 6, (9, 7)),
            ({**SDXL, "in_channels": 9, "time_cond_proj_dim": 8}, 6, (8, 4)),
        ]
    ),
    ids=["base", "refiner", "instruct-pix2pix", "inpaint-lcm"],
)
def test_unets_of_sdxl_equal_diffusers(tmp_path, config, numbers, size):
    added = {"text_embeds": normal(2, 5), "time_ids": 100 * np.abs(normal(2, numbers, seed=2))}
    inputs = {"added_cond": added}
    upstream = {"added_cond_kwargs": {k: torch.tensor(v) for k, v in added.items()}}
    if "time_cond_proj_dim" in config:
        inputs["timestep_cond"] = normal(2, 8, seed=3)
        upstream["timestep_cond"] = torch.tensor(inputs["timestep_cond"])
    assert_close(*both(tmp_path, config, size=size, inputs=inputs, upstream=upstream))


def test_controlnet_residuals_equal_diffusers(tmp_path):
    shapes = [(2, 8, 8, 32), (2, 8, 8, 32), (2, 4, 4, 32), (2, 4, 4, 64)]
    down = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    mid = normal(2, 4, 4, 64, seed=9)

    def nchw(x):
        return torch.tensor(x.transpose(0, 3, 1, 2).copy())

    inputs = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
    upstream = {
        "down_block_additional_residuals": tuple(map(nchw, down)),
        "mid_block_additional_residual": nchw(mid),
    }
    assert_close(*both(tmp_path, {}, inputs=inputs, upstream=upstream))


def test_bfloat16_is_close_to_float32(tmp_path):
    randomize(diffusers.UNet2DConditionModel(**BASE)).save_pretrained(tmp_path)
    x, context = normal(2, 8, 8, 4), normal(2, 7, CONTEXT)
    outputs = []
    for dtype in ("float32", "bfloat16"):
        network = load_network(tmp_path, dtype=dtype)
        y = jax.jit(network.apply)(network.params, x, np.float32(37), context)
        assert y.dtype == jnp.dtype(dtype)
        outputs.append(np.asarray(y, np.float32))
    exact, rounded = outputs
    assert np.linalg.norm(rounded - exact) <= 0.03 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("act_fn", "mish"),
        ("attention_type", "gated"),
        ("down_block_types", ["KDownBlock2D"] * 4),
        ("class_embed_type", "other"),
        ("addition_embed_type", "image"),
        ("encoder_hid_dim_type", "text_proj"),
        ("made_up", 1),
    ],
)
def test_unsupported_options_are_errors_that_name_them(option, value):
    with pytest.raises(ValueError, match=option):
        config_from_dict(UNet2DConditionConfig, {option: value})


@pytest.mark.parametrize(
    ("down", "up", "middle"),
    [
        ("CrossAttnDownBlock2D", "UpBlock2D", "UNetMidBlock2D"),
        ("DownBlock2D", "CrossAttnUpBlock2D", "UNetMidBlock2D"),
        ("DownBlock2D", "UpBlock2D", "UNetMidBlock2DCrossAttn"),
    ],
)
def test_a_block_that_attends_needs_a_channel_for_each_head(down, up, middle):
    config = {"down_block_types": [down] * 2, "up_block_types": [up] * 2, "mid_block_type": middle}
    config |= {"block_out_channels": [8, 8], "norm_num_groups": 4}
    with pytest.raises(ValueError, match=r"attention_head_dim=9, .* where a block attends"):
        config_from_dict(UNet2DConditionConfig, {**config, "attention_head_dim": 9})
    config_from_dict(UNet2DConditionConfig, {**config, "attention_head_dim": 8})


def test_missing_condition_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="class_labels"):
        both(tmp_path, {"num_class_embeds": 4}, upstream={"class_labels": torch.tensor([0, 1])})
