"""Stable Diffusion 2 base at full size on a GPU: 512x512, 20 steps, bfloat16, random weights.

Prints seconds per picture, pictures per second, achieved TFLOP/s (of the UNet's counted operations)
and compile seconds, for batches of 1 and 8; and diffusers eager and compiled, where installed.
    python benchmarks/gpu.py
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from full_size import SD2, VAE, VIT_H
from machine import describe

import diffusax
from diffusax.models import (
    AutoencoderKL,
    AutoencoderKLConfig,
    CLIPTextConfig,
    CLIPTextModel,
    UNet2DConditionConfig,
    UNet2DConditionModel,
    initialize,
)
from diffusax.runtime.flops import count_flops

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from clip_vocabulary import write_clip_vocabulary

STEPS = 20


def main() -> None:
    """One line per system and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-torch", action="store_true", help="leave diffusers out")
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}; {describe('torch', 'diffusers')}", flush=True)
    pipe = full_size_pipeline()
    for batch in args.batches:
        measure_diffusax(pipe, batch, args.repeats)
    if not args.no_torch:
        measure_diffusers(pipe, args.batches, args.repeats)


def full_size_pipeline() -> diffusax.StableDiffusionPipeline:
    """SD 2 base with random weights in bfloat16 and CLIP's real vocabulary."""
    from diffusax.text.tokenizer import CLIPTokenizer

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = CLIPTokenizer.from_folder(write_clip_vocabulary(Path(folder), pad="!"))
    dtype = jnp.bfloat16
    pipe = diffusax.StableDiffusionPipeline(
        text_encoder=initialize(CLIPTextModel, CLIPTextConfig(**VIT_H), dtype=dtype),
        tokenizer=tokenizer,
        unet=initialize(UNet2DConditionModel, UNet2DConditionConfig(**SD2), dtype=dtype),
        vae=initialize(AutoencoderKL, AutoencoderKLConfig(**VAE), dtype=dtype),
        scheduler=diffusax.DDIMScheduler(clip_sample=False, beta_schedule="scaled_linear"),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def measure_diffusax(pipe: diffusax.StableDiffusionPipeline, batch: int, repeats: int) -> None:
    """The whole call, text to arrays on the host."""

    def draw() -> np.ndarray:
        return pipe(
            "a photo of an astronaut",
            num_images_per_prompt=batch,
            num_inference_steps=STEPS,
            seed=0,
            output_type="np",
        ).images

    seconds, first = timed(draw, repeats)
    x = jax.ShapeDtypeStruct((2 * batch, 64, 64, 4), jnp.bfloat16)
    context = jax.ShapeDtypeStruct((2 * batch, 77, 1024), jnp.bfloat16)
    t = jax.ShapeDtypeStruct((), jnp.float32)
    flops = count_flops(pipe.unet.apply, pipe.params["unet"], x, t, context) * STEPS
    report("diffusax", batch, seconds, first - seconds, flops / seconds / 1e12)


def measure_diffusers(
    pipe: diffusax.StableDiffusionPipeline, batches: list[int], repeats: int
) -> None:
    """diffusers on the same weights: eager, then torch.compile with channels_last."""
    try:
        import diffusers
        import torch
    except ImportError as error:
        print(f"diffusers: not measured ({error})")
        return
    with tempfile.TemporaryDirectory() as folder:
        pipe.save_pretrained(folder)
        reference = diffusers.StableDiffusionPipeline.from_pretrained(
            folder, torch_dtype=torch.bfloat16
        ).to("cuda")
    reference.set_progress_bar_config(disable=True)
    for name in ("eager", "max-autotune"):
        if name == "max-autotune":
            for part in ("unet", "vae"):
                getattr(reference, part).to(memory_format=torch.channels_last)
            options = {"mode": name, "fullgraph": True}
            reference.unet = torch.compile(reference.unet, **options)
            reference.vae.decode = torch.compile(reference.vae.decode, **options)
        for batch in batches:

            def draw(batch: int = batch) -> np.ndarray:
                return reference(
                    "a photo of an astronaut",
                    num_images_per_prompt=batch,
                    num_inference_steps=STEPS,
                    output_type="np",
                ).images

            seconds, first = timed(draw, repeats)
            report(f"diffusers {name}", batch, seconds, first - seconds, None)


def timed(draw: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median seconds of a call, and seconds of the first."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        draw()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]), times[0]


def report(name: str, batch: int, seconds: float, compiling: float, tflops: float | None) -> None:
    """One line."""
    achieved = "" if tflops is None else f", {tflops:.0f} TFLOP/s"
    print(
        f"{name}, batch {batch}: {seconds / batch:.3f} s per picture, {batch / seconds:.2f} "
        f"pictures/s{achieved}, {compiling:.0f} s to compile",
        flush=True,
    )


if __name__ == "__main__":
    main()
