"""ControlNet: an image steers a UNet through its skip connections (Zhang et al. 2023)."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.boundary.config import Channels, Widths
from diffusax.models.layers import resnet, transformer
from diffusax.models.layers.inputs import check_map
from diffusax.models.layers.layers import Conv2d
from diffusax.models.ops.activations import silu
from diffusax.models.unet.unet_encoder import UNetEncoder, UNetEncoderConfig, skip_widths

Residuals = tuple[tuple[jax.Array, ...], jax.Array]
"""One map b h w c for each skip connection of the UNet, and one for its middle block."""


@dataclasses.dataclass(frozen=True)
class ControlNetConfig(UNetEncoderConfig):
    """The options of diffusers' ControlNetModel, for Stable Diffusion and SDXL."""

    class_name: ClassVar[str] = "ControlNetModel"
    fixed: ClassVar[dict[str, Any]] = {
        "act_fn": ("silu", "swish"),
        "addition_embed_type_num_heads": 64,
        "encoder_hid_dim": None,
        "encoder_hid_dim_type": None,
        "num_attention_heads": None,
    }
    ignored: ClassVar[frozenset[str]] = frozenset()

    mid_block_type: Literal["UNetMidBlock2DCrossAttn", "UNetMidBlock2D"] = "UNetMidBlock2DCrossAttn"
    class_embed_type: Literal["timestep", "identity", "projection"] | None = None
    conditioning_channels: Channels = 3
    controlnet_conditioning_channel_order: Literal["rgb", "bgr"] = "rgb"
    conditioning_embedding_out_channels: Widths = (16, 32, 96, 256)
    global_pool_conditions: bool = False

    @property
    def downsampling(self) -> int:
        """The number of control-image pixels per latent in each direction."""
        return 2 ** (len(self.conditioning_embedding_out_channels) - 1)


