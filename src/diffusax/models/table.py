"""The table of the Flax modules that a checkpoint may name."""

from flax import nnx

from diffusax.models.autoencoders.asymmetric import AsymmetricAutoencoderKL
from diffusax.models.autoencoders.flux2 import AutoencoderKLFlux2
from diffusax.models.autoencoders.kl import AutoencoderKL
from diffusax.models.autoencoders.qwen_image import AutoencoderKLQwenImage
from diffusax.models.autoencoders.qwen_image21 import AutoencoderKLQwenImage21
from diffusax.models.autoencoders.tiny import AutoencoderTiny
from diffusax.models.autoencoders.wan import AutoencoderKLWan
from diffusax.models.encoders.clip import CLIPTextModel, CLIPTextModelWithProjection
from diffusax.models.encoders.clip_vision import (
    CLIPModel,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
)
from diffusax.models.encoders.qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLModel,
    Qwen2_5_VLTextModel,
)
from diffusax.models.encoders.qwen2_5_vl_vision import Qwen2_5_VisionTransformerPretrainedModel
from diffusax.models.encoders.qwen3 import Qwen3ForCausalLM, Qwen3Model
from diffusax.models.encoders.qwen3_vl import (
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLTextModel,
)
from diffusax.models.encoders.qwen3_vl_vision import Qwen3VLVisionModel
from diffusax.models.encoders.t5 import T5EncoderModel, UMT5EncoderModel
from diffusax.models.encoders.vit import Dinov2Model, ViTModel
from diffusax.models.transformers.flux import FluxTransformer2DModel
from diffusax.models.transformers.flux2 import Flux2Transformer2DModel
from diffusax.models.transformers.flux3 import Flux3Transformer2DModel
from diffusax.models.transformers.flux_controlnet import FluxControlNetModel
from diffusax.models.transformers.krea2 import Krea2Transformer2DModel
from diffusax.models.transformers.qwen_image import QwenImageTransformer2DModel
from diffusax.models.transformers.qwen_image21 import QwenImage21Transformer2DModel
from diffusax.models.transformers.wan import WanTransformer3DModel
from diffusax.models.transformers.wan_vace import WanVACETransformer3DModel
from diffusax.models.transformers.z_image import ZImageTransformer2DModel
from diffusax.models.unet.controlnet import ControlNetModel
from diffusax.models.unet.t2i_adapter import T2IAdapter
from diffusax.models.unet.unet import UNet2DConditionModel
from diffusax.models.unet.unet_2d import UNet2DModel
from diffusax.runtime.devices.mesh import Rules

MODELS: dict[str, type[nnx.Module]] = {
    cls.__name__: cls
    for cls in (
        AsymmetricAutoencoderKL,
        AutoencoderKL,
        AutoencoderKLFlux2,
        AutoencoderKLQwenImage,
        AutoencoderKLQwenImage21,
        AutoencoderKLWan,
        AutoencoderTiny,
        CLIPModel,
        CLIPTextModel,
        CLIPTextModelWithProjection,
        CLIPVisionModel,
        CLIPVisionModelWithProjection,
        ControlNetModel,
        Dinov2Model,
        FluxControlNetModel,
        Flux2Transformer2DModel,
        Flux3Transformer2DModel,
        FluxTransformer2DModel,
        QwenImage21Transformer2DModel,
        Krea2Transformer2DModel,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLModel,
        Qwen2_5_VLTextModel,
        Qwen2_5_VisionTransformerPretrainedModel,
        QwenImageTransformer2DModel,
        Qwen3ForCausalLM,
        Qwen3Model,
        Qwen3VLForConditionalGeneration,
        Qwen3VLModel,
        Qwen3VLTextModel,
        Qwen3VLVisionModel,
        T2IAdapter,
        T5EncoderModel,
        UMT5EncoderModel,
        UNet2DConditionModel,
        UNet2DModel,
        ViTModel,
        WanTransformer3DModel,
        WanVACETransformer3DModel,
        ZImageTransformer2DModel,
    )
}
"""The Flax module classes by name; enter one here, and checkpoints that name it can be loaded.

A class of models with a `module_class` enters it."""

TENSOR_RULES: Rules = tuple(
    dict.fromkeys(rule for cls in MODELS.values() for rule in getattr(cls, "tensor_rules", ()))
)
"""The rules of all networks, for trees that hold several."""
