"""The configs of denoising transformers."""

import dataclasses
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from diffusax.typed.config import Channels, Epsilon, Heads, Layers, Positive, check_types

Axes = Annotated[tuple[Channels, ...], Meta(min_length=3, max_length=3)]


@dataclasses.dataclass(frozen=True)
class ZImageTransformer2DConfig:
    """The options of diffusers' ZImageTransformer2DModel for one image in patches of 2x2."""

    class_name: ClassVar[str] = "ZImageTransformer2DModel"
    fixed: ClassVar[dict[str, Any]] = {
        # A list in files, and a tuple in PyTorch's objects.
        "all_patch_size": ([2], (2,)),
        "all_f_patch_size": ([1], (1,)),
        "siglip_feat_dim": None,
    }
    ignored: ClassVar[frozenset[str]] = frozenset()

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

    def __post_init__(self) -> None:
        check_types(self)
        if self.dim % self.n_heads or sum(self.axes_dims) != self.dim // self.n_heads:
            raise ValueError(
                f"axes_dims={self.axes_dims} must add up to dim / n_heads "
                f"(got {self.dim} / {self.n_heads})"
            )
        if any(dim % 2 for dim in self.axes_dims):
            raise ValueError(f"axes_dims={self.axes_dims} must be even")
