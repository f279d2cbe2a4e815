"""Draws the images that show what a denoiser in training can do."""

from PIL import Image

from diffusax.pipelines.components.adapters import resolve_adapters
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.run.images import output
from diffusax.pipelines.run.sample import at_once, bind, sample
from diffusax.pipelines.tasks.tasks import Task


def draw_images(c: Components, task: Task, call: Call) -> list[Image.Image]:
    """Returns the images of a call, in one dispatch.

    Raises:
        ValueError: the call cannot be.
    """
    c, call = resolve_adapters(c, call)
    run = task(c, call)
    latents = sample(bind(c, run.adapters), run.plan, at_once(len(run.schedule)))
    images: list[Image.Image] = output(c, latents, run.decoding, run.decoder_condition, "pil")
    return images
