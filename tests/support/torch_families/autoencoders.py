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


def deep_compression() -> Any:
    """AutoencoderDC of factor 4, as Sana has it at factor 32."""
    blocks = ("ResBlock", "ResBlock", "EfficientViTBlock")
    return randomize(
        diffusers.AutoencoderDC(
            in_channels=3,
            latent_channels=4,
            attention_head_dim=2,
            encoder_block_types=blocks,
            decoder_block_types=blocks,
            encoder_block_out_channels=(8, 8, 8),
            decoder_block_out_channels=(8, 8, 8),
            encoder_qkv_multiscales=((), (), (5,)),
            decoder_qkv_multiscales=((), (), (5,)),
            encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            downsample_block_type="conv",
            upsample_block_type="interpolate",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        )
    )


def qwen_autoencoder(z_dim: int = 4, **changes: Any) -> Any:
    """Qwen-Image's autoencoder of videos, factor 8."""
    return randomize(
        diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=z_dim,
            dim_mult=[1, 1, 2, 2],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1 * i for i in range(z_dim)],
            latents_std=[1.0 + 0.1 * i for i in range(z_dim)],
            **changes,
        )
    )


def wan_autoencoder(z_dim: int = 16, **changes: Any) -> Any:
    """Wan's autoencoder of videos, factor 8 in space and 4 in time."""
    config = {
        "base_dim": 4,
        "z_dim": z_dim,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.1 * i for i in range(z_dim)],
        "latents_std": [1.0 + 0.1 * i for i in range(z_dim)],
    }
    return randomize(diffusers.AutoencoderKLWan(**{**config, **changes}))


def flux2_autoencoder(latent_channels: int = 4) -> Any:
    """Flux 2's autoencoder, factor 8, with statistics of its latents."""
    made = randomize(
        diffusers.AutoencoderKLFlux2(
            block_out_channels=(8, 8, 16, 16),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=latent_channels,
            layers_per_block=1,
            norm_num_groups=4,
            sample_size=64,
        )
    )
    made.bn.running_mean.normal_(std=0.2)
    made.bn.running_var.uniform_(0.5, 1.5)
    return made
