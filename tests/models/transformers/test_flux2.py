import diffusers
import jax
import numpy as np
import pytest
import torch
from diffusers.models.transformers import transformer_flux2
from flax import nnx
from support.tiny import randomize
from support.tiny_transformers import klein_inputs, klein_transformer, upstream_klein
from support.torch_params import assert_close, params_of

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models import Flux2Transformer2DConfig, Flux2Transformer2DModel
from diffusax.models.layers.layers import SplitLinear
from diffusax.models.network import Network, cast_params
from diffusax.models.transformers.blocks import rotation_at
from diffusax.models.transformers.flux2 import (
    Flux2SingleTransformerBlock,
    Flux2TransformerBlock,
    image_ids,
    text_ids,
)
from diffusax.networks import Model, load_network
from diffusax.runtime.devices.lowering import lowering_for

REAL = {
    "attention_head_dim": 128,
    "axes_dims_rope": [32, 32, 32, 32],
    "eps": 1e-06,
    "guidance_embeds": False,
    "in_channels": 128,
    "joint_attention_dim": 7680,
    "mlp_ratio": 3.0,
    "num_attention_heads": 24,
    "num_layers": 5,
    "num_single_layers": 20,
    "out_channels": None,
    "patch_size": 1,
    "rope_theta": 2000,
    "timestep_guidance_channels": 256,
}
"""The options of FLUX.2 klein-4B."""
CONFIG = config_from_dict(Flux2Transformer2DConfig, REAL)
WITH_SCALES = {"guidance_embeds": True, "out_channels": 12, "mlp_ratio": 2.5}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux2")
    network = klein_transformer()
    network.save_pretrained(folder)
    return network, load_network(folder, dtype="float32")


def predict(model, given):
    """Our prediction, b h w c."""
    more = {}
    if given.references:
        more["references"] = given.references
    if model.config.guidance_embeds:
        more["guidance"] = given.scales
    call = given.latents, given.times, given.text
    return np.asarray(jax.jit(model.apply)(model.params, *call, **more).astype("float32"))


def test_the_network_predicts_as_diffusers_does(both):
    network, model = both
    given = klein_inputs()
    expected = upstream_klein(network, given)
    assert expected.std() > 0.1
    assert_close(predict(model, given), expected)


def test_references_are_seen_as_in_diffusers(both):
    network, model = both
    given = klein_inputs((2, 3), (4, 2))
    seen = predict(model, given)
    assert_close(seen, upstream_klein(network, given))
    assert np.abs(seen - predict(model, klein_inputs())).max() > 0.05


@pytest.mark.slow
def test_with_guidance_scales_and_other_channels(tmp_path):
    network = klein_transformer(1, **WITH_SCALES)
    network.save_pretrained(tmp_path)
    model = load_network(tmp_path, dtype="float32")
    assert_close(
        predict(model, klein_inputs(size=(4, 7))),
        upstream_klein(network, klein_inputs(size=(4, 7))),
    )
    with pytest.raises(ValueError, match="guidance must be given"):
        model(**{**klein_inputs().arguments(), "guidance": None})


@pytest.mark.slow
def test_every_parameter_changes_the_prediction(both):
    _, model = both
    given = klein_inputs((2, 3))
    call = given.latents, given.times, given.text

    def gradients(**options):
        def squares(params):
            y = model.apply(params, *call, references=given.references, **options)
            return (y**2).sum()

        return jax.jit(jax.grad(squares))(model.params)

    found, again = gradients(), gradients(gradient_checkpointing="blocks")
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        assert_close(np.asarray(other), np.asarray(leaf), 1e-4)


def test_bfloat16_is_as_near_to_float32_as_pytorch_is(both):
    network, model = both
    given = klein_inputs()
    exact = upstream_klein(network, given)
    half = klein_transformer().to(torch.bfloat16)
    theirs = np.abs(upstream_klein(half, given, torch.bfloat16) - exact)
    halved = Model(model.network, cast_params(model.params, "bfloat16"))
    ours = np.abs(predict(halved, given) - exact)
    assert 0 < ours.mean() < 1.2 * theirs.mean()


