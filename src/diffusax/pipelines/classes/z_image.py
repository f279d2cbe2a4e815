"""Z-Image and Z-Image-Turbo.

The calls' arguments, their order and defaults are diffusers'; those after the star are added.
"""

from diffusax.pipelines.classes.bases import LooksAtImages, ZImage
from diffusax.pipelines.pipeline import diffusers_methods
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.arguments import TENSORS
from diffusax.pipelines.tasks.inpainting import inpaint
from diffusax.pipelines.tasks.tasks import edit, image_to_image, text_to_image

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class ZImagePipeline(ZImage):
    """Generates images from prompts (Z-Image Team 2025)."""

    task = staticmethod(text_to_image)

    @documented
    def __call__(
        self, prompt=None, height=None, width=None, num_inference_steps=50, sigmas=None,
        guidance_scale=5.0, cfg_normalization=False, cfg_truncation=1.0, negative_prompt=None,
        num_images_per_prompt=1, generator=None, latents=None, prompt_embeds=None,
        negative_prompt_embeds=None, output_type="pil", return_dict=True,
        joint_attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts. A guidance_scale of 0 means no guidance."""


class ZImageEditPipeline(LooksAtImages, ZImage):
    """Generates images from prompts and images to look at, by networks that have learned it.

    diffusers has no such pipeline: the arguments are those of `ZImagePipeline`, and image. What it
    saves is opened by diffusers as a ZImagePipeline.
    """

    task = staticmethod(edit)
    diffusers_name = "ZImagePipeline"

    @documented
    def __call__(
        self, prompt=None, image=None, height=None, width=None, num_inference_steps=50,
        sigmas=None, guidance_scale=5.0, cfg_normalization=False, cfg_truncation=1.0,
        negative_prompt=None, num_images_per_prompt=1, generator=None, latents=None,
        prompt_embeds=None, negative_prompt_embeds=None, output_type="pil", return_dict=True,
        joint_attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts, which may speak of the given images.

        image is an image to edit or to look at, or a list of them: all are looked at for each
        prompt, also where the negative prompt is read. Height and width are by default the first
        one's. A guidance_scale of 0 means no guidance.
        """


class ZImageImg2ImgPipeline(ZImage):
    """Generates images from images and prompts."""

    task = staticmethod(image_to_image)

    @documented
    def __call__(
        self, prompt=None, image=None, strength=0.6, height=None, width=None,
        num_inference_steps=50, sigmas=None, guidance_scale=5.0, cfg_normalization=False,
        cfg_truncation=1.0, negative_prompt=None, num_images_per_prompt=1, generator=None,
        latents=None, prompt_embeds=None, negative_prompt_embeds=None, output_type="pil",
        return_dict=True, joint_attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images from the given images. A guidance_scale of 0 means no guidance."""


class ZImageInpaintPipeline(ZImage):
    """Generates images anew where a mask is white."""

    task = staticmethod(inpaint)
    mask_processor = diffusers_methods.mask_processor

    @documented
    def __call__(
        self, prompt=None, image=None, mask_image=None, masked_image_latents=None, strength=1.0,
        height=None, width=None, num_inference_steps=50, sigmas=None, guidance_scale=5.0,
        cfg_normalization=False, cfg_truncation=1.0, negative_prompt=None, num_images_per_prompt=1,
        generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        output_type="pil", return_dict=True, joint_attention_kwargs=None,
        callback_on_step_end=None, callback_on_step_end_tensor_inputs=TENSORS,
        max_sequence_length=512, *, seed=None, noise="jax", guidance_start=0.0, guidance_end=1.0,
        adapters=None, guide=None, hooks=None,
    ):
        """Generates the masked regions anew. A guidance_scale of 0 means no guidance."""
