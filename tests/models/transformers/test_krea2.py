import diffusers
import jax
import numpy as np
import pytest
import torch
from support.tiny_transformers import krea2_inputs, krea2_transformer, upstream_krea2
from support.torch_params import assert_close

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models import Krea2Transformer2DConfig, Krea2Transformer2DModel
from diffusax.models.network import Network, cast_params
from diffusax.networks import Model, load_network


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("krea2")
    network = krea2_transformer()
    network.save_pretrained(folder)
    return network, load_network(folder, dtype="float32")


def predict(model, given):
    """Our prediction, b h w c, of texts with padding after them."""
    y = jax.jit(model.apply)(model.params, given.latents, given.times, *given.padded)
    return np.asarray(y.astype("float32"))


# diffusers' texts have their padding inside.
@pytest.mark.parametrize(
    ("lengths", "size"),
    [((5, 12, 9), (6, 10)), pytest.param((33,), (8, 14), marks=pytest.mark.slow)],
)
def test_the_network_predicts_as_diffusers_does(both, lengths, size):
    network, model = both
    given = krea2_inputs(lengths, size)
    expected = upstream_krea2(network, given)
    assert expected.std() > 0.1
    assert_close(predict(model, given), expected)


def test_the_text_is_fused_once_for_all_times(both):
    network, model = both
    given = krea2_inputs((5, 12))
    text, lengths = given.padded
    fused = model.apply(model.params, text, lengths, method="fuse_text")
    assert fused.shape == (*text.shape[:2], 48)
    call = model.params, given.latents, given.times, fused, lengths
    assert_close(np.asarray(model.apply(*call, fused=True)), upstream_krea2(network, given))


@pytest.mark.slow
def test_every_parameter_changes_the_prediction(both):
    _, model = both
    given = krea2_inputs((5, 12))

    def squares(params):
        return (model.apply(params, given.latents, given.times, *given.padded) ** 2).sum()

    gradients = jax.jit(jax.grad(squares))(model.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


def test_gradients_are_the_same_with_activations_computed_again(both):
    _, model = both
    given = krea2_inputs((5, 12))

    def gradient(kind):
        def squares(params):
            y = model.apply(
                params, given.latents, given.times, *given.padded, gradient_checkpointing=kind
            )
            return (y**2).mean()

        return jax.jit(jax.grad(squares))(model.params)

    plain, again = gradient("none"), gradient("blocks")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), plain, again)


def test_bfloat16_is_as_near_to_float32_as_pytorch_is(both):
    network, model = both
    given = krea2_inputs((5, 12))
    exact = upstream_krea2(network, given)
    half = krea2_transformer().to(torch.bfloat16)
    for name, parameter in half.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    theirs = np.abs(upstream_krea2(half, given, torch.bfloat16) - exact)
    ours = np.abs(
        predict(Model(model.network, cast_params(model.params, "bfloat16")), given) - exact
    )
    assert 0 < ours.mean() < 1.2 * theirs.mean()


def test_called_as_in_diffusers(both):
    network, model = both
    given = krea2_inputs((5, 12)).arguments()
    expected = network(**given).sample
    actual = model(**given).sample
    assert actual.shape == expected.shape
    assert_close(actual.numpy(), expected.numpy())
    # Positions of the text's tokens that differ go with their tokens.
    text = given["encoder_hidden_states"].shape[1]
    given["position_ids"][:text, 2] = torch.arange(text)
    moved = network(**given).sample
    assert (moved - expected).abs().max() > 1e-2
    (as_tuple,) = model(**given, return_dict=False)
    assert_close(as_tuple.numpy(), moved.numpy())
    given["encoder_attention_mask"] = None
    assert_close(model(**given).sample.numpy(), network(**given).sample.numpy())
    with pytest.raises(ValueError, match="position_ids must be integers of at least 0, of shape"):
        model(**{**given, "position_ids": given["position_ids"][:-1]})
    with pytest.raises(ValueError, match="text must have shape"):
        model(**{**given, "encoder_hidden_states": given["encoder_hidden_states"][:, :, :2]})
    with pytest.raises(ValueError, match="encoder_attention_mask must have shape"):
        model(**{**given, "encoder_attention_mask": np.ones((2, 3), bool)})


def test_saved_and_read_by_diffusers(both, tmp_path):
    network, model = both
    save_network(model, tmp_path)
    again = diffusers.Krea2Transformer2DModel.from_pretrained(tmp_path)
    given = krea2_inputs((7,))
    assert_close(upstream_krea2(again, given), upstream_krea2(network, given))
    for name, tensor in network.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes_dims_rope": [32, 48, 40]}, "must add up to attention_head_dim"),
        ({"axes_dims_rope": [31, 49, 48]}, "must be even"),
        ({"num_key_value_heads": 5}, "num_attention_heads=48 must be divisible by num_key_value"),
        ({"text_num_key_value_heads": 3}, "text_num_attention_heads=20 must be divisible by text_"),
        ({"text_hidden_dim": 2561}, "text_hidden_dim=2561 must be divisible by"),
        ({"in_channels": 66}, "in_channels=66 must be divisible by 4"),
    ],
)
def test_other_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(Krea2Transformer2DConfig, changes)


def test_latents_of_other_channels_are_an_error(both):
    _, model = both
    given = krea2_inputs((5,))
    with pytest.raises(ValueError, match=r"x must have shape \(batch, height, width, 4\)"):
        model.apply(model.params, given.latents[..., :3], given.times, *given.padded)


def test_the_whole_has_the_tensors_of_diffusers():
    with torch.device("meta"):
        theirs = diffusers.Krea2Transformer2DModel()
    shapes = torch_shapes(Network(Krea2Transformer2DModel, Krea2Transformer2DConfig()).shapes)
    assert shapes == {name: tuple(x.shape) for name, x in theirs.state_dict().items()}
    assert sum(map(np.prod, shapes.values())) > 12e9
