"""The networks, one file each, and the table of those a checkpoint may name."""

from flax import nnx

# Importing the kinds of models makes them known to Model.
from diffusax.models import calls as calls
from diffusax.models.autoencoders.asymmetric import (
    AsymmetricAutoencoderKL,
    AsymmetricAutoencoderKLConfig,
)
from diffusax.models.autoencoders.flux2 import AutoencoderKLFlux2, AutoencoderKLFlux2Config
from diffusax.models.autoencoders.kl import AutoencoderKL, AutoencoderKLConfig
from diffusax.models.autoencoders.tiny import AutoencoderTiny, AutoencoderTinyConfig
from diffusax.models.encoders.clip import CLIPTextModel, CLIPTextModelWithProjection
from diffusax.models.encoders.clip_vision import (
    CLIPModel,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
)
from diffusax.models.encoders.configs import (
    CLIPConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    Qwen3Config,
    T5Config,
)
from diffusax.models.encoders.qwen3 import Qwen3ForCausalLM, Qwen3Model
from diffusax.models.encoders.t5 import T5EncoderModel
from diffusax.models.network import Model, Network, Params, initialize
from diffusax.models.transformers.configs import (
    Flux2Transformer2DConfig,
    FluxControlNetConfig,
    FluxTransformer2DConfig,
    ZImageTransformer2DConfig,
)
from diffusax.models.transformers.flux import FluxTransformer2DModel
from diffusax.models.transformers.flux2 import Flux2Transformer2DModel
from diffusax.models.transformers.flux_controlnet import FluxControlNetModel
from diffusax.models.transformers.z_image import ZImageTransformer2DModel
from diffusax.models.unet.controlnet import ControlNetConfig, ControlNetModel
from diffusax.models.unet.t2i_adapter import T2IAdapter, T2IAdapterConfig
from diffusax.models.unet.unet import UNet2DConditionConfig, UNet2DConditionModel
from diffusax.models.unet.unet_2d import UNet2DConfig, UNet2DModel
from diffusax.runtime.devices.mesh import Rules

MODELS: dict[str, type[nnx.Module]] = {
    cls.__name__: cls
    for cls in (
        AsymmetricAutoencoderKL,
        AutoencoderKL,
        AutoencoderKLFlux2,
        AutoencoderTiny,
        CLIPModel,
        CLIPTextModel,
        CLIPTextModelWithProjection,
        CLIPVisionModel,
        CLIPVisionModelWithProjection,
        ControlNetModel,
        FluxControlNetModel,
        Flux2Transformer2DModel,
        FluxTransformer2DModel,
        Qwen3ForCausalLM,
        Qwen3Model,
        T2IAdapter,
        T5EncoderModel,
        UNet2DConditionModel,
        UNet2DModel,
        ZImageTransformer2DModel,
    )
}
"""The classes of networks by name; enter one here, and checkpoints that name it can be loaded."""

TENSOR_RULES: Rules = tuple(
    dict.fromkeys(rule for cls in MODELS.values() for rule in getattr(cls, "tensor_rules", ()))
)
"""The rules of all networks, for trees that hold several."""

__all__ = [
    "MODELS",
    "TENSOR_RULES",
    "AsymmetricAutoencoderKL",
    "AsymmetricAutoencoderKLConfig",
    "AutoencoderKL",
    "AutoencoderKLConfig",
    "AutoencoderKLFlux2",
    "AutoencoderKLFlux2Config",
    "AutoencoderTiny",
    "AutoencoderTinyConfig",
    "CLIPConfig",
    "CLIPModel",
    "CLIPTextConfig",
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "CLIPVisionConfig",
    "CLIPVisionModel",
    "CLIPVisionModelWithProjection",
    "ControlNetConfig",
    "ControlNetModel",
    "Flux2Transformer2DConfig",
    "Flux2Transformer2DModel",
    "FluxControlNetConfig",
    "FluxControlNetModel",
    "FluxTransformer2DConfig",
    "FluxTransformer2DModel",
    "Model",
    "Network",
    "Params",
    "Qwen3Config",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    "T2IAdapter",
    "T2IAdapterConfig",
    "T5Config",
    "T5EncoderModel",
    "UNet2DConditionConfig",
    "UNet2DConditionModel",
    "UNet2DConfig",
    "UNet2DModel",
    "ZImageTransformer2DConfig",
    "ZImageTransformer2DModel",
    "initialize",
]
