"""FLUX.2's autoencoder, whose latents are normalised in patches of 2x2."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import ones, zeros

from diffusax.boundary.config import (
    Channels,
    Keyed,
    Positive,
    Repeats,
    Size,
    Widths,
    check_types,
)
from diffusax.models.autoencoders.kl import (
    AutoencoderKL,
    AutoencoderKLConfig,
    Decoder,
    Encoder,
)
from diffusax.models.layers.layers import Conv2d
from diffusax.models.layers.rngs import shaped

_Down = Literal["DownEncoderBlock2D"]
_Up = Literal["UpDecoderBlock2D"]
_DOWN: tuple[_Down, ...] = ("DownEncoderBlock2D",) * 4
_UP: tuple[_Up, ...] = ("UpDecoderBlock2D",) * 4


@dataclasses.dataclass(frozen=True)
class AutoencoderKLFlux2Config(Keyed):
    """The options of diffusers' AutoencoderKLFlux2."""

    class_name: ClassVar[str] = "AutoencoderKLFlux2"
    fixed: ClassVar[dict[str, Any]] = {
        "act_fn": ("silu", "swish"),
        # A list in files, and a tuple in PyTorch's objects.
        "patch_size": ([2, 2], (2, 2)),
    }
    # Published files have force_upcast, which diffusers has dropped.
    ignored: ClassVar[frozenset[str]] = frozenset({"batch_norm_momentum", "force_upcast"})
    latent_patch: ClassVar[int] = 2
    """The latents in each direction that are one latent of the diffusion model."""

    in_channels: Channels = 3
    out_channels: Channels = 3
    down_block_types: tuple[_Down, ...] = _DOWN
    up_block_types: tuple[_Up, ...] = _UP
    block_out_channels: Widths = (128, 256, 512, 512)
    decoder_block_out_channels: Widths | None = None
    """The channels of the decoder's levels; None for those of the encoder."""
    layers_per_block: Repeats = 2
    latent_channels: Channels = 32
    norm_num_groups: Channels = 32
    sample_size: Size = 1024
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True
    batch_norm_eps: Positive = 1e-4

    def __post_init__(self) -> None:
        check_types(self)
        widths = self.decoder_block_out_channels
        if widths is not None and len(widths) != len(self.block_out_channels):
            raise ValueError(
                "decoder_block_out_channels must have one entry per level of block_out_channels "
                f"(got {len(widths)} for {len(self.block_out_channels)} levels)"
            )
        for name in ("block_out_channels", "decoder_block_out_channels"):
            if (widths := getattr(self, name)) is not None:
                self.with_widths(widths)

    @property
    def downsampling(self) -> int:
        """The number of pixels per latent in each direction, before latents are put in patches."""
        return 2 ** (len(self.block_out_channels) - 1)

    def with_widths(self, widths: tuple[int, ...]) -> AutoencoderKLConfig:
        """Returns the options of an AutoencoderKL of which a half has these channels.

        Raises:
            ValueError: they do not fit the other options.
        """
        shared = (
            "in_channels",
            "out_channels",
            "down_block_types",
            "up_block_types",
            "layers_per_block",
            "latent_channels",
            "norm_num_groups",
            "mid_block_add_attention",
        )
        options = {name: getattr(self, name) for name in shared}
        return AutoencoderKLConfig(block_out_channels=widths, **options)


class LatentStatistics(nnx.Module):
    """The mean and variance of the channels of patches of latents, c each."""

    def __init__(self, c: int, *, rngs: nnx.Rngs):
        make = rngs.params
        self.running_mean = nnx.Param(shaped(zeros)(make(), (c,), jnp.float32))
        self.running_var = nnx.Param(shaped(ones)(make(), (c,), jnp.float32))


class AutoencoderKLFlux2(AutoencoderKL):
    """An AutoencoderKL that holds the statistics by which its latents are normalised.

    Upstream: diffusers models/autoencoders/autoencoder_kl_flux2.py. Latents here are the network's
    own; `diffusax.models.autoencoders.latents` cuts them into patches and normalises these.
    """

    config_class: Any = AutoencoderKLFlux2Config
    ignored_keys = ("bn.num_batches_tracked",)

    def __init__(self, config: AutoencoderKLFlux2Config, *, rngs: nnx.Rngs):
        self.config = config
        z = config.latent_channels
        widths = config.block_out_channels
        self.encoder = Encoder(config.with_widths(widths), rngs=rngs)
        widths = config.decoder_block_out_channels or widths
        self.decoder = Decoder(config.with_widths(widths), rngs=rngs)
        self.quant_conv = Conv2d(2 * z, 2 * z, 1, rngs=rngs) if config.use_quant_conv else None
        self.post_quant_conv = Conv2d(z, z, 1, rngs=rngs) if config.use_post_quant_conv else None
        self.bn = LatentStatistics(z * config.latent_patch**2, rngs=rngs)
