import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers.models.transformers import transformer_flux
from support.tiny import randomize
from support.tiny_transformers import flux_arguments, flux_inputs, flux_transformer, upstream_flux
from support.torch_params import assert_close, params_of

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models import FluxTransformer2DConfig, FluxTransformer2DModel
from diffusax.models.autoencoders.latents import patchify, unpatchify
from diffusax.models.network import Network, cast_params
from diffusax.models.transformers import blocks
from diffusax.models.transformers.flux import (
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
    add_residual,
    image_rotation,
)
from diffusax.networks import Model, load_network

REAL = {
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "guidance_embeds": True,
    "in_channels": 64,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 19,
    "num_single_layers": 38,
    "patch_size": 1,
    "pooled_projection_dim": 768,
}
"""The options of FLUX.1-dev."""
CONFIG = config_from_dict(FluxTransformer2DConfig, REAL)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux")
    network = flux_transformer()
    network.save_pretrained(folder)
    return network, load_network(folder, dtype="float32")


def predict(model, given, **more):
    """Our prediction, b t d."""
    rotation = image_rotation(model.config.axes_dims_rope, given.text.shape[1], given.size)
    scales = given.scales if model.config.guidance_embeds else None
    call = given.tokens, given.times, given.text, given.pooled, rotation, scales
    return np.asarray(jax.jit(model.apply)(model.params, *call, **more).astype("float32"))


def test_the_network_predicts_as_diffusers_does(both):
    network, model = both
    given = flux_inputs()
    expected = upstream_flux(network, given)
    assert expected.std() > 0.1
    assert_close(predict(model, given), expected)


@pytest.mark.slow
def test_without_guidance_and_with_other_channels(tmp_path):
    network = flux_transformer(1, guidance_embeds=False, in_channels=96, out_channels=64)
    network.save_pretrained(tmp_path)
    given = flux_inputs(1, (4, 7), channels=96)
    model = load_network(tmp_path, dtype="float32")
    assert_close(predict(model, given), upstream_flux(network, given))


@pytest.mark.slow
def test_every_parameter_changes_the_prediction(both):
    _, model = both
    given = flux_inputs()
    rotation = image_rotation(model.config.axes_dims_rope, given.text.shape[1], given.size)
    call = given.tokens, given.times, given.text, given.pooled, rotation, given.scales
    gradients = jax.jit(jax.grad(lambda params: (model.apply(params, *call) ** 2).sum()))(
        model.params
    )
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.slow
def test_bfloat16_is_as_near_to_float32_as_pytorch_is(both):
    network, model = both
    given = flux_inputs()
    exact = upstream_flux(network, given)
    half = flux_transformer().to(torch.bfloat16)
    theirs = np.abs(upstream_flux(half, given, torch.bfloat16) - exact)
    halved = Model(model.network, cast_params(model.params, "bfloat16"))
    ours = np.abs(predict(halved, given) - exact)
    assert 0 < ours.mean() < 1.2 * theirs.mean()


def test_called_as_in_diffusers_with_residuals(both):
    network, model = both
    call = flux_arguments(flux_inputs())
    generator = torch.Generator().manual_seed(0)
    # Two residuals for three blocks: the first two share one.
    residuals = {
        "controlnet_block_samples": [torch.randn(2, 15, 24, generator=generator)],
        "controlnet_single_block_samples": list(torch.randn(2, 2, 15, 24, generator=generator)),
    }
    expected = network(**call, **residuals).sample
    actual = model(**call, **residuals).sample
    assert_close(actual.numpy(), expected.numpy())
    assert (actual - model(**call, return_dict=False)[0]).abs().max() > 0.1
    cycled = {**call, **residuals, "controlnet_blocks_repeat": True}
    assert_close(model(**cycled).sample.numpy(), network(**cycled).sample.numpy())
    with pytest.raises(ValueError, match="img_ids must be integers of at least 0"):
        model(**{**call, "img_ids": call["img_ids"][1:]})
    with pytest.raises(ValueError, match="guidance must be given"):
        model(**{**call, "guidance": None})
    with pytest.raises(ValueError, match="joint_attention_kwargs must be None"):
        model(**call, joint_attention_kwargs={"scale": 1.0})


