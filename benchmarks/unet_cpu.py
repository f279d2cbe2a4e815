"""One step of the full-size Stable Diffusion 2 UNet against diffusers' PyTorch, on the CPU.

866 M parameters, random weights, 64x64 latents, batch 2 (one picture with guidance), in turns.
    python benchmarks/unet_cpu.py --dtype float32 bfloat16
"""

import argparse

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch
from full_size import SD2
from machine import describe, interleaved_medians

from diffusax.checkpoints.tree import checkpoint_name, to_torch
from diffusax.models import UNet2DConditionConfig, UNet2DConditionModel, initialize


def main() -> None:
    """Prints a line for each dtype."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(describe("torch", "diffusers"))
    for dtype in args.dtype:
        compare(dtype, args.repeats)


def compare(dtype: str, repeats: int) -> None:
    """Both networks with the same weights and inputs."""
    network = initialize(UNet2DConditionModel, UNet2DConditionConfig(**SD2))
    reference = pytorch_unet(network.params, SD2, getattr(torch, dtype))
    params = jax.tree.map(lambda x: x.astype(dtype), network.params)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 64, 64, 4), np.float32)
    context = rng.standard_normal((2, 77, 1024), np.float32)
    inputs = jnp.asarray(x, dtype), jnp.float32(500), jnp.asarray(context, dtype)
    step = jax.jit(network.apply).lower(params, *inputs).compile()
    torch_inputs = (
        torch.tensor(x.transpose(0, 3, 1, 2).copy()).to(reference.dtype),
        torch.tensor(500),
        torch.tensor(context).to(reference.dtype),
    )

    def ours() -> np.ndarray:
        return np.asarray(step(params, *inputs), np.float32).transpose(0, 3, 1, 2)

    @torch.no_grad()
    def theirs() -> np.ndarray:
        return reference(*torch_inputs).sample.float().numpy()

    difference = np.abs(ours() - theirs()).max() / np.abs(theirs()).max()
    medians = interleaved_medians({"diffusax": ours, "PyTorch": theirs}, repeats)
    ratio = medians["PyTorch"] / medians["diffusax"]
    print(
        f"{dtype}: diffusax {medians['diffusax']:.2f} s, PyTorch eager {medians['PyTorch']:.2f} s, "
        f"{ratio:.2f} times as fast (median of {repeats}; largest difference {difference:.1e})",
        flush=True,
    )


def pytorch_unet(params: object, config: dict, dtype: torch.dtype) -> torch.nn.Module:
    """diffusers' UNet with a copy of our parameters."""
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(**config)
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    state = {
        checkpoint_name(path): torch.from_numpy(np.array(to_torch(np.asarray(leaf), path)))
        for path, leaf in leaves
    }
    unet.load_state_dict(state, assign=True)
    return unet.to(dtype).eval()


if __name__ == "__main__":
    main()
