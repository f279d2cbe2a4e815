"""How far blocks of full-size transformers are from themselves with kernels of int8, on a CPU.

    python benchmarks/int8_error.py [--models flux z-image flux3 qwen-image21] [--tokens 128]

Random weights and tokens, float32, one block of each kind of `int8_compile.MODELS`. The error is
that of what the block adds to its tokens, relative to the norm: of kernels that are rounded and
multiplied out ("off" of `int8_activations`) and of integers multiplied by integers ("on"), each
without and with ConvRot's rotation.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import int8_compile
import jax
import jax.numpy as jnp
import numpy as np
from random_models import random_params

from diffusax.models.parameter_tree import path_name
from diffusax.models.quantized import Quantized, hadamard, quantize, quantizes
from diffusax.runtime.devices.lowering import int8_activations


def rounded(params, group: int):
    """The parameters with kernels of int8."""

    def one(path, x):
        if not quantizes(path_name(path), x.shape) or x.ndim != 2:
            return x
        kernel, own = np.asarray(x), group if x.shape[0] % max(group, 1) == 0 else 0
        if own:
            parts = kernel.reshape(-1, own, kernel.shape[1])
            kernel = np.einsum("ij,gjd->gid", hadamard(own), parts).reshape(kernel.shape)
        found = quantize(kernel, "int8", np.float32)
        return Quantized(jnp.asarray(found.values), jnp.asarray(found.scale), found.dtype, own)

    return jax.tree_util.tree_map_with_path(one, params)


def inputs(given, tokens: int, key):
    """Random arrays for shapes, with fewer tokens."""
    sizes = {4096: tokens, 4224: tokens + 32, 4608: 2 * tokens, 512: tokens}
    count = iter(range(1000))

    def one(x):
        shape = list(x.shape)
        if len(shape) > 2 and shape[1] in sizes:
            shape[1] = sizes[shape[1]]
        if x.dtype == jnp.int32:
            return jnp.full(shape, tokens, jnp.int32)
        if x.dtype == jnp.float32:
            # Rotations by an eighth of a turn.
            return jnp.full(shape, 0.5**0.5)
        own = jax.random.fold_in(key, next(count))
        # Some channels are much larger than the others, as transformers' are.
        y = jax.random.normal(own, shape)
        return y.at[..., :: max(1, shape[-1] // 8)].multiply(10) if len(shape) > 2 else y

    return jax.tree.map(one, given)


def difference(actual, expected, before) -> float:
    """The error of what was added to the tokens."""
    pairs = list(zip(*map(jax.tree.leaves, (actual, expected, before))))
    wrong = sum(float(jnp.sum((a - e) ** 2)) for a, e, _ in pairs)
    added = sum(float(jnp.sum((e - b) ** 2)) for _, e, b in pairs)
    return (wrong / added) ** 0.5


def main() -> None:
    """Prints a line for each kind of block."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    models = list(int8_compile.MODELS)
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    for name in args.models:
        network, kinds = int8_compile.MODELS[name]
        params = random_params(
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, "float32"), network.shapes)
        )
        for i, kind in enumerate(kinds):
            given = inputs(kind.given, args.tokens, jax.random.key(i))
            before = given[:2] if name == "flux" and i == 0 else given[0]

            def block(params, given, kind=kind, network=network):
                return kind.block(network.module(params))(*given)

            expected = jax.jit(block)(params, given)
            found = []
            for group in (0, 256):
                own = rounded(params, group)
                for choice in ("off", "on"):
                    with int8_activations(choice):
                        actual = jax.jit(block)(own, given)
                    found.append(f"{difference(actual, expected, before):.5f}")
            off, on, rotated_off, rotated_on = found
            print(
                f"{name}, kind {i}: int8 {off} multiplied out, {on} of integers; ConvRot "
                f"{rotated_off} multiplied out, {rotated_on} of integers",
                flush=True,
            )


if __name__ == "__main__":
    main()
