"""Images that networks of text to image look at, against diffusers' modules with a mask."""

import dataclasses

import jax
import numpy as np
import pytest
import torch
from support import looking
from support.tiny_transformers import (
    krea2_inputs,
    krea2_transformer,
    upstream_krea2,
    upstream_z_image,
    z_image_inputs,
    z_image_transformer,
)
from support.torch_params import assert_close

from diffusax.boundary.config import config_from_dict, config_to_dict
from diffusax.models import Krea2Transformer2DConfig
from diffusax.networks import Model, load_network
from diffusax.pipelines.components.references import with_layout

SIZES = (4, 6), (8, 2)
"""Of latents of images to look at."""


def tensors(maps):
    return [torch.tensor(x.transpose(0, 3, 1, 2)) for x in maps]


class OfKrea2:
    network = staticmethod(krea2_transformer)
    given = krea2_inputs((5, 12, 9))
    channels = 4

    def __init__(self):
        self.latents, self.times = self.given.latents, self.given.times
        self.text = self.given.padded

    def upstream(self, network, images, layout):
        text, mask = self.given.padded_inside
        own = torch.tensor(text), torch.tensor(mask)
        (x,) = tensors([self.latents])
        with torch.no_grad():
            y = looking.krea2(network, x, torch.tensor(self.times), *own, tensors(images), layout)
        return y.numpy().transpose(0, 2, 3, 1)

    def alone(self, network):
        return upstream_krea2(network, self.given)

    def prefix(self, model, images):
        return model.apply(model.params, images, method="prefix")


class OfZImage:
    network = staticmethod(z_image_transformer)
    given = z_image_inputs((5, 40, 32))
    channels = 16

    def __init__(self):
        self.latents, self.times = self.given.latents.transpose(0, 2, 3, 1), self.given.times
        self.text = self.given.padded

    def upstream(self, network, images, layout):
        def one(i):
            own = torch.tensor(self.given.latents[i]), torch.tensor(self.times[i])
            seen = [x[i] for x in tensors(images)]
            caption = torch.tensor(self.given.captions[i])
            return looking.z_image(network, *own, caption, seen, layout)

        with torch.no_grad():
            y = torch.stack([one(i) for i in range(len(self.times))])
        return y.numpy().transpose(0, 2, 3, 1)

    def alone(self, network):
        return upstream_z_image(network, self.given).transpose(0, 2, 3, 1)

    def prefix(self, model, images):
        caption, lengths = self.text
        return model.apply(model.params, images, lengths, caption.shape[1], method="prefix")


@pytest.fixture(scope="module", params=[OfKrea2, OfZImage])
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("looking")
    network = request.param.network()
    network.save_pretrained(folder)
    return request.param(), network, load_network(folder, dtype="float32")


def looking_as(model, layout):
    return Model(with_layout(model.network, layout), model.params)


def images_for(own, count):
    rng = np.random.default_rng(5)
    shapes = [(len(own.times), *size, own.channels) for size in SIZES[:count]]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def predict(model, own, **options):
    call = jax.jit(model.apply, static_argnames=("gradient_checkpointing",))
    return np.asarray(call(model.params, own.latents, own.times, *own.text, **options))


@pytest.mark.parametrize("layout", looking.LAYOUTS)
@pytest.mark.parametrize("count", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_images_are_clean_tokens_beside_the_others(case, layout, count):
    own, network, model = case
    images = images_for(own, count)
    expected = own.upstream(network, images, layout)
    found = predict(looking_as(model, layout), own, references=images)
    assert_close(found, expected)
    assert np.abs(expected - own.alone(network)).max() > 0.05
    other = next(name for name in looking.LAYOUTS if name != layout)
    assert np.abs(expected - own.upstream(network, images, other)).max() > 1e-3


def test_without_images_the_composition_is_diffusers_call(case):
    own, network, _ = case
    assert_close(own.upstream(network, [], "blind"), own.alone(network))


def test_what_is_read_of_images_that_see_each_other_alone_is_computed_once(case):
    own, _, model = case
    images = images_for(own, 2)
    prefix = own.prefix(model, images)
    # What a network without a layout does is "blind", too.
    for layout in (None, "blind"):
        network = model if layout is None else looking_as(model, layout)
        once = predict(network, own, prefix=prefix)
        np.testing.assert_allclose(once, predict(network, own, references=images), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", looking.LAYOUTS)
def test_gradients_are_the_same_with_activations_computed_again(case, layout):
    own, _, model = case
    model, images = looking_as(model, layout), images_for(own, 1)

    def gradient(kind):
        def squares(params):
            given = params, own.latents, own.times, *own.text
            y = model.apply(*given, references=images, gradient_checkpointing=kind)
            return (y**2).mean()

        return jax.jit(jax.grad(squares))(model.params)

    plain, again = gradient("none"), gradient("blocks")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), plain, again)


def test_images_of_other_channels_or_too_large_are_an_error(case):
    own, _, model = case
    (image,) = images_for(own, 1)
    with pytest.raises(ValueError, match=r"references must have shape \(batch, height, width"):
        predict(model, own, references=[image[..., :3]])


def test_a_config_says_what_was_learned_where_diffusers_does_not_look(case, tmp_path):
    _, network, model = case
    plain = config_to_dict(model.config)
    assert not {"references_layout", "_references_layout"} & plain.keys()
    learned = looking_as(model, "joint")
    learned.save_pretrained(tmp_path)
    assert load_network(tmp_path).config.references_layout == "joint"
    again = type(network).from_pretrained(tmp_path)
    for name, tensor in network.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], tensor)
    assert config_to_dict(learned.config) == {**plain, "_references_layout": "joint"}


def test_a_layout_that_is_none_is_an_error():
    config = Krea2Transformer2DConfig()
    with pytest.raises(ValueError, match="references_layout='other' is not supported"):
        config_from_dict(Krea2Transformer2DConfig, {"_references_layout": "other"})
    with pytest.raises(ValueError, match="references_layout='all' is not supported"):
        dataclasses.replace(config, references_layout="all")
