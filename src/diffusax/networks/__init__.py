"""Models under diffusers' and transformers' names: one class for each network, with parameters.

They are loaded, saved and called as diffusers' and transformers' are, and pipelines hold them.
Images, latents and residuals are b c h w. Arrays of JAX and NumPy are taken, and arrays of JAX come
back; where samples or texts are tensors of PyTorch, so are the results. Calls are compiled, once
for each shape.
"""

from diffusax.networks.autoencoders import (
    AsymmetricAutoencoderKL,
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLQwenImage,
    AutoencoderKLQwenImage21,
    AutoencoderKLWan,
    AutoencoderTiny,
)
from diffusax.networks.encoders import (
    CLIPModel,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    Dinov2Model,
    ViTModel,
)
from diffusax.networks.flux import (
    Flux2Transformer2DModel,
    Flux3Transformer2DModel,
    FluxControlNetModel,
    FluxTransformer2DModel,
)
from diffusax.networks.language_models import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLModel,
    Qwen2_5_VLTextModel,
    Qwen3ForCausalLM,
    Qwen3Model,
    Qwen3VLForConditionalGeneration,
    Qwen3VLModel,
    Qwen3VLTextModel,
    Qwen3VLVisionModel,
    T5EncoderModel,
    UMT5EncoderModel,
)
from diffusax.networks.model import Model, load_network
from diffusax.networks.model import initialize as initialize
from diffusax.networks.transformers import (
    Krea2Transformer2DModel,
    QwenImage21Transformer2DModel,
    QwenImageTransformer2DModel,
    ZImageTransformer2DModel,
)
from diffusax.networks.unet import (
    ControlNetModel,
    MultiAdapter,
    T2IAdapter,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusax.networks.video import WanTransformer3DModel, WanVACETransformer3DModel

AutoModel = Model
"""diffusers' name of the class that loads any network."""

__all__ = [
    "AsymmetricAutoencoderKL",
    "AutoModel",
    "AutoencoderKL",
    "AutoencoderKLFlux2",
    "AutoencoderKLQwenImage",
    "AutoencoderKLQwenImage21",
    "AutoencoderKLWan",
    "AutoencoderTiny",
    "CLIPModel",
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "CLIPVisionModel",
    "CLIPVisionModelWithProjection",
    "ControlNetModel",
    "Dinov2Model",
    "Flux2Transformer2DModel",
    "Flux3Transformer2DModel",
    "FluxControlNetModel",
    "FluxTransformer2DModel",
    "Krea2Transformer2DModel",
    "MultiAdapter",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2_5_VLModel",
    "Qwen2_5_VLTextModel",
    "Qwen2_5_VisionTransformerPretrainedModel",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLModel",
    "Qwen3VLTextModel",
    "Qwen3VLVisionModel",
    "QwenImage21Transformer2DModel",
    "QwenImageTransformer2DModel",
    "T2IAdapter",
    "T5EncoderModel",
    "UMT5EncoderModel",
    "UNet2DConditionModel",
    "UNet2DModel",
    "ViTModel",
    "WanTransformer3DModel",
    "WanVACETransformer3DModel",
    "ZImageTransformer2DModel",
    "load_network",
]
