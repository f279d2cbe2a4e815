"""The configs of denoising transformers."""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from diffusax.boundary.config import (
    Channels,
    Epsilon,
    Heads,
    Keyed,
    Layers,
    Positive,
    check_types,
)
from diffusax.models.transformers.references import Layout

Axes = Annotated[tuple[Channels, ...], Meta(min_length=3, max_length=3)]
Blocks = Annotated[int, Meta(ge=0, le=64)]
OWN = frozenset(["references_layout"])
"""The options that diffusers' networks of text to image do not have, see `Config`."""


@dataclasses.dataclass(frozen=True)
class ZImageTransformer2DConfig(Keyed):
    """The options of diffusers' ZImageTransformer2DModel for one image in patches of 2x2."""

    class_name: ClassVar[str] = "ZImageTransformer2DModel"
    fixed: ClassVar[dict[str, Any]] = {
        # A list in files, and a tuple in PyTorch's objects.
        "all_patch_size": ([2], (2,)),
        "all_f_patch_size": ([1], (1,)),
        "siglip_feat_dim": None,
    }
    ignored: ClassVar[frozenset[str]] = frozenset()
    own: ClassVar[frozenset[str]] = OWN

    in_channels: Channels = 16
    dim: Channels = 3840
    n_layers: Layers = 30
    n_refiner_layers: Layers = 2
    n_heads: Heads = 30
    n_kv_heads: Heads = 30
    """Changes nothing, as in diffusers, where keys have as many heads as queries."""
    norm_eps: Epsilon = 1e-5
    qk_norm: bool = True
    cap_feat_dim: Channels = 2560
    rope_theta: Positive = 256.0
    t_scale: Positive = 1000.0
    axes_dims: Axes = (32, 48, 48)
    """The channels of a head for the position in the text, the row and the column."""
    axes_lens: Axes = (1024, 512, 512)
    """The number of positions on each of these axes."""
    references_layout: Layout | None = None
    """What images to look at see, "blind" or "joint", in a network that has learned to look at
    some; None in others, which look at them as "blind"."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.dim % self.n_heads or sum(self.axes_dims) != self.dim // self.n_heads:
            raise ValueError(
                f"axes_dims={self.axes_dims} must add up to dim / n_heads "
                f"(got {self.dim} / {self.n_heads})"
            )
        if any(dim % 2 for dim in self.axes_dims):
            raise ValueError(f"axes_dims={self.axes_dims} must be even")


@dataclasses.dataclass(frozen=True)
class FluxConfig(Keyed):
    """The options that diffusers' FluxTransformer2DModel and FluxControlNetModel have in common."""

    class_name: ClassVar[str]
    fixed: ClassVar[dict[str, Any]]
    ignored: ClassVar[frozenset[str]]

    in_channels: Channels = 64
    """The channels of a token of the image, a patch of 2x2 latents."""
    num_layers: Blocks = 19
    """Blocks in which image and text have layers of their own."""
    num_single_layers: Blocks = 38
    """Blocks over both in one sequence."""
    attention_head_dim: Channels = 128
    num_attention_heads: Heads = 24
    joint_attention_dim: Channels = 4096
    """The width of the text's hidden states."""
    pooled_projection_dim: Channels = 768
    guidance_embeds: bool = False
    """Whether the guidance scale is an input."""
    axes_dims_rope: Axes = (16, 56, 56)
    """The channels of a head for the image's number, the row and the column."""

    def __post_init__(self) -> None:
        check_types(self)
        _check_axes(self.axes_dims_rope, self.attention_head_dim)

    @property
    def width(self) -> int:
        """The channels of tokens between the blocks."""
        return self.num_attention_heads * self.attention_head_dim


@dataclasses.dataclass(frozen=True)
class FluxTransformer2DConfig(FluxConfig):
    """The options of diffusers' FluxTransformer2DModel."""

    class_name: ClassVar[str] = "FluxTransformer2DModel"
    fixed: ClassVar[dict[str, Any]] = {"patch_size": 1}
    ignored: ClassVar[frozenset[str]] = frozenset()

    out_channels: Channels | None = None
    """None for as many as in_channels."""


