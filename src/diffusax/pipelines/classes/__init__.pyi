"""The components and calls of pipelines, with types. Written by tests/support/stubs.py: do not edit."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self

import jax
import numpy as np
from PIL import Image

from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.images.outputs import ImagePipelineOutput, VideoPipelineOutput
from diffusax.networks import (
    AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLQwenImage21,
    AutoencoderKLWan, CLIPTextModel, CLIPTextModelWithProjection, CLIPVisionModelWithProjection,
    Flux2Transformer2DModel, Flux3Transformer2DModel, FluxTransformer2DModel,
    Krea2Transformer2DModel, QwenImage21Transformer2DModel, QwenImageTransformer2DModel,
    T5EncoderModel, UMT5EncoderModel, UNet2DConditionModel, UNet2DModel, WanTransformer3DModel,
    ZImageTransformer2DModel,
)
from diffusax.pipelines.components.attributes import ComponentAttribute
from diffusax.pipelines.pipeline import diffusers_methods
from diffusax.pipelines.pipeline.lora_methods import LoraMethods
from diffusax.pipelines.pipeline.pipeline import DiffusionPipeline
from diffusax.samplers import Scheduler
from diffusax.text.tokenizer import CLIPTokenizer
from diffusax.text.language_tokenizer import ProcessorTokenizer
from diffusax.text.language_tokenizer import Qwen2Tokenizer
from diffusax.text.language_tokenizer import Qwen2VLProcessorTokenizer
from diffusax.text.language_tokenizer import T5Tokenizer

__all__ = [
    "DDIMPipeline", "DDPMPipeline", "Flux2KleinInpaintPipeline", "Flux2KleinKVPipeline",
    "Flux2KleinPipeline", "Flux3KleinInpaintPipeline", "Flux3KleinPipeline",
    "FluxControlNetPipeline", "FluxFillPipeline", "FluxImg2ImgPipeline", "FluxInpaintPipeline",
    "FluxKontextPipeline", "FluxPipeline", "Krea2EditPipeline", "Krea2Pipeline",
    "LatentConsistencyModelImg2ImgPipeline", "LatentConsistencyModelPipeline",
    "QwenImage21Pipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline",
    "QwenImageImg2ImgPipeline", "QwenImageInpaintPipeline", "QwenImagePipeline",
    "StableDiffusionAdapterPipeline", "StableDiffusionControlNetImg2ImgPipeline",
    "StableDiffusionControlNetInpaintPipeline", "StableDiffusionControlNetPipeline",
    "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline",
    "StableDiffusionInstructPix2PixPipeline", "StableDiffusionPipeline",
    "StableDiffusionXLAdapterPipeline", "StableDiffusionXLControlNetImg2ImgPipeline",
    "StableDiffusionXLControlNetInpaintPipeline", "StableDiffusionXLControlNetPipeline",
    "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline",
    "StableDiffusionXLInstructPix2PixPipeline", "StableDiffusionXLPipeline",
    "WanImageToVideoPipeline", "WanPipeline", "WanVACEPipeline", "WanVideoToVideoPipeline",
    "ZImageEditPipeline", "ZImageImg2ImgPipeline", "ZImageInpaintPipeline", "ZImagePipeline",
]

class _Tensor(Protocol):
    def detach(self) -> Any: ...

class _Generator(Protocol):
    def initial_seed(self) -> int: ...

_Array = jax.Array | np.ndarray[Any, Any] | _Tensor
_Arrays = _Array | list[Any] | tuple[Any, ...]
_Images = Image.Image | str | Path | _Array | list[Any] | tuple[Any, ...]
_Numbers = Sequence[float] | _Array
_Seed = int | jax.Array | Sequence[int]
_Generators = int | jax.Array | _Generator | Sequence[int | _Generator]
_Adapters = Mapping[str, Any] | Sequence[Mapping[str, Any]]
_Callback = Callable[..., Any]

class DDIMPipeline(DiffusionPipeline):
    unet: ComponentAttribute[UNet2DModel]
    scheduler: ComponentAttribute[Scheduler]
    def __init__(
        self, **components: Any,
    ) -> None: ...
    def __call__(
        self, batch_size: int = 1, generator: _Generators | None = None, eta: float | None = 0.0,
        num_inference_steps: int | None = 50, use_clipped_model_output: bool | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        *, seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax', hooks: Any = None,
        callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class DDPMPipeline(DiffusionPipeline):
    unet: ComponentAttribute[UNet2DModel]
    scheduler: ComponentAttribute[Scheduler]
    def __call__(
        self, batch_size: int = 1, generator: _Generators | None = None,
        num_inference_steps: int | None = 1000,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        *, seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax', hooks: Any = None,
        callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class _TransformerLoRAs(LoraMethods):
    @classmethod
    def save_lora_weights(  # type: ignore[override]
        cls, save_directory: Any, transformer_lora_layers: Any = None, is_main_process: bool = True,
        weight_name: Any = None, save_function: Any = None, safe_serialization: bool = True,
        transformer_lora_adapter_metadata: Any = None, *, text_encoder_lora_layers: Any = None,
    ) -> None: ...

class Flux2Klein(_TransformerLoRAs, DiffusionPipeline):
    vae: ComponentAttribute[AutoencoderKLFlux2]
    text_encoder: ComponentAttribute[Any]
    tokenizer: ComponentAttribute[Qwen2Tokenizer]
    transformer: ComponentAttribute[Flux2Transformer2DModel]
    scheduler: ComponentAttribute[Scheduler]
    def encode_prompt(
        self, prompt: str | Sequence[str] | None = None, device: Any = None,
        num_images_per_prompt: int | None = 1, prompt_embeds: _Arrays | None = None,
        max_sequence_length: int = 512, text_encoder_out_layers: Sequence[int] | None = (9, 18, 27),
        *, adapters: _Adapters | None = None,
    ) -> Any: ...

class Flux2KleinInpaintPipeline(Flux2Klein):
    mask_processor = diffusers_methods.mask_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        image_reference: _Images | None = None, mask_image: _Images | None = None,
        height: int | None = None, width: int | None = None, padding_mask_crop: int | None = None,
        strength: float = 0.8, num_inference_steps: int | None = 50, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 8.0, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, text_encoder_out_layers: Sequence[int] | None = (9, 18, 27),
        *, seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        guidance_start: float = 0.0, guidance_end: float = 1.0, adapters: _Adapters | None = None,
        guide: Any = None, hooks: Any = None, callback: _Callback | None = None,
        callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class Flux2KleinKVPipeline(Flux2Klein):
    vae: ComponentAttribute[AutoencoderKLFlux2]
    text_encoder: ComponentAttribute[Any]
    tokenizer: ComponentAttribute[Qwen2Tokenizer]
    transformer: ComponentAttribute[Flux2Transformer2DModel]
    scheduler: ComponentAttribute[Scheduler]
    def __call__(
        self, image: _Images | None = None, prompt: str | Sequence[str] | None = None,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 4,
        sigmas: _Numbers | None = None, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, text_encoder_out_layers: Sequence[int] | None = (9, 18, 27),
        *, seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        guidance_start: float = 0.0, guidance_end: float = 1.0, adapters: _Adapters | None = None,
        guide: Any = None, hooks: Any = None, callback: _Callback | None = None,
        callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class Flux2KleinPipeline(Flux2Klein):
    def __call__(
        self, image: _Images | None = None, prompt: str | Sequence[str] | None = None,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 50,
        sigmas: _Numbers | None = None, guidance_scale: float | None = 4.0,
        num_images_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, text_encoder_out_layers: Sequence[int] | None = (9, 18, 27),
        *, seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        guidance_start: float = 0.0, guidance_end: float = 1.0, adapters: _Adapters | None = None,
        guide: Any = None, hooks: Any = None, callback: _Callback | None = None,
        callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class Flux3Klein(_TransformerLoRAs, DiffusionPipeline):
    vae: ComponentAttribute[AutoencoderKLFlux2]
    text_encoder: ComponentAttribute[Any]
    tokenizer: ComponentAttribute[ProcessorTokenizer]
    transformer: ComponentAttribute[Flux3Transformer2DModel]
    scheduler: ComponentAttribute[Scheduler]
    @property
    def own_defaults(self) -> dict[str, Any]: ...
    @classmethod
    def modular_name(
        cls, parts: Any,
    ) -> Any: ...
    def encode_prompt(
        self, prompt: str | Sequence[str] | None = None, device: Any = None,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | Sequence[str] | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, max_sequence_length: int = 8192,
        text_encoder_out_layers: Sequence[int] | None = (4, 8, 12, 16, 20, 24, 28, 32), *,
        adapters: _Adapters | None = None,
    ) -> Any: ...

class Flux3KleinInpaintPipeline(Flux3Klein):
    mask_processor = diffusers_methods.mask_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        image_reference: _Images | None = None, mask_image: _Images | None = None,
        negative_prompt: str | Sequence[str] | None = None, height: int | None = None,
        width: int | None = None, padding_mask_crop: int | None = None, strength: float = 0.8,
        num_inference_steps: int | None = 50, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 3.5, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 8192,
        text_encoder_out_layers: Sequence[int] | None = (4, 8, 12, 16, 20, 24, 28, 32), *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        guidance_start: float = 0.0, guidance_end: float = 1.0, adapters: _Adapters | None = None,
        guide: Any = None, hooks: Any = None, callback: _Callback | None = None,
        callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class Flux3KleinPipeline(Flux3Klein):
    def __call__(
        self, image: _Images | None = None, prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None, height: int | None = None,
        width: int | None = None, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 3.5, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 8192,
        text_encoder_out_layers: Sequence[int] | None = (4, 8, 12, 16, 20, 24, 28, 32), *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        guidance_start: float = 0.0, guidance_end: float = 1.0, adapters: _Adapters | None = None,
        guide: Any = None, hooks: Any = None, callback: _Callback | None = None,
        callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class Flux(DiffusionPipeline):
    vae: ComponentAttribute[AutoencoderKL]
    text_encoder: ComponentAttribute[CLIPTextModel]
    text_encoder_2: ComponentAttribute[T5EncoderModel]
    tokenizer: ComponentAttribute[CLIPTokenizer]
    tokenizer_2: ComponentAttribute[T5Tokenizer]
    transformer: ComponentAttribute[FluxTransformer2DModel]
    scheduler: ComponentAttribute[Scheduler]
    image_encoder: ComponentAttribute[CLIPVisionModelWithProjection]
    feature_extractor: ComponentAttribute[CLIPImageProcessor]
    def encode_prompt(
        self, prompt: str | Sequence[str] | None, prompt_2: str | Sequence[str] | None = None,
        device: Any = None, num_images_per_prompt: int | None = 1,
        prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        max_sequence_length: int = 512, lora_scale: float | None = None, *,
        adapters: _Adapters | None = None,
    ) -> Any: ...
    @classmethod
    def save_lora_weights(  # type: ignore[override]
        cls, save_directory: Any, transformer_lora_layers: Any = None,
        text_encoder_lora_layers: Any = None, is_main_process: bool = True, weight_name: Any = None,
        save_function: Any = None, safe_serialization: bool = True,
        transformer_lora_adapter_metadata: Any = None,
        text_encoder_lora_adapter_metadata: Any = None, *, text_encoder_2_lora_layers: Any = None,
    ) -> None: ...

class FluxControlNetPipeline(Flux):
    controlnet: ComponentAttribute[Any]
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, true_cfg_scale: float = 1.0,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 28,
        sigmas: _Numbers | None = None, guidance_scale: float | None = 7.0,
        control_guidance_start: float | Sequence[float] = 0.0,
        control_guidance_end: float | Sequence[float] = 1.0, control_image: _Images | None = None,
        control_mode: int | Sequence[int | None] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 1.0,
        num_images_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        pooled_prompt_embeds: _Arrays | None = None, ip_adapter_image: _Images | None = None,
        ip_adapter_image_embeds: _Arrays | None = None, negative_ip_adapter_image: Any = None,
        negative_ip_adapter_image_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class FluxFillPipeline(Flux):
    mask_processor = diffusers_methods.mask_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None, image: _Images | None = None,
        mask_image: _Images | None = None, masked_image_latents: _Arrays | None = None,
        height: int | None = None, width: int | None = None, strength: float = 1.0,
        num_inference_steps: int | None = 50, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 30.0, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class FluxImg2ImgPipeline(Flux):
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, true_cfg_scale: float = 1.0,
        image: _Images | None = None, height: int | None = None, width: int | None = None,
        strength: float = 0.6, num_inference_steps: int | None = 28, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 7.0, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        negative_ip_adapter_image: Any = None,
        negative_ip_adapter_image_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class FluxInpaintPipeline(Flux):
    mask_processor = diffusers_methods.mask_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, true_cfg_scale: float = 1.0,
        image: _Images | None = None, mask_image: _Images | None = None,
        masked_image_latents: _Arrays | None = None, height: int | None = None,
        width: int | None = None, padding_mask_crop: int | None = None, strength: float = 0.6,
        num_inference_steps: int | None = 28, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 7.0, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        negative_ip_adapter_image: Any = None,
        negative_ip_adapter_image_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class FluxKontextPipeline(Flux):
    def __call__(
        self, image: _Images | None = None, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, true_cfg_scale: float = 1.0,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 28,
        sigmas: _Numbers | None = None, guidance_scale: float | None = 3.5,
        num_images_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        pooled_prompt_embeds: _Arrays | None = None, ip_adapter_image: _Images | None = None,
        ip_adapter_image_embeds: _Arrays | None = None, negative_ip_adapter_image: Any = None,
        negative_ip_adapter_image_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, max_area: int = 1048576, _auto_resize: bool = True, *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        guidance_start: float = 0.0, guidance_end: float = 1.0, adapters: _Adapters | None = None,
        guide: Any = None, hooks: Any = None, callback: _Callback | None = None,
        callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class FluxPipeline(Flux):
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, true_cfg_scale: float = 1.0,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 28,
        sigmas: _Numbers | None = None, guidance_scale: float | None = 3.5,
        num_images_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        pooled_prompt_embeds: _Arrays | None = None, ip_adapter_image: _Images | None = None,
        ip_adapter_image_embeds: _Arrays | None = None, negative_ip_adapter_image: Any = None,
        negative_ip_adapter_image_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class _LearnsToLook:
    @property
    def references_layout(self) -> str: ...
    @references_layout.setter
    def references_layout(self, layout: str) -> None: ...

class Krea2(_LearnsToLook, _TransformerLoRAs, DiffusionPipeline):
    vae: ComponentAttribute[AutoencoderKLQwenImage]
    text_encoder: ComponentAttribute[Any]
    tokenizer: ComponentAttribute[Qwen2Tokenizer]
    transformer: ComponentAttribute[Krea2Transformer2DModel]
    scheduler: ComponentAttribute[Scheduler]
    def encode_prompt(
        self, prompt: str | Sequence[str] | None, device: Any = None,
        num_images_per_prompt: int | None = 1, prompt_embeds: _Arrays | None = None,
        prompt_embeds_mask: _Arrays | None = None, max_sequence_length: int = 512, *,
        adapters: _Adapters | None = None,
    ) -> Any: ...

class LooksAtImages:
    def __init__(
        self, *, references_layout: Any = None, **components: Any,
    ) -> None: ...
    @classmethod
    def from_pipe(
        cls, pipe: Any, **components: Any,
    ) -> Self: ...

class Krea2EditPipeline(LooksAtImages, Krea2):
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        negative_prompt: str | Sequence[str] | None = None, height: int | None = None,
        width: int | None = None, num_inference_steps: int | None = 28,
        sigmas: _Numbers | None = None, guidance_scale: float | None = 4.5,
        num_images_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        prompt_embeds_mask: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds_mask: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        attention_kwargs: Mapping[str, Any] | None = None, max_sequence_length: int = 512, *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        guidance_start: float = 0.0, guidance_end: float = 1.0, adapters: _Adapters | None = None,
        guide: Any = None, hooks: Any = None, callback: _Callback | None = None,
        callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class Krea2Pipeline(Krea2):
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None, height: int | None = 1024,
        width: int | None = 1024, num_inference_steps: int | None = 28,
        sigmas: _Numbers | None = None, guidance_scale: float | None = 4.5,
        num_images_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        prompt_embeds_mask: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds_mask: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        attention_kwargs: Mapping[str, Any] | None = None, max_sequence_length: int = 512, *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        guidance_start: float = 0.0, guidance_end: float = 1.0, adapters: _Adapters | None = None,
        guide: Any = None, hooks: Any = None, callback: _Callback | None = None,
        callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusion(DiffusionPipeline):
    vae: ComponentAttribute[AutoencoderKL]
    text_encoder: ComponentAttribute[CLIPTextModel]
    tokenizer: ComponentAttribute[CLIPTokenizer]
    unet: ComponentAttribute[UNet2DConditionModel]
    scheduler: ComponentAttribute[Scheduler]
    image_encoder: ComponentAttribute[CLIPVisionModelWithProjection]
    feature_extractor: ComponentAttribute[CLIPImageProcessor]
    def encode_prompt(
        self, prompt: str | Sequence[str] | None = None, device: Any = None,
        num_images_per_prompt: int | None = 1, do_classifier_free_guidance: bool = True,
        negative_prompt: str | Sequence[str] | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, lora_scale: float | None = None,
        clip_skip: int | None = None, *, adapters: _Adapters | None = None,
        long_prompt: bool = False, prompt_weighting: bool = False,
    ) -> Any: ...
    def decode_latents(
        self, latents: _Arrays | None,
    ) -> Any: ...

class LatentConsistencyModelImg2ImgPipeline(StableDiffusion):
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        num_inference_steps: int | None = 4, strength: float = 0.8,
        original_inference_steps: int | None = None, timesteps: _Numbers | None = None,
        guidance_scale: float | None = 8.5, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, ip_adapter_image: _Images | None = None,
        ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class LatentConsistencyModelPipeline(StableDiffusion):
    prepare_latents = diffusers_methods.prepare_latents
    def __call__(
        self, prompt: str | Sequence[str] | None = None, height: int | None = None,
        width: int | None = None, num_inference_steps: int | None = 4,
        original_inference_steps: int | None = None, timesteps: _Numbers | None = None,
        guidance_scale: float | None = 8.5, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, ip_adapter_image: _Images | None = None,
        ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class QwenImage21(_TransformerLoRAs, DiffusionPipeline):
    vae: ComponentAttribute[AutoencoderKLQwenImage21]
    text_encoder: ComponentAttribute[Any]
    processor: ComponentAttribute[ProcessorTokenizer]
    transformer: ComponentAttribute[QwenImage21Transformer2DModel]
    scheduler: ComponentAttribute[Scheduler]
    def encode_prompt(
        self, prompt: str | Sequence[str] | None, image: _Images | None = None, device: Any = None,
        num_images_per_prompt: int | None = 1, prompt_embeds: _Arrays | None = None,
        prompt_embeds_mask: _Arrays | None = None, image_pad_mask: Any = None, *,
        adapters: _Adapters | None = None,
    ) -> Any: ...

class QwenImage21Pipeline(QwenImage21):
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        negative_prompt: str | Sequence[str] | None = None, true_cfg_scale: float = 1.0,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 40,
        sigmas: _Numbers | None = None, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, prompt_embeds_mask: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds_mask: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        output_resolution: int | None = 1024, use_kv_cache: bool = True, *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        guidance_scale: float | None = None, guidance_start: float = 0.0, guidance_end: float = 1.0,
        adapters: _Adapters | None = None, guide: Any = None, hooks: Any = None,
        callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class QwenImageEdit(_TransformerLoRAs, DiffusionPipeline):
    vae: ComponentAttribute[AutoencoderKLQwenImage]
    text_encoder: ComponentAttribute[Any]
    processor: ComponentAttribute[Qwen2VLProcessorTokenizer]
    transformer: ComponentAttribute[QwenImageTransformer2DModel]
    scheduler: ComponentAttribute[Scheduler]
    tokenizer: ComponentAttribute[Qwen2Tokenizer]
    def encode_prompt(
        self, prompt: str | Sequence[str] | None, image: _Images | None = None, device: Any = None,
        num_images_per_prompt: int | None = 1, prompt_embeds: _Arrays | None = None,
        prompt_embeds_mask: _Arrays | None = None, max_sequence_length: int = 1024, *,
        adapters: _Adapters | None = None,
    ) -> Any: ...

class QwenImageEditPipeline(QwenImageEdit):
    def __call__(
        self, image: _Images | None = None, prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None, true_cfg_scale: float = 4.0,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 50,
        sigmas: _Numbers | None = None, guidance_scale: float | None = None,
        num_images_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        prompt_embeds_mask: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds_mask: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class QwenImageEditPlusPipeline(QwenImageEdit):
    vae: ComponentAttribute[AutoencoderKLQwenImage]
    text_encoder: ComponentAttribute[Any]
    processor: ComponentAttribute[Qwen2VLProcessorTokenizer]
    transformer: ComponentAttribute[QwenImageTransformer2DModel]
    scheduler: ComponentAttribute[Scheduler]
    tokenizer: ComponentAttribute[Qwen2Tokenizer]
    def __call__(
        self, image: _Images | None = None, prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None, true_cfg_scale: float = 4.0,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 50,
        sigmas: _Numbers | None = None, guidance_scale: float | None = None,
        num_images_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        prompt_embeds_mask: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds_mask: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class QwenImage(_TransformerLoRAs, DiffusionPipeline):
    vae: ComponentAttribute[AutoencoderKLQwenImage]
    text_encoder: ComponentAttribute[Any]
    tokenizer: ComponentAttribute[Qwen2Tokenizer]
    transformer: ComponentAttribute[QwenImageTransformer2DModel]
    scheduler: ComponentAttribute[Scheduler]
    def encode_prompt(
        self, prompt: str | Sequence[str] | None, device: Any = None,
        num_images_per_prompt: int | None = 1, prompt_embeds: _Arrays | None = None,
        prompt_embeds_mask: _Arrays | None = None, max_sequence_length: int = 1024, *,
        adapters: _Adapters | None = None,
    ) -> Any: ...

class QwenImageImg2ImgPipeline(QwenImage):
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None, true_cfg_scale: float = 4.0,
        image: _Images | None = None, height: int | None = None, width: int | None = None,
        strength: float = 0.6, num_inference_steps: int | None = 50, sigmas: _Numbers | None = None,
        guidance_scale: float | None = None, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, prompt_embeds_mask: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds_mask: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class QwenImageInpaintPipeline(QwenImage):
    mask_processor = diffusers_methods.mask_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None, true_cfg_scale: float = 4.0,
        image: _Images | None = None, mask_image: _Images | None = None,
        masked_image_latents: _Arrays | None = None, height: int | None = None,
        width: int | None = None, padding_mask_crop: int | None = None, strength: float = 0.6,
        num_inference_steps: int | None = 50, sigmas: _Numbers | None = None,
        guidance_scale: float | None = None, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, prompt_embeds_mask: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds_mask: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class QwenImagePipeline(QwenImage):
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None, true_cfg_scale: float = 4.0,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 50,
        sigmas: _Numbers | None = None, guidance_scale: float | None = None,
        num_images_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        prompt_embeds_mask: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds_mask: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionAdapterPipeline(StableDiffusion):
    adapter: ComponentAttribute[Any]
    prepare_latents = diffusers_methods.prepare_latents
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 7.5, negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int | None = 1, eta: float | None = 0.0,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        callback: _Callback | None = None, callback_steps: int | None = 1,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        adapter_conditioning_scale: float | Sequence[float] | None = 1.0,
        clip_skip: int | None = None, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', long_prompt: bool = False,
        prompt_weighting: bool = False, guidance_start: float = 0.0, guidance_end: float = 1.0,
        adapters: _Adapters | None = None, guide: Any = None, hooks: Any = None,
    ) -> ImagePipelineOutput: ...

class StableDiffusionControlNetImg2ImgPipeline(StableDiffusion):
    controlnet: ComponentAttribute[Any]
    control_image_processor = diffusers_methods.control_image_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        control_image: _Images | None = None, height: int | None = None, width: int | None = None,
        strength: float = 0.8, num_inference_steps: int | None = 50,
        guidance_scale: float | None = 7.5, negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int | None = 1, eta: float | None = 0.0,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 0.8, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0,
        control_guidance_end: float | Sequence[float] = 1.0, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionControlNetInpaintPipeline(StableDiffusion):
    controlnet: ComponentAttribute[Any]
    control_image_processor = diffusers_methods.control_image_processor
    mask_processor = diffusers_methods.mask_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        mask_image: _Images | None = None, control_image: _Images | None = None,
        height: int | None = None, width: int | None = None, padding_mask_crop: int | None = None,
        strength: float = 1.0, num_inference_steps: int | None = 50,
        guidance_scale: float | None = 7.5, negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int | None = 1, eta: float | None = 0.0,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 0.5, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0,
        control_guidance_end: float | Sequence[float] = 1.0, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionControlNetPipeline(StableDiffusion):
    controlnet: ComponentAttribute[Any]
    prepare_latents = diffusers_methods.prepare_latents
    control_image_processor = diffusers_methods.control_image_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 7.5, negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int | None = 1, eta: float | None = 0.0,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 1.0, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0,
        control_guidance_end: float | Sequence[float] = 1.0, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionImg2ImgPipeline(StableDiffusion):
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        strength: float = 0.8, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 7.5, negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int | None = 1, eta: float | None = 0.0,
        generator: _Generators | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, ip_adapter_image: _Images | None = None,
        ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionInpaintPipeline(StableDiffusion):
    mask_processor = diffusers_methods.mask_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        mask_image: _Images | None = None, masked_image_latents: _Arrays | None = None,
        height: int | None = None, width: int | None = None, padding_mask_crop: int | None = None,
        strength: float = 1.0, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 7.5, negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int | None = 1, eta: float | None = 0.0,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionInstructPix2PixPipeline(StableDiffusion):
    prepare_latents = diffusers_methods.prepare_latents
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        num_inference_steps: int | None = 100, guidance_scale: float | None = 7.5,
        image_guidance_scale: float = 1.5, negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int | None = 1, eta: float | None = 0.0,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        cross_attention_kwargs: Mapping[str, Any] | None = None, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', long_prompt: bool = False,
        prompt_weighting: bool = False, guidance_start: float = 0.0, guidance_end: float = 1.0,
        adapters: _Adapters | None = None, guide: Any = None, hooks: Any = None,
        callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionPipeline(StableDiffusion):
    prepare_latents = diffusers_methods.prepare_latents
    def __call__(
        self, prompt: str | Sequence[str] | None = None, height: int | None = None,
        width: int | None = None, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 7.5, negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int | None = 1, eta: float | None = 0.0,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None, guidance_rescale: float = 0.0,
        clip_skip: int | None = None, callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionXL(DiffusionPipeline):
    vae: ComponentAttribute[AutoencoderKL]
    text_encoder: ComponentAttribute[CLIPTextModel]
    text_encoder_2: ComponentAttribute[CLIPTextModelWithProjection]
    tokenizer: ComponentAttribute[CLIPTokenizer]
    tokenizer_2: ComponentAttribute[CLIPTokenizer]
    unet: ComponentAttribute[UNet2DConditionModel]
    scheduler: ComponentAttribute[Scheduler]
    image_encoder: ComponentAttribute[CLIPVisionModelWithProjection]
    feature_extractor: ComponentAttribute[CLIPImageProcessor]
    def encode_prompt(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None, device: Any = None,
        num_images_per_prompt: int | None = 1, do_classifier_free_guidance: bool = True,
        negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None, lora_scale: float | None = None,
        clip_skip: int | None = None, *, adapters: _Adapters | None = None,
        long_prompt: bool = False, prompt_weighting: bool = False,
    ) -> Any: ...

class StableDiffusionXLAdapterPipeline(StableDiffusionXL):
    adapter: ComponentAttribute[Any]
    prepare_latents = diffusers_methods.prepare_latents
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None, image: _Images | None = None,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, sigmas: _Numbers | None = None,
        denoising_end: float | None = None, guidance_scale: float | None = 5.0,
        negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, num_images_per_prompt: int | None = 1,
        eta: float | None = 0.0, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        callback: _Callback | None = None, callback_steps: int | None = 1,
        cross_attention_kwargs: Mapping[str, Any] | None = None, guidance_rescale: float = 0.0,
        original_size: Sequence[int] | None = None, crops_coords_top_left: Sequence[int] = (0, 0),
        target_size: Sequence[int] | None = None,
        negative_original_size: Sequence[int] | None = None,
        negative_crops_coords_top_left: Sequence[int] = (0, 0),
        negative_target_size: Sequence[int] | None = None,
        adapter_conditioning_scale: float | Sequence[float] | None = 1.0,
        adapter_conditioning_factor: float | None = 1.0, clip_skip: int | None = None, *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None,
    ) -> ImagePipelineOutput: ...

class StableDiffusionXLControlNetImg2ImgPipeline(StableDiffusionXL):
    controlnet: ComponentAttribute[Any]
    control_image_processor = diffusers_methods.control_image_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None, image: _Images | None = None,
        control_image: _Images | None = None, height: int | None = None, width: int | None = None,
        strength: float = 0.8, num_inference_steps: int | None = 50,
        guidance_scale: float | None = 5.0, negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, num_images_per_prompt: int | None = 1,
        eta: float | None = 0.0, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 0.8, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0,
        control_guidance_end: float | Sequence[float] = 1.0,
        original_size: Sequence[int] | None = None, crops_coords_top_left: Sequence[int] = (0, 0),
        target_size: Sequence[int] | None = None,
        negative_original_size: Sequence[int] | None = None,
        negative_crops_coords_top_left: Sequence[int] = (0, 0),
        negative_target_size: Sequence[int] | None = None, aesthetic_score: float = 6.0,
        negative_aesthetic_score: float = 2.5, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionXLControlNetInpaintPipeline(StableDiffusionXL):
    controlnet: ComponentAttribute[Any]
    control_image_processor = diffusers_methods.control_image_processor
    mask_processor = diffusers_methods.mask_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None, image: _Images | None = None,
        mask_image: _Images | None = None, control_image: _Images | None = None,
        height: int | None = None, width: int | None = None, padding_mask_crop: int | None = None,
        strength: float = 0.9999, num_inference_steps: int | None = 50,
        denoising_start: float | None = None, denoising_end: float | None = None,
        guidance_scale: float | None = 5.0, negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, num_images_per_prompt: int | None = 1,
        eta: float | None = 0.0, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, ip_adapter_image: _Images | None = None,
        ip_adapter_image_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 1.0, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0,
        control_guidance_end: float | Sequence[float] = 1.0, guidance_rescale: float = 0.0,
        original_size: Sequence[int] | None = None, crops_coords_top_left: Sequence[int] = (0, 0),
        target_size: Sequence[int] | None = None, aesthetic_score: float = 6.0,
        negative_aesthetic_score: float = 2.5, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionXLControlNetPipeline(StableDiffusionXL):
    controlnet: ComponentAttribute[Any]
    prepare_latents = diffusers_methods.prepare_latents
    control_image_processor = diffusers_methods.control_image_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None, image: _Images | None = None,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, sigmas: _Numbers | None = None,
        denoising_end: float | None = None, guidance_scale: float | None = 5.0,
        negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, num_images_per_prompt: int | None = 1,
        eta: float | None = 0.0, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None,
        controlnet_conditioning_scale: float | Sequence[float] = 1.0, guess_mode: bool = False,
        control_guidance_start: float | Sequence[float] = 0.0,
        control_guidance_end: float | Sequence[float] = 1.0,
        original_size: Sequence[int] | None = None, crops_coords_top_left: Sequence[int] = (0, 0),
        target_size: Sequence[int] | None = None,
        negative_original_size: Sequence[int] | None = None,
        negative_crops_coords_top_left: Sequence[int] = (0, 0),
        negative_target_size: Sequence[int] | None = None, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionXLImg2ImgPipeline(StableDiffusionXL):
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None, image: _Images | None = None,
        strength: float = 0.3, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, sigmas: _Numbers | None = None,
        denoising_start: float | None = None, denoising_end: float | None = None,
        guidance_scale: float | None = 5.0, negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, num_images_per_prompt: int | None = 1,
        eta: float | None = 0.0, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None, guidance_rescale: float = 0.0,
        original_size: Sequence[int] | None = None, crops_coords_top_left: Sequence[int] = (0, 0),
        target_size: Sequence[int] | None = None,
        negative_original_size: Sequence[int] | None = None,
        negative_crops_coords_top_left: Sequence[int] = (0, 0),
        negative_target_size: Sequence[int] | None = None, aesthetic_score: float = 6.0,
        negative_aesthetic_score: float = 2.5, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionXLInpaintPipeline(StableDiffusionXL):
    mask_processor = diffusers_methods.mask_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None, image: _Images | None = None,
        mask_image: _Images | None = None, masked_image_latents: _Arrays | None = None,
        height: int | None = None, width: int | None = None, padding_mask_crop: int | None = None,
        strength: float = 0.9999, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, sigmas: _Numbers | None = None,
        denoising_start: float | None = None, denoising_end: float | None = None,
        guidance_scale: float | None = 7.5, negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, num_images_per_prompt: int | None = 1,
        eta: float | None = 0.0, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None, guidance_rescale: float = 0.0,
        original_size: Sequence[int] | None = None, crops_coords_top_left: Sequence[int] = (0, 0),
        target_size: Sequence[int] | None = None,
        negative_original_size: Sequence[int] | None = None,
        negative_crops_coords_top_left: Sequence[int] = (0, 0),
        negative_target_size: Sequence[int] | None = None, aesthetic_score: float = 6.0,
        negative_aesthetic_score: float = 2.5, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class StableDiffusionXLInstructPix2PixPipeline(StableDiffusionXL):
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None, image: _Images | None = None,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 100,
        denoising_end: float | None = None, guidance_scale: float | None = 5.0,
        image_guidance_scale: float = 1.5, negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, num_images_per_prompt: int | None = 1,
        eta: float | None = 0.0, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        callback: _Callback | None = None, callback_steps: int | None = 1,
        cross_attention_kwargs: Mapping[str, Any] | None = None, guidance_rescale: float = 0.0,
        original_size: Sequence[int] | None = None, crops_coords_top_left: Sequence[int] = (0, 0),
        target_size: Sequence[int] | None = None, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', long_prompt: bool = False,
        prompt_weighting: bool = False, guidance_start: float = 0.0, guidance_end: float = 1.0,
        adapters: _Adapters | None = None, guide: Any = None, hooks: Any = None,
    ) -> ImagePipelineOutput: ...

class StableDiffusionXLPipeline(StableDiffusionXL):
    prepare_latents = diffusers_methods.prepare_latents
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        prompt_2: str | Sequence[str] | None = None, height: int | None = None,
        width: int | None = None, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, sigmas: _Numbers | None = None,
        denoising_end: float | None = None, guidance_scale: float | None = 5.0,
        negative_prompt: str | Sequence[str] | None = None,
        negative_prompt_2: str | Sequence[str] | None = None, num_images_per_prompt: int | None = 1,
        eta: float | None = 0.0, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, pooled_prompt_embeds: _Arrays | None = None,
        negative_pooled_prompt_embeds: _Arrays | None = None,
        ip_adapter_image: _Images | None = None, ip_adapter_image_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        cross_attention_kwargs: Mapping[str, Any] | None = None, guidance_rescale: float = 0.0,
        original_size: Sequence[int] | None = None, crops_coords_top_left: Sequence[int] = (0, 0),
        target_size: Sequence[int] | None = None,
        negative_original_size: Sequence[int] | None = None,
        negative_crops_coords_top_left: Sequence[int] = (0, 0),
        negative_target_size: Sequence[int] | None = None, clip_skip: int | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'], *,
        seed: _Seed | None = None, noise: Literal['jax', 'torch'] = 'jax',
        long_prompt: bool = False, prompt_weighting: bool = False, guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class Wan(_TransformerLoRAs, DiffusionPipeline):
    vae: ComponentAttribute[AutoencoderKLWan]
    text_encoder: ComponentAttribute[UMT5EncoderModel]
    tokenizer: ComponentAttribute[T5Tokenizer]
    transformer: ComponentAttribute[WanTransformer3DModel]
    scheduler: ComponentAttribute[Scheduler]
    transformer_2: ComponentAttribute[WanTransformer3DModel]
    def encode_prompt(
        self, prompt: str | Sequence[str] | None,
        negative_prompt: str | Sequence[str] | None = None,
        do_classifier_free_guidance: bool = True, num_videos_per_prompt: int | None = 1,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        max_sequence_length: int = 226, device: Any = None, dtype: Any = None, *,
        adapters: _Adapters | None = None,
    ) -> Any: ...

class WanImageToVideoPipeline(Wan):
    vae: ComponentAttribute[AutoencoderKLWan]
    text_encoder: ComponentAttribute[UMT5EncoderModel]
    tokenizer: ComponentAttribute[T5Tokenizer]
    transformer: ComponentAttribute[WanTransformer3DModel]
    scheduler: ComponentAttribute[Scheduler]
    transformer_2: ComponentAttribute[WanTransformer3DModel]
    image_encoder: ComponentAttribute[CLIPVisionModelWithProjection]
    image_processor: ComponentAttribute[CLIPImageProcessor]  # type: ignore[assignment]
    def __call__(
        self, image: _Images | None, prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None, height: int | None = 480,
        width: int | None = 832, num_frames: int | None = 81, num_inference_steps: int | None = 50,
        guidance_scale: float | None = 5.0, guidance_scale_2: float | None = None,
        num_videos_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, image_embeds: _Arrays | None = None,
        last_image: _Images | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'np', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> VideoPipelineOutput: ...

class WanPipeline(Wan):
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None, height: int | None = 480,
        width: int | None = 832, num_frames: int | None = 81, num_inference_steps: int | None = 50,
        guidance_scale: float | None = 5.0, guidance_scale_2: float | None = None,
        num_videos_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'np', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> VideoPipelineOutput: ...

class WanVACEPipeline(Wan):
    def __call__(
        self, prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None, video: Any = None, mask: Any = None,
        reference_images: _Images | None = None, conditioning_scale: float | Sequence[float] = 1.0,
        height: int | None = 480, width: int | None = 832, num_frames: int | None = 81,
        num_inference_steps: int | None = 50, guidance_scale: float | None = 5.0,
        guidance_scale_2: float | None = None, num_videos_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'np', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> VideoPipelineOutput: ...

class WanVideoToVideoPipeline(Wan):
    def __call__(
        self, video: Any = None, prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None, height: int | None = 480,
        width: int | None = 832, num_inference_steps: int | None = 50,
        timesteps: _Numbers | None = None, guidance_scale: float | None = 5.0,
        strength: float = 0.8, num_videos_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'np', return_dict: bool = True,
        attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> VideoPipelineOutput: ...

class ZImage(_LearnsToLook, _TransformerLoRAs, DiffusionPipeline):
    vae: ComponentAttribute[AutoencoderKL]
    text_encoder: ComponentAttribute[Any]
    tokenizer: ComponentAttribute[Qwen2Tokenizer]
    transformer: ComponentAttribute[ZImageTransformer2DModel]
    scheduler: ComponentAttribute[Scheduler]
    def encode_prompt(
        self, prompt: str | Sequence[str] | None = None, device: Any = None,
        do_classifier_free_guidance: bool = True,
        negative_prompt: str | Sequence[str] | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None, max_sequence_length: int = 512, *,
        adapters: _Adapters | None = None,
    ) -> Any: ...

class ZImageEditPipeline(LooksAtImages, ZImage):
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        height: int | None = None, width: int | None = None, num_inference_steps: int | None = 50,
        sigmas: _Numbers | None = None, guidance_scale: float | None = 5.0,
        cfg_normalization: float = False, cfg_truncation: float | None = 1.0,
        negative_prompt: str | Sequence[str] | None = None, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class ZImageImg2ImgPipeline(ZImage):
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        strength: float = 0.6, height: int | None = None, width: int | None = None,
        num_inference_steps: int | None = 50, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 5.0, cfg_normalization: float = False,
        cfg_truncation: float | None = 1.0, negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class ZImageInpaintPipeline(ZImage):
    mask_processor = diffusers_methods.mask_processor
    def __call__(
        self, prompt: str | Sequence[str] | None = None, image: _Images | None = None,
        mask_image: _Images | None = None, masked_image_latents: _Arrays | None = None,
        strength: float = 1.0, height: int | None = None, width: int | None = None,
        num_inference_steps: int | None = 50, sigmas: _Numbers | None = None,
        guidance_scale: float | None = 5.0, cfg_normalization: float = False,
        cfg_truncation: float | None = 1.0, negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int | None = 1, generator: _Generators | None = None,
        latents: _Arrays | None = None, prompt_embeds: _Arrays | None = None,
        negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...

class ZImagePipeline(ZImage):
    def __call__(
        self, prompt: str | Sequence[str] | None = None, height: int | None = None,
        width: int | None = None, num_inference_steps: int | None = 50,
        sigmas: _Numbers | None = None, guidance_scale: float | None = 5.0,
        cfg_normalization: float = False, cfg_truncation: float | None = 1.0,
        negative_prompt: str | Sequence[str] | None = None, num_images_per_prompt: int | None = 1,
        generator: _Generators | None = None, latents: _Arrays | None = None,
        prompt_embeds: _Arrays | None = None, negative_prompt_embeds: _Arrays | None = None,
        output_type: Literal['pil', 'np', 'jax', 'pt', 'latent'] = 'pil', return_dict: bool = True,
        joint_attention_kwargs: Mapping[str, Any] | None = None,
        callback_on_step_end: _Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] | None = ['latents'],
        max_sequence_length: int = 512, *, seed: _Seed | None = None,
        noise: Literal['jax', 'torch'] = 'jax', guidance_start: float = 0.0,
        guidance_end: float = 1.0, adapters: _Adapters | None = None, guide: Any = None,
        hooks: Any = None, callback: _Callback | None = None, callback_steps: int | None = 1,
    ) -> ImagePipelineOutput: ...
