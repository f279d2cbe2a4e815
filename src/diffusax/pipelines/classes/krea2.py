"""Krea 2.

The call's arguments, their order and defaults are diffusers'; those after the star are added.
"""

from diffusax.pipelines.classes.bases import Krea2, LooksAtImages
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.arguments import TENSORS
from diffusax.pipelines.tasks.tasks import edit, text_to_image

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class Krea2Pipeline(Krea2):
    """Generates images from prompts (Krea 2, Krea AI 2026)."""

    task = staticmethod(text_to_image)

    @documented
    def __call__(
        self, prompt=None, negative_prompt=None, height=1024, width=1024, num_inference_steps=28,
        sigmas=None, guidance_scale=4.5, num_images_per_prompt=1, generator=None, latents=None,
        prompt_embeds=None, prompt_embeds_mask=None, negative_prompt_embeds=None,
        negative_prompt_embeds_mask=None, output_type="pil", return_dict=True,
        callback_on_step_end=None, callback_on_step_end_tensor_inputs=TENSORS,
        attention_kwargs=None, max_sequence_length=512, *, seed=None, noise="jax",
        guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts. A guidance_scale of 0 means no guidance.

        The distilled checkpoint (Turbo) is for num_inference_steps=8 and guidance_scale=0.
        """


class Krea2EditPipeline(LooksAtImages, Krea2):
    """Generates images from prompts and images to look at, by networks that have learned it.

    diffusers has no such pipeline: the arguments are those of `Krea2Pipeline`, and image. What it
    saves is opened by diffusers as a Krea2Pipeline.
    """

    task = staticmethod(edit)
    diffusers_name = "Krea2Pipeline"

    @documented
    def __call__(
        self, prompt=None, image=None, negative_prompt=None, height=None, width=None,
        num_inference_steps=28, sigmas=None, guidance_scale=4.5, num_images_per_prompt=1,
        generator=None, latents=None, prompt_embeds=None, prompt_embeds_mask=None,
        negative_prompt_embeds=None, negative_prompt_embeds_mask=None, output_type="pil",
        return_dict=True, callback_on_step_end=None, callback_on_step_end_tensor_inputs=TENSORS,
        attention_kwargs=None, max_sequence_length=512, *, seed=None, noise="jax",
        guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates images for the prompts, which may speak of the given images.

        image is an image to edit or to look at, or a list of them: all are looked at for each
        prompt, also where the negative prompt is read. Height and width are by default the first
        one's. A guidance_scale of 0 means no guidance.
        """
