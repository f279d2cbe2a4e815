"""Qwen-Image's transformer beside diffusers'."""

import diffusers
import jax
import numpy as np
import pytest
import torch
from support.tiny_transformers import (
    qwen_image_inputs,
    qwen_image_transformer,
    upstream_qwen_image,
)
from support.torch_params import assert_close

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models import QwenImageTransformer2DConfig, QwenImageTransformer2DModel
from diffusax.models.network import Network, cast_params
from diffusax.networks import Model, load_network


@pytest.fixture(scope="module")
def nets(tmp_path_factory):
    """PyTorch's network and ours, by whether images to look at are modulated as at time zero."""
    found = {}
    for still in (False, True):
        folder = tmp_path_factory.mktemp("qwen-image")
        network = qwen_image_transformer(zero_cond_t=still)
        network.save_pretrained(folder)
        found[still] = network, load_network(folder, dtype="float32")
    return found


@pytest.fixture(scope="module")
def both(nets):
    return nets[False]


def predict(model, given, **options):
    """Our prediction, b h w c, of texts with padding after them."""
    call = jax.jit(lambda params, *args, **more: model.apply(params, *args, **more, **options))
    text, lengths = given.padded
    read = given.latents, given.times, text, lengths
    y = call(model.params, *read, references=tuple(given.references))
    return np.asarray(y.astype("float32"))


SEEN = ((4, 6), (8, 2))


@pytest.mark.parametrize("still", [False, True])
@pytest.mark.parametrize(
    ("lengths", "size", "seen"),
    [
        ((5, 12, 9), (6, 10), ()),
        ((3, 8), (6, 10), SEEN),
        # A larger image than the target moves the text.
        ((8, 3), (2, 4), ((10, 14),)),
    ],
)
def test_the_network_predicts_as_diffusers_does(nets, lengths, size, seen, still):
    network, model = nets[still]
    given = qwen_image_inputs(lengths, size, *seen)
    expected = upstream_qwen_image(network, given)
    assert expected.std() > 0.1
    assert_close(predict(model, given), expected)


def test_images_to_look_at_are_modulated_as_at_time_zero_if_the_config_says_so(nets):
    plain, still = (
        predict(model, qwen_image_inputs((5,), (6, 10), *SEEN)) for _, model in nets.values()
    )
    assert np.abs(plain - still).max() > 0.01


def test_what_stands_in_padding_changes_nothing(both):
    _, model = both
    given = qwen_image_inputs((5, 12))
    text, lengths = given.padded
    other = np.where(np.arange(text.shape[1])[:, None] < lengths[:, None, None], text, np.nan)
    y = model.apply(model.params, given.latents, given.times, other, lengths)
    assert_close(np.asarray(y), predict(model, given), 1e-6)


@pytest.mark.slow
def test_every_parameter_changes_the_prediction(both):
    _, model = both
    given = qwen_image_inputs((5, 12))

    def squares(params):
        return (model.apply(params, given.latents, given.times, *given.padded) ** 2).sum()

    gradients = jax.jit(jax.grad(squares))(model.params)
    last = f"transformer_blocks.{model.config.num_layers - 1}"
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        name = ".".join(str(key.key) for key in path)
        # What the last block makes of the text is not read, as in diffusers.
        parts = ("txt_mlp", "attn.to_add_out", "attn.add_q_proj", "attn.norm_added_q")
        unread = name.startswith(tuple(f"{last}.{part}" for part in parts))
        assert unread or np.abs(leaf).max() > 0, name


def test_gradients_are_the_same_with_activations_computed_again(nets):
    _, model = nets[True]
    given = qwen_image_inputs((5, 12), (6, 10), *SEEN)

    def gradient(kind):
        def squares(params):
            options = {"references": given.references, "gradient_checkpointing": kind}
            read = given.latents, given.times, *given.padded
            return (model.apply(params, *read, **options) ** 2).mean()

        return jax.jit(jax.grad(squares))(model.params)

    plain, again = gradient("none"), gradient("blocks")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), plain, again)


def test_bfloat16_is_as_near_to_float32_as_pytorch_is(both):
    network, model = both
    given = qwen_image_inputs((5, 12), (6, 10), *SEEN)
    exact = upstream_qwen_image(network, given)
    half = qwen_image_transformer().to(torch.bfloat16)
    theirs = np.abs(upstream_qwen_image(half, given, torch.bfloat16) - exact)
    cast = Model(model.network, cast_params(model.params, "bfloat16"))
    ours = np.abs(predict(cast, given) - exact)
    assert 0 < ours.mean() < 1.2 * theirs.mean()


@pytest.mark.parametrize("seen", [(), SEEN])
def test_called_as_in_diffusers(nets, seen):
    network, model = nets[True]
    given = qwen_image_inputs((5, 12), (6, 10), *seen)
    call = given.arguments()
    expected = network(**call).sample[:, :15]
    assert_close(model(**call).sample.numpy(), expected.numpy())
    call["encoder_hidden_states_mask"] = None
    (unmasked,) = model(**call, return_dict=False)
    assert_close(unmasked.numpy(), network(**call).sample[:, :15].numpy())


def test_arguments_that_do_not_fit_are_refused(both):
    _, model = both
    call = qwen_image_inputs((5, 12)).arguments()
    with pytest.raises(ValueError, match="img_shapes must be the same for all rows, of 15 tokens"):
        model(**{**call, "img_shapes": [[(1, 3, 4)]] * 2})
    mask = call["encoder_hidden_states_mask"].flip(1)
    with pytest.raises(ValueError, match="encoder_hidden_states_mask must have shape"):
        model(**{**call, "encoder_hidden_states_mask": mask})
    with pytest.raises(ValueError, match="guidance, controlnet_block_samples"):
        model(**call, guidance=torch.ones(2))
    with pytest.raises(ValueError, match="text must have"):
        model(**{**call, "encoder_hidden_states": call["encoder_hidden_states"][..., :3]})


def test_saved_and_read_by_diffusers(nets, tmp_path):
    network, model = nets[True]
    save_network(model, tmp_path)
    again = diffusers.QwenImageTransformer2DModel.from_pretrained(tmp_path)
    assert again.config.zero_cond_t is True
    for name, tensor in network.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes_dims_rope": [16, 56, 40]}, "must add up to attention_head_dim"),
        ({"in_channels": 66}, "in_channels=66 must be divisible by 4"),
        ({"use_layer3d_rope": True}, "use_layer3d_rope"),
        ({"guidance_embeds": True}, "guidance_embeds"),
    ],
)
def test_other_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(QwenImageTransformer2DConfig, changes)


def test_diffusers_has_no_input_for_guidance_either():
    network = qwen_image_transformer(guidance_embeds=True)
    call = qwen_image_inputs((5,)).arguments()
    with pytest.raises(TypeError):
        network(**call, guidance=torch.ones(1))


def test_the_whole_has_the_tensors_of_diffusers():
    with torch.device("meta"):
        theirs = diffusers.QwenImageTransformer2DModel()
    shapes = torch_shapes(
        Network(QwenImageTransformer2DModel, QwenImageTransformer2DConfig()).shapes
    )
    assert shapes == {name: tuple(x.shape) for name, x in theirs.state_dict().items()}
    assert sum(map(np.prod, shapes.values())) > 20e9
