"""FLUX.2 klein.

The call's arguments, their order and defaults are diffusers'; those after the star are added.
"""

from diffusax.pipelines.classes.bases import Flux2Klein
from diffusax.pipelines.families import FLUX2_KLEIN_KV
from diffusax.pipelines.pipeline import diffusers_methods
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.arguments import TENSORS
from diffusax.pipelines.tasks.inpainting import inpaint
from diffusax.pipelines.tasks.tasks import image_to_image, text_to_image

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class Flux2KleinPipeline(Flux2Klein):
    """Generates images from prompts, and from images to look at (FLUX.2 klein, BFL 2026)."""

    task = staticmethod(text_to_image)
    more_tasks = (image_to_image,)

    @documented
    def __call__(
        self, image=None, prompt=None, height=None, width=None, num_inference_steps=50,
        sigmas=None, guidance_scale=4.0, num_images_per_prompt=1, generator=None, latents=None,
        prompt_embeds=None, negative_prompt_embeds=None, output_type="pil", return_dict=True,
        attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512,
        text_encoder_out_layers=(9, 18, 27), *, seed=None, noise="jax", guidance_start=0.0,
        guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts, which may speak of the given images.

        All images are looked at for each prompt; height and width are by default the first one's.
        A distilled checkpoint ignores guidance_scale.
        """


class Flux2KleinInpaintPipeline(Flux2Klein):
    """Generates images anew where a mask is white, and looks at these and at further images."""

    task = staticmethod(inpaint)
    mask_processor = diffusers_methods.mask_processor

    @documented
    def __call__(
        self, prompt=None, image=None, image_reference=None, mask_image=None, height=None,
        width=None, padding_mask_crop=None, strength=0.8, num_inference_steps=50, sigmas=None,
        guidance_scale=8.0, num_images_per_prompt=1, generator=None, latents=None,
        prompt_embeds=None, negative_prompt_embeds=None, output_type="pil", return_dict=True,
        attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512,
        text_encoder_out_layers=(9, 18, 27), *, seed=None, noise="jax", guidance_start=0.0,
        guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates the masked regions anew, in the size of the given image.

        height and width have no effect, as in diffusers. A distilled checkpoint ignores
        guidance_scale.
        """


class Flux2KleinKVPipeline(Flux2Klein):
    """Generates images from prompts and images to look at, which are computed once (FLUX.2 klein
    KV, BFL 2026).

    The checkpoint was trained with images that see themselves alone, at time zero.
    """

    family = FLUX2_KLEIN_KV
    task = staticmethod(text_to_image)
    more_tasks = (image_to_image,)

    @documented
    def __call__(
        self, image=None, prompt=None, height=None, width=None, num_inference_steps=4, sigmas=None,
        num_images_per_prompt=1, generator=None, latents=None, prompt_embeds=None,
        output_type="pil", return_dict=True, attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512,
        text_encoder_out_layers=(9, 18, 27), *, seed=None, noise="jax", guidance_start=0.0,
        guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts, which may speak of the given images.

        All images are looked at for each prompt; height and width are by default the first one's.
        """
