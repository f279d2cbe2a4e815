import diffusers
import jax
import numpy as np
import pytest
import torch
from support.tiny import randomize

from diffusax.models.autoencoders.tiling import tiled_decode
from diffusax.networks import load_network


def kl(levels, sample_size):
    return randomize(
        diffusers.AutoencoderKL(
            block_out_channels=(8, 16, 8)[:levels],
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            norm_num_groups=4,
            sample_size=sample_size,
        )
    )


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def nhwc(x):
    return np.asarray(x).transpose(0, 2, 3, 1)


def nchw(x):
    return torch.tensor(np.asarray(x).transpose(0, 3, 1, 2))


def assert_close(actual, expected, tolerance=1e-5):
    expected = nhwc(expected)
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


# One tile; cut-off tiles of one size, of two sizes; a last tile of one latent; more tiles one way.
SIZES = [(8, 8), (17, 9), (15, 22), (13, 7), (6, 31)]


# PyTorch runs the tiles too, so that only the tiles and their blending are compared.
@torch.no_grad()
@pytest.mark.parametrize(
    ("size", "levels", "batch"), list(zip(SIZES, (2, 2, 1, 2, 2), (1, 2, 1, 1, 1), strict=True))
)
def test_tiles_and_blending_are_those_of_diffusers(size, levels, batch):
    factor = 2 ** (levels - 1)
    vae = kl(levels, 8 * factor)
    z = normal(batch, 4, *size)
    vae.enable_tiling()
    decoded = vae.decode(torch.tensor(z)).sample
    vae.disable_tiling()

    def decode(tile):
        return nhwc(vae.decode(nchw(tile)).sample)

    assert_close(tiled_decode(decode, nhwc(z), tile=8, factor=factor), decoded)


def test_networks_in_tiles_equal_diffusers(tmp_path):
    vae = kl(2, 16)
    vae.save_pretrained(tmp_path)
    vae.enable_tiling()
    network = load_network(tmp_path)
    z = normal(1, 4, 14, 6)
    with torch.no_grad():
        decoded = vae.decode(torch.tensor(z)).sample

    @jax.jit
    def decode(z):
        return network.apply(network.params, z, method="decode")

    assert_close(tiled_decode(decode, nhwc(z), tile=8, factor=2), decoded)


@torch.no_grad()
@pytest.mark.parametrize("size", SIZES)
def test_encoding_in_tiles_is_that_of_diffusers(tmp_path, size):
    vae = kl(2, 16)
    vae.save_pretrained(tmp_path)
    vae.enable_tiling()
    model = load_network(tmp_path)
    model.enable_tiling()
    x = torch.tensor(normal(1, 3, *(2 * n for n in size)))
    expected, found = vae.encode(x).latent_dist, model.encode(x).latent_dist
    for theirs, ours in ((expected.mean, found.mean), (expected.logvar, found.logvar)):
        assert np.abs(np.asarray(ours) - theirs.numpy()).max() < 1e-4


def enlarge(seen):
    def decode(z):
        seen.append(z.shape[1:3])
        return z.repeat(2, axis=1).repeat(2, axis=2)

    return decode


@pytest.mark.parametrize("size", SIZES)
def test_tiles_have_at_most_three_heights_and_three_widths(size):
    seen = []
    tiled_decode(enlarge(seen), normal(1, *size, 3), tile=8, factor=2)
    for axis in (0, 1):
        assert max(shape[axis] for shape in seen) == min(8, size[axis])
        assert len({shape[axis] for shape in seen}) <= 3


# Sizes for which diffusers gives a picture of another size.
@pytest.mark.parametrize("tile", [1, 2, 3, 5, 6, 7, 9])
def test_any_tile_gives_a_picture_of_the_right_size_without_shifts(tile):
    z = np.linspace(0, 1, 20, dtype=np.float32)[None, :, None, None] + np.zeros((1, 1, 13, 3))
    result = tiled_decode(enlarge([]), z, tile=tile, factor=2)
    np.testing.assert_allclose(result, enlarge([])(z), atol=1e-6)


def test_tile_of_no_latent_is_an_error():
    with pytest.raises(ValueError, match="tile must be at least one latent"):
        tiled_decode(enlarge([]), normal(1, 8, 8, 3), tile=0, factor=8)