@pytest.mark.parametrize(("count", "chosen"), [(5, [0, 0, 0, 1, 1]), (0, [0, 1, 0, 1, 0])])
def test_fewer_residuals_than_blocks_are_shared_or_begun_again(count, chosen):
    residuals = list(np.arange(2.0))
    assert [int(add_residual(np.zeros(()), residuals, i, count)) for i in range(5)] == chosen


def test_saved_and_read_by_diffusers(both, tmp_path):
    network, model = both
    save_network(model, tmp_path)
    again = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path)
    np.testing.assert_array_equal(
        upstream_flux(again, flux_inputs()), upstream_flux(network, flux_inputs())
    )


def test_tokens_are_those_of_diffusers():
    x = np.random.default_rng(0).standard_normal((2, 4, 6, 3)).astype(np.float32)
    pack = diffusers.FluxPipeline._pack_latents
    expected = pack(torch.tensor(x.transpose(0, 3, 1, 2)), 2, 3, 4, 6).numpy()
    tokens = patchify(x, 2, channels_first=True)
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(unpatchify(tokens, 2, 4, 6, channels_first=True), x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 2}, "patch_size"),
        ({"axes_dims_rope": [16, 56, 48]}, "must add up to attention_head_dim"),
        ({"axes_dims_rope": [15, 57, 56]}, "must be even"),
    ],
)
def test_other_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(FluxTransformer2DConfig, {**REAL, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["double", "single"])
def test_one_block_at_full_width_is_as_diffusers_block(kind):
    theirs = {
        "double": transformer_flux.FluxTransformerBlock,
        "single": transformer_flux.FluxSingleTransformerBlock,
    }[kind](3072, 24, 128)
    randomize(theirs).requires_grad_(False)
    ours = {"double": FluxTransformerBlock, "single": FluxSingleTransformerBlock}[kind]
    rng = np.random.default_rng(0)
    x, text = (rng.standard_normal((1, n, 3072)).astype(np.float32) for n in (6 * 7, 30))
    temb = rng.standard_normal((1, 3072)).astype(np.float32)
    rows, columns = np.indices((6, 7)).reshape(2, -1)
    ids = np.concatenate([np.zeros((30, 3)), np.stack([0 * rows, rows, columns], axis=-1)])
    rope = transformer_flux.FluxPosEmbed(10000, [16, 56, 56])(torch.tensor(ids))
    given = {"image_rotary_emb": rope, "temb": torch.tensor(temb)}
    expected = theirs(torch.tensor(x), torch.tensor(text), **given)

    network = Network(ours, CONFIG)
    params = params_of(network, theirs)
    rotation = image_rotation((16, 56, 56), 30, (6, 7))
    active = jax.nn.silu(temb)
    if kind == "double":
        actual = jax.jit(network.apply)(params, x, text, (active, active), rotation)
    else:
        joined = np.concatenate([text, x], axis=1)
        y = jax.jit(network.apply)(params, joined, active, rotation)
        actual = y[:, 30:], y[:, :30]
    for mine, other in zip(actual, reversed(expected), strict=True):
        assert_close(np.asarray(mine), other.numpy())


def test_the_whole_has_the_tensors_of_diffusers():
    with torch.device("meta"):
        theirs = diffusers.FluxTransformer2DModel(**REAL)
    shapes = torch_shapes(Network(FluxTransformer2DModel, CONFIG).shapes)
    assert shapes == {name: tuple(x.shape) for name, x in theirs.state_dict().items()}
    assert sum(map(np.prod, shapes.values())) > 11.9e9


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_gpus_copy_no_modulations_side_by_side(platform):
    temb = jax.ShapeDtypeStruct((1, 8), np.float32)
    traced = jax.jit(lambda temb: blocks.activations(temb, 2, 2, 3)).trace(temb)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert (":7 = stablehlo.optimization_barrier" in text) == (platform == "cuda")
