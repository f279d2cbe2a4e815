"""Qwen-Image 2.1's transformer beside diffusers'."""

import dataclasses
import math

import diffusers
import jax
import numpy as np
import pytest
import torch
from support.tiny_transformers import qwen_image21_transformer as transformer
from support.torch_params import assert_close

from diffusax.models.network import cast_params
from diffusax.networks import Model, load_network


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the network reads, of images whose texts have lengths of their own.

    x: b h w c. before: for each image to look at the text before it, b s d, and its latents, b h w
    c. text: b s d with padding behind `lengths`, b.
    """

    x: np.ndarray
    times: np.ndarray
    text: np.ndarray
    lengths: np.ndarray
    before: tuple[tuple[np.ndarray, np.ndarray], ...]


def inputs(lengths, size=(6, 4), looked_at=()) -> Inputs:
    """looked_at: the length of the text before each image, and the image's size."""
    rng, b = np.random.default_rng(5), len(lengths)

    def normal(*shape):
        return rng.standard_normal((b, *shape)).astype(np.float32)

    before = tuple((normal(s, 20), normal(*shape, 6)) for s, shape in looked_at)
    times = np.linspace(0.9, 0.2, b).astype(np.float32)
    return Inputs(
        normal(*size, 6), times, normal(max(lengths), 20), np.array(lengths, np.int32), before
    )


def upstream(network, given: Inputs, dtype=torch.float32) -> np.ndarray:
    """PyTorch's prediction for each image alone, b h w c."""
    return np.concatenate([_alone(network, given, i, dtype) for i in range(len(given.x))])


def arguments(given: Inputs, i: int, dtype=torch.float32) -> tuple:
    """What diffusers' network is called with for one image."""
    hidden, mask, shapes, tokens = [], [], [], []
    for text, latents in given.before:
        h, w, c = latents[i].shape
        # Whatever the encoder returned for an image is replaced.
        hidden += [text[i], np.full((h * w // 4, 20), 7.0, np.float32)]
        mask += [False] * len(text[i]) + [True] * (h * w // 4)
        shapes.append((1, h, w))
        tokens.append(latents[i].reshape(-1, c))
    own = given.text[i, : given.lengths[i]]
    h, w, c = given.x[i].shape
    mask += [False] * len(own) + [True] * (h * w // 4)
    joined = np.concatenate([*tokens, given.x[i].reshape(-1, c)])
    return (
        torch.tensor(joined[None], dtype=dtype),
        torch.tensor(np.concatenate([*hidden, own])[None], dtype=dtype),
        torch.tensor(given.times[i : i + 1], dtype=dtype),
        [[*shapes, (1, h, w)]],
        torch.tensor([mask]),
    )


def _alone(network, given: Inputs, i: int, dtype) -> np.ndarray:
    h, w, c = given.x[i].shape
    y = network(*arguments(given, i, dtype)).sample
    return y[:, -h * w :].float().numpy().reshape(1, h, w, c)


def predict(model, given: Inputs, params=None) -> np.ndarray:
    call = jax.jit(lambda p, *args, **kw: model.apply(p, *args, **kw))
    given_to = given.x, given.times, given.text, given.lengths
    y = call(params or model.params, *given_to, references=given.before)
    return np.asarray(y.astype("float32"))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen-image21")
    network = transformer()
    network.save_pretrained(folder)
    return network, load_network(folder, dtype="float32")


LOOKED_AT = [(), ((3, (4, 6)),), ((3, (4, 6)), (2, (2, 2)), (4, (6, 4)))]


@pytest.mark.parametrize("looked_at", LOOKED_AT)
def test_the_network_predicts_as_diffusers_does_for_each_image_alone(both, looked_at):
    network, model = both
    given = inputs((9, 5, 1), looked_at=looked_at)
    expected = upstream(network, given)
    assert expected.std() > 0.1
    assert_close(predict(model, given), expected)


def test_what_stands_in_padding_changes_nothing(both):
    _, model = both
    given = inputs((9, 5), looked_at=LOOKED_AT[1])
    other = given.text.copy()
    other[1, 5:] = np.nan
    expected = predict(model, given)
    assert_close(predict(model, dataclasses.replace(given, text=other)), expected, 1e-6)


@pytest.mark.parametrize("looked_at", LOOKED_AT[:2])
def test_a_prefix_that_is_computed_once_serves_all_steps(both, looked_at):
    _, model = both
    given = inputs((9, 5), looked_at=looked_at)
    prefix = model.apply(model.params, given.text, given.lengths, given.before, method="prefix")
    for times in (given.times, given.times[::-1]):
        moved = dataclasses.replace(given, times=times)
        found = model.apply(model.params, given.x, times, prefix=prefix)
        assert_close(np.asarray(found), predict(model, moved), 1e-6)


@pytest.mark.slow
def test_every_parameter_changes_the_prediction(both):
    _, model = both
    given = inputs((9, 5), looked_at=LOOKED_AT[1])

    def squares(params):
        y = model.apply(
            params, given.x, given.times, given.text, given.lengths, references=given.before
        )
        return (y**2).sum()

    gradients = jax.jit(jax.grad(squares))(model.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.abs(leaf).max() > 0, jax.tree_util.keystr(path)


def test_bfloat16_is_as_near_to_float32_as_pytorch_is(both):
    network, model = both
    given = inputs((9, 5), looked_at=LOOKED_AT[1])
    exact = upstream(network, given)
    half = transformer().to(torch.bfloat16)
    theirs = np.abs(upstream(half, given, torch.bfloat16) - exact)
    cast = Model(model.network, cast_params(model.params, "bfloat16"))
    ours = np.abs(predict(cast, given) - exact)
    assert 0 < ours.mean() < 1.2 * theirs.mean()


@pytest.mark.parametrize("looked_at", LOOKED_AT)
def test_called_as_in_diffusers(both, looked_at):
    network, model = both
    given = inputs((9, 5), looked_at=looked_at)
    for i in range(2):
        call = arguments(given, i)
        expected = network(*call).sample[:, -24:]
        found = model(*call).sample
        assert_close(found.numpy(), expected.numpy())
        masked = model(*call, encoder_hidden_states_mask=torch.ones(call[1].shape[:2]))
        assert_close(masked.sample.numpy(), expected.numpy())


def test_too_many_positions_are_refused(both):
    _, model = both
    given = inputs((9,))
    text = np.zeros((1, 8192, 20), np.float32)
    with pytest.raises(ValueError, match="use a shorter prompt"):
        jax.eval_shape(
            lambda: model.apply(
                model.params, given.x, given.times, text, np.array([8192], np.int32)
            )
        )


def test_networks_go_back_to_diffusers_as_they_came(both, tmp_path):
    network, model = both
    model.save_pretrained(tmp_path)
    again = diffusers.QwenImage21Transformer2DModel.from_pretrained(tmp_path)
    state = again.state_dict()
    assert state.keys() == network.state_dict().keys()
    assert all(math.isclose(0, (x - state[n]).abs().max()) for n, x in network.state_dict().items())
