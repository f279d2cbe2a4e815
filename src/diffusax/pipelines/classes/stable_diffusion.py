"""Stable Diffusion 1.x and 2.x, and consistency models distilled from them.

The calls' arguments, their order and defaults are diffusers'; those after the star are added.
"""

from diffusax.pipelines.classes.bases import StableDiffusion
from diffusax.pipelines.pipeline import diffusers_methods
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.arguments import TENSORS
from diffusax.pipelines.tasks.inpainting import inpaint
from diffusax.pipelines.tasks.tasks import (
    consistency_image_to_image,
    image_to_image,
    instruct,
    text_to_image,
)

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class StableDiffusionPipeline(StableDiffusion):
    """Generates images from prompts."""

    task = staticmethod(text_to_image)
    prepare_latents = diffusers_methods.prepare_latents
    scheduler_options = {"steps_offset": 1, "clip_sample": False}  # noqa: RUF012

    @documented
    def __call__(
        self, prompt=None, height=None, width=None, num_inference_steps=50, timesteps=None,
        sigmas=None, guidance_scale=7.5, negative_prompt=None, num_images_per_prompt=1, eta=0.0,
        generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        ip_adapter_image=None, ip_adapter_image_embeds=None, output_type="pil", return_dict=True,
        cross_attention_kwargs=None, guidance_rescale=0.0, clip_skip=None,
        callback_on_step_end=None, callback_on_step_end_tensor_inputs=TENSORS, *, seed=None,
        noise="jax", long_prompt=False, prompt_weighting=False, guidance_start=0.0,
        guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts."""


class StableDiffusionImg2ImgPipeline(StableDiffusion):
    """Generates images from images and prompts (Meng et al. 2022, SDEdit)."""

    task = staticmethod(image_to_image)
    scheduler_options = {"steps_offset": 1, "clip_sample": False}  # noqa: RUF012

    @documented
    def __call__(
        self, prompt=None, image=None, strength=0.8, num_inference_steps=50, timesteps=None,
        sigmas=None, guidance_scale=7.5, negative_prompt=None, num_images_per_prompt=1, eta=0.0,
        generator=None, prompt_embeds=None, negative_prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, output_type="pil", return_dict=True,
        cross_attention_kwargs=None, clip_skip=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, *, seed=None, noise="jax", long_prompt=False,
        prompt_weighting=False, guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Generates images from the given images and the prompts."""


class StableDiffusionInpaintPipeline(StableDiffusion):
    """Generates images anew where a mask is white."""

    task = staticmethod(inpaint)
    mask_processor = diffusers_methods.mask_processor
    scheduler_options = {"steps_offset": 1, "skip_prk_steps": True}  # noqa: RUF012

    @documented
    def __call__(
        self, prompt=None, image=None, mask_image=None, masked_image_latents=None, height=None,
        width=None, padding_mask_crop=None, strength=1.0, num_inference_steps=50, timesteps=None,
        sigmas=None, guidance_scale=7.5, negative_prompt=None, num_images_per_prompt=1, eta=0.0,
        generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        ip_adapter_image=None, ip_adapter_image_embeds=None, output_type="pil", return_dict=True,
        cross_attention_kwargs=None, clip_skip=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, *, seed=None, noise="jax", long_prompt=False,
        prompt_weighting=False, guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Generates the masked regions of the images anew."""


class StableDiffusionInstructPix2PixPipeline(StableDiffusion):
    """Edits images as an instruction says (Brooks et al. 2023)."""

    task = staticmethod(instruct)
    prepare_latents = diffusers_methods.prepare_latents

    @documented
    def __call__(
        self, prompt=None, image=None, num_inference_steps=100, guidance_scale=7.5,
        image_guidance_scale=1.5, negative_prompt=None, num_images_per_prompt=1, eta=0.0,
        generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        ip_adapter_image=None, ip_adapter_image_embeds=None, output_type="pil", return_dict=True,
        callback_on_step_end=None, callback_on_step_end_tensor_inputs=TENSORS,
        cross_attention_kwargs=None, *, seed=None, noise="jax", long_prompt=False,
        prompt_weighting=False, guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Edits the images as the prompts say."""


class LatentConsistencyModelPipeline(StableDiffusion):
    """Generates images from prompts in a few steps (Luo et al. 2023)."""

    task = staticmethod(text_to_image)
    prepare_latents = diffusers_methods.prepare_latents

    @documented
    def __call__(
        self, prompt=None, height=None, width=None, num_inference_steps=4,
        original_inference_steps=None, timesteps=None, guidance_scale=8.5, num_images_per_prompt=1,
        generator=None, latents=None, prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, output_type="pil", return_dict=True,
        cross_attention_kwargs=None, clip_skip=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, *, seed=None, noise="jax", long_prompt=False,
        prompt_weighting=False, guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Generates images for the prompts."""


class LatentConsistencyModelImg2ImgPipeline(StableDiffusion):
    """Generates images from images in a few steps (Luo et al. 2023)."""

    task = staticmethod(consistency_image_to_image)

    @documented
    def __call__(
        self, prompt=None, image=None, num_inference_steps=4, strength=0.8,
        original_inference_steps=None, timesteps=None, guidance_scale=8.5, num_images_per_prompt=1,
        generator=None, latents=None, prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, output_type="pil", return_dict=True,
        cross_attention_kwargs=None, clip_skip=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, *, seed=None, noise="jax", long_prompt=False,
        prompt_weighting=False, guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Generates images from the given images and the prompts."""
