"""Wan's autoencoders of videos against PyTorch's."""

import diffusers
import jax
import numpy as np
import pytest
import torch
from support.tiny_transformers import WAN22_VAE, wan_autoencoder
from support.torch_params import params_of

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models import AutoencoderKLWan, AutoencoderKLWanConfig
from diffusax.models.network import Network, cast_params
from diffusax.networks import Model, load_network

# Wan-AI/Wan2.2-TI2V-5B-Diffusers, vae/config.json; the numbers of latents are others.
WHOLE_22 = {
    **WAN22_VAE,
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "num_res_blocks": 2,
    "latents_mean": [0.1] * 48,
    "latents_std": [0.9] * 48,
}


@pytest.fixture(scope="module", params=[{}, WAN22_VAE], ids=["2.1", "2.2"])
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    vae = wan_autoencoder(**request.param)
    vae.save_pretrained(folder)
    return vae, load_network(folder)


def of_torch(vae):
    """The model with the parameters of PyTorch's."""
    network = Network(AutoencoderKLWan, config_of(vae))
    return Model(network, params_of(network, vae))


def config_of(vae):
    """Our config of PyTorch's network."""
    given = {k: v for k, v in vae.config.items() if not k.startswith("_")}
    return config_from_dict(AutoencoderKLWanConfig, given)


def factor(vae):
    """Pixels per latent."""
    return vae.config.scale_factor_spatial


def videos(frames, h, w, b=2):
    """b 3 f h w."""
    shape = b, 3, frames, h, w
    return torch.tensor(np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32))


def latents(vae, frames, h, w, b=2):
    """b z f h w."""
    shape = b, vae.config.z_dim, frames, h, w
    return torch.tensor(np.random.default_rng(1).standard_normal(shape).astype(np.float32))


def assert_close(actual, expected, tolerance=1e-4):
    """In every frame; both are b c f h w."""
    actual, expected = (np.asarray(x.detach()) for x in (actual, expected))
    assert actual.shape == expected.shape
    error = np.abs(actual - expected).max((0, 1, 3, 4))
    assert (error <= tolerance * np.abs(expected).max((0, 1, 3, 4))).all(), error


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 5, 9])
def test_encodes_and_decodes_as_diffusers_does(both, frames):
    vae, model = both
    n = factor(vae)
    # Frames that are no chunk of four are left out.
    x = videos(frames + 2 * (frames > 5), 3 * n, 2 * n)
    found, expected = model.encode(x).latent_dist, vae.encode(x).latent_dist
    assert_close(found.mode(), expected.mode())
    assert_close(found.logvar, expected.logvar)
    z = latents(vae, (frames + 3) // 4, 3, 2)
    decoded = vae.decode(z).sample
    assert decoded.shape[2] == frames
    assert ((decoded > -1) & (decoded < 1)).float().mean() > 0.2
    assert_close(model.decode(z).sample, decoded)
    (as_tuple,) = model.decode(z, return_dict=False)
    assert_close(as_tuple, decoded)
    if frames == 5:
        assert_close(model(x).sample, vae(x).sample)


@torch.no_grad()
def test_sides_of_videos_that_are_no_multiple_of_latents():
    vae = wan_autoencoder()
    x = videos(5, 27, 45, b=1)
    assert_close(of_torch(vae).encode(x).latent_dist.mode(), vae.encode(x).latent_dist.mode())


@torch.no_grad()
def test_frames_do_not_depend_on_those_after_them(both):
    vae, model = both
    z = latents(vae, 3, 3, 2)
    whole = model.decode(z).sample
    for count in (1, 2):
        fewer = model.decode(z[:, :, :count]).sample
        assert_close(fewer, whole[:, :, : 4 * count - 3], 1e-6)
    other = model.decode(z.flip(2)).sample
    assert (other - whole).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "size", "pixels"),
    # Wan 2.2's tiles are of 256 pixels for decoding, but of 512 for encoding.
    [({}, (33, 26), (33, 9)), (WAN22_VAE, (17, 14), (27, 9))],
    ids=["2.1", "2.2"],
)
def test_tiles_and_blending_are_those_of_diffusers(options, size, pixels):
    few = {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "decoder_base_dim": None}
    vae = wan_autoencoder(**{**options, **few})
    model = of_torch(vae)
    vae.enable_tiling()
    model.enable_tiling()
    z = latents(vae, 2, *size, b=1)
    decoded = vae.decode(z).sample
    assert_close(model.decode(z).sample, decoded)
    model.disable_tiling()
    assert (model.decode(z).sample - decoded).abs().max() > 1e-3
    model.enable_tiling()
    x = videos(5, *(n * factor(vae) for n in pixels), b=1)
    found, expected = model.encode(x).latent_dist, vae.encode(x).latent_dist
    assert_close(found.mean, expected.mean)
    assert_close(found.logvar, expected.logvar)


