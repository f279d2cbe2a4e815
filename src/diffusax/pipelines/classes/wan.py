"""Wan.

The calls' arguments, their order and defaults are diffusers'; those after the star are added.
"""

from diffusax.pipelines.classes.bases import Wan
from diffusax.pipelines.families import WAN_IMAGE_TO_VIDEO
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.plan.arguments import TENSORS
from diffusax.pipelines.tasks.tasks import text_to_image
from diffusax.pipelines.tasks.videos import control_video, image_to_video, video_to_video

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the videos.
# fmt: off


class WanPipeline(Wan):
    """Generates videos from prompts (Wan 2.1 and 2.2, Team Wan 2025)."""

    task = staticmethod(text_to_image)

    @documented
    def __call__(
        self, prompt=None, negative_prompt=None, height=480, width=832, num_frames=81,
        num_inference_steps=50, guidance_scale=5.0, guidance_scale_2=None, num_videos_per_prompt=1,
        generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        output_type="np", return_dict=True, attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates videos for the prompts; the result has `frames`."""


class WanImageToVideoPipeline(Wan):
    """Generates videos that begin with an image (Wan 2.1 and 2.2, Team Wan 2025)."""

    family = WAN_IMAGE_TO_VIDEO
    task = staticmethod(image_to_video)

    @documented
    def __call__(
        self, image, prompt=None, negative_prompt=None, height=480, width=832, num_frames=81,
        num_inference_steps=50, guidance_scale=5.0, guidance_scale_2=None, num_videos_per_prompt=1,
        generator=None, latents=None, prompt_embeds=None, negative_prompt_embeds=None,
        image_embeds=None, last_image=None, output_type="np", return_dict=True,
        attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates videos from the image and the prompts; the result has `frames`.

        The image is also needed beside its `image_embeds`.
        """


class WanVACEPipeline(Wan):
    """Generates videos that a video, a mask and images control (VACE, Jiang et al. 2025)."""

    task = staticmethod(control_video)

    @documented
    def __call__(
        self, prompt=None, negative_prompt=None, video=None, mask=None, reference_images=None,
        conditioning_scale=1.0, height=480, width=832, num_frames=81, num_inference_steps=50,
        guidance_scale=5.0, guidance_scale_2=None, num_videos_per_prompt=1, generator=None,
        latents=None, prompt_embeds=None, negative_prompt_embeds=None, output_type="np",
        return_dict=True, attention_kwargs=None, callback_on_step_end=None,
        callback_on_step_end_tensor_inputs=TENSORS, max_sequence_length=512, *, seed=None,
        noise="jax", guidance_start=0.0, guidance_end=1.0, adapters=None, guide=None, hooks=None,
    ):
        """Generates videos; the result has `frames`.

        The video is stretched to height and width, and tells the number of frames where num_frames
        is left out.
        """


class WanVideoToVideoPipeline(Wan):
    """Generates videos from videos and prompts (Wan 2.1, Team Wan 2025)."""

    task = staticmethod(video_to_video)

    @documented
    def __call__(
        self, video=None, prompt=None, negative_prompt=None, height=480, width=832,
        num_inference_steps=50, timesteps=None, guidance_scale=5.0, strength=0.8,
        num_videos_per_prompt=1, generator=None, latents=None, prompt_embeds=None,
        negative_prompt_embeds=None, output_type="np", return_dict=True, attention_kwargs=None,
        callback_on_step_end=None, callback_on_step_end_tensor_inputs=TENSORS,
        max_sequence_length=512, *, seed=None, noise="jax", guidance_start=0.0, guidance_end=1.0,
        adapters=None, guide=None, hooks=None,
    ):
        """Generates videos from the given video; the result has `frames`.

        diffusers makes one video for each prompt whatever num_videos_per_prompt says.
        """
