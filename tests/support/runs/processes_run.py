"""One of several processes, each of which draws its own prompts on a mesh of all their devices.

python processes_run.py CHECKPOINT OUT MESH SEED [wait]
"""

import sys
import time
from pathlib import Path

import numpy as np

import diffusax


def main(checkpoint: str, out: str, mesh: str, seed: str, wait: str = "") -> None:
    """Writes this process's pictures; with `wait`, goes on drawing until it is ended."""
    if mesh != "alone":
        diffusax.initialize(heartbeat_seconds=10)
    options = {} if mesh == "alone" else {"mesh": mesh}
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(checkpoint, **options)
    # As many programs do: the bar of one process alone.
    pipe.set_progress_bar_config(disable=seed != "5")
    call = {"num_inference_steps": 2, "output_type": "np", "seed": int(seed)}
    prompts = [f"picture {seed}", "a frog", "a boat"]
    images = pipe(prompts, **call).images

    def change(pipe, row, timestep, tensors):
        return {"latents": tensors["latents"] * 0.9}

    changed = pipe(prompts, **call, callback_on_step_end=change).images
    np.save(out, np.concatenate([images, changed]))
    while wait:
        Path(f"{out}.drawing").touch()
        pipe("a frog", **call)
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
