"""Transformers of full width with one block of each kind against PyTorch diffusers, on the CPU.

FLUX.1 (a block with two streams, one with one) and Z-Image (a refiner of each kind, one block over
both), random weights, one image of 512x512, in turns.
    python benchmarks/transformer_blocks_cpu.py [--models flux z-image] [--dtype float32 bfloat16]
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch
from machine import describe, interleaved_medians

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.tiny_transformers import flux_inputs, upstream_flux, upstream_z_image, z_image_inputs
from support.torch_params import params_of

from diffusax.models import (
    FluxTransformer2DConfig,
    FluxTransformer2DModel,
    ZImageTransformer2DConfig,
    ZImageTransformer2DModel,
)
from diffusax.models.network import Network
from diffusax.models.transformers.flux import image_rotation

Step = Callable[[], np.ndarray]
TOKENS = (32, 32)
"""Rows and columns of tokens of an image of 512x512."""
CAPTION = 128


def flux(dtype: str) -> tuple[Step, Step]:
    """FLUX.1's transformer with one of its 19 and one of its 38 blocks: ours and PyTorch's."""
    options = {"num_layers": 1, "num_single_layers": 1, "guidance_embeds": True}
    theirs = diffusers.FluxTransformer2DModel(**options).eval().to(getattr(torch, dtype))
    network = Network(FluxTransformer2DModel, FluxTransformer2DConfig(**options))
    given = flux_inputs(1, TOKENS, 512, text_width=4096, pooled_width=768)
    arrays = given.tokens, given.times, given.text, given.pooled
    x, times, text, pooled, scales = (jnp.asarray(a, dtype) for a in (*arrays, given.scales))
    rotation = image_rotation(network.config.axes_dims_rope, text.shape[1], TOKENS)
    ours = compiled(network, theirs, (x, times, text, pooled, rotation, scales))
    return ours, lambda: upstream_flux(theirs, given, getattr(torch, dtype))


def z_image(dtype: str) -> tuple[Step, Step]:
    """Z-Image's transformer with one of 30 blocks and one of two refiners: ours and PyTorch's."""
    options = {"n_layers": 1, "n_refiner_layers": 1}
    theirs = diffusers.ZImageTransformer2DModel(**options).eval().to(getattr(torch, dtype))
    network = Network(ZImageTransformer2DModel, ZImageTransformer2DConfig(**options))
    given = z_image_inputs((CAPTION,), tuple(2 * n for n in TOKENS), width=2560)
    latents = jnp.asarray(given.latents.transpose(0, 2, 3, 1), dtype)
    caption = jnp.asarray(given.captions[0][None], dtype)
    inputs = latents, jnp.asarray(given.times), caption, jnp.array([CAPTION])
    ours = compiled(network, theirs, inputs)
    return (
        lambda: ours().transpose(0, 3, 1, 2),
        lambda: upstream_z_image(theirs, given, getattr(torch, dtype)),
    )


def compiled(network: Network, module: torch.nn.Module, inputs: tuple) -> Step:
    """A function that calls the network with a module's weights."""
    dtype = next(module.parameters()).dtype
    params = params_of(network, module.float())
    params = jax.tree.map(lambda x: jnp.asarray(x, str(dtype).removeprefix("torch.")), params)
    module.to(dtype)
    run = jax.jit(network.apply).lower(params, *inputs).compile()
    return lambda: np.asarray(run(params, *inputs), np.float32)


MODELS = {"flux": flux, "z-image": z_image}


def main() -> None:
    """Prints a line for each model and dtype."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(describe("torch", "diffusers"))
    for model in args.models:
        for dtype in args.dtype:
            ours, theirs = MODELS[model](dtype)
            expected = theirs()
            difference = np.abs(ours() - expected).max() / np.abs(expected).max()
            medians = interleaved_medians({"diffusax": ours, "PyTorch": theirs}, args.repeats)
            own, other = medians["diffusax"], medians["PyTorch"]
            print(
                f"{model}, {dtype}: diffusax {own:.3f} s, PyTorch {other:.3f} s, "
                f"{other / own:.2f} times as fast (median of {args.repeats}; largest difference "
                f"{difference:.1e})",
                flush=True,
            )


if __name__ == "__main__":
    main()
