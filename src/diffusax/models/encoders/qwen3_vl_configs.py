"""The configs of Qwen3-VL (Bai et al. 2025): its language and vision networks, and the whole."""

import dataclasses
import math
from typing import Annotated, Any, ClassVar

import numpy as np
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
Sections = Annotated[tuple[Section, ...], Meta(min_length=3, max_length=3)]
Index = Annotated[int, Meta(ge=0, le=63)]
TokenId = Annotated[int, Meta(ge=0, le=10**7)]


@dataclasses.dataclass(frozen=True)
class RotaryAxesConfig(Keyed):
    """The options of Qwen3-VL's rope_scaling, of which one is read.

    mrope_section: how many frequencies of rotary positions belong to the frame, the row and the
    column of a token, see `axes`.
    """

    class_name: ClassVar[str] = "Qwen3VLTextConfig"
    fixed: ClassVar[dict[str, Any]] = {"rope_type": "default", "mrope_interleaved": True}
    ignored: ClassVar[frozenset[str]] = frozenset()

    mrope_section: Sections = (24, 20, 20)

    def __post_init__(self) -> None:
        check_types(self)

    def axes(self, count: int) -> np.ndarray:
        """Returns which axis of positions each of so many frequencies turns by: 0, 1 or 2.

        Those of rows and columns take every third place, as long as they have some left.
        """
        axes = np.zeros(count, np.int32)
        for axis in (1, 2):
            axes[axis : 3 * self.mrope_section[axis] : 3] = axis
        return axes


@dataclasses.dataclass(frozen=True)
class Qwen3VLTextConfig(Qwen3Config):
    """The options of transformers' Qwen3VLTextConfig that change the result, see `Qwen3Config`."""

    class_name: ClassVar[str] = "Qwen3VLTextModel"
    fixed: ClassVar[dict[str, Any]] = {"model_type": "qwen3_vl_text", "hidden_act": "silu"}
    ignored: ClassVar[frozenset[str]] = IGNORED - {"tie_word_embeddings"} | {"eos_token_id"}

    parts: ClassVar[dict[str, Any]] = {"rope_scaling": RotaryAxesConfig}

    max_position_embeddings: Annotated[int, Meta(ge=1, le=10**8)] = 128000
    rope_theta: Theta = 500000.0
    rope_scaling: RotaryAxesConfig = dataclasses.field(default_factory=RotaryAxesConfig)

    def __post_init__(self) -> None:
        read_part(self, "rope_scaling")
        super().__post_init__()

    @staticmethod
    def upgrade(data: dict[str, Any]) -> dict[str, Any]:
        """Returns the options in transformers 4's words, see `DecoderConfig.upgrade`."""
        return Qwen3Config.upgrade(split_rope(data))


def split_rope(data: dict[str, Any]) -> dict[str, Any]:
    """Returns options with rope_parameters split in rope_theta and rope_scaling."""
    rope = data.get("rope_parameters")
    if not isinstance(rope, dict):
        return data
    theta = {k: v for k, v in rope.items() if k == "rope_theta"}
    axes = {k: v for k, v in rope.items() if k != "rope_theta"}
    kept = {k: v for k, v in data.items() if k != "rope_parameters"}
    return {**kept, **theta, "rope_scaling": axes}


AXIAL = {"rope_theta": 10000.0, "rope_type": "axial"}


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
        "rope_parameters": (AXIAL, None),
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
        check_vision_heads(self)
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


def check_vision_heads(config: Any) -> None:
    """Raises ValueError where rotary positions of two axes do not fit a vision network's heads."""
    if config.hidden_size % (4 * config.num_heads):
        raise ValueError(
            f"hidden_size={config.hidden_size} must be divisible by four times num_heads="
            f"{config.num_heads}, for rotary positions of two axes"
        )


@dataclasses.dataclass(frozen=True)
class SeeingConfig(Keyed):
    """The options that Qwen's models of texts and images have in common.

    A subclass has text_config and vision_config, and under `parts` their classes. vision_config is
    None for a model that reads texts alone, without the parameters for images.
    """

    class_name: ClassVar[str]
    fixed: ClassVar[dict[str, Any]]
    parts: ClassVar[dict[str, Any]]
    ignored: ClassVar[frozenset[str]] = IGNORED - {"tie_word_embeddings"} | {"eos_token_id"}

    image_token_id: TokenId = 151655
    video_token_id: TokenId = 151656
    vision_start_token_id: TokenId = 151652
    vision_end_token_id: TokenId = 151653
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        read_part(self, "text_config")
        if self.vision_config is not None:
            read_part(self, "vision_config")
        check_types(self)

    @property
    def vocab_size(self) -> int:
        """The number of embeddings."""
        found: int = self.text_config.vocab_size
        return found

    @property
    def hidden_size(self) -> int:
        """The width of the language model's hidden states."""
        found: int = self.text_config.hidden_size
        return found

    @property
    def num_hidden_layers(self) -> int:
        """The number of the language model's layers."""
        found: int = self.text_config.num_hidden_layers
        return found

    @property
    def max_position_embeddings(self) -> int:
        """The most tokens of a text."""
        found: int = self.text_config.max_position_embeddings
        return found


@dataclasses.dataclass(frozen=True)
class Qwen3VLConfig(SeeingConfig):
    """The options of transformers' Qwen3VLConfig that change the result, see `SeeingConfig`."""

    class_name: ClassVar[str] = "Qwen3VLForConditionalGeneration"
    fixed: ClassVar[dict[str, Any]] = {"model_type": "qwen3_vl"}
    parts: ClassVar[dict[str, Any]] = {
        "text_config": Qwen3VLTextConfig,
        "vision_config": Qwen3VLVisionConfig,
    }

    text_config: Qwen3VLTextConfig = dataclasses.field(default_factory=Qwen3VLTextConfig)
    vision_config: Qwen3VLVisionConfig | None = None


def read_part(config: Any, name: str) -> None:
    """Makes a config of the options of a part, which may be a dictionary or None.

    Its class is in the config's `parts`.
    """
    value, kind = getattr(config, name), config.parts[name]
    if not isinstance(value, kind):
        value = config_from_dict(kind, {} if value is None else value, source=name)
        object.__setattr__(config, name, value)
