"""The networks as Flax modules, one file each, without parameters.

The names of networks here are diffusers': `diffusax.models.UNet2DConditionModel` is the class of
models `diffusax.UNet2DConditionModel`, and its Flax module is its `module_class`.
"""

import importlib
from typing import Any

from diffusax.models.autoencoders.asymmetric import AsymmetricAutoencoderKLConfig
from diffusax.models.autoencoders.flux2 import AutoencoderKLFlux2Config
from diffusax.models.autoencoders.kl import AutoencoderKLConfig
from diffusax.models.autoencoders.qwen_image import AutoencoderKLQwenImageConfig
from diffusax.models.autoencoders.qwen_image21 import AutoencoderKLQwenImage21Config
from diffusax.models.autoencoders.tiny import AutoencoderTinyConfig
from diffusax.models.autoencoders.wan import AutoencoderKLWanConfig
from diffusax.models.encoders.configs import (
    CLIPConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    Dinov2Config,
    Qwen3Config,
    T5Config,
    UMT5Config,
    ViTConfig,
)
from diffusax.models.encoders.qwen2_5_vl_configs import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLVisionConfig,
)
from diffusax.models.encoders.qwen3_vl_configs import (
    Qwen3VLConfig,
    Qwen3VLTextConfig,
    Qwen3VLVisionConfig,
)
from diffusax.models.network import Network, Params
from diffusax.models.table import MODELS, TENSOR_RULES
from diffusax.models.transformers.configs import (
    Flux2Transformer2DConfig,
    Flux3Transformer2DConfig,
    FluxControlNetConfig,
    FluxTransformer2DConfig,
    Krea2Transformer2DConfig,
    QwenImage21Transformer2DConfig,
    QwenImageTransformer2DConfig,
    ZImageTransformer2DConfig,
)
from diffusax.models.transformers.wan_embeddings import WanTransformer3DConfig
from diffusax.models.transformers.wan_vace import WanVACETransformer3DConfig
from diffusax.models.unet.controlnet import ControlNetConfig
from diffusax.models.unet.t2i_adapter import T2IAdapterConfig
from diffusax.models.unet.unet import UNet2DConditionConfig
from diffusax.models.unet.unet_2d import UNet2DConfig


def __getattr__(name: str) -> Any:
    """Returns a class of models from the room above, because `diffusers.models` has them here."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("diffusax.networks"), name)


__all__ = [
    *MODELS,
    "AsymmetricAutoencoderKLConfig",
    "AutoencoderKLConfig",
    "AutoencoderKLFlux2Config",
    "AutoencoderKLQwenImage21Config",
    "AutoencoderKLQwenImageConfig",
    "AutoencoderKLWanConfig",
    "AutoencoderTinyConfig",
    "CLIPConfig",
    "CLIPTextConfig",
    "CLIPVisionConfig",
    "ControlNetConfig",
    "Dinov2Config",
    "Flux2Transformer2DConfig",
    "Flux3Transformer2DConfig",
    "FluxControlNetConfig",
    "FluxTransformer2DConfig",
    "Krea2Transformer2DConfig",
    "MODELS",
    "Model",
    "Network",
    "Params",
    "Qwen2_5_VLConfig",
    "Qwen2_5_VLTextConfig",
    "Qwen2_5_VLVisionConfig",
    "Qwen3Config",
    "Qwen3VLConfig",
    "Qwen3VLTextConfig",
    "Qwen3VLVisionConfig",
    "T2IAdapterConfig",
    "T5Config",
    "TENSOR_RULES",
    "UMT5Config",
    "UNet2DConditionConfig",
    "UNet2DConfig",
    "ViTConfig",
    "WanTransformer3DConfig",
    "WanVACETransformer3DConfig",
    "QwenImage21Transformer2DConfig",
    "QwenImageTransformer2DConfig",
    "ZImageTransformer2DConfig",
    "initialize",
]
