"""The configs of Qwen3-VL (Bai et al. 2025): its language and vision networks, and the whole."""

import dataclasses
import math
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from diffusax.boundary.config import (
    Channels,
    Heads,
    Keyed,
    Layers,
    check_types,
    config_from_dict,
)
from diffusax.models.encoders.configs import IGNORED, Qwen3Config, Theta

Section = Annotated[int, Meta(ge=0, le=1024)]
Index = Annotated[int, Meta(ge=0, le=63)]
TokenId = Annotated[int, Meta(ge=0, le=10**7)]


@dataclasses.dataclass(frozen=True)
class RotaryAxesConfig(Keyed):
    """The options of Qwen3-VL's rope_scaling, of which one is read.

    mrope_section: how many frequencies of rotary positions belong to the frame, the row and the
    column of a token; they take turns as long as the row and the column have some left.
    """

    class_name: ClassVar[str] = "Qwen3VLTextConfig"
    fixed: ClassVar[dict[str, Any]] = {"rope_type": "default", "mrope_interleaved": True}
    ignored: ClassVar[frozenset[str]] = frozenset()

    mrope_section: Annotated[tuple[Section, ...], Meta(min_length=3, max_length=3)] = (24, 20, 20)

    def __post_init__(self) -> None:
        check_types(self)


@dataclasses.dataclass(frozen=True)
class Qwen3VLTextConfig(Qwen3Config):
    """The options of transformers' Qwen3VLTextConfig that change the result, see `Qwen3Config`."""

    class_name: ClassVar[str] = "Qwen3VLTextModel"
    fixed: ClassVar[dict[str, Any]] = {"model_type": "qwen3_vl_text", "hidden_act": "silu"}
    ignored: ClassVar[frozenset[str]] = IGNORED - {"tie_word_embeddings"} | {"eos_token_id"}

    max_position_embeddings: Annotated[int, Meta(ge=1, le=10**8)] = 128000
    rope_theta: Theta = 500000.0
    rope_scaling: RotaryAxesConfig = dataclasses.field(default_factory=RotaryAxesConfig)

    def __post_init__(self) -> None:
        _read_part(self, "rope_scaling", RotaryAxesConfig)
        super().__post_init__()

    @staticmethod
    def upgrade(data: dict[str, Any]) -> dict[str, Any]:
        """Returns the options in transformers 4's words, see `Qwen3Config.upgrade`."""
        rope = data.get("rope_parameters")
        if isinstance(rope, dict):
            theta = {k: v for k, v in rope.items() if k == "rope_theta"}
            axes = {k: v for k, v in rope.items() if k != "rope_theta"}
            kept = {k: v for k, v in data.items() if k != "rope_parameters"}
            data = {**kept, **theta, "rope_scaling": axes}
        return Qwen3Config.upgrade(data)


_ROPE = {"rope_theta": 10000.0, "rope_type": "axial"}


@dataclasses.dataclass(frozen=True)
class Qwen3VLVisionConfig(Keyed):
    """The options of transformers' Qwen3VLVisionConfig that change the result.

    deepstack_visual_indexes: the blocks whose states the language model's first layers are given,
    in their order.
    """

    class_name: ClassVar[str] = "Qwen3VLVisionModel"
    fixed: ClassVar[dict[str, Any]] = {
        # Files of transformers 4 name the whole.
        "model_type": ("qwen3_vl_vision", "qwen3_vl"),
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": (_ROPE, None),
    }
    ignored: ClassVar[frozenset[str]] = IGNORED | {"eos_token_id"}

    depth: Layers = 27
    hidden_size: Channels = 1152
    intermediate_size: Channels = 4304
    num_heads: Heads = 16
    in_channels: Annotated[int, Meta(ge=1, le=64)] = 3
    patch_size: Annotated[int, Meta(ge=1, le=256)] = 16
    spatial_merge_size: Annotated[int, Meta(ge=1, le=16)] = 2
    temporal_patch_size: Annotated[int, Meta(ge=1, le=16)] = 2
    out_hidden_size: Channels = 3584
    num_position_embeddings: Annotated[int, Meta(ge=1, le=10**6)] = 2304
    deepstack_visual_indexes: Annotated[tuple[Index, ...], Meta(max_length=64)] = (8, 16, 24)

    def __post_init__(self) -> None:
        check_types(self)
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} must be divisible by four times num_heads="
                f"{self.num_heads}, for rotary positions of two axes"
            )
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(
                f"num_position_embeddings={self.num_position_embeddings} must be a square"
            )
        indices = self.deepstack_visual_indexes
        if sorted(set(indices)) != list(indices):
            raise ValueError(
                f"deepstack_visual_indexes={indices} must be in their order, each one once"
            )
        if indices and indices[-1] >= self.depth:
            raise ValueError(
                f"deepstack_visual_indexes={indices} must be less than depth={self.depth}"
            )

    @property
    def patch_values(self) -> int:
        """The number of values of a patch: channels, frames, rows and columns."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclasses.dataclass(frozen=True)
class Qwen3VLConfig(Keyed):
    """The options of transformers' Qwen3VLConfig that change the result.

    vision_config: None for a model that reads texts alone, without the parameters for images.
    """

    class_name: ClassVar[str] = "Qwen3VLForConditionalGeneration"
    fixed: ClassVar[dict[str, Any]] = {"model_type": "qwen3_vl"}
    ignored: ClassVar[frozenset[str]] = IGNORED - {"tie_word_embeddings"} | {"eos_token_id"}

    text_config: Qwen3VLTextConfig = dataclasses.field(default_factory=Qwen3VLTextConfig)
    vision_config: Qwen3VLVisionConfig | None = None
    image_token_id: TokenId = 151655
    video_token_id: TokenId = 151656
    vision_start_token_id: TokenId = 151652
    vision_end_token_id: TokenId = 151653
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        _read_part(self, "text_config", Qwen3VLTextConfig)
        if self.vision_config is not None:
            _read_part(self, "vision_config", Qwen3VLVisionConfig)
        check_types(self)

    @property
    def vocab_size(self) -> int:
        """The number of embeddings."""
        return self.text_config.vocab_size

    @property
    def hidden_size(self) -> int:
        """The width of the language model's hidden states."""
        return self.text_config.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        """The number of the language model's layers."""
        return self.text_config.num_hidden_layers

    @property
    def max_position_embeddings(self) -> int:
        """The most tokens of a text."""
        return self.text_config.max_position_embeddings


def _read_part(config: Any, name: str, kind: Any) -> None:
    """Makes a config of the options of a part, which may be a dictionary or None."""
    value = getattr(config, name)
    if not isinstance(value, kind):
        value = config_from_dict(kind, {} if value is None else value, source=name)
        object.__setattr__(config, name, value)
