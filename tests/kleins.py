"""Tiny FLUX.2 networks of PyTorch with all weights random, two blocks of each kind and more."""

from typing import Any

import diffusers
import torch
from tiny import randomize

VAE: dict[str, Any] = {
    "block_out_channels": (8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
    "mid_block_add_attention": False,
    "sample_size": 64,
}


def autoencoder(seed: int = 1, **changes: Any) -> Any:
    """An autoencoder with statistics of its latents that differ between channels."""
    vae = randomize(diffusers.AutoencoderKLFlux2(**{**VAE, **changes}), seed)
    generator = torch.Generator().manual_seed(seed)
    vae.bn.running_mean.normal_(std=0.3, generator=generator)
    vae.bn.running_var.uniform_(0.5, 2.0, generator=generator)
    return vae.requires_grad_(False)
