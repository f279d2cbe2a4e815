"""Networks of full width against PyTorch's, on the CPU, in turns, with random weights.

Transformers with one block of each kind: FLUX.1 (a block with two streams, one with one), Z-Image
(a refiner of each kind, one block over both), one image of 512x512 each, and Wan 1.3B (a block),
nine frames of 256x256. Whole: the decoder of Stable Diffusion's autoencoder, an image of 256x256,
for which PyTorch has its layout channels_last, and the text encoders of SD 1 (ViT-L) and SD 2
(ViT-H), two texts of 77 tokens.
    python benchmarks/networks_cpu.py [--models flux z-image wan decoder vit-l vit-h]
        [--dtype float32 bfloat16]
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from full_size import VAE, VIT_H, VIT_L, WAN_1_3B
from machine import describe, interleaved_medians

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.tiny_transformers import flux_inputs, upstream_flux, upstream_z_image, z_image_inputs
from support.torch_params import params_of

from diffusax.models import (
    AutoencoderKL,
    AutoencoderKLConfig,
    CLIPTextConfig,
    CLIPTextModel,
    FluxTransformer2DConfig,
    FluxTransformer2DModel,
    WanTransformer3DConfig,
    WanTransformer3DModel,
    ZImageTransformer2DConfig,
    ZImageTransformer2DModel,
)
from diffusax.models.network import Network
from diffusax.models.transformers.flux import image_rotation
from diffusax.runtime.devices.lowering import compiler_options

Step = Callable[[], np.ndarray]
TOKENS = (32, 32)
"""Rows and columns of tokens of an image of 512x512."""
CAPTION = 128
FRAMES = (3, 32, 32)
"""Frames, rows and columns of latents of a video."""


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


def compiled(network: Network, module: torch.nn.Module, inputs: tuple, **options: str) -> Step:
    """A function that calls the network with a module's weights. options: those of `apply`."""
    dtype = next(module.parameters()).dtype
    params = params_of(network, module.float())
    params = jax.tree.map(lambda x: jnp.asarray(x, str(dtype).removeprefix("torch.")), params)
    module.to(dtype)
    apply = jax.jit(functools.partial(network.apply, **options))
    run = apply.lower(params, *inputs).compile(compiler_options() or None)
    return lambda: np.asarray(jax.tree.leaves(run(params, *inputs))[0], np.float32)


def wan(dtype: str) -> tuple[Step, Step]:
    """Wan 1.3B's transformer with one of its 30 blocks: ours and PyTorch's."""
    options = {**WAN_1_3B, "num_layers": 1}
    # Times and tables stay float32 in both.
    theirs = diffusers.WanTransformer3DModel(**options).eval().to(getattr(torch, dtype))
    network = Network(WanTransformer3DModel, WanTransformer3DConfig(**options))
    rng = np.random.default_rng(0)
    x, text = (
        rng.standard_normal(shape, np.float32) for shape in ((1, 16, *FRAMES), (1, 512, 4096))
    )
    given = jnp.asarray(np.moveaxis(x, 1, -1), dtype), jnp.array([700.0]), jnp.asarray(text, dtype)
    ours = compiled(network, theirs, given)
    tensors = [torch.tensor(a, dtype=getattr(torch, dtype)) for a in (x, text)]

    @torch.no_grad()
    def other() -> np.ndarray:
        return theirs(tensors[0], torch.tensor([700.0]), tensors[1]).sample.float().numpy()

    return lambda: np.moveaxis(ours(), -1, 1), other


def decoder(dtype: str) -> tuple[Step, Step]:
    """The decoder of Stable Diffusion's autoencoder: ours and PyTorch's."""
    theirs = diffusers.AutoencoderKL(**VAE).eval().to(getattr(torch, dtype))
    network = Network(AutoencoderKL, AutoencoderKLConfig(**VAE))
    latents = np.random.default_rng(0).standard_normal((1, 4, 32, 32), np.float32)
    given = jnp.asarray(np.moveaxis(latents, 1, -1), dtype)
    ours = compiled(network, theirs, (given,), method="decode")
    theirs.to(memory_format=torch.channels_last)
    tensor = torch.tensor(latents, dtype=theirs.dtype).contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def other() -> np.ndarray:
        return theirs.decode(tensor).sample.float().numpy()

    return lambda: np.moveaxis(ours(), -1, 1), other


def clip(options: dict, dtype: str) -> tuple[Step, Step]:
    """A text encoder of CLIP, the state after its last layer: ours and PyTorch's."""
    config = transformers.CLIPTextConfig(**options)
    theirs = transformers.CLIPTextModel(config).eval().to(getattr(torch, dtype))
    network = Network(CLIPTextModel, CLIPTextConfig(**options))
    ids = np.random.default_rng(0).integers(0, 49000, (2, 77), np.int32)
    tokens = torch.tensor(ids, dtype=torch.long)
    ours = compiled(network, theirs, (jnp.asarray(ids),))

    @torch.no_grad()
    def other() -> np.ndarray:
        return theirs(tokens).last_hidden_state.float().numpy()

    return ours, other


MODELS: dict[str, Callable[[str], tuple[Step, Step]]] = {
    "flux": flux,
    "z-image": z_image,
    "wan": wan,
    "decoder": decoder,
    "vit-l": functools.partial(clip, VIT_L),
    "vit-h": functools.partial(clip, VIT_H),
}


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
