"""Qwen-Image 2.1.

The call's arguments, their order and defaults are diffusers'; those after the star are added.
"""

from diffusax.pipelines.classes.bases import QwenImage21
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.arguments import TENSORS
from diffusax.pipelines.tasks.tasks import image_to_image, text_to_image

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class QwenImage21Pipeline(QwenImage21):
    """Generates images with an opacity from prompts, and from images to look at (Qwen-Image 2.1,
    Qwen 2026).
    """

    task = staticmethod(text_to_image)
    more_tasks = (image_to_image,)

    @documented
    def __call__(
        self, prompt=None, image=None, negative_prompt=None, true_cfg_scale=1.0, height=None,
        width=None, num_inference_steps=40, sigmas=None, num_images_per_prompt=1, generator=None,
        latents=None, prompt_embeds=None, prompt_embeds_mask=None, negative_prompt_embeds=None,
        negative_prompt_embeds_mask=None, output_type="pil", return_dict=True,
        attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, output_resolution=1024, use_kv_cache=True, *,
        seed=None, noise="jax",
        guidance_scale=None, guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Generates images for the prompts, of which each has its own length.

        It is meant to be used without guidance; a true_cfg_scale above 1 needs negative_prompt.
        guidance_scale is another name of it, which other families have.
        image is an image to edit or to look at, or a list of them: all are read with each prompt,
        in the area of output_resolution times output_resolution pixels. The result has the shape
        of the last, unless height and width are given. use_kv_cache changes nothing: what does not
        change from step to step is always computed once.
        A checkpoint with sample_sigmas, such as Turbo, ignores num_inference_steps.
        """
