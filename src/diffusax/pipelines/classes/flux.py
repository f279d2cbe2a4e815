"""FLUX.1.

The calls' arguments, their order and defaults are diffusers'; those after the star are added.
"""

from diffusax.pipelines.classes.bases import Flux
from diffusax.pipelines.families.family import CONTROLNET, IMAGE_PROMPTS
from diffusax.pipelines.pipeline import diffusers_methods
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.arguments import TENSORS
from diffusax.pipelines.tasks.flux import control, fill, kontext
from diffusax.pipelines.tasks.inpainting import inpaint
from diffusax.pipelines.tasks.tasks import image_to_image, text_to_image

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class FluxPipeline(Flux):
    """Generates images from prompts (Black Forest Labs 2024)."""

    task = staticmethod(text_to_image)

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, negative_prompt=None, negative_prompt_2=None,
        true_cfg_scale=1.0, height=None, width=None, num_inference_steps=28, sigmas=None,
        guidance_scale=3.5, num_images_per_prompt=1, generator=None, latents=None,
        prompt_embeds=None, pooled_prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, negative_ip_adapter_image=None,
        negative_ip_adapter_image_embeds=None, negative_prompt_embeds=None,
        negative_pooled_prompt_embeds=None, output_type="pil", return_dict=True,
        joint_attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts. guidance_scale is an input of distilled networks."""


class FluxImg2ImgPipeline(Flux):
    """Generates images from images and prompts."""

    task = staticmethod(image_to_image)

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, negative_prompt=None, negative_prompt_2=None,
        true_cfg_scale=1.0, image=None, height=None, width=None, strength=0.6,
        num_inference_steps=28, sigmas=None, guidance_scale=7.0, num_images_per_prompt=1,
        generator=None, latents=None, prompt_embeds=None, pooled_prompt_embeds=None,
        ip_adapter_image=None, ip_adapter_image_embeds=None, negative_ip_adapter_image=None,
        negative_ip_adapter_image_embeds=None, negative_prompt_embeds=None,
        negative_pooled_prompt_embeds=None, output_type="pil", return_dict=True,
        joint_attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images from the given images. guidance_scale is an input of the network."""


class FluxInpaintPipeline(Flux):
    """Generates images anew where a mask is white, with a network for text to image."""

    task = staticmethod(inpaint)
    mask_processor = diffusers_methods.mask_processor

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, negative_prompt=None, negative_prompt_2=None,
        true_cfg_scale=1.0, image=None, mask_image=None, masked_image_latents=None, height=None,
        width=None, padding_mask_crop=None, strength=0.6, num_inference_steps=28, sigmas=None,
        guidance_scale=7.0, num_images_per_prompt=1, generator=None, latents=None,
        prompt_embeds=None, pooled_prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, negative_ip_adapter_image=None,
        negative_ip_adapter_image_embeds=None, negative_prompt_embeds=None,
        negative_pooled_prompt_embeds=None, output_type="pil", return_dict=True,
        joint_attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates the masked regions anew. guidance_scale is an input of the network."""


class FluxFillPipeline(Flux):
    """Generates images anew where a mask is white, with a network that sees mask and image."""

    task = staticmethod(fill)
    extra_components = ()
    mask_processor = diffusers_methods.mask_processor

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, image=None, mask_image=None, masked_image_latents=None,
        height=None, width=None, strength=1.0, num_inference_steps=50, sigmas=None,
        guidance_scale=30.0, num_images_per_prompt=1, generator=None, latents=None,
        prompt_embeds=None, pooled_prompt_embeds=None, output_type="pil", return_dict=True,
        joint_attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates the masked regions anew. guidance_scale is an input of the network."""


class FluxKontextPipeline(Flux):
    """Generates images from prompts and an image to look at (Labs et al. 2025)."""

    task = staticmethod(kontext)

    @documented
    def __call__(
        self, image=None, prompt=None, prompt_2=None, negative_prompt=None, negative_prompt_2=None,
        true_cfg_scale=1.0, height=None, width=None, num_inference_steps=28, sigmas=None,
        guidance_scale=3.5, num_images_per_prompt=1, generator=None, latents=None,
        prompt_embeds=None, pooled_prompt_embeds=None, ip_adapter_image=None,
        ip_adapter_image_embeds=None, negative_ip_adapter_image=None,
        negative_ip_adapter_image_embeds=None, negative_prompt_embeds=None,
        negative_pooled_prompt_embeds=None, output_type="pil", return_dict=True,
        joint_attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, max_area=1024**2,
        _auto_resize=True, *, seed=None, noise="jax", guidance_start=0.0, guidance_end=1.0,
        adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts, which may say what to change in the given image."""


class FluxControlNetPipeline(Flux):
    """Generates images from prompts, steered by ControlNets (Zhang et al. 2023)."""

    task = staticmethod(control)
    extra_components = (CONTROLNET, *IMAGE_PROMPTS)

    @documented
    def __call__(
        self, prompt=None, prompt_2=None, negative_prompt=None, negative_prompt_2=None,
        true_cfg_scale=1.0, height=None, width=None, num_inference_steps=28, sigmas=None,
        guidance_scale=7.0, control_guidance_start=0.0, control_guidance_end=1.0,
        control_image=None, control_mode=None, controlnet_conditioning_scale=1.0,
        num_images_per_prompt=1, generator=None, latents=None, prompt_embeds=None,
        pooled_prompt_embeds=None, ip_adapter_image=None, ip_adapter_image_embeds=None,
        negative_ip_adapter_image=None, negative_ip_adapter_image_embeds=None,
        negative_prompt_embeds=None, negative_pooled_prompt_embeds=None, output_type="pil",
        return_dict=True, joint_attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts, steered by the control images."""