class ConditioningEmbedding(nnx.Module):
    """Convolutions from the control image to the latents' size. x: b H W 3 -> b h w c."""

    def __init__(self, channels: int, widths: Sequence[int], d: int, *, rngs: nnx.Rngs):
        self.conv_in = Conv2d(channels, widths[0], 3, rngs=rngs)
        blocks: list[Conv2d] = []
        for narrow, wide in itertools.pairwise(widths):
            blocks.append(Conv2d(narrow, narrow, 3, rngs=rngs))
            blocks.append(Conv2d(narrow, wide, 3, stride=2, rngs=rngs))
        self.blocks = nnx.List(blocks)
        self.conv_out = Conv2d(widths[-1], d, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = silu(self.conv_in(x))
        for block in self.blocks:
            x = silu(block(x))
        return self.conv_out(x)


class ControlNetModel(UNetEncoder):
    """Computes residuals for a UNet's skip connections from latents, a prompt and an image.

    Upstream: diffusers models/controlnets/controlnet.py. Call `embed_condition` once for an image,
    and the model and `scale_residuals` for every evaluation; add the residuals of several
    ControlNets and pass them to the UNet.
    """

    config_class = ControlNetConfig
    tensor_rules = (*transformer.TENSOR_RULES, *resnet.TENSOR_RULES)
    adapter_groups = transformer.ADAPTER_GROUPS

    def __init__(self, config: ControlNetConfig, *, rngs: nnx.Rngs):
        width = config.block_out_channels[0]
        super().__init__(config, time_dim=4 * width, rngs=rngs)
        self.controlnet_cond_embedding = ConditioningEmbedding(
            config.conditioning_channels,
            config.conditioning_embedding_out_channels,
            width,
            rngs=rngs,
        )
        self.controlnet_down_blocks = nnx.List(
            [Conv2d(d, d, 1, rngs=rngs) for d in skip_widths(config)]
        )
        self.controlnet_mid_block = Conv2d(
            config.block_out_channels[-1], config.block_out_channels[-1], 1, rngs=rngs
        )

    def embed_condition(self, cond: jax.Array) -> jax.Array:
        """Embeds control images in [0, 1] for the call. cond: b H W 3 -> b h w c.

        Raises:
            ValueError: cond has another shape.
        """
        check_map("cond", cond, self.config.conditioning_channels)
        if self.config.controlnet_conditioning_channel_order == "bgr":
            cond = cond[..., ::-1]
        return self.controlnet_cond_embedding(cond)

    def __call__(
        self,
        sample: jax.Array,
        timestep: jax.Array,
        encoder_hidden_states: jax.Array,
        *,
        cond_embedding: jax.Array,
        class_labels: jax.Array | None = None,
        timestep_cond: jax.Array | None = None,
        added_cond: dict[str, jax.Array] | None = None,
        gradient_checkpointing: str = "none",
    ) -> Residuals:
        """Returns the residuals before any scale.

        Args:
            sample: b h w in_channels.
            timestep: a scalar or b.
            encoder_hidden_states: b s cross_attention_dim.
            cond_embedding: b h w c (or 1 h w c), from `embed_condition`.
            class_labels: b (or b c, for "projection"), where the config has them.
            timestep_cond: has no effect: a ControlNet has no layer for it.
            added_cond: SDXL's {"text_embeds": b p, "time_ids": b 6}.
            gradient_checkpointing: see `UNet2DConditionModel`.

        Raises:
            ValueError: a condition that the config asks for is missing, or an input has another
                shape.
        """
        self.check_inputs(sample, timestep, encoder_hidden_states)
        check_map("cond_embedding", cond_embedding, self.config.block_out_channels[0])
        self._check_size(sample, cond_embedding)
        dtype = self.conv_in.kernel.dtype
        sample, context = sample.astype(dtype), encoder_hidden_states.astype(dtype)
        timestep = jnp.broadcast_to(timestep, sample.shape[:1])
        temb = self.embed(timestep, class_labels, timestep_cond, added_cond).astype(dtype)
        x = self.conv_in(sample) + cond_embedding.astype(dtype)
        given = temb, context, (), gradient_checkpointing
        skips = [x, *self.down_maps(x, *given)]
        x = self.middle(skips[-1], *given)
        down = (conv(skip) for conv, skip in zip(self.controlnet_down_blocks, skips, strict=True))
        return tuple(down), self.controlnet_mid_block(x)

    def _check_size(self, sample: jax.Array, cond_embedding: jax.Array) -> None:
        """Raises ValueError unless the embedded control images have the size of the latents."""
        size, given = sample.shape[1:3], cond_embedding.shape[1:3]
        if size != given:
            channels = self.config.conditioning_embedding_out_channels
            raise ValueError(
                f"cond_embedding must have the height and width of the latents, {size} (got "
                f"{given}): conditioning_embedding_out_channels={channels} divides control images "
                f"by {2 ** (len(channels) - 1)}; is the ControlNet made for this autoencoder?"
            )

    def scaled_residuals(
        self,
        sample: jax.Array,
        timestep: jax.Array,
        encoder_hidden_states: jax.Array,
        cond: jax.Array,
        scales: Any,
        **conditions: Any,
    ) -> Residuals:
        """Embeds the control images, and returns the residuals times `scales`.

        cond: see `embed_condition`. scales: see `scale_residuals`. The rest is as in the call.
        """
        embedding = self.embed_condition(cond)
        residuals = self(
            sample, timestep, encoder_hidden_states, cond_embedding=embedding, **conditions
        )
        return scale_residuals(self.config, residuals, scales)


def scale_residuals(config: ControlNetConfig, residuals: Residuals, scales: Any) -> Residuals:
    """Multiplies the residuals by `scales`, then averages them over the map if the config says so.

    scales: a scalar, one for each residual (r, the middle block's last), or r b: `guess_scales`
    times the scale in guess mode (which upstream leaves out with `global_pool_conditions`).
    """
    down, mid = residuals
    scales = jnp.asarray(scales, jnp.float32)
    scales = jnp.broadcast_to(scales, (len(down) + 1, *scales.shape[1:]))
    scales = scales.reshape(len(down) + 1, -1, 1, 1, 1)
    scaled = [(x * scale).astype(x.dtype) for x, scale in zip((*down, mid), scales, strict=True)]
    if config.global_pool_conditions:
        scaled = [x.mean((1, 2), keepdims=True) for x in scaled]
    return tuple(scaled[:-1]), scaled[-1]


def guess_scales(count: int) -> np.ndarray:
    """Returns guess mode's weights of `count` residuals, the middle block's last: 0.1 rising to 1.

    Their logarithms have equal steps, as in upstream's `forward` (Zhang et al. 2023, section 3.5).
    float32.
    """
    return np.logspace(-1, 0, count, dtype=np.float32)
