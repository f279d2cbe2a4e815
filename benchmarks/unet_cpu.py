"""One step of full-size Stable Diffusion UNets against diffusers' PyTorch, on the CPU.

SD 2 (866 M parameters) and SDXL (2.6 B), random weights, 64x64 latents, batch 2 (one picture with
guidance), in turns with PyTorch in each of its two memory layouts.
    python benchmarks/unet_cpu.py --model sd2 --dtype float32 bfloat16
    python benchmarks/unet_cpu.py --model sdxl --dtype bfloat16
"""

import argparse
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch
from full_size import SD2, SDXL
from machine import describe, interleaved_medians

from diffusax.checkpoints.tree import checkpoint_name, to_torch
from diffusax.models import UNet2DConditionConfig, UNet2DConditionModel
from diffusax.networks import initialize
from diffusax.runtime.devices.lowering import compiler_options

CONFIGS = {"sd2": SD2, "sdxl": SDXL}
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def main() -> None:
    """Prints a line for each model, dtype and layout of PyTorch's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=["sd2"], choices=sorted(CONFIGS))
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["float32", "bfloat16"],
        help="SDXL twice over in float32 takes 21 GB",
    )
    parser.add_argument("--layout", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--size", type=int, default=64, help="of the latents")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(describe("torch", "diffusers"))
    for model in args.model:
        for dtype in args.dtype:
            compare(model, dtype, args.layout, args.size, args.repeats)


def compare(model: str, dtype: str, layouts: list[str], size: int, repeats: int) -> None:
    """Both networks with the same weights and inputs."""
    config = UNet2DConditionConfig(**CONFIGS[model])
    network = initialize(UNet2DConditionModel, config, dtype=jnp.dtype(dtype))
    inputs = draw_inputs(config, size)
    args = {name: jnp.asarray(value, dtype) for name, value in inputs.items()}
    step = jax.jit(lambda params, args: call(network, params, **args))
    compiled = step.lower(network.params, args).compile(compiler_options() or None)
    reference = pytorch_unet(network.params, CONFIGS[model])

    def ours() -> np.ndarray:
        return np.asarray(compiled(network.params, args), np.float32).transpose(0, 3, 1, 2)

    for layout in layouts:
        theirs = pytorch_step(reference, inputs, LAYOUTS[layout])
        difference = np.abs(ours() - theirs()).max() / np.abs(theirs()).max()
        medians = interleaved_medians({"diffusax": ours, "PyTorch": theirs}, repeats)
        print(
            f"{model}, {dtype}, {size}x{size}: diffusax {medians['diffusax']:.2f} s, PyTorch eager "
            f"{layout} {medians['PyTorch']:.2f} s, "
            f"{medians['PyTorch'] / medians['diffusax']:.2f} times as fast "
            f"(median of {repeats}; largest difference {difference:.1e})",
            flush=True,
        )


def draw_inputs(config: UNet2DConditionConfig, size: int) -> dict[str, np.ndarray]:
    """The UNet's inputs, channels last."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "sample": (2, size, size, config.in_channels),
        "context": (2, 77, config.cross_attention_dim),  # type: ignore[dict-item]
    }
    if config.addition_embed_type:
        text = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        shapes |= {"text_embeds": (2, text)}
    inputs = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    if config.addition_embed_type:
        inputs["time_ids"] = np.tile(np.float32([1024, 1024, 0, 0, 1024, 1024]), (2, 1))
    return inputs


def call(network: Any, params: Any, sample: Any, context: Any, **added: Any) -> Any:
    """diffusax's UNet at timestep 500."""
    return network.apply(params, sample, jnp.float32(500), context, added_cond=added or None)


def pytorch_step(reference: torch.nn.Module, inputs: dict[str, np.ndarray], layout: Any) -> Any:
    """A function that runs one step of diffusers' UNet in a memory layout."""
    reference.to(memory_format=layout)
    tensors = {name: torch.tensor(value).to(reference.dtype) for name, value in inputs.items()}
    sample = tensors.pop("sample").permute(0, 3, 1, 2).contiguous(memory_format=layout)
    context = tensors.pop("context")

    @torch.no_grad()
    def run() -> np.ndarray:
        result = reference(sample, torch.tensor(500), context, added_cond_kwargs=tensors or None)
        return result.sample.float().numpy()

    return run


def pytorch_unet(params: object, config: dict) -> torch.nn.Module:
    """diffusers' UNet with a copy of our parameters, in their dtype."""
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(**config)
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    state = {
        checkpoint_name(path): to_tensor(to_torch(np.asarray(leaf), path)) for path, leaf in leaves
    }
    unet.load_state_dict(state, assign=True)
    return unet.eval()


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """A copy as a tensor, bfloat16 too, which NumPy has not."""
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(np.array(array.view(np.uint16))).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


if __name__ == "__main__":
    main()
