"""The configs of Qwen2.5-VL (Bai et al. 2025): its language and vision networks, and the whole."""

import dataclasses
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from diffusax.boundary.config import Channels, Epsilon, Heads, Keyed, Layers, check_types
from diffusax.models.encoders.configs import IGNORED, DecoderConfig, Theta, Tokens
from diffusax.models.encoders.qwen3_vl_configs import (
    AXIAL,
    Index,
    RotaryAxesConfig,
    Sections,
    SeeingConfig,
    check_vision_heads,
    read_part,
    split_rope,
)

_TOKENS = frozenset(
    """
    image_token_id video_token_id vision_end_token_id vision_start_token_id vision_token_id
    """.split()  # noqa: SIM905
)
"""Tokens that transformers 4 wrote into the language model's options, too."""


@dataclasses.dataclass(frozen=True)
class RotarySectionsConfig(RotaryAxesConfig):
    """The options of Qwen2.5-VL's rope_scaling, of which one is read.

    mrope_section: how many frequencies of rotary positions belong to the frame, the row and the
    column of a token, in this order.
    """

    class_name: ClassVar[str] = "Qwen2_5_VLTextConfig"
    fixed: ClassVar[dict[str, Any]] = {"rope_type": "default"}

    mrope_section: Sections = (16, 24, 24)

    @staticmethod
    def upgrade(data: dict[str, Any]) -> dict[str, Any]:
        """Returns the options of old files, which name the type "mrope", in newer words."""
        kind = data.get("rope_type", data.get("type", "default"))
        kept = {k: v for k, v in data.items() if k != "type"}
        return {**kept, "rope_type": "default" if kind == "mrope" else kind}

    def axes(self, count: int) -> np.ndarray:
        """Returns which axis of positions each of so many frequencies turns by: 0, 1 or 2."""
        return np.repeat(np.arange(3, dtype=np.int32), self.mrope_section)[:count]


@dataclasses.dataclass(frozen=True)
class Qwen2_5_VLTextConfig(DecoderConfig):
    """The options of transformers' Qwen2_5_VLTextConfig that change the result.

    See `DecoderConfig`.
    """

    class_name: ClassVar[str] = "Qwen2_5_VLTextModel"
    fixed: ClassVar[dict[str, Any]] = {
        "model_type": "qwen2_5_vl_text",
        "hidden_act": "silu",
        "use_sliding_window": False,
    }
    ignored: ClassVar[frozenset[str]] = DecoderConfig.ignored | _TOKENS
    parts: ClassVar[dict[str, Any]] = {"rope_scaling": RotarySectionsConfig}
    qk_norm: ClassVar[bool] = False
    attention_bias: ClassVar[bool] = True
    output_bias: ClassVar[bool] = False

    vocab_size: Tokens = 152064
    hidden_size: Channels = 8192
    intermediate_size: Channels = 29568
    num_hidden_layers: Annotated[int, Meta(ge=1, le=128)] = 80
    num_attention_heads: Heads = 64
    num_key_value_heads: Heads = 8
    rms_norm_eps: Epsilon = 1e-5
    rope_theta: Theta = 1000000.0
    rope_scaling: RotarySectionsConfig = dataclasses.field(default_factory=RotarySectionsConfig)

    def __post_init__(self) -> None:
        read_part(self, "rope_scaling")
        super().__post_init__()
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} must be divisible by num_attention_heads="
                f"{self.num_attention_heads}"
            )
        sections = self.rope_scaling.mrope_section
        if 2 * sum(sections) != self.head_dim:
            raise ValueError(
                f"mrope_section={sections} must have {self.head_dim // 2} frequencies in all, half "
                f"of a head's channels"
            )

    @property
    def head_dim(self) -> int:
        """The channels of a head."""
        return self.hidden_size // self.num_attention_heads

    @staticmethod
    def upgrade(data: dict[str, Any]) -> dict[str, Any]:
        """Returns the options in transformers 4's words, see `DecoderConfig.upgrade`."""
        heads = {"num_key_value_heads": 8} | data
        return DecoderConfig.upgrade(split_rope(heads))


