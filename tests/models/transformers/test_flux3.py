import dataclasses

import diffusers
import jax
import numpy as np
import pytest
import torch
from support.tiny_flux3 import flux3_inputs, flux3_transformer, upstream_flux3
from support.torch_params import assert_close

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models import Flux3Transformer2DConfig, Flux3Transformer2DModel
from diffusax.models.network import Network, cast_params
from diffusax.networks import Model, load_network

REAL = {
    "attention_head_dim": 128,
    "axes_dims_rope": [32, 32, 32, 32],
    "cond_in_channels": 128,
    "eps": 1e-06,
    "flow_map": True,
    "in_channels": 128,
    "joint_attention_dim": 20480,
    "mlp_ratio": 3.0,
    "num_attention_heads": 24,
    "num_layers": 5,
    "num_single_layers": 28,
    "rope_theta": 10000,
    "timestep_channels": 256,
}
"""The options of FLUX.3 klein, distilled."""
REFERENCES = [(2, 3), (4, 2)]


@pytest.fixture(scope="module", params=[False, True], ids=["base", "distilled"])
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux3")
    network = flux3_transformer(flow_map=request.param)
    network.save_pretrained(folder)
    return network, load_network(folder, dtype="float32")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flux3")
    network = flux3_transformer()
    network.save_pretrained(folder)
    return network, load_network(folder, dtype="float32")


def predict(model, given, **more):
    """Our prediction, b h w c."""
    if given.references:
        more["references"] = given.references
    if model.config.flow_map:
        more["target"] = given.targets
    call = given.latents, given.times, given.text
    return np.asarray(jax.jit(model.apply)(model.params, *call, **more).astype("float32"))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_network_predicts_as_diffusers_does(both, count):
    network, model = both
    given = flux3_inputs(*REFERENCES[:count])
    expected = upstream_flux3(network, given)
    assert expected.std() > 0.1
    assert_close(predict(model, given), expected)
    if count:
        without = dataclasses.replace(given, references=given.references[:-1])
        assert np.abs(expected - predict(model, without)).max() > 0.01


@pytest.mark.parametrize("count", [0, 2])
def test_texts_of_different_lengths_share_a_batch(base, count):
    network, model = base
    given = flux3_inputs(*REFERENCES[:count], text=9, size=(4, 3))
    short = dataclasses.replace(given, text=given.text[:, :4])
    lengths = np.array([9, 4], np.int32)
    actual = predict(model, given, lengths=lengths)
    assert_close(actual[:1], upstream_flux3(network, given)[:1])
    assert_close(actual[1:], upstream_flux3(network, short)[1:])
    noise = given.text.copy()
    noise[1, 4:] = 100
    assert_close(predict(model, dataclasses.replace(given, text=noise), lengths=lengths), actual)


@pytest.mark.parametrize("count", [0, 2])
def test_what_is_read_once_serves_all_times(base, count):
    _, model = base
    given = flux3_inputs(*REFERENCES[:count], text=6)
    lengths = np.array([6, 4], np.int32)
    read = jax.jit(model.network.apply, static_argnames="method")(
        model.params, given.text, lengths, given.references, method="read_conditions"
    )
    assert len(read) == 1 + bool(count)
    for times in (given.times, given.times / 2):
        at = dataclasses.replace(given, times=times)
        expected = predict(model, at, lengths=lengths)
        assert_close(predict(model, at, lengths=lengths, read=read), expected)
    changed = jax.tree.map(lambda x: -x, read)
    assert np.abs(predict(model, at, lengths=lengths, read=changed) - expected).max() > 0.05


@pytest.mark.slow
def test_every_parameter_changes_the_prediction(both):
    _, model = both
    given = flux3_inputs((2, 3))
    call = given.latents, given.times, given.text
    more = {"target": given.targets} if model.config.flow_map else {}

    def gradients(**options):
        def squares(params):
            y = model.apply(params, *call, references=given.references, **more, **options)
            return (y**2).sum()

        return jax.jit(jax.grad(squares))(model.params)

    found, again = gradients(), gradients(gradient_checkpointing="blocks")
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True):
        assert_close(np.asarray(other), np.asarray(leaf), 1e-4)


def test_bfloat16_is_as_near_to_float32_as_pytorch_is(base):
    network, model = base
    given = flux3_inputs((2, 3))
    exact = upstream_flux3(network, given)
    half = flux3_transformer().to(torch.bfloat16)
    theirs = np.abs(upstream_flux3(half, given, torch.bfloat16) - exact)
    halved = Model(model.network, cast_params(model.params, "bfloat16"))
    ours = np.abs(predict(halved, given) - exact)
    assert 0 < ours.mean() < 1.2 * theirs.mean()


def test_called_as_in_diffusers(both):
    network, model = both
    call = flux3_inputs((2, 3), (4, 2)).arguments(flow_map=model.config.flow_map)
    expected = network(**call).sample
    actual = model(**call).sample
    assert_close(actual.numpy(), expected.numpy())
    assert_close(model(**call, return_dict=False)[0].numpy(), expected.numpy())
    with pytest.raises(ValueError, match=r"img_ids must be numbers, of shape \(15, 4\)"):
        model(**{**call, "img_ids": call["img_ids"][1:]})
    with pytest.raises(ValueError, match="attention_kwargs must be None"):
        model(**call, attention_kwargs={"scale": 1.0})
    with pytest.raises(ValueError, match="image_cond_ids must be given together"):
        model(**{**call, "image_cond_ids": None})
    call.pop("target_timestep", None)
    with pytest.raises(ValueError, match="to a transformer with flow_map=True and to no other"):
        model(**call, **({} if model.config.flow_map else {"target_timestep": 0.5}))


def test_saved_and_read_by_diffusers(both, tmp_path):
    network, model = both
    save_network(model, tmp_path)
    again = diffusers.Flux3Transformer2DModel.from_pretrained(tmp_path)
    given = flux3_inputs((2, 3))
    np.testing.assert_array_equal(upstream_flux3(again, given), upstream_flux3(network, given))


def test_the_whole_has_the_tensors_of_diffusers():
    with torch.device("meta"):
        theirs = diffusers.Flux3Transformer2DModel(**REAL)
    config = config_from_dict(Flux3Transformer2DConfig, REAL)
    shapes = torch_shapes(Network(Flux3Transformer2DModel, config).shapes)
    assert shapes == {name: tuple(x.shape) for name, x in theirs.state_dict().items()}
    assert 5.5e9 < sum(map(np.prod, shapes.values())) < 5.8e9
