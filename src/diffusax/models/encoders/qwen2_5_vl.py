"""Qwen2.5-VL (Bai et al. 2025), which Qwen-Image conditions on.

Its language model is that of Qwen3-VL with biases in the place of norms of queries and keys.

Upstream: transformers models/qwen2_5_vl/modeling_qwen2_5_vl.py.
"""

from typing import Any, ClassVar

from diffusax.models.encoders.qwen2_5_vl_configs import Qwen2_5_VLConfig, Qwen2_5_VLTextConfig
from diffusax.models.encoders.qwen2_5_vl_vision import (
    VISION_RULES,
    Qwen2_5_VisionTransformerPretrainedModel,
)
from diffusax.models.encoders.qwen3 import TENSOR_RULES
from diffusax.models.encoders.qwen3_vl import (
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLTextModel,
)

_RULES = (*TENSOR_RULES, *VISION_RULES)
_OLD_NAMES = (
    # transformers 4 left out language_model, or model; both are put back.
    *(("model.language_model.", "model."), ("language_model.", "model.")),
    *(("model.visual.", "visual."), ("model.", "language_model.")),
)


class Qwen2_5_VLTextModel(Qwen3VLTextModel):
    """Qwen2.5-VL's language model without its head. input_ids: b t -> hidden states, b t c."""

    config_class: ClassVar[Any] = Qwen2_5_VLTextConfig


class Qwen2_5_VLModel(Qwen3VLModel):
    """Qwen2.5-VL without its head. input_ids: b t -> hidden states, b t c."""

    config_class = Qwen2_5_VLConfig
    text_class = Qwen2_5_VLTextModel
    vision_class = Qwen2_5_VisionTransformerPretrainedModel
    tensor_rules = _RULES
    legacy_names = _OLD_NAMES


class Qwen2_5_VLForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """Qwen2.5-VL with its head, the table of embeddings where tie_word_embeddings is set."""

    config_class: ClassVar[Any] = Qwen2_5_VLConfig
    model_class = Qwen2_5_VLModel
    tensor_rules = _RULES
    legacy_names: ClassVar[tuple[tuple[str, str], ...]] = _OLD_NAMES