@dataclasses.dataclass(frozen=True)
class Qwen2_5_VLVisionConfig(Keyed):
    """The options of transformers' Qwen2_5_VLVisionConfig that change the result.

    window_size: the side in pixels of the windows in which most blocks attend.
    fullatt_block_indexes: the blocks that attend to the whole image. tokens_per_second: of videos,
    only kept.
    """

    class_name: ClassVar[str] = "Qwen2_5_VisionTransformerPretrainedModel"
    fixed: ClassVar[dict[str, Any]] = {
        # Files of transformers 4 name the whole.
        "model_type": ("qwen2_5_vl_vision", "qwen2_5_vl"),
        "hidden_act": "silu",
        "rope_parameters": (AXIAL, None),
    }
    # in_chans and spatial_patch_size are other names in the files of the Hub, which nobody reads.
    ignored: ClassVar[frozenset[str]] = IGNORED | {"eos_token_id", "in_chans", "spatial_patch_size"}

    depth: Layers = 32
    hidden_size: Channels = 3584
    intermediate_size: Channels = 3420
    num_heads: Heads = 16
    in_channels: Annotated[int, Meta(ge=1, le=64)] = 3
    patch_size: Annotated[int, Meta(ge=1, le=256)] = 14
    spatial_merge_size: Annotated[int, Meta(ge=1, le=16)] = 2
    temporal_patch_size: Annotated[int, Meta(ge=1, le=16)] = 2
    tokens_per_second: Annotated[int, Meta(ge=1, le=10**6)] = 4
    window_size: Annotated[int, Meta(ge=1, le=65536)] = 112
    out_hidden_size: Channels = 3584
    fullatt_block_indexes: Annotated[tuple[Index, ...], Meta(max_length=64)] = (7, 15, 23, 31)

    def __post_init__(self) -> None:
        check_types(self)
        check_vision_heads(self)
        square = self.patch_size * self.spatial_merge_size
        if self.window_size < square:
            raise ValueError(
                f"window_size={self.window_size} must be at least patch_size times "
                f"spatial_merge_size, {square}"
            )

    @property
    def patch_values(self) -> int:
        """The number of values of a patch: channels, frames, rows and columns."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def window_squares(self) -> int:
        """The side of a window in merged squares of patches."""
        return self.window_size // self.spatial_merge_size // self.patch_size


_FLAT = frozenset(
    {
        *(field.name for field in dataclasses.fields(Qwen2_5_VLTextConfig)),
        *("hidden_act", "layer_types", "max_window_layers", "rope_parameters", "sliding_window"),
        "use_sliding_window",
    }
) - {"tie_word_embeddings"}
"""Options of the language model that old files have beside the others, or in their place."""


@dataclasses.dataclass(frozen=True)
class Qwen2_5_VLConfig(SeeingConfig):
    """The options of transformers' Qwen2_5_VLConfig that change the result, see `SeeingConfig`."""

    class_name: ClassVar[str] = "Qwen2_5_VLForConditionalGeneration"
    fixed: ClassVar[dict[str, Any]] = {"model_type": "qwen2_5_vl"}
    parts: ClassVar[dict[str, Any]] = {
        "text_config": Qwen2_5_VLTextConfig,
        "vision_config": Qwen2_5_VLVisionConfig,
    }
    ignored: ClassVar[frozenset[str]] = SeeingConfig.ignored | {"vision_token_id"}

    text_config: Qwen2_5_VLTextConfig = dataclasses.field(default_factory=Qwen2_5_VLTextConfig)
    vision_config: Qwen2_5_VLVisionConfig | None = None

    @staticmethod
    def upgrade(data: dict[str, Any]) -> dict[str, Any]:
        """Returns the options of old files in newer words.

        The language model's are in text_config; where there is none, beside the others. A head
        that is tied there is tied (transformers' configuration_qwen2_5_vl.py, Qwen2_5_VLConfig).
        """
        text = data.get("text_config")
        kept = {k: v for k, v in data.items() if k not in _FLAT}
        if text is None:
            text = {k: v for k, v in data.items() if k in _FLAT}
        if isinstance(text, dict) and not data.get("tie_word_embeddings"):
            kept["tie_word_embeddings"] = text.get("tie_word_embeddings", False)
        return {**kept, "text_config": text}
