"""Qwen-Image.

The calls' arguments, their order and defaults are diffusers'; those after the star are added.
"""

from diffusax.pipelines.classes.bases import QwenImage, QwenImageEdit
from diffusax.pipelines.families import QWEN_IMAGE_EDIT_PLUS
from diffusax.pipelines.pipeline import diffusers_methods
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.arguments import TENSORS
from diffusax.pipelines.tasks.inpainting import inpaint
from diffusax.pipelines.tasks.tasks import image_to_image, text_to_image

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class QwenImagePipeline(QwenImage):
    """Generates images from prompts (Qwen-Image, Qwen 2025)."""

    task = staticmethod(text_to_image)

    @documented
    def __call__(
        self, prompt=None, negative_prompt=None, true_cfg_scale=4.0, height=None, width=None,
        num_inference_steps=50, sigmas=None, guidance_scale=None, num_images_per_prompt=1,
        generator=None, latents=None, prompt_embeds=None, prompt_embeds_mask=None,
        negative_prompt_embeds=None, negative_prompt_embeds_mask=None, output_type="pil",
        return_dict=True, attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts. Guidance needs negative_prompt, which may be " ".

        guidance_scale is another name of true_cfg_scale, where that is not given; it takes a
        missing negative_prompt for an empty one. diffusers ignores it, as no checkpoint is told it.
        """


class QwenImageImg2ImgPipeline(QwenImage):
    """Generates images from images and prompts."""

    task = staticmethod(image_to_image)

    @documented
    def __call__(
        self, prompt=None, negative_prompt=None, true_cfg_scale=4.0, image=None, height=None,
        width=None, strength=0.6, num_inference_steps=50, sigmas=None, guidance_scale=None,
        num_images_per_prompt=1, generator=None, latents=None, prompt_embeds=None,
        prompt_embeds_mask=None, negative_prompt_embeds=None, negative_prompt_embeds_mask=None,
        output_type="pil", return_dict=True, attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images from the given images. Guidance needs negative_prompt."""


class QwenImageInpaintPipeline(QwenImage):
    """Generates images anew where a mask is white."""

    task = staticmethod(inpaint)
    mask_processor = diffusers_methods.mask_processor

    @documented
    def __call__(
        self, prompt=None, negative_prompt=None, true_cfg_scale=4.0, image=None, mask_image=None,
        masked_image_latents=None, height=None, width=None, padding_mask_crop=None, strength=0.6,
        num_inference_steps=50, sigmas=None, guidance_scale=None, num_images_per_prompt=1,
        generator=None, latents=None, prompt_embeds=None, prompt_embeds_mask=None,
        negative_prompt_embeds=None, negative_prompt_embeds_mask=None, output_type="pil",
        return_dict=True, attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates the masked regions anew. Guidance needs negative_prompt."""


class QwenImageEditPipeline(QwenImageEdit):
    """Generates images from an image and a prompt that says what to change (Qwen-Image-Edit)."""

    task = staticmethod(text_to_image)
    more_tasks = (image_to_image,)

    @documented
    def __call__(
        self, image=None, prompt=None, negative_prompt=None, true_cfg_scale=4.0, height=None,
        width=None, num_inference_steps=50, sigmas=None, guidance_scale=None,
        num_images_per_prompt=1, generator=None, latents=None, prompt_embeds=None,
        prompt_embeds_mask=None, negative_prompt_embeds=None, negative_prompt_embeds_mask=None,
        output_type="pil", return_dict=True, attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images of about a megapixel in the shape of the given image, for all prompts.

        Guidance needs negative_prompt. The given image is brought to a megapixel first.
        max_sequence_length has no effect, as in diffusers.
        """


class QwenImageEditPlusPipeline(QwenImageEdit):
    """Generates images from images and a prompt that speaks of them (Qwen-Image-Edit-2509, -2511).

    The language model is given the parts of images at the positions that it was trained with, and
    by diffusers 0.42 with transformers 5 at those of a text; pixels differ by about 0.015.
    """

    family = QWEN_IMAGE_EDIT_PLUS
    task = staticmethod(text_to_image)
    more_tasks = (image_to_image,)

    @documented
    def __call__(
        self, image=None, prompt=None, negative_prompt=None, true_cfg_scale=4.0, height=None,
        width=None, num_inference_steps=50, sigmas=None, guidance_scale=None,
        num_images_per_prompt=1, generator=None, latents=None, prompt_embeds=None,
        prompt_embeds_mask=None, negative_prompt_embeds=None, negative_prompt_embeds_mask=None,
        output_type="pil", return_dict=True, attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images of about a megapixel in the shape of the last given image.

        A prompt may call the images "Picture 1", "Picture 2" and so on; all are looked at for each
        prompt. Guidance needs negative_prompt. max_sequence_length has no effect, as in diffusers.
        """
