"""Pipelines with a PyTorch UNet on two devices; prints "MESH ok" for each mesh.

XLA_FLAGS=--xla_force_host_platform_device_count=2 python torch_networks_on_meshes.py FOLDER
"""

import sys
from pathlib import Path

import diffusers
import jax
import numpy as np
from pairs import NEGATIVES, PROMPTS
from tiny import build_stable_diffusion

import diffusax

CALL = {"prompt": PROMPTS, "negative_prompt": NEGATIVES, "seed": 1, "output_type": "np"}


class Squashed(diffusers.UNet2DConditionModel):
    """A user's UNet, with a forward of its own."""

    def forward(self, sample, *args, **kwargs):
        """Another prediction."""
        return (super().forward(sample, *args, **kwargs)[0] + 0.2 * sample.tanh(),)


def run(folder: Path) -> None:
    """Draws on each mesh what one device draws."""
    jax.config.update("jax_disable_most_optimizations", True)
    pipe = build_stable_diffusion(folder / "checkpoint")
    unet = Squashed.from_config(pipe.unet.config)
    unet.load_state_dict(pipe.unet.state_dict())
    pipe.unet = unet.eval()
    expected = None
    for mesh in (None, "data=2", "fsdp=2"):
        place = {"device": jax.devices()[0]} if mesh is None else {"mesh": mesh}
        ours = diffusax.DiffusionPipeline.from_torch(pipe, **place)
        ours.set_progress_bar_config(disable=True)
        pictures = ours(**CALL, num_inference_steps=3).images
        if mesh is None:
            expected = pictures
            assert expected.std() > 0.03
            continue
        assert len(ours.params["unet"]["conv_in.weight"].sharding.device_set) == 2
        split = [x for x in ours.params["unet"].values() if not x.is_fully_replicated]
        assert bool(split) == (mesh == "fsdp=2")
        difference = np.abs(pictures - expected).max()
        assert difference < 1e-4, difference
        print(mesh, "ok")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
