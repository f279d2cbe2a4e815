"""UNet2DModel against diffusers', all weights random."""

import dataclasses

import diffusers
import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from support.effort import first
from support.tiny import randomize

import diffusax
from diffusax.boundary.config import config_to_dict
from diffusax.models import UNet2DConfig, UNet2DModel
from diffusax.models.network import Network
from diffusax.networks import initialize, load_network

BASE = {
    "sample_size": 8,
    "block_out_channels": (16, 32),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 8,
    "layers_per_block": 1,
}
# As google/ddpm-cifar10-32's: one head of all channels, and sinusoids in another order.
GOOGLE = {
    "attention_head_dim": None,
    "downsample_padding": 0,
    "flip_sin_to_cos": False,
    "freq_shift": 1,
    "norm_eps": 1e-6,
    "layers_per_block": 2,
}
THREE = {
    "block_out_channels": (8, 16, 24),
    "down_block_types": ("AttnDownBlock2D", "ResnetDownsampleBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "ResnetUpsampleBlock2D", "AttnUpBlock2D"),
    "norm_num_groups": 4,
    "attention_head_dim": 3,
}
CASES = [
    (GOOGLE, {}),
    ({"num_class_embeds": 5, "resnet_time_scale_shift": "scale_shift"}, {"class_labels": [1, 4]}),
    ({**THREE, "downsample_type": "resnet", "upsample_type": "resnet"}, {}),
    ({"time_embedding_type": "fourier", "mid_block_scale_factor": 1.5, "add_attention": False}, {}),
    ({"time_embedding_type": "learned", "num_train_timesteps": 50}, {}),
    ({"class_embed_type": "timestep", "center_input_sample": True}, {"class_labels": [3, 40]}),
    ({"time_embedding_dim": 24, "mid_block_type": None, "in_channels": 1, "out_channels": 2}, {}),
    (
        {
            "resnet_time_scale_shift": "scale_shift",
            "attn_norm_num_groups": 4,
            "mid_block_scale_factor": 2.0,
        },
        {},
    ),
    ({**THREE, "downsample_padding": 0, "class_embed_type": "identity"}, {"class_labels": "own"}),
]


def both(folder, config, inputs, size=(8, 8)):
    """The outputs of diffusers' network and of ours from the same file."""
    unet = randomize(diffusers.UNet2DModel(**{**BASE, **config}))
    if config.get("time_embedding_type") == "fourier":
        unet.time_proj.weight.data *= 0.1
    unet.save_pretrained(folder)
    model = load_network(folder, dtype="float32")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, unet.config.in_channels, *size)).astype(np.float32)
    t = np.array([3, 37], np.int32)
    labels = inputs.get("class_labels")
    if labels == "own":
        labels = rng.normal(size=(2, 32)).astype(np.float32)
    given = {} if labels is None else {"class_labels": np.asarray(labels)}
    with torch.no_grad():
        theirs = {name: torch.tensor(value) for name, value in given.items()}
        expected = unet(torch.tensor(x), torch.tensor(t), **theirs).sample.numpy()
    ours = jax.jit(model.apply)(model.params, x.transpose(0, 2, 3, 1), t, **given)
    return np.asarray(ours).transpose(0, 3, 1, 2), expected


@pytest.mark.parametrize(("config", "inputs"), first(CASES, 2))
def test_the_same_as_diffusers(tmp_path, config, inputs):
    ours, expected = both(tmp_path, config, inputs)
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.slow
def test_pictures_that_are_not_square(tmp_path):
    ours, expected = both(tmp_path, THREE, {}, size=(12, 8))
    assert np.abs(ours - expected).max() <= 1e-5 * np.abs(expected).max()


def test_old_names_and_what_is_saved(tmp_path):
    """google/ddpm-* have the names that attention had before diffusers 0.15."""
    unet = randomize(diffusers.UNet2DModel(**{**BASE, **GOOGLE}))
    unet.save_pretrained(tmp_path / "new")
    model = load_network(tmp_path / "new")
    file = "diffusion_pytorch_model.safetensors"
    names = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = load_file(tmp_path / "new" / file)
    for new, old in names.items():
        tensors = {name.replace(f".{new}.", f".{old}."): x for name, x in tensors.items()}
    assert any(".proj_attn." in name for name in tensors)
    save_file(tensors, tmp_path / "new" / file)
    again = load_network(tmp_path / "new")
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    again.save_pretrained(tmp_path / "ours")
    theirs = diffusers.UNet2DModel.from_pretrained(tmp_path / "ours").state_dict()
    assert {name: x.tolist() for name, x in theirs.items()} == {
        name: x.tolist() for name, x in unet.state_dict().items()
    }
    assert type(diffusax.UNet2DModel.from_pretrained(tmp_path / "ours")) is type(again)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"down_block_types": ("DownBlock2D",)}, "down_block_types and block_out_channels"),
        ({"down_block_types": ("DownBlock2D", "SkipDownBlock2D")}, "down_block_types"),
        ({"norm_num_groups": 7}, "norm_num_groups=7"),
        ({"attention_head_dim": 64}, "attention_head_dim=64, the width of a head"),
        ({"time_embedding_type": "learned"}, "num_train_timesteps must be given"),
        ({"layers_per_block": 16, "block_out_channels": (16,) * 10}, "block_types"),
        ({"block_out_channels": (2, 4), "norm_num_groups": 2}, r"block_out_channels\[0\]"),
    ],
)
def test_configs_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        UNet2DConfig(**{**BASE, **changes})


def test_inputs_that_cannot_be():
    model = initialize(UNet2DModel, UNet2DConfig(**BASE))
    x, t = np.zeros((1, 8, 8, 3), np.float32), np.zeros(1, np.float32)
    with pytest.raises(ValueError, match=r"sample must have shape .* channels come last"):
        jax.eval_shape(model.apply, model.params, x.transpose(0, 3, 1, 2), t)
    with pytest.raises(ValueError, match="height and width divisible by 2"):
        jax.eval_shape(model.apply, model.params, x[:, :7], t)
    with pytest.raises(ValueError, match="class_labels cannot be given"):
        jax.eval_shape(lambda p: model.apply(p, x, t, class_labels=np.zeros(1, int)), model.params)
    told = Network(UNet2DModel, dataclasses.replace(model.config, num_class_embeds=3))
    with pytest.raises(ValueError, match="class_labels must be given"):
        jax.eval_shape(told.apply, told.shapes, x, t)


def test_the_defaults_are_those_of_diffusers():
    theirs = {k: v for k, v in diffusers.UNet2DModel(**BASE).config.items() if k[0] != "_"}
    ours = config_to_dict(UNet2DConfig(**BASE))
    del ours["_class_name"]
    as_list = {k: list(v) if isinstance(v, tuple) else v for k, v in theirs.items()}
    assert ours == as_list


@pytest.mark.slow
def test_gradient_checkpointing_changes_no_gradient():
    model = initialize(UNet2DModel, UNet2DConfig(**BASE))
    x = np.random.default_rng(0).normal(size=(1, 8, 8, 3)).astype(np.float32)

    def gradient(level):
        def loss(params):
            y = model.apply(params, x, np.float32(7), gradient_checkpointing=level)
            return (y**2).sum()

        return jax.jit(jax.grad(loss))(model.params)

    expected = gradient("none")
    for level in ("blocks", "full"):
        for a, b in zip(jax.tree.leaves(gradient(level)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
