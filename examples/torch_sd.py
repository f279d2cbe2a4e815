"""Draws with a PyTorch pipeline of diffusers whose loop is compiled by XLA.

    python examples/torch_sd.py stabilityai/stable-diffusion-2-1-base "an astronaut riding a horse"

Any pipeline of diffusers will do; what diffusax cannot trace stays with PyTorch.
"""

import argparse
import time

import diffusers
import torch

import diffusax.torch


def main() -> None:
    """Draws twice, and says how long each took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder in diffusers' layout, or a Hub repository id")
    parser.add_argument("prompt")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--mesh", help="devices to spread over, such as data=4,fsdp=2")
    parser.add_argument("--output", default="out.png")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    pipe = diffusers.DiffusionPipeline.from_pretrained(args.model, torch_dtype=dtype)
    diffusax.torch.compile(pipe, mesh=args.mesh, fuse_loop=True, on_error="eager")
    for run in ("first, with compilation", "second"):
        start = time.perf_counter()
        generator = torch.Generator().manual_seed(0)
        image = pipe(args.prompt, num_inference_steps=args.steps, generator=generator).images[0]
        print(f"{run}: {time.perf_counter() - start:.2f} s")
    image.save(args.output)


if __name__ == "__main__":
    main()
