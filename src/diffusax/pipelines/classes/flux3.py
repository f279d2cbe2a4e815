"""FLUX.3 klein.

The arguments of the calls and their defaults are those of diffusers' modular pipeline, in the order
of FLUX.2 klein's; those after the star are added.
"""

from diffusax.pipelines.classes.bases import Flux3Klein
from diffusax.pipelines.pipeline import diffusers_methods
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.arguments import TENSORS
from diffusax.pipelines.tasks.inpainting import inpaint
from diffusax.pipelines.tasks.tasks import image_to_image, text_to_image

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class Flux3KleinPipeline(Flux3Klein):
    """Generates images from prompts, and from images to look at (FLUX.3 klein, BFL 2026).

    The model was trained on long captions. diffusers' modular pipeline has another language model
    rewrite prompts to such captions first, which is left out here: write prompts of several
    sentences, or have them rewritten before, because images for short prompts look poor.
    """

    task = staticmethod(text_to_image)
    more_tasks = (image_to_image,)

    @documented
    def __call__(
        self, image=None, prompt=None, negative_prompt=None, height=None, width=None,
        num_inference_steps=50, timesteps=None, sigmas=None, guidance_scale=3.5,
        num_images_per_prompt=1, generator=None, latents=None, prompt_embeds=None,
        negative_prompt_embeds=None, output_type="pil", return_dict=True, attention_kwargs=None,
        callback_on_step_end=None, callback_on_step_end_tensor_inputs=TENSORS,
        max_sequence_length=8192, text_encoder_out_layers=(4, 8, 12, 16, 20, 24, 28, 32), *,
        seed=None, noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None,
        hooks=None,
    ):
        """Generates images for the prompts, which may speak of the given images.

        All images are looked at for each prompt. Only one is kept whole, up to four megapixels, and
        the results have its size; of several, up to one megapixel each, the borders are cut off,
        and the results have the size of the first. A distilled checkpoint makes 16 steps by
        default, and ignores negative_prompt and guidance_scale.
        """


class Flux3KleinInpaintPipeline(Flux3Klein):
    """Generates images anew where a mask is white, and looks at these and at further images.

    diffusers has no such pipeline of FLUX.3; it does what FLUX.2 klein's does.
    """

    task = staticmethod(inpaint)
    mask_processor = diffusers_methods.mask_processor

    @documented
    def __call__(
        self, prompt=None, image=None, image_reference=None, mask_image=None, negative_prompt=None,
        height=None, width=None, padding_mask_crop=None, strength=0.8, num_inference_steps=50,
        sigmas=None, guidance_scale=3.5, num_images_per_prompt=1, generator=None, latents=None,
        prompt_embeds=None, negative_prompt_embeds=None, output_type="pil", return_dict=True,
        attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=8192,
        text_encoder_out_layers=(4, 8, 12, 16, 20, 24, 28, 32), *, seed=None, noise="jax",
        guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates the masked regions anew, in the size of the given image.

        height and width have no effect, as in FLUX.2 klein's pipeline. A distilled checkpoint makes
        16 steps by default, and ignores negative_prompt and guidance_scale.
        """
