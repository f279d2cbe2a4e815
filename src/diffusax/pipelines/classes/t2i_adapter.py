"""Generates images steered by others: sketches, depth, colours (Mou et al. 2023, T2I-Adapter).

The calls' arguments, their order and defaults are diffusers'; those after the star are added.
"""

from diffusax.pipelines.classes.bases import StableDiffusion, StableDiffusionXL
from diffusax.pipelines.families.family import IMAGE_PROMPTS, T2I_ADAPTER
from diffusax.pipelines.pipeline import diffusers_methods
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.tasks.steering import adapter_text_to_image

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class StableDiffusionAdapterPipeline(StableDiffusion):
    """Generates images from prompts, steered by T2I-Adapters."""

    task = staticmethod(adapter_text_to_image)
    prepare_latents = diffusers_methods.prepare_latents
    # diffusers has no image encoder here, and so no IP-Adapters.
    extra_components = (T2I_ADAPTER, IMAGE_PROMPTS[1])

    @documented
    def __call__(
        self, prompt=None, image=None, height=None, width=None, num_inference_steps=50,
        timesteps=None, sigmas=None, guidance_scale=7.5, negative_prompt=None,
        num_images_per_prompt=1, eta=0.0, generator=None, latents=None, prompt_embeds=None,
        negative_prompt_embeds=None, output_type="pil", return_dict=True, callback=None,
        callback_steps=1, cross_attention_kwargs=None, adapter_conditioning_scale=1.0,
        clip_skip=None, *, seed=None, noise="jax", long_prompt=False, prompt_weighting=False,
        guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts, steered by `image`, the input of the T2I-Adapters."""


class StableDiffusionXLAdapterPipeline(StableDiffusionXL):
    """Generates images from prompts with Stable Diffusion XL, steered by T2I-Adapters."""

    task = staticmethod(adapter_text_to_image)
    prepare_latents = diffusers_methods.prepare_latents
    extra_components = (T2I_ADAPTER, *IMAGE_PROMPTS)

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, image=None, height=None, width=None,
        num_inference_steps=50, timesteps=None, sigmas=None, denoising_end=None, guidance_scale=5.0,
        negative_prompt=None, negative_prompt_2=None, num_images_per_prompt=1, eta=0.0,
        generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        pooled_prompt_embeds=None, negative_pooled_prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, output_type="pil", return_dict=True, callback=None,
        callback_steps=1, cross_attention_kwargs=None, guidance_rescale=0.0, original_size=None,
        crops_coords_top_left=(0, 0), target_size=None, negative_original_size=None,
        negative_crops_coords_top_left=(0, 0), negative_target_size=None,
        adapter_conditioning_scale=1.0, adapter_conditioning_factor=1.0, clip_skip=None, *,
        seed=None, noise="jax", long_prompt=False, prompt_weighting=False, guidance_start=0.0,
        guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts, steered by `image`, the input of the T2I-Adapters."""