@torch.no_grad()
def test_networks_go_back_to_diffusers_as_they_came(both, tmp_path):
    vae, model = both
    model.save_pretrained(tmp_path)
    again = diffusers.AutoencoderKLWan.from_pretrained(tmp_path)
    state = again.state_dict()
    assert state.keys() == vae.state_dict().keys()
    for name, tensor in vae.state_dict().items():
        np.testing.assert_array_equal(state[name], tensor)
    told = {k: v for k, v in vae.config.items() if not k.startswith("_")}
    assert {k: v for k, v in again.config.items() if k in told} == told


@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_pytorch_is(both):
    vae, model = both
    half = Model(model.network, cast_params(model.params, "bfloat16"))
    rounded = type(vae)(**vae.config).to(torch.bfloat16)
    rounded.load_state_dict(vae.state_dict())
    z = latents(vae, 2, 3, 2)
    exact = vae.decode(z).sample
    theirs = (rounded.decode(z.to(torch.bfloat16)).sample.float() - exact).abs().mean()
    ours = (half.decode(z.to(torch.bfloat16)).sample.float() - exact).abs().mean()
    # A convolution here rounds its sums before it adds the bias.
    assert 0 < ours < 1.5 * theirs


def test_gradients_are_those_of_pytorch():
    vae = wan_autoencoder(**WAN22_VAE)
    model = of_torch(vae)
    z = latents(vae, 3, 2, 2, b=1).requires_grad_()
    weights = np.random.default_rng(2).standard_normal(tuple(vae.decode(z).sample.shape))
    weights = weights.astype(np.float32)
    (vae.decode(z).sample * torch.tensor(weights)).sum().backward()

    def loss(z):
        videos = model.apply(model.params, z, method="decode").clip(-1, 1)
        return (videos * weights.transpose(0, 2, 3, 4, 1)).sum()

    found = jax.jit(jax.grad(loss))(z.detach().numpy().transpose(0, 2, 3, 4, 1))
    assert_close(torch.tensor(np.array(found)).permute(0, 4, 1, 2, 3), z.grad)


def equations(jaxpr):
    """The number of equations, those of inner programs too."""
    inner = jax.tree.leaves(
        [e.params for e in jaxpr.eqns], is_leaf=lambda x: hasattr(getattr(x, "jaxpr", x), "eqns")
    )
    found = (getattr(x, "jaxpr", x) for x in inner)
    return len(jaxpr.eqns) + sum(equations(x) for x in found if hasattr(x, "eqns"))


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_the_program_does_not_grow_with_the_frames(both, method):
    _, model = both

    def size(frames):
        shape = (frames, 32, 32, 3) if method == "encode" else (frames // 4 + 1, 4, 4)
        shape = shape if method == "encode" else (*shape, model.config.z_dim)

        def call(params, x):
            return model.apply(params, x, method=method)

        x = jax.ShapeDtypeStruct((1, *shape), np.float32)
        return equations(jax.make_jaxpr(call)(model.network.shapes, x).jaxpr)

    assert size(9) == size(17) > size(1)


def test_other_shapes_are_refused(both):
    vae, model = both
    z = vae.config.z_dim
    with pytest.raises(ValueError, match=r"x must have shape \(batch, 3, frames, height, width\)"):
        model.encode(torch.zeros(1, 3, 32, 32))
    with pytest.raises(ValueError, match=r"second here: z.transpose\(0, 4, 1, 2, 3\)"):
        model.decode(torch.zeros(1, 2, 3, 3, z))
    with pytest.raises(ValueError, match="z must have at least one frame"):
        model.decode(torch.zeros(1, z, 0, 3, 3))
    with pytest.raises(ValueError, match=r"last here: z.transpose\(0, 2, 3, 4, 1\)"):
        model.run(np.zeros((1, z, 2, 3, 3), np.float32), method="decode")
    if vae.config.is_residual:
        with pytest.raises(ValueError, match=r"multiples of 16 \(got 40x32\)"):
            model.encode(torch.zeros(1, 3, 1, 40, 32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperal_downsample": [True, True, True]}, "at most two entries that are True"),
        ({"temperal_downsample": [True]}, "one entry for each level of dim_mult but the"),
        ({"patch_size": 2}, "in_channels must be divisible by the 4 pixels of a patch"),
        ({"is_residual": True, "dim_mult": [1, 2, 4, 8]}, "more channels on the last level"),
        ({"latents_std": [1.0]}, "latents_std must have one entry per latent channel"),
        ({"attn_scales": [1.0]}, "attn_scales"),
    ],
)
def test_other_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(AutoencoderKLWanConfig, changes)


@pytest.mark.parametrize("options", [{}, WHOLE_22], ids=["2.1", "2.2"])
def test_the_whole_has_the_tensors_and_options_of_diffusers(options):
    with torch.device("meta"):
        theirs = diffusers.AutoencoderKLWan(**options)
    config = config_of(theirs)
    shapes = torch_shapes(Network(AutoencoderKLWan, config).shapes)
    assert shapes == {name: tuple(x.shape) for name, x in theirs.state_dict().items()}
    assert config.downsampling == theirs.config.scale_factor_spatial
    assert config.frames_per_latent == theirs.config.scale_factor_temporal
    assert options or config == AutoencoderKLWanConfig()
