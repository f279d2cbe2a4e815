"""Wan's transformer of VACE, which is also shown a video, a mask and images.

Jiang et al. 2025, section 3.3; upstream: diffusers models/transformers/transformer_wan_vace.py.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
from flax import nnx
from msgspec import Meta

from diffusax.boundary.config import Channels
from diffusax.models.layers.inputs import check_video
from diffusax.models.layers.layers import Linear
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.ops.rotation import Rotation
from diffusax.models.transformers.wan import Prefix, WanTransformer3DModel, WanTransformerBlock
from diffusax.models.transformers.wan_embeddings import PatchEmbedding, WanTransformer3DConfig
from diffusax.runtime.devices.splitting import split_tokens


@dataclasses.dataclass(frozen=True)
class WanVACETransformer3DConfig(WanTransformer3DConfig):
    """The options of diffusers' WanVACETransformer3DModel."""

    class_name: ClassVar[str] = "WanVACETransformer3DModel"

    vace_layers: Annotated[
        tuple[Annotated[int, Meta(ge=0, le=128)], ...], Meta(min_length=1, max_length=128)
    ] = (0, 5, 10, 15, 20, 25, 30, 35)
    """The blocks behind which something is added that is made of the control, in ascending order;
    the first of them is 0."""
    vace_in_channels: Channels = 96
    """The channels of the control: twice those of latents, and a mask's pixels of one latent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        layers = self.vace_layers
        if layers[0] != 0 or layers != tuple(sorted({*layers})) or layers[-1] >= self.num_layers:
            raise ValueError(
                f"vace_layers must be ascending numbers from 0 on, below num_layers="
                f"{self.num_layers} (got {layers})"
            )


class Control(NamedTuple):
    """What a network of VACE is shown: its latents, b f h w c, and weights of its layers, b n."""

    latents: jax.Array
    scale: jax.Array


class WanVACETransformerBlock(WanTransformerBlock):
    """A block over the control's tokens, which also returns what another block's output gains.

    control, x: b t c -> (b t c, b t c).
    """

    def __init__(self, config: WanTransformer3DConfig, *, first: bool, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        c = config.width
        self.proj_in = Linear(c, c, rngs=rngs) if first else None
        self.proj_out = Linear(c, c, rngs=rngs)

    def __call__(  # type: ignore[override]
        self, control: jax.Array, x: jax.Array, *rest: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns what a block's output gains, and the next block's tokens of the control.

        x: the tokens of the video, which only the first block reads. rest: as of the base.
        """
        if self.proj_in is not None:
            control = self.proj_in(control) + x
        control = super().__call__(control, *rest)
        return self.proj_out(control), control


class WanVACETransformer3DModel(WanTransformer3DModel):
    """Predicts the flow from videos to noise, also shown a video, a mask and images (VACE)."""

    config_class = WanVACETransformer3DConfig
    adapter_groups = (WanTransformer3DModel.adapter_groups[0], r"(vace_)?blocks\..*")

    def __init__(self, config: WanVACETransformer3DConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.vace_patch_embedding = PatchEmbedding(config, config.vace_in_channels, rngs=rngs)
        self.vace_blocks = nnx.List(
            [
                WanVACETransformerBlock(config, first=i == 0, rngs=rngs)
                for i in range(len(config.vace_layers))
            ]
        )

    def __call__(
        self,
        x: jax.Array,
        timestep: jax.Array,
        text: jax.Array | None = None,
        images: jax.Array | None = None,
        control: Control | None = None,
        *,
        prefix: Prefix | None = None,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Returns the prediction, b f h w c, in the dtype of the parameters.

        Args:
            x: as of WanTransformer3DModel, like all others that are not named here.
            timestep: see there.
            text: see there.
            images: see there.
            control: what the network is shown. Its latents are of x's frames, rows and columns,
                with vace_in_channels channels: those of what is kept, of what is to change, and a
                mask. Its scale has a weight for each of vace_layers.
            prefix: see there.
            gradient_checkpointing: see there.

        Raises:
            ValueError: an input has another shape, or is missing.
        """
        config: Any = self.config
        if control is None:
            raise ValueError("control must be given: the network is shown a video, with a mask")
        check_video("control", control.latents, config.vace_in_channels)
        if control.latents.shape[:4] != x.shape[:4]:
            raise ValueError(
                "control must have the videos, frames, rows and columns of x (got shapes "
                f"{control.latents.shape} and {x.shape})"
            )
        if control.scale.shape != (len(x), len(config.vace_layers)):
            raise ValueError(
                f"control's scale must have shape {(len(x), len(config.vace_layers))} (got "
                f"{control.scale.shape})"
            )
        prefix = self._known(text, images, prefix)
        return self._predict(x, timestep, prefix, gradient_checkpointing != "none", control)

    def _gains(
        self,
        control: Control,
        x: jax.Array,
        each: jax.Array,
        rotation: Rotation,
        known: list[Any],
        remat: bool,
    ) -> dict[int, jax.Array]:
        """Returns what the outputs of blocks gain, b t c each, by the number of the block."""
        config: Any = self.config
        y = split_tokens(self.vace_patch_embedding(control.latents))
        scale = control.scale.astype(x.dtype)[:, :, None, None]
        gains, own = {}, known[len(self.blocks) :]
        for i, (layer, block) in enumerate(zip(config.vace_layers, self.vace_blocks)):
            gain, y = rematerialized(block, remat)(y, x, each, rotation, *own[i])
            gains[layer] = gain * scale[:, i]
        return gains

    def _readers(self) -> list[WanTransformerBlock]:
        return [*self.blocks, *self.vace_blocks]
