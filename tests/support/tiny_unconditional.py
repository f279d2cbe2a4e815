"""Tiny real checkpoints of networks that draw from noise alone, with all weights random."""

from pathlib import Path
from typing import Any

import diffusers

from support.tiny import own_numbers, randomize

UNET: dict[str, Any] = {
    "sample_size": 16,
    "block_out_channels": (16, 32),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 8,
    "layers_per_block": 1,
}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "small": {},
    "large": {"variance_type": "fixed_large"},
    "sample": {"prediction_type": "sample", "beta_schedule": "squaredcos_cap_v2"},
    "v": {"prediction_type": "v_prediction", "timestep_spacing": "trailing", "thresholding": True},
}


def build_unconditional(folder: Path, scheduler: str = "small", **unet: Any) -> Path:
    """A DDPMPipeline of diffusers, saved in `folder`. scheduler: one of SCHEDULERS."""
    with own_numbers():
        pipe = diffusers.DDPMPipeline(
            unet=randomize(diffusers.UNet2DModel(**{**UNET, **unet})),
            scheduler=diffusers.DDPMScheduler(**SCHEDULERS[scheduler]),
        )
    pipe.save_pretrained(folder)
    return folder
