"""Pipelines with a PyTorch UNet on two devices; prints "MESH ok" for each mesh.

XLA_FLAGS=--xla_force_host_platform_device_count=2 python torch_networks_on_meshes.py FOLDER
"""

import sys
from pathlib import Path

import diffusers
import jax
import numpy as np

import diffusax
from support.pairs import NEGATIVES, PROMPTS, generators
from support.tiny import build_stable_diffusion

CALL = {"prompt": PROMPTS, "negative_prompt": NEGATIVES, "num_inference_steps": 3}
PLAIN = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}


class Squashed(diffusers.UNet2DConditionModel):
    """A user's UNet, with a forward of its own."""

    def forward(self, sample, *args, **kwargs):
        """Another prediction."""
        return (super().forward(sample, *args, **kwargs)[0] + 0.2 * sample.tanh(),)


def run(folder: Path) -> None:
    """Draws on each mesh what PyTorch draws."""
    jax.config.update("jax_disable_most_optimizations", True)
    pipe = build_stable_diffusion(folder / "checkpoint", unet=PLAIN)
    unet = Squashed.from_config(pipe.unet.config)
    unet.load_state_dict(pipe.unet.state_dict())
    pipe.unet = unet.eval()
    expected = pipe(**CALL, generator=generators([1, 2]), output_type="latent").images
    for mesh in ("data=2", "fsdp=2"):
        ours = diffusax.DiffusionPipeline.from_torch(pipe, mesh=mesh)
        ours.set_progress_bar_config(disable=True)
        assert len(ours.params["unet"]["conv_in.weight"].sharding.device_set) == 2
        split = [x for x in ours.params["unet"].values() if not x.is_fully_replicated]
        assert bool(split) == (mesh == "fsdp=2")
        latents = ours(**CALL, generator=generators([1, 2]), output_type="latent").images
        difference = np.abs(np.asarray(latents) - expected.numpy()).max()
        assert difference < 1e-4 * expected.std(), difference
        print(mesh, "ok")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
