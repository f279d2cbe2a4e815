"""A tiny SD 2 drawn five ways: PyTorch, torchax by hand, and diffusax's three ways.

By hand is the published recipe for torchax (output classes registered, the scheduler's tensors
moved, static arguments named, the autoencoder's decode compiled): its loop stays in Python.
    python benchmarks/torchax_cpu.py --steps 20
    python benchmarks/torchax_cpu.py --unet     # one forward of a full-size SD 2 UNet
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import diffusers
import jax
import numpy as np
import torch
from machine import describe
from support.tiny import build_stable_diffusion, randomize

import diffusax
import diffusax.torch
from diffusax.interop.torch.importing import torchax_module


def by_hand(pipe: Any) -> Callable[..., Any]:
    """The pipeline's call with modules compiled by torchax itself."""
    torchax_module("tensor")  # Imports torchax also where torch is too new for it.
    import torchax
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    jax.tree_util.register_pytree_node(
        BaseModelOutputWithPooling,
        lambda v: ((v.last_hidden_state, v.pooler_output, v.hidden_states, v.attentions), None),
        lambda _, children: BaseModelOutputWithPooling(*children),
    )
    env = torchax.default_env()
    options = {"jax_jit_kwargs": {"static_argnames": ("return_dict",)}}
    decode = torchax.CompileOptions(methods_to_compile=["decode"], **options)
    with env:
        pipe.to("jax")
        for name, value in vars(pipe.scheduler).items():
            if isinstance(value, torch.Tensor):
                setattr(pipe.scheduler, name, value.to("jax"))
        pipe.unet = torchax.compile(pipe.unet, torchax.CompileOptions(**options))
        pipe.vae = torchax.compile(pipe.vae, decode)
        pipe.text_encoder = torchax.compile(pipe.text_encoder)

    def call(*args: Any, **kwargs: Any) -> Any:
        with env:
            return pipe(*args, **kwargs)

    return call


def seconds(call: Callable[[], Any], runs: int) -> float:
    """The median of some calls after the first, which compiles."""
    call()
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def tiny() -> Any:
    """A pipeline of its own for each way."""
    folder = Path(tempfile.mkdtemp()) / "sd2"
    scheduler = diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    pipe = build_stable_diffusion(folder, style="sd2", scheduler=scheduler)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pipelines(steps: int, size: int, runs: int) -> None:
    """Prints the seconds of a call each way, for a picture of size x size."""
    own: dict[str, Any] = {"num_inference_steps": steps, "height": size, "width": size}
    prompt = "a photograph of an astronaut riding a horse"
    native = diffusax.DiffusionPipeline.from_torch(tiny())
    native.set_progress_bar_config(disable=True)
    ways = {
        "PyTorch": tiny(),
        "torchax by hand": by_hand(tiny()),
        "diffusax.torch.compile": diffusax.torch.compile(tiny()),
        "diffusax.torch.compile, fuse_loop": diffusax.torch.compile(tiny(), fuse_loop=True),
        "from_torch, native networks": native,
    }
    found = {}
    for name, way in ways.items():
        try:
            found[name] = seconds(lambda way=way: way(prompt, **own), runs)
        except Exception as error:
            reason = " ".join(str(error).split())[:150]
            print(f"{name}: fails with {type(error).__name__}: {reason}")
            continue
        print(f"{name}: {1000 * found[name]:.1f} ms a call of {steps} steps", flush=True)
    hand = found.get("torchax by hand")
    if hand:
        for name, value in found.items():
            print(f"  {name}: {hand / value:.2f}x torchax by hand")


def unet(runs: int) -> None:
    """Prints the seconds of one forward of a UNet of SD 2's size, batch 2, float32."""
    from full_size import SD2

    module = randomize(diffusers.UNet2DConditionModel(**SD2))
    rng = np.random.default_rng(0)
    given = [
        torch.from_numpy(rng.standard_normal((2, 4, 64, 64), np.float32)),
        torch.tensor(500),
        torch.from_numpy(rng.standard_normal((2, 77, 1024), np.float32)),
    ]
    with torch.no_grad():
        print(f"PyTorch: {seconds(lambda: module(*given), runs):.2f} s a forward", flush=True)
        diffusax.torch.compile(module)
        print(f"compiled: {seconds(lambda: module(*given), runs):.2f} s a forward", flush=True)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--size", type=int, default=64, help="height and width in pixels")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--unet", action="store_true", help="time a full-size UNet instead")
    args = parser.parse_args()
    print(describe())
    if args.unet:
        unet(args.runs)
    else:
        pipelines(args.steps, args.size, args.runs)


if __name__ == "__main__":
    main()