@dataclasses.dataclass(frozen=True)
class FluxControlNetConfig(FluxConfig):
    """The options of diffusers' FluxControlNetModel."""

    class_name: ClassVar[str] = "FluxControlNetModel"
    fixed: ClassVar[dict[str, Any]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    patch_size: Literal[1, 2] = 1
    """Maps per token, in each direction, where the network reads pixels."""
    num_mode: Channels | None = None
    """The kinds of images that it knows; None for one kind."""
    conditioning_embedding_channels: Channels | None = None
    """The width of a map that convolutions make of pixels; None where it reads latents."""


@dataclasses.dataclass(frozen=True)
class FourAxesConfig(Keyed):
    """The options that diffusers' Flux2Transformer2DModel and Flux3Transformer2DModel share.

    Their tokens are latents.
    """

    class_name: ClassVar[str]
    fixed: ClassVar[dict[str, Any]]
    ignored: ClassVar[frozenset[str]] = frozenset()

    in_channels: Channels = 128
    num_layers: Blocks = 8
    """Blocks in which image and text have layers of their own."""
    num_single_layers: Blocks = 48
    """Blocks over both in one sequence."""
    attention_head_dim: Channels = 128
    num_attention_heads: Heads = 48
    joint_attention_dim: Channels = 15360
    """The width of the text's hidden states."""
    mlp_ratio: Positive = 3.0
    axes_dims_rope: Annotated[tuple[Channels, ...], Meta(min_length=4, max_length=4)] = (32,) * 4
    """The channels of a head for the image's number, the row, the column, and the position in the
    text."""
    rope_theta: Positive = 2000.0

    def __post_init__(self) -> None:
        check_types(self)
        _check_axes(self.axes_dims_rope, self.attention_head_dim)

    @property
    def width(self) -> int:
        """The channels of tokens between the blocks."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def mlp_dim(self) -> int:
        """The inner width of feed-forward layers."""
        return int(self.width * self.mlp_ratio)


@dataclasses.dataclass(frozen=True)
class Flux2Transformer2DConfig(FourAxesConfig):
    """The options of diffusers' Flux2Transformer2DModel."""

    class_name: ClassVar[str] = "Flux2Transformer2DModel"
    fixed: ClassVar[dict[str, Any]] = {"patch_size": 1, "eps": 1e-6}

    out_channels: Channels | None = None
    """None for as many as in_channels."""
    timestep_guidance_channels: Channels = 256
    guidance_embeds: bool = True
    """Whether the guidance scale is an input."""


@dataclasses.dataclass(frozen=True)
class Flux3Transformer2DConfig(FourAxesConfig):
    """The options of diffusers' Flux3Transformer2DModel."""

    class_name: ClassVar[str] = "Flux3Transformer2DModel"
    fixed: ClassVar[dict[str, Any]] = {"eps": 1e-6}

    cond_in_channels: Channels = 128
    """The channels of the latents of images to look at."""
    num_layers: Blocks = 5
    """Blocks over the image, the text and the images to look at, each by itself."""
    num_single_layers: Blocks = 28
    num_attention_heads: Heads = 24
    joint_attention_dim: Channels = 20480
    timestep_channels: Channels = 256
    rope_theta: Positive = 10000.0
    flow_map: bool = False
    """Whether the time that a step leads to is an input, as in networks distilled to few steps."""


@dataclasses.dataclass(frozen=True)
class Krea2Transformer2DConfig(Keyed):
    """The options of diffusers' Krea2Transformer2DModel."""

    class_name: ClassVar[str] = "Krea2Transformer2DModel"
    fixed: ClassVar[dict[str, Any]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()
    own: ClassVar[frozenset[str]] = OWN

    in_channels: Channels = 64
    """The channels of a token of the image, a patch of 2x2 latents."""
    num_layers: Blocks = 28
    attention_head_dim: Channels = 128
    num_attention_heads: Heads = 48
    num_key_value_heads: Heads = 12
    intermediate_size: Channels = 16384
    """The inner width of feed-forward layers."""
    timestep_embed_dim: Channels = 256
    text_hidden_dim: Channels = 2560
    """The width of the text's hidden states."""
    num_text_layers: Layers = 12
    """The hidden states of each token of the text."""
    text_num_attention_heads: Heads = 20
    text_num_key_value_heads: Heads = 20
    text_intermediate_size: Channels = 6912
    num_layerwise_text_blocks: Blocks = 2
    """Blocks in which the hidden states of one token attend to each other."""
    num_refiner_text_blocks: Blocks = 2
    """Blocks in which the tokens of the text do."""
    axes_dims_rope: Axes = (32, 48, 48)
    """The channels of a head for the frame, the row and the column."""
    rope_theta: Positive = 1000.0
    norm_eps: Epsilon = 1e-5
    references_layout: Layout | None = None
    """What images to look at see, "blind" or "joint", in a network that has learned to look at
    some; None in others, which look at them as "blind"."""

    def __post_init__(self) -> None:
        check_types(self)
        _check_axes(self.axes_dims_rope, self.attention_head_dim)
        if self.in_channels % 4 or self.timestep_embed_dim % 2:
            raise ValueError(
                f"in_channels={self.in_channels} must be divisible by 4, and timestep_embed_dim="
                f"{self.timestep_embed_dim} by 2"
            )
        if self.text_hidden_dim % self.text_num_attention_heads:
            raise ValueError(
                f"text_hidden_dim={self.text_hidden_dim} must be divisible by "
                f"text_num_attention_heads={self.text_num_attention_heads}"
            )
        for prefix in ("", "text_"):
            heads, keys = (
                getattr(self, f"{prefix}num_{kind}_heads") for kind in ("attention", "key_value")
            )
            if heads % keys:
                raise ValueError(
                    f"{prefix}num_attention_heads={heads} must be divisible by "
                    f"{prefix}num_key_value_heads={keys}"
                )

    @property
    def width(self) -> int:
        """The channels of tokens between the blocks."""
        return self.num_attention_heads * self.attention_head_dim


@dataclasses.dataclass(frozen=True)
class QwenImageTransformer2DConfig(Keyed):
    """The options of diffusers' QwenImageTransformer2DModel."""

    class_name: ClassVar[str] = "QwenImageTransformer2DModel"
    # diffusers' network has no parameters for guidance_embeds; the others are for layered images.
    fixed: ClassVar[dict[str, Any]] = {
        "patch_size": 2,
        "guidance_embeds": False,
        "use_additional_t_cond": False,
        "use_layer3d_rope": False,
    }
    ignored: ClassVar[frozenset[str]] = frozenset()

    in_channels: Channels = 64
    """The channels of a token of the image, a patch of 2x2 latents."""
    out_channels: Channels | None = 16
    """The channels of the predicted latents; None for as many as in_channels."""
    num_layers: Blocks = 60
    attention_head_dim: Channels = 128
    num_attention_heads: Heads = 24
    joint_attention_dim: Channels = 3584
    """The width of the text's hidden states."""
    axes_dims_rope: Axes = (16, 56, 56)
    """The channels of a head for the image's number, the row and the column."""
    zero_cond_t: bool = False
    """Whether images to look at are modulated as at time zero."""

    def __post_init__(self) -> None:
        check_types(self)
        _check_axes(self.axes_dims_rope, self.attention_head_dim)
        if self.in_channels % 4:
            raise ValueError(f"in_channels={self.in_channels} must be divisible by 4")

    @property
    def width(self) -> int:
        """The channels of tokens between the blocks."""
        return self.num_attention_heads * self.attention_head_dim


@dataclasses.dataclass(frozen=True)
class QwenImage21Transformer2DConfig(Keyed):
    """The options of diffusers' QwenImage21Transformer2DModel, whose tokens are latents."""

    class_name: ClassVar[str] = "QwenImage21Transformer2DModel"
    # Without causal_condition the text would depend on the time.
    fixed: ClassVar[dict[str, Any]] = {"patch_size": 1, "causal_condition": True}
    ignored: ClassVar[frozenset[str]] = frozenset()

    in_channels: Channels = 64
    out_channels: Channels | None = 64
    """None for as many as in_channels."""
    num_layers: Blocks = 32
    attention_head_dim: Channels = 128
    num_attention_heads: Heads = 32
    context_in_dim: Channels = 4096
    """The width of the text's hidden states."""
    mlp_ratio: Annotated[int, Meta(ge=1, le=16)] = 3
    """The inner width of feed-forward layers, in widths of tokens."""
    axes_dims_rope: Axes = (16, 56, 56)
    """The channels of a head for the position in the text, the row and the column."""
    eps: Epsilon = 1e-6

    def __post_init__(self) -> None:
        check_types(self)
        _check_axes(self.axes_dims_rope, self.attention_head_dim)

    @property
    def width(self) -> int:
        """The channels of tokens between the blocks."""
        return self.num_attention_heads * self.attention_head_dim


def _check_axes(dims: tuple[int, ...], head_dim: int) -> None:
    """Raises ValueError unless the axes of positions fill a head, in pairs of channels."""
    if sum(dims) != head_dim:
        raise ValueError(
            f"axes_dims_rope={dims} must add up to attention_head_dim (got {head_dim})"
        )
    if any(dim % 2 for dim in dims):
        raise ValueError(f"axes_dims_rope={dims} must be even")