def test_a_tpus_products_are_the_same():
    layer = SplitLinear(8, (4, 4, 2, 6), read_together=(1, 2, 1), rngs=nnx.Rngs(0))
    layer.bias[...] = np.arange(16.0)
    x = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    results, products = {}, {}
    for platform in ("cpu", "tpu"):
        with lowering_for((platform,)):
            results[platform] = layer(x)
            products[platform] = str(jax.make_jaxpr(layer)(x)).count("dot_general")
    one, several = results.values()
    assert products == {"cpu": 1, "tpu": 3}
    assert [y.shape[-1] for y in several] == [4, 4, 2, 6]
    for y, z in zip(one, several, strict=True):
        np.testing.assert_allclose(z, y, atol=1e-5)


def test_called_as_in_diffusers(both):
    network, model = both
    call = klein_inputs((2, 3)).arguments()
    expected = network(**call).sample
    actual = model(**call).sample
    assert_close(actual.numpy(), expected.numpy())
    assert_close(model(**call, return_dict=False)[0].numpy(), expected.numpy())
    with pytest.raises(ValueError, match=r"img_ids must be integers .* of shape \(21, 4\)"):
        model(**{**call, "img_ids": call["img_ids"][:, 1:]})
    with pytest.raises(ValueError, match="joint_attention_kwargs must be None"):
        model(**call, joint_attention_kwargs={"scale": 1.0})
    with pytest.raises(ValueError, match="keys are not kept"):
        model(**call, kv_cache_mode="extract", num_ref_tokens=6)


def test_saved_and_read_by_diffusers(both, tmp_path):
    network, model = both
    save_network(model, tmp_path)
    again = diffusers.Flux2Transformer2DModel.from_pretrained(tmp_path)
    np.testing.assert_array_equal(
        upstream_klein(again, klein_inputs()), upstream_klein(network, klein_inputs())
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 2}, "patch_size"),
        ({"axes_dims_rope": [32, 32, 32]}, "axes_dims_rope"),
        ({"axes_dims_rope": [32, 32, 32, 16]}, "must add up to attention_head_dim"),
        ({"axes_dims_rope": [31, 33, 32, 32]}, "must be even"),
    ],
)
def test_other_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(Flux2Transformer2DConfig, {**REAL, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["double", "single"])
def test_one_block_at_full_width_is_as_diffusers_block(kind):
    theirs = {
        "double": transformer_flux2.Flux2TransformerBlock,
        "single": transformer_flux2.Flux2SingleTransformerBlock,
    }[kind](3072, 24, 128)
    randomize(theirs).requires_grad_(False)
    ours = {"double": Flux2TransformerBlock, "single": Flux2SingleTransformerBlock}[kind]
    rng = np.random.default_rng(0)
    x, text = (rng.standard_normal((1, n, 3072)).astype(np.float32) for n in (6 * 7, 30))
    of_x, of_text = rng.standard_normal((2, 1, 1, 6 * 3072)).astype(np.float32)
    ids = np.concatenate([text_ids(30), image_ids(6, 7, 10)])
    rope = transformer_flux2.Flux2PosEmbed(2000, [32] * 4)(torch.tensor(ids))
    network, rotation = Network(ours, CONFIG), rotation_at(ids, [32] * 4, 2000)
    params = params_of(network, theirs)
    if kind == "double":
        given = map(torch.tensor, (x, text, of_x, of_text))
        expected = theirs(*given, rope)
        parts = (np.split(m, 6, axis=-1) for m in (of_x, of_text))
        actual = jax.jit(network.apply)(params, x, text, *parts, rotation)
        for mine, other in zip(actual, reversed(expected), strict=True):
            assert_close(np.asarray(mine), other.numpy())
    else:
        joined, of_x = np.concatenate([text, x], axis=1), of_x[..., : 3 * 3072]
        expected = theirs(torch.tensor(joined), None, torch.tensor(of_x), rope)
        actual = jax.jit(network.apply)(params, joined, np.split(of_x, 3, axis=-1), rotation)
        assert_close(np.asarray(actual), expected.numpy())


def test_the_whole_has_the_tensors_of_diffusers():
    with torch.device("meta"):
        theirs = diffusers.Flux2Transformer2DModel(**REAL)
    shapes = torch_shapes(Network(Flux2Transformer2DModel, CONFIG).shapes)
    assert shapes == {name: tuple(x.shape) for name, x in theirs.state_dict().items()}
    assert 3.8e9 < sum(map(np.prod, shapes.values())) < 4.0e9
