"""Qwen3-VL (Bai et al. 2025), which FLUX.3 klein, Krea 2 and Qwen-Image 2.1 condition on.

Its language model is Qwen3 with positions of three axes: frame, row and column.

Upstream: transformers models/qwen3_vl/modeling_qwen3_vl.py.
"""

from typing import Any, ClassVar

import jax
from flax import nnx

from diffusax.models.encoders.qwen3 import (
    ADAPTER_GROUPS,
    TENSOR_RULES,
    DecoderModel,
    Positions,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from diffusax.models.encoders.qwen3_vl_configs import Qwen3VLConfig, Qwen3VLTextConfig
from diffusax.models.encoders.qwen3_vl_vision import (
    VISION_RULES,
    Qwen3VLVisionModel,
    VisionOutput,
)

_TOWER = ("model.visual.", "visual.")
_RULES = (*TENSOR_RULES, *VISION_RULES)


class Qwen3VLTextModel(Qwen3Model):
    """Qwen3-VL's language model without its head. input_ids: b t -> hidden states, b t c."""

    config_class: ClassVar[Any] = Qwen3VLTextConfig
    legacy_names: ClassVar[tuple[tuple[str, str], ...]] = ()

    def spread(self, positions: Positions) -> Positions:
        """Returns the positions of tokens for each rotary frequency: b t 1, or b t d/2.

        positions: b t, or 3 b t (frame, row, column). A text's are equal on the three axes.

        Raises:
            ValueError: they have another number of axes.
        """
        if positions.ndim == 2:
            return super().spread(positions)
        if positions.ndim != 3 or positions.shape[0] != 3:
            raise ValueError(f"position_ids must be b t or 3 b t (got shape {positions.shape})")
        axes = self.config.rope_scaling.axes(self.config.head_dim // 2)
        return positions[axes].transpose(1, 2, 0)


class Qwen3VLModel(DecoderModel):
    """Qwen3-VL without its head. input_ids: b t -> hidden states, b t c."""

    config_class: ClassVar[Any] = Qwen3VLConfig
    text_class: ClassVar[Any] = Qwen3VLTextModel
    vision_class: ClassVar[Any] = Qwen3VLVisionModel
    tensor_rules = _RULES
    adapter_groups = ADAPTER_GROUPS
    # The files of checkpoints mostly have the names of the model with its head.
    legacy_names: ClassVar[tuple[tuple[str, str], ...]] = (
        ("model.language_model.", "language_model."),
        ("model.visual.", "visual."),
    )
    ignored_keys = ("lm_head.weight",)
    # Of models that read texts alone, see `Qwen3VLConfig`.
    ignored_parts = _TOWER

    def __init__(self, config: Qwen3VLConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.language_model = self.text_class(config.text_config, rngs=rngs)
        vision = config.vision_config
        self.visual = None if vision is None else self.vision_class(vision, rngs=rngs)

    @property
    def decoder(self) -> Qwen3Model:
        """The language model."""
        found: Qwen3Model = self.language_model
        return found

    def encode_images(self, pixel_values: jax.Array, grid: jax.Array) -> VisionOutput:
        """Encodes images of as many patches each, see `Qwen3VLVisionModel`.

        Raises:
            ValueError: pixel_values have another shape, or the model reads texts alone.
        """
        if self.visual is None:
            raise ValueError("pixel_values must be None: the model was loaded to read texts alone")
        found: VisionOutput = self.visual(pixel_values, grid)
        return found


class Qwen3VLForConditionalGeneration(Qwen3ForCausalLM):
    """Qwen3-VL with its head, which is the table of embeddings where tie_word_embeddings is set."""

    config_class: ClassVar[Any] = Qwen3VLConfig
    model_class = Qwen3VLModel
    tensor_rules = _RULES
    ignored_parts = _TOWER

    def encode_images(self, pixel_values: jax.Array, grid: jax.Array) -> VisionOutput:
        """Encodes images of as many patches each, see `Qwen3VLModel.encode_images`."""
        found: VisionOutput = self.model.encode_images(pixel_values, grid)
        return found
