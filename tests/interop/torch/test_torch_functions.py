"""PyTorch modules as functions, their arguments and results, and the import of torchax."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from transformers import DynamicCache

import diffusax.torch
from diffusax.interop.torch import importing
from diffusax.interop.torch.lowerings import convolution, scaled_dot_product_attention
from diffusax.interop.torch.structures import flatten, rebuild


class Tied(torch.nn.Module):
    """A module with a part under two names, a buffer and random numbers."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = self.first
        self.register_buffer("offset", torch.randn(3))

    def forward(self, x, noisy=False):
        """An output class of diffusers."""
        y = self.second(torch.tanh(self.first(x))) + self.offset
        return UNet2DConditionOutput(sample=y + torch.randn_like(y) if noisy else y)


def test_a_module_becomes_a_function_and_its_parameters():
    module = Tied()
    params, apply = diffusax.torch.to_jax(module)
    assert params.keys() == {"first.weight", "first.bias", "offset"}
    x = np.random.default_rng(0).standard_normal((2, 3), np.float32)
    expected = module(torch.from_numpy(x)).sample.detach().numpy()
    found = jax.jit(apply)(params, jnp.asarray(x))
    assert isinstance(found, UNet2DConditionOutput)
    assert isinstance(found.sample, jax.Array)
    np.testing.assert_allclose(found.sample, expected, atol=1e-6)
    np.testing.assert_allclose(apply(params, x=x).sample, expected, atol=1e-6)


def test_gradients_of_a_module():
    module = Tied()
    params, apply = diffusax.torch.to_jax(module)
    x = np.ones((2, 3), np.float32)
    found = jax.grad(lambda offset: apply({**params, "offset": offset}, x).sample.sum())
    np.testing.assert_allclose(found(params["offset"]), np.full(3, 2.0))
    module(torch.from_numpy(x)).sample.sum().backward()
    found = jax.grad(lambda p: apply({**params, "first.weight": p}, x).sample.sum())
    np.testing.assert_allclose(found(params["first.weight"]), module.first.weight.grad, atol=1e-5)


def test_random_numbers_follow_the_seed():
    params, apply = diffusax.torch.to_jax(Tied())
    x = np.zeros((2, 3), np.float32)
    draws = [apply(params, x, noisy=True, seed=seed).sample for seed in (1, 1, 2)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert np.abs(draws[0] - draws[2]).max() > 0.1


def test_dtype_of_the_parameters():
    params, apply = diffusax.torch.to_jax(Tied(), dtype=jnp.bfloat16)
    assert {x.dtype for x in params.values()} == {jnp.dtype(jnp.bfloat16)}
    assert apply(params, jnp.zeros((1, 3), jnp.bfloat16)).sample.dtype == jnp.bfloat16


def test_arguments_are_taken_apart_and_put_together():
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), 0)
    posterior = DiagonalGaussianDistribution(torch.randn(1, 4, 2, 2))
    value = {
        "output": AutoencoderKLOutput(latent_dist=posterior),
        "cache": cache,
        "more": [torch.ones(2), (np.zeros(3), None, 1.5, "text", True)],
        "dtype": torch.float16,
    }
    leaves, structure = flatten(value)
    assert hash(structure) == hash(flatten(value)[1])
    again = rebuild(structure, iter([x + 1 for x in leaves]))
    np.testing.assert_allclose(again["output"].latent_dist.mean, posterior.mean + 1)
    assert type(again["cache"]) is DynamicCache
    assert again["cache"].layers[0].keys.max() == 2
    assert again["more"][1][1:] == (None, 1.5, "text", True)
    assert again["dtype"] is torch.float16
    other = flatten({**value, "more": [torch.ones(2), (np.zeros(3), None, 1.5, "text", 1)]})[1]
    assert other != structure


@pytest.mark.parametrize("kind", ["none", "bool", "float", "causal", "hidden", "grouped"])
def test_attention_equals_pytorch(kind):
    shape = (2, 4, 6, 8)
    q, k, v = (torch.randn(shape) for _ in range(3))
    options = {}
    if kind in ("bool", "hidden"):
        options["attn_mask"] = torch.rand(2, 1, 6, 6) > 0.4
    if kind == "hidden":
        options["attn_mask"][:, :, 2] = False
    if kind == "float":
        options["attn_mask"] = torch.randn(2, 1, 6, 6)
    if kind == "causal":
        options["is_causal"] = True
    if kind == "grouped":
        k, v = k[:, :2], v[:, :2]
        options["enable_gqa"] = True
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3, **options)
    given = {n: jnp.asarray(x.numpy()) if hasattr(x, "numpy") else x for n, x in options.items()}
    arrays = (jnp.asarray(x.numpy()) for x in (q, k, v))
    found = scaled_dot_product_attention(*arrays, scale=0.3, **given)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "groups"),
    [(3, 1, 1, 1), (3, 2, 1, 1), (1, 1, 0, 1), (3, 1, 0, 2), (2, 2, 0, 1)],
)
def test_convolutions_equal_pytorch(kernel, stride, padding, groups):
    x, weight = torch.randn(2, 4, 8, 8), torch.randn(6, 4 // groups, kernel, kernel)
    bias = torch.randn(6)
    options = {"stride": stride, "padding": padding, "groups": groups}
    expected = torch.nn.functional.conv2d(x, weight, bias, **options)
    arrays = (jnp.asarray(t.numpy()) for t in (x, weight, bias))
    pair = [stride] * 2, [padding] * 2, [1, 1]
    found = convolution(*arrays, *pair, False, [0, 0], groups)
    np.testing.assert_allclose(found, expected, atol=1e-5)


class Filling(torch.nn.Module):
    """Writes into a mask in place, as attention with perturbed branches does."""

    def forward(self, x):
        """n n -> n n."""
        mask = torch.zeros((4, 4), device=x.device, dtype=x.dtype)
        mask[:3, :3] = 5.0
        mask.fill_diagonal_(1.0)
        mask[1:].fill_diagonal_(2.0)
        return x + mask


def test_diagonals_are_filled_in_place():
    x = torch.rand(4, 4)
    module = Filling()
    expected = module(x)
    with torch.no_grad():
        torch.testing.assert_close(diffusax.torch.compile(module)(x), expected)


def test_torchax_is_helped_only_where_it_must_be():
    needs = importing.needs_dropped_overloads
    assert needs("2.13.0+cpu", "0.0.13")
    assert needs("2.14.0", "0.0.9")
    assert not needs("2.12.1", "0.0.13")
    assert not needs("2.13.0", "0.0.14")
    assert not needs("2.13.0", None)
    with pytest.raises(AttributeError, match="dim_Dimname"):
        torch.ops.aten.prod.dim_Dimname  # noqa: B018


@pytest.mark.slow
def test_without_torchax_one_line_names_the_extra():
    code = (
        "import sys; sys.modules['torchax'] = None\n"
        "import diffusax\n"
        "try:\n    diffusax.torch\nexcept ImportError as error:\n    print(error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.count("\n") == 1
    assert "pip install 'diffusax[torch]'" in found.stdout
