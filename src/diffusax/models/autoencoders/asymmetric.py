"""The asymmetric autoencoder (Zhu et al. 2023), whose larger decoder sees what inpainting keeps."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
from flax import nnx

from diffusax.boundary.config import (
    Channels,
    Keyed,
    Positive,
    Repeats,
    Size,
    Widths,
    check_groups,
    check_types,
)
from diffusax.models.autoencoders.kl import (
    AutoencoderKL,
    AutoencoderKLConfig,
    Decoder,
    Encoder,
)
from diffusax.models.layers.inputs import check_map
from diffusax.models.layers.layers import Conv2d
from diffusax.models.layers.resnet import upsample_nearest


@dataclasses.dataclass(frozen=True)
class AsymmetricAutoencoderKLConfig(Keyed):
    """The options of diffusers' AsymmetricAutoencoderKL."""

    class_name: ClassVar[str] = "AsymmetricAutoencoderKL"
    fixed: ClassVar[dict[str, Any]] = {"act_fn": ("silu", "swish")}
    # diffusers derives this option from up_block_out_channels and writes both.
    ignored: ClassVar[frozenset[str]] = frozenset({"block_out_channels"})
    shift_factor: ClassVar[None] = None

    in_channels: Channels = 3
    out_channels: Channels = 3
    down_block_types: tuple[Literal["DownEncoderBlock2D"], ...] = ("DownEncoderBlock2D",)
    down_block_out_channels: Widths = (64,)
    layers_per_down_block: Repeats = 1
    up_block_types: tuple[Literal["UpDecoderBlock2D"], ...] = ("UpDecoderBlock2D",)
    up_block_out_channels: Widths = (64,)
    layers_per_up_block: Repeats = 1
    latent_channels: Channels = 4
    norm_num_groups: Channels = 32
    sample_size: Size = 32
    scaling_factor: Positive = 0.18215
    force_upcast: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        for side in ("down", "up"):
            name = f"{side}_block_out_channels"
            widths, types = getattr(self, name), getattr(self, f"{side}_block_types")
            if len(types) != len(widths):
                raise ValueError(
                    f"{side}_block_types must have one entry per level of {name} "
                    f"(got {len(types)} for {len(widths)} levels)"
                )
            check_groups(widths, self.norm_num_groups, name)
        if len(self.down_block_out_channels) != len(self.up_block_out_channels):
            raise ValueError(
                "down_block_out_channels and up_block_out_channels must have as many levels, for "
                "images to keep their size (got "
                f"{len(self.down_block_out_channels)} and {len(self.up_block_out_channels)})"
            )

    @property
    def downsampling(self) -> int:
        """The number of pixels per latent in each direction."""
        return self.half("down").downsampling

    @property
    def block_out_channels(self) -> tuple[int, ...]:
        """The channels of the decoder, which is the wider half."""
        return self.up_block_out_channels

    def half(self, side: Literal["down", "up"]) -> AutoencoderKLConfig:
        """Returns the options of an AutoencoderKL with this encoder ("down") or decoder ("up")."""
        shared = ("in_channels", "out_channels", "latent_channels", "norm_num_groups")
        return AutoencoderKLConfig(
            **{name: getattr(self, name) for name in shared},
            block_out_channels=getattr(self, f"{side}_block_out_channels"),
            layers_per_block=getattr(self, f"layers_per_{side}_block"),
            down_block_types=self.down_block_types,
            up_block_types=self.up_block_types,
        )


class MaskConditionEncoder(nnx.Module):
    """Maps of what a mask keeps, x: b H W 3 -> five maps b h w c, each half as large as the last.

    The first two have the size of the image.
    """

    def __init__(self, c: int, width: int, limit: int, *, rngs: nnx.Rngs):
        """Builds the layers. width: the first map's channels, doubled for each next one up to
        limit.
        """
        widths = [*(min(width * 2**i, limit) for i in range(4)), limit]
        layers = []
        for i, (before, after) in enumerate(zip((c, *widths), widths)):
            kernel, stride = (3, 1) if i < 2 else (4, 2)
            layers.append(Conv2d(before, after, kernel, stride=stride, padding=1, rngs=rngs))
        self.layers = nnx.List(layers)

    def __call__(self, x: jax.Array) -> list[jax.Array]:
        maps: list[jax.Array] = []
        for layer in self.layers:
            maps.append(layer(nnx.relu(maps[-1]) if maps else x))
        return maps


class MaskConditionDecoder(Decoder):
    """z: b h w z -> b H W 3. Upstream: diffusers models/autoencoders/vae.py, of the same name."""

    def __init__(self, config: AutoencoderKLConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        widths = config.block_out_channels
        self.condition_encoder = MaskConditionEncoder(
            config.out_channels, widths[0], widths[-1], rngs=rngs
        )

    def __call__(
        self, z: jax.Array, image: jax.Array | None = None, mask: jax.Array | None = None
    ) -> jax.Array:
        """Decodes latents to images, b H W 3; image and mask are optional.

        Args:
            z: b h w z.
            image: b H W 3 in [-1, 1].
            mask: b H W 1, zero where the image is kept.

        Raises:
            ValueError: the condition has no map of the size or the width that a level has.
        """
        x = self.mid_block(self.conv_in(z))
        if image is None or mask is None:
            maps, mask = None, None
        else:
            mask = mask.astype(x.dtype)
            kept = self.condition_encoder((1 - mask) * image.astype(x.dtype))
            # If several maps have one shape, the last one counts, as upstream.
            maps = {y.shape: y for y in kept}
        for block in self.up_blocks:
            x = block(_mixed(x, maps, mask))
        return self.head(_mixed(x, maps, mask))


def _mixed(
    x: jax.Array, maps: dict[tuple[int, ...], jax.Array] | None, mask: jax.Array | None
) -> jax.Array:
    """Takes x where the mask is one, and the condition's map where it is zero."""
    if maps is None or mask is None:
        return x
    if x.shape not in maps:
        raise ValueError(
            f"image and mask must give a map of shape {x.shape} to this autoencoder's decoder (got "
            f"{', '.join(map(str, maps))}); give an image of the latents' size, or neither"
        )
    small = upsample_nearest(mask, (x.shape[1], x.shape[2]))
    return x * small + maps[x.shape] * (1 - small)


class AsymmetricAutoencoderKL(AutoencoderKL):
    """An AutoencoderKL whose decoder may also take an image and its mask.

    Upstream: diffusers models/autoencoders/autoencoder_asym_kl.py.
    """

    config_class: Any = AsymmetricAutoencoderKLConfig
    decoder: MaskConditionDecoder

    def __init__(self, config: AsymmetricAutoencoderKLConfig, *, rngs: nnx.Rngs):
        self.config = config
        z = config.latent_channels
        self.encoder = Encoder(config.half("down"), rngs=rngs)
        self.decoder = MaskConditionDecoder(config.half("up"), rngs=rngs)
        self.quant_conv = Conv2d(2 * z, 2 * z, 1, rngs=rngs)
        self.post_quant_conv: Any = Conv2d(z, z, 1, rngs=rngs)

    def decode(
        self, z: jax.Array, image: jax.Array | None = None, mask: jax.Array | None = None
    ) -> jax.Array:
        """Decodes latents. z: b h w z -> b H W 3. image, mask: see `MaskConditionDecoder`.

        Raises:
            ValueError: z has another shape.
        """
        check_map("z", z, self.config.latent_channels)
        return self.decoder(self.post_quant_conv(z), image, mask)

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """Reconstructs images from the latents' mean. x: b H W 3, mask: b H W 1 -> b H W 3."""
        return self.decode(self.encode(x)[0], x, mask)
