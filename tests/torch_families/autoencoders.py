"""Tiny autoencoders with random weights."""

from typing import Any

import diffusers

from .weights import randomize


def autoencoder(latent_channels: int = 4, levels: int = 4, **changes: Any) -> Any:
    """AutoencoderKL; its factor is 2 to the power of `levels` - 1."""
    config = {
        "block_out_channels": (8, 8, 16, 16)[-levels:],
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "latent_channels": latent_channels,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "sample_size": 64,
    }
    return randomize(diffusers.AutoencoderKL(**{**config, **changes}))


def flow_autoencoder(latent_channels: int = 16, **changes: Any) -> Any:
    """AutoencoderKL as Flux and SD3 have it: with a shift and without the last projections."""
    config = {"use_quant_conv": False, "use_post_quant_conv": False}
    numbers = {"shift_factor": 0.0609, "scaling_factor": 1.5035}
    return autoencoder(latent_channels, **{**config, **numbers, **changes})
