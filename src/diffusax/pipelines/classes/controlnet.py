"""Generates images steered by others: edges, depth, poses (Zhang et al. 2023, ControlNet).

The calls' arguments, their order and defaults are diffusers'; those after the star are added.
"""

from diffusax.pipelines.classes.bases import StableDiffusion, StableDiffusionXL
from diffusax.pipelines.families.family import CONTROLNET, IMAGE_PROMPTS
from diffusax.pipelines.pipeline import diffusers_methods
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.arguments import TENSORS
from diffusax.pipelines.tasks.steering import (
    control_image_to_image,
    control_inpaint,
    control_text_to_image,
)

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class StableDiffusionControlNetPipeline(StableDiffusion):
    """Generates images from prompts, steered by ControlNets."""

    task = staticmethod(control_text_to_image)
    prepare_latents = diffusers_methods.prepare_latents
    control_image_processor = diffusers_methods.control_image_processor
    extra_components = (CONTROLNET, *IMAGE_PROMPTS)

    @documented
    def __call__(
        self, prompt=None, image=None, height=None, width=None, num_inference_steps=50,
        timesteps=None, sigmas=None, guidance_scale=7.5, negative_prompt=None,
        num_images_per_prompt=1, eta=0.0, generator=None, latents=None, prompt_embeds=None,
        negative_prompt_embeds=None, ip_adapter_image=None, ip_adapter_image_embeds=None,
        output_type="pil", return_dict=True, cross_attention_kwargs=None,
        controlnet_conditioning_scale=1.0, guess_mode=False, control_guidance_start=0.0,
        control_guidance_end=1.0, clip_skip=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, *, seed=None, noise="jax", long_prompt=False,
        prompt_weighting=False, guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Generates images for the prompts, steered by `image`, the input of the ControlNets."""


class StableDiffusionControlNetImg2ImgPipeline(StableDiffusion):
    """Generates images from images, steered by ControlNets."""

    task = staticmethod(control_image_to_image)
    control_image_processor = diffusers_methods.control_image_processor
    extra_components = (CONTROLNET, *IMAGE_PROMPTS)

    @documented
    def __call__(
        self, prompt=None, image=None, control_image=None, height=None, width=None, strength=0.8,
        num_inference_steps=50, guidance_scale=7.5, negative_prompt=None, num_images_per_prompt=1,
        eta=0.0, generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        ip_adapter_image=None, ip_adapter_image_embeds=None, output_type="pil", return_dict=True,
        cross_attention_kwargs=None, controlnet_conditioning_scale=0.8, guess_mode=False,
        control_guidance_start=0.0, control_guidance_end=1.0, clip_skip=None,
        callback_on_step_end=None, callback_on_step_end_tensor_inputs=TENSORS, *, seed=None,
        noise="jax", long_prompt=False, prompt_weighting=False, guidance_start=0.0,
        guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images from the given images and the prompts."""


class StableDiffusionControlNetInpaintPipeline(StableDiffusion):
    """Generates images anew where a mask is white, steered by ControlNets."""

    task = staticmethod(control_inpaint)
    control_image_processor = diffusers_methods.control_image_processor
    mask_processor = diffusers_methods.mask_processor
    extra_components = (CONTROLNET, *IMAGE_PROMPTS)

    @documented
    def __call__(
        self, prompt=None, image=None, mask_image=None, control_image=None, height=None, width=None,
        padding_mask_crop=None, strength=1.0, num_inference_steps=50, guidance_scale=7.5,
        negative_prompt=None, num_images_per_prompt=1, eta=0.0, generator=None, latents=None,
        prompt_embeds=None, negative_prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, output_type="pil", return_dict=True,
        cross_attention_kwargs=None, controlnet_conditioning_scale=0.5, guess_mode=False,
        control_guidance_start=0.0, control_guidance_end=1.0, clip_skip=None,
        callback_on_step_end=None, callback_on_step_end_tensor_inputs=TENSORS, *, seed=None,
        noise="jax", long_prompt=False, prompt_weighting=False, guidance_start=0.0,
        guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates the masked regions of the images anew."""


class StableDiffusionXLControlNetPipeline(StableDiffusionXL):
    """Generates images from prompts with Stable Diffusion XL, steered by ControlNets."""

    task = staticmethod(control_text_to_image)
    prepare_latents = diffusers_methods.prepare_latents
    control_image_processor = diffusers_methods.control_image_processor
    extra_components = (CONTROLNET, *IMAGE_PROMPTS)

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, image=None, height=None, width=None,
        num_inference_steps=50, timesteps=None, sigmas=None, denoising_end=None, guidance_scale=5.0,
        negative_prompt=None, negative_prompt_2=None, num_images_per_prompt=1, eta=0.0,
        generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        pooled_prompt_embeds=None, negative_pooled_prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, output_type="pil", return_dict=True,
        cross_attention_kwargs=None, controlnet_conditioning_scale=1.0, guess_mode=False,
        control_guidance_start=0.0, control_guidance_end=1.0, original_size=None,
        crops_coords_top_left=(0, 0), target_size=None, negative_original_size=None,
        negative_crops_coords_top_left=(0, 0), negative_target_size=None, clip_skip=None,
        callback_on_step_end=None, callback_on_step_end_tensor_inputs=TENSORS, *, seed=None,
        noise="jax", long_prompt=False, prompt_weighting=False, guidance_start=0.0,
        guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts, steered by `image`, the input of the ControlNets."""


class StableDiffusionXLControlNetImg2ImgPipeline(StableDiffusionXL):
    """Generates images from images with Stable Diffusion XL, steered by ControlNets."""

    task = staticmethod(control_image_to_image)
    control_image_processor = diffusers_methods.control_image_processor
    extra_components = (CONTROLNET, *IMAGE_PROMPTS)

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, image=None, control_image=None, height=None, width=None,
        strength=0.8, num_inference_steps=50, guidance_scale=5.0, negative_prompt=None,
        negative_prompt_2=None, num_images_per_prompt=1, eta=0.0, generator=None, latents=None,
        prompt_embeds=None, negative_prompt_embeds=None, pooled_prompt_embeds=None,
        negative_pooled_prompt_embeds=None, ip_adapter_image=None, ip_adapter_image_embeds=None,
        output_type="pil", return_dict=True, cross_attention_kwargs=None,
        controlnet_conditioning_scale=0.8, guess_mode=False, control_guidance_start=0.0,
        control_guidance_end=1.0, original_size=None, crops_coords_top_left=(0, 0),
        target_size=None, negative_original_size=None, negative_crops_coords_top_left=(0, 0),
        negative_target_size=None, aesthetic_score=6.0, negative_aesthetic_score=2.5,
        clip_skip=None, callback_on_step_end=None, callback_on_step_end_tensor_inputs=TENSORS, *,
        seed=None, noise="jax", long_prompt=False, prompt_weighting=False, guidance_start=0.0,
        guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images from the given images and the prompts."""


class StableDiffusionXLControlNetInpaintPipeline(StableDiffusionXL):
    """Generates images anew where a mask is white with Stable Diffusion XL."""

    task = staticmethod(control_inpaint)
    control_image_processor = diffusers_methods.control_image_processor
    mask_processor = diffusers_methods.mask_processor
    extra_components = (CONTROLNET, *IMAGE_PROMPTS)

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, image=None, mask_image=None, control_image=None,
        height=None, width=None, padding_mask_crop=None, strength=0.9999, num_inference_steps=50,
        denoising_start=None, denoising_end=None, guidance_scale=5.0, negative_prompt=None,
        negative_prompt_2=None, num_images_per_prompt=1, eta=0.0, generator=None, latents=None,
        prompt_embeds=None, negative_prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, pooled_prompt_embeds=None, negative_pooled_prompt_embeds=None,
        output_type="pil", return_dict=True, cross_attention_kwargs=None,
        controlnet_conditioning_scale=1.0, guess_mode=False, control_guidance_start=0.0,
        control_guidance_end=1.0, guidance_rescale=0.0, original_size=None,
        crops_coords_top_left=(0, 0), target_size=None, aesthetic_score=6.0,
        negative_aesthetic_score=2.5, clip_skip=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, *, seed=None, noise="jax", long_prompt=False,
        prompt_weighting=False, guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Generates the masked regions of the images anew."""
