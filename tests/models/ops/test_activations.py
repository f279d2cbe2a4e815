"""Activations against PyTorch's, in each form that a platform has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from diffusax.models.ops import activations

CASES = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "approximate_gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gated_silu": lambda gate, x: functional.silu(gate) * x,
    "gated_gelu": lambda gate, x: functional.gelu(gate) * x,
    "gated_approximate_gelu": lambda gate, x: functional.gelu(gate, approximate="tanh") * x,
}


def draw(name: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[jax.Array]]:
    """The arguments of an activation for PyTorch and for JAX."""
    r = np.random.default_rng(0)
    count = 2 if name.startswith("gated") else 1
    given = [torch.tensor(r.standard_normal((64, 64), np.float32)) for _ in range(count)]
    given = [x.to(dtype) for x in given]
    return given, [jnp.asarray(x.float().numpy(), str(dtype)[6:]) for x in given]


@pytest.mark.parametrize("name", CASES)
def test_an_activation_equals_pytorch(name):
    """In float32, whose result is that of every platform to rounding."""
    theirs, ours = draw(name, torch.float32)
    found = getattr(activations, name)(*ours)
    np.testing.assert_allclose(found, CASES[name](*theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", [activations.gelu_by_tanh, activations.gelu_by_sigmoid])
def test_both_formulas_of_the_approximate_gelu_are_pytorchs(form):
    """The second is the one that GPUs have."""
    x = np.linspace(-9, 9, 1001, dtype=np.float32)
    expected = functional.gelu(torch.tensor(x), approximate="tanh")
    np.testing.assert_allclose(form(x), expected, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_cpus_round_half_precision_once(name):
    """As PyTorch's kernels do: all but a few results have the bits of the exact ones, rounded."""
    theirs, ours = draw(name, torch.bfloat16)
    exact = CASES[name](*(x.double() for x in theirs)).to(torch.bfloat16).float().numpy()
    found = np.asarray(jax.jit(getattr(activations, name))(*ours), np.float32)
    assert found.dtype == exact.dtype
    assert (found == exact).mean() > 0.99


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_only_cpus_leave_half_precision(platform):
    """GPUs have the exponential function of the approximate GELU in float32 as well."""
    x = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
    for name, widened in (("gated_silu", ("cpu",)), ("approximate_gelu", ("cpu", "cuda"))):
        function = getattr(activations, name)
        lowered = jax.jit(function).trace(*[x] * (2 if "gated" in name else 1))
        text = lowered.lower(lowering_platforms=(platform,)).as_text()
        assert ("xf32>" in text) == (platform in widened), name
