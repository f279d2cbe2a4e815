"""A loop by hand over the embedded model, as in diffusers' tutorial, against the pipeline's call.

python benchmarks/steps_by_hand_cpu.py
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from machine import describe, interleaved_medians

import diffusax
from diffusax.samplers import scheduler_from_name

PROMPTS = ["a red apple", ""]


def main() -> None:
    """Prints a line for each sampler and number of images."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    print(describe())
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    pipe.set_progress_bar_config(disable=True)
    for name in ("dpm++2m", "euler_a"):
        for images in (1, 4):
            compare(pipe, name, images, args.steps, args.repeats)


def compare(pipe: Any, name: str, images: int, steps: int, repeats: int) -> None:
    """Runs the same latents both ways, with guidance, to latents."""
    scheduler = pipe.scheduler = scheduler_from_name(name, pipe.scheduler)
    call = {"num_inference_steps": steps, "guidance_scale": 5.0, "seed": 0}
    call |= {"num_images_per_prompt": images}
    start = jnp.moveaxis(pipe.prepare_inputs(PROMPTS[0], **call).plan.latents, -1, 1)
    context = np.concatenate([pipe.encode_prompt(p)[0].repeat(images, 0) for p in PROMPTS])
    context = jnp.asarray(context)
    key = {"generator": jax.random.key(0)} if name == "euler_a" else {}

    def by_hand() -> np.ndarray:
        latents = start
        scheduler.set_timesteps(steps)
        for t in scheduler.timesteps:
            both = scheduler.scale_model_input(jnp.concatenate([latents, latents]), t)
            predicted = pipe.unet(both, t, encoder_hidden_states=context).sample
            prompted, empty = jnp.split(predicted, 2)
            guided = empty + 5.0 * (prompted - empty)
            latents = scheduler.step(guided, t, latents, **key).prev_sample
        return np.asarray(latents)

    def fused() -> np.ndarray:
        return np.asarray(pipe(PROMPTS[0], output_type="latent", **call).images)

    # Noise depends on the layout, which is channels last in a call.
    difference = np.abs(by_hand() - fused()).max()
    found = "noise of its own" if key else f"largest difference {difference:.1e}"
    medians = interleaved_medians({"by hand": by_hand, "call": fused}, repeats)
    print(
        f"{name}, {images} images: by hand {medians['by hand'] * 1e3:.0f} ms, "
        f"the call {medians['call'] * 1e3:.0f} ms, ratio "
        f"{medians['by hand'] / medians['call']:.2f} "
        f"({steps} steps, median of {repeats}; {found})",
        flush=True,
    )


if __name__ == "__main__":
    main()
