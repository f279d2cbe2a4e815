"""A whole tiny Stable Diffusion pipeline, 20 steps, against diffusers on the same checkpoint.

In so small a model the time goes to dispatch, of which diffusax has one for all steps.
    python benchmarks/pipeline_cpu.py
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from machine import describe, interleaved_medians

import diffusax

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.tiny import build_stable_diffusion

SMALL = {
    "unet": {"block_out_channels": (16, 32), "sample_size": 8},
    "vae": {"block_out_channels": (8, 16), "sample_size": 16},
}
LEVELS = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
}


def main() -> None:
    """Prints a line for one picture and one for a batch of four."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    print(describe("torch", "diffusers"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        reference = build_stable_diffusion(path, unet=SMALL["unet"], vae={**SMALL["vae"], **LEVELS})
        pipe = diffusax.DiffusionPipeline.from_pretrained(path)
    pipe.set_progress_bar_config(disable=True)
    for n in (1, 4):
        compare(pipe, reference, n, args.steps, args.repeats)


def compare(pipe, reference, n: int, steps: int, repeats: int) -> None:
    """The same latents through both."""
    latents = np.random.default_rng(0).standard_normal((n, 4, 8, 8), np.float32)
    call = {"num_inference_steps": steps, "num_images_per_prompt": n, "output_type": "np"}
    call |= {"height": 16, "width": 16}

    def ours() -> np.ndarray:
        return pipe("a cat", latents=latents, **call).images

    def theirs() -> np.ndarray:
        return reference("a cat", latents=torch.tensor(latents), **call).images

    difference = np.abs(ours() - theirs()).max()
    medians = interleaved_medians({"diffusax": ours, "PyTorch": theirs}, repeats)
    print(
        f"batch {n}: diffusax {medians['diffusax'] * 1e3:.1f} ms, "
        f"diffusers {medians['PyTorch'] * 1e3:.1f} ms, "
        f"{medians['PyTorch'] / medians['diffusax']:.1f} times as fast "
        f"({steps} steps, median of {repeats}; largest difference {difference:.1e})",
        flush=True,
    )


if __name__ == "__main__":
    main()
