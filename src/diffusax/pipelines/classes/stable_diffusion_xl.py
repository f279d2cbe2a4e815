"""Stable Diffusion XL, base and refiner.

The calls' arguments, their order and defaults are diffusers'; those after the star are added.
"""

from diffusax.pipelines.classes.bases import StableDiffusionXL
from diffusax.pipelines.pipeline import diffusers_methods
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.arguments import TENSORS
from diffusax.pipelines.tasks.inpainting import inpaint
from diffusax.pipelines.tasks.tasks import image_to_image, instruct, text_to_image

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class StableDiffusionXLPipeline(StableDiffusionXL):
    """Generates images from prompts (Podell et al. 2023)."""

    task = staticmethod(text_to_image)
    prepare_latents = diffusers_methods.prepare_latents

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, height=None, width=None, num_inference_steps=50,
        timesteps=None, sigmas=None, denoising_end=None, guidance_scale=5.0, negative_prompt=None,
        negative_prompt_2=None, num_images_per_prompt=1, eta=0.0, generator=None, latents=None,
        prompt_embeds=None, negative_prompt_embeds=None, pooled_prompt_embeds=None,
        negative_pooled_prompt_embeds=None, ip_adapter_image=None, ip_adapter_image_embeds=None,
        output_type="pil", return_dict=True, cross_attention_kwargs=None, guidance_rescale=0.0,
        original_size=None, crops_coords_top_left=(0, 0), target_size=None,
        negative_original_size=None, negative_crops_coords_top_left=(0, 0),
        negative_target_size=None, clip_skip=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, *, seed=None, noise="jax", long_prompt=False,
        prompt_weighting=False, guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Generates images for the prompts."""


class StableDiffusionXLImg2ImgPipeline(StableDiffusionXL):
    """Generates images from images and prompts, or refines latents."""

    task = staticmethod(image_to_image)

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, image=None, strength=0.3, num_inference_steps=50,
        timesteps=None, sigmas=None, denoising_start=None, denoising_end=None, guidance_scale=5.0,
        negative_prompt=None, negative_prompt_2=None, num_images_per_prompt=1, eta=0.0,
        generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        pooled_prompt_embeds=None, negative_pooled_prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, output_type="pil", return_dict=True,
        cross_attention_kwargs=None, guidance_rescale=0.0, original_size=None,
        crops_coords_top_left=(0, 0), target_size=None, negative_original_size=None,
        negative_crops_coords_top_left=(0, 0), negative_target_size=None, aesthetic_score=6.0,
        negative_aesthetic_score=2.5, clip_skip=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, *, seed=None, noise="jax", long_prompt=False,
        prompt_weighting=False, guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Generates images from the given images or latents and the prompts."""


class StableDiffusionXLInpaintPipeline(StableDiffusionXL):
    """Generates images anew where a mask is white."""

    task = staticmethod(inpaint)
    mask_processor = diffusers_methods.mask_processor

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, image=None, mask_image=None, masked_image_latents=None,
        height=None, width=None, padding_mask_crop=None, strength=0.9999, num_inference_steps=50,
        timesteps=None, sigmas=None, denoising_start=None, denoising_end=None, guidance_scale=7.5,
        negative_prompt=None, negative_prompt_2=None, num_images_per_prompt=1, eta=0.0,
        generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        pooled_prompt_embeds=None, negative_pooled_prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, output_type="pil", return_dict=True,
        cross_attention_kwargs=None, guidance_rescale=0.0, original_size=None,
        crops_coords_top_left=(0, 0), target_size=None, negative_original_size=None,
        negative_crops_coords_top_left=(0, 0), negative_target_size=None, aesthetic_score=6.0,
        negative_aesthetic_score=2.5, clip_skip=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, *, seed=None, noise="jax", long_prompt=False,
        prompt_weighting=False, guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Generates the masked regions of the images anew."""


class StableDiffusionXLInstructPix2PixPipeline(StableDiffusionXL):
    """Edits images as an instruction says (Brooks et al. 2023)."""

    task = staticmethod(instruct)
    extra_components = ()

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, image=None, height=None, width=None,
        num_inference_steps=100, denoising_end=None, guidance_scale=5.0, image_guidance_scale=1.5,
        negative_prompt=None, negative_prompt_2=None, num_images_per_prompt=1, eta=0.0,
        generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        pooled_prompt_embeds=None, negative_pooled_prompt_embeds=None, output_type="pil",
        return_dict=True, callback=None, callback_steps=1, cross_attention_kwargs=None,
        guidance_rescale=0.0, original_size=None, crops_coords_top_left=(0, 0), target_size=None, *,
        seed=None, noise="jax", long_prompt=False, prompt_weighting=False, guidance_start=0.0,
        guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Edits the images as the prompts say."""
