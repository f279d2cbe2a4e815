import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers.models.transformers import transformer_z_image
from support.tiny import randomize
from support.tiny_transformers import upstream_z_image, z_image_inputs, z_image_transformer
from support.torch_params import assert_close, params_of

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models import ZImageTransformer2DConfig, ZImageTransformer2DModel
from diffusax.models.network import Network, cast_params
from diffusax.models.ops.rotation import ROTATIONS
from diffusax.models.transformers.blocks import rotary_positions
from diffusax.models.transformers.z_image import ZImageTransformerBlock
from diffusax.networks import Model, load_network

REAL = {
    "all_patch_size": [2],
    "all_f_patch_size": [1],
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "cap_feat_dim": 2560,
    "dim": 3840,
    "in_channels": 16,
    "n_heads": 30,
    "n_kv_heads": 30,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "norm_eps": 1e-05,
    "qk_norm": True,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
}
"""The options of Z-Image-Turbo."""
CONFIG = config_from_dict(ZImageTransformer2DConfig, REAL)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("z-image")
    network = z_image_transformer()
    network.save_pretrained(folder)
    return network, load_network(folder, dtype="float32")


def predict(model, given):
    """Our prediction, b c h w."""
    x = given.latents.transpose(0, 2, 3, 1)
    y = jax.jit(model.apply)(model.params, x, given.times, *given.padded)
    return np.asarray(y.astype("float32")).transpose(0, 3, 1, 2)


# 15 tokens of an image and 5, 32 and 40 of captions: each is filled up, or full.
@pytest.mark.parametrize(
    ("lengths", "size"),
    [((5, 40, 32), (6, 10)), pytest.param((33,), (8, 16), marks=pytest.mark.slow)],
)
def test_the_network_predicts_as_diffusers_does(both, lengths, size):
    network, model = both
    given = z_image_inputs(lengths, size)
    expected = upstream_z_image(network, given)
    assert expected.std() > 0.1
    assert_close(predict(model, given), expected)


@pytest.mark.slow
def test_every_parameter_changes_the_prediction(both):
    _, model = both
    given = z_image_inputs((5, 40))
    x = given.latents.transpose(0, 2, 3, 1)

    def squares(params):
        return (model.apply(params, x, given.times, *given.padded) ** 2).sum()

    gradients = jax.jit(jax.grad(squares))(model.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


def test_bfloat16_is_as_near_to_float32_as_pytorch_is(both):
    network, model = both
    given = z_image_inputs((5, 40))
    exact = upstream_z_image(network, given)
    half = z_image_transformer().to(torch.bfloat16)
    theirs = np.abs(upstream_z_image(half, given, torch.bfloat16) - exact)
    ours = np.abs(
        predict(Model(model.network, cast_params(model.params, "bfloat16")), given) - exact
    )
    assert 0 < ours.mean() < 1.2 * theirs.mean()


@pytest.mark.parametrize("form", ["product", "swap"])
def test_rotations_of_tpus_and_gpus_are_the_same(form):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    positions = [rng.integers(0, 9, (2, 5)) for _ in range(2)]
    rotation = rotary_positions(positions, (9, 9), (2, 6), 256.0)
    pairs, other = (ROTATIONS[name](x, rotation) for name in ("pairs", form))
    np.testing.assert_allclose(pairs, other, atol=1e-6)
    assert np.abs(np.asarray(pairs) - x).max() > 0.1


def test_called_as_in_diffusers(both):
    network, model = both
    given = z_image_inputs((5, 40))
    latents = [torch.tensor(x)[:, None] for x in given.latents]
    captions = list(map(torch.tensor, given.captions))
    expected = network(latents, torch.tensor(given.times), captions).sample
    actual = model(latents, torch.tensor(given.times), captions).sample
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape
        assert_close(ours.numpy(), theirs.numpy())
    (as_tuple,) = model(latents, given.times, captions, return_dict=False)
    assert len(as_tuple) == 2
    with pytest.raises(ValueError, match="x must be a list of latents of one shape"):
        model(given.latents, given.times, captions)
    with pytest.raises(ValueError, match="cap_feats must be a list of 2 arrays"):
        model(latents, given.times, captions[:1])
    with pytest.raises(ValueError, match="patch_size and f_patch_size must be 2 and 1"):
        model(latents, given.times, captions, patch_size=4)


def test_saved_and_read_by_diffusers(both, tmp_path):
    network, model = both
    save_network(model, tmp_path)
    again = diffusers.ZImageTransformer2DModel.from_pretrained(tmp_path)
    given = z_image_inputs((7,))
    np.testing.assert_array_equal(upstream_z_image(again, given), upstream_z_image(network, given))
    assert again.config.all_patch_size in ([2], (2,))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"all_patch_size": [2, 4]}, "all_patch_size"),
        ({"siglip_feat_dim": 1152}, "siglip_feat_dim"),
        ({"axes_dims": [32, 48, 40]}, "must add up to dim / n_heads"),
        ({"axes_dims": [31, 49, 48]}, "must be even"),
    ],
)
def test_other_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(ZImageTransformer2DConfig, {**REAL, **changes})


def test_more_positions_than_there_are_is_an_error(both):
    _, model = both
    given = z_image_inputs((5,), (66, 4))
    with pytest.raises(ValueError, match="33 rows of patches are more than axes_lens"):
        predict(model, given)


@pytest.mark.slow
def test_one_block_at_full_width_is_as_diffusers_block():
    theirs = transformer_z_image.ZImageTransformerBlock(0, 3840, 30, 30, 1e-5, True)
    randomize(theirs).requires_grad_(False)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 96, 3840)).astype(np.float32)
    temb = rng.standard_normal((1, 256)).astype(np.float32)
    ids = rng.integers(0, 512, (96, 3)).astype(np.int32)
    rope = transformer_z_image.RopeEmbedder(256.0, [32, 48, 48], [1536, 512, 512])(
        torch.tensor(ids)
    )
    expected = theirs(torch.tensor(x), None, rope[None], torch.tensor(temb)).numpy()

    class Block(ZImageTransformerBlock):
        def __init__(self, config, *, rngs):
            super().__init__(config, modulated=True, rngs=rngs)

    network = Network(Block, CONFIG)
    positions = [ids[None, :, i] for i in range(3)]
    rotation = rotary_positions(positions, (512, 512, 512), (32, 48, 48), 256.0)
    actual = jax.jit(network.apply)(params_of(network, theirs), x, rotation, None, temb)
    assert_close(np.asarray(actual), expected)


def test_the_whole_has_the_tensors_of_diffusers():
    with torch.device("meta"):
        theirs = diffusers.ZImageTransformer2DModel(**REAL)
    shapes = torch_shapes(Network(ZImageTransformer2DModel, CONFIG).shapes)
    assert shapes == {name: tuple(x.shape) for name, x in theirs.state_dict().items()}
    assert sum(map(np.prod, shapes.values())) > 6e9
