"""Adapters in training, layer by layer, against PEFT's own layers in live PyTorch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from support.effort import few
from support.lora_training import randomize_adapters, trained_tree

from diffusax.models.adapters.low_rank import Base
from diffusax.models.adapters.trained import TrainedAdapters, TrainedLayer
from diffusax.models.ops.conv import conv2d

RANK, SCALE, DROPOUT = 3, 1.5, 0.4
PADDING = ((1, 1), (1, 1))


class Masked(torch.nn.Module):
    """Dropout by a mask that is given."""

    def __init__(self, mask: np.ndarray):
        super().__init__()
        self.mask = torch.tensor(mask)

    def forward(self, x):
        return x * self.mask


def torch_layer(kind: str, dora: bool) -> torch.nn.Module:
    layer = torch.nn.Linear(6, 5) if kind == "linear" else torch.nn.Conv2d(6, 5, 3, 2, 1)
    net = torch.nn.Sequential(layer).requires_grad_(False)
    options = {"lora_alpha": SCALE * RANK, "use_dora": dora, "init_lora_weights": False}
    net = peft.get_peft_model(net, peft.LoraConfig(r=RANK, target_modules=["0"], **options))
    randomize_adapters(net, 1)
    return net.base_model.model


def ours(kind: str, params: dict, x: jax.Array, weight, bias, keys) -> jax.Array:
    layer = TrainedLayer(**params, scale=SCALE, dropout=DROPOUT, keys=keys)
    if kind == "linear":
        y = x @ weight + bias
        return y + layer.linear(x, Base(y, weight, bias))
    y = conv2d(x, weight, stride=2, padding=PADDING) + bias
    return y + layer.conv(x, Base(y, weight, bias), stride=2, padding=PADDING)


CASES = list(itertools.product(("linear", "conv"), (False, True), (False, True)))
QUICK = ("linear", False, True), ("conv", True, True)


@pytest.mark.parametrize(("kind", "dora", "dropped"), few(CASES, *QUICK))
def test_a_layer_and_its_gradients_are_those_of_peft(kind, dora, dropped):
    net = torch_layer(kind, dora)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 7, 6) if kind == "linear" else (2, 8, 8, 6), np.float32)
    keys = jax.random.split(jax.random.key(0), 2) if dropped else None
    channels_first = (lambda a: a) if kind == "linear" else (lambda a: np.moveaxis(a, -1, 1))
    (path, params), *_ = trained_tree(net).items()
    assert path == "0"
    if dropped:
        mask = TrainedLayer(**params, scale=SCALE, dropout=DROPOUT, keys=keys).dropped(
            jnp.ones(x.shape)
        )
        assert abs(float((mask == 0).mean()) - DROPOUT) < 0.15
        net[0].lora_dropout["default"] = Masked(channels_first(np.asarray(mask)).copy())
    net.train()
    expected = net(torch.tensor(channels_first(x).copy()))
    (expected**2).sum().backward()

    weight, bias = (p.detach().numpy() for p in net[0].base_layer.parameters())
    weight = weight.T if kind == "linear" else weight.transpose(2, 3, 1, 0)
    run = lambda params: ours(kind, params, x, weight, bias, keys)  # noqa: E731
    y, gradient = run(params), jax.grad(lambda p: (run(p) ** 2).sum())(params)
    np.testing.assert_allclose(channels_first(np.asarray(y)), expected.detach(), atol=1e-5)
    for name, value in trained_tree(net, gradients=True)["0"].items():
        np.testing.assert_allclose(gradient[name], value, atol=1e-5 * np.abs(value).max())


def test_a_row_drops_by_its_own_key_whatever_stands_beside_it():
    down, up = np.ones((6, 2), np.float32), np.ones((2, 5), np.float32)
    layers = {path: {"down": down, "up": up} for path in ("a", "b")}
    keys = jax.random.split(jax.random.key(3), 4)
    adapters = TrainedAdapters(layers, {"a": 1.0, "b": 1.0}, 0.5, keys)
    x = jnp.ones((4, 30, 6))
    together = {path: layer.dropped(x) for path, layer in adapters.by_layer().items()}
    alone = adapters._replace(keys=keys[2:3]).by_layer()
    for path, dropped in together.items():
        np.testing.assert_array_equal(dropped[2], alone[path].dropped(x[:1])[0])
    assert (together["a"] != together["b"]).any()
    assert (together["a"][0] != together["a"][1]).any()
    # The rows of a text of two windows share their key.
    twice = adapters.for_rows(8).by_layer()["a"].dropped(jnp.ones((8, 30, 6)))
    np.testing.assert_array_equal(twice[4], twice[5])
    np.testing.assert_array_equal(twice[4], together["a"][2])
