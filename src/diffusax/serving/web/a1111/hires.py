"""Hires fix: the second pass of txt2img over the first pass's images, made larger."""

import dataclasses
from collections.abc import Sequence

from PIL import Image

from diffusax.infotext.samplers import to_webui
from diffusax.samplers import scheduler_from_name
from diffusax.serving.catalogue.entries import ModelEntry
from diffusax.serving.engine.upscaling import Upscalers
from diffusax.serving.requests.generation import Generation
from diffusax.serving.web.a1111.fields import TextToImage
from diffusax.serving.web.a1111.reading import from_webui, own_sampler, read_prompt, with_noise
from diffusax.text.prompt_schedules import with_whole_steps

LATENT_MODES = {
    "Latent": "Bilinear",
    "Latent (antialiased)": "Bilinear",
    "Latent (bicubic)": "Bicubic",
    "Latent (bicubic antialiased)": "Bicubic",
    "Latent (nearest)": "Nearest",
    "Latent (nearest-exact)": "Nearest",
}
"""The filters of hires fix that A1111 has for latents, and those for images that stand for them."""
_NONE = {"None": "Lanczos"}
"""The filter that A1111 resizes with where there is no upscaler."""


@dataclasses.dataclass(frozen=True)
class Enlargement:
    """How the first pass's images are made larger, in pixels."""

    width: int
    """The size to which they are resized."""
    height: int
    left: int
    """What is cut away at the left and at the top."""
    top: int
    final_width: int
    """The size that is left for the second pass."""
    final_height: int

    def apply(self, image: Image.Image, upscalers: Upscalers, name: str) -> Image.Image:
        """Returns a larger image, by the upscaler of a name."""
        image = upscalers.resize(name, image, (self.width, self.height), "hr_scale")
        right, bottom = self.left + self.final_width, self.top + self.final_height
        return image.crop((self.left, self.top, right, bottom))


def enlargement(fields: TextToImage, width: int, height: int, multiple: int) -> Enlargement:
    """Returns how images of the first pass are made larger.

    With one side given the proportions stay; with both, the images fill them and are cropped in the
    middle (stable-diffusion-webui, modules/processing.py, calculate_target_resolution).

    Args:
        fields: the call.
        width: of the first pass.
        height: of the first pass.
        multiple: the sides are multiples of so many pixels.
    """
    to_x, to_y = fields.hr_resize_x, fields.hr_resize_y
    cut = to_x and to_y
    if not to_x and not to_y:
        x, y = int(width * fields.hr_scale), int(height * fields.hr_scale)
    elif not to_y or (cut and width / height < to_x / to_y):
        x, y = to_x, to_x * height // width
    else:
        x, y = to_y * width // height, to_y
    sides = [max(side // multiple, 1) for side in (x, y)]
    # What is cut is counted in latents, of which the end loses one more.
    more = [max(x - to_x, 0) // multiple, max(y - to_y, 0) // multiple] if cut else [0, 0]
    left = [max(side - lost, 1) for side, lost in zip(sides, more)]
    whole = [side * multiple for side in sides]
    begin = [lost // 2 * multiple for lost in more]
    return Enlargement(*whole, *begin, *(side * multiple for side in left))


def second_pass(
    fields: TextToImage,
    first: Generation,
    images: Sequence[tuple[Generation, Image.Image]],
    entry: ModelEntry,
    upscalers: Upscalers,
) -> list[Generation]:
    """Returns what the second pass generates, one `Generation` for each image.

    Args:
        fields: the call.
        first: the first pass.
        images: the first pass's images, each with what generates it by itself.
        entry: the second pass's model.
        upscalers: those of the server.

    Raises:
        Refused: its upscaler or its sampler is not there.
    """
    upscaler = upscalers.find(upscaler_of(fields), "hr_upscaler")
    larger = enlargement(fields, first.width or 8, first.height or 8, entry.multiple)
    sampler, eta = _sampler(fields, first, entry)
    steps = fields.hr_second_pass_steps or first.num_inference_steps or 1
    # Changes of prompts count on from the first pass's steps.
    before = (first.num_inference_steps or 1) * _order(first.sampler)
    prompt, negative = (
        with_whole_steps(text, steps * _order(sampler), before)
        for text in prompts_of_second_pass(fields, first)
    )
    again = dataclasses.replace(
        first,
        prompt=prompt,
        negative_prompt=negative,
        model=entry.name,
        strength=fields.denoising_strength,
        strength_rule="exact",
        width=larger.final_width,
        height=larger.final_height,
        num_inference_steps=steps,
        sampler=sampler,
        eta=eta,
        guidance_scale=first.guidance_scale if fields.hr_cfg is None else fields.hr_cfg,
        num_images=1,
        controls=tuple(
            dataclasses.replace(control, image=larger.apply(control.image, upscalers, "Lanczos"))
            for control in first.controls
        ),
    )
    return [
        dataclasses.replace(
            again,
            image=larger.apply(image, upscalers, upscaler),
            seed=single.seed,
            variation_seed=single.variation_seed,
        )
        for single, image in images
    ]


def prompts_of_second_pass(fields: TextToImage, first: Generation) -> tuple[str, str]:
    """Returns the prompt and the negative prompt; those left out are the first pass's."""
    prompt = read_prompt(fields, fields.hr_prompt)
    return prompt or first.prompt, fields.hr_negative_prompt or first.negative_prompt


def upscaler_of(fields: TextToImage) -> str:
    """Returns the name of the upscaler that a call's stands for here."""
    name = fields.hr_upscaler or "Latent"
    return {**LATENT_MODES, **_NONE}.get(name, name)


def settings_of_second_pass(
    fields: TextToImage, first: Generation, second: Generation
) -> dict[str, str | int | None]:
    """Returns the settings of the second pass for an image's text, by A1111's names."""
    sampler, schedule = to_webui(second.sampler or "")
    own = to_webui(first.sampler or "")
    resized = fields.hr_resize_x or fields.hr_resize_y
    prompt, negative = prompts_of_second_pass(fields, first)
    return {
        "Denoising strength": f"{fields.denoising_strength:g}",
        "Hires upscale": None if resized else f"{fields.hr_scale:g}",
        "Hires resize": f"{fields.hr_resize_x}x{fields.hr_resize_y}" if resized else None,
        "Hires steps": fields.hr_second_pass_steps or None,
        "Hires upscaler": fields.hr_upscaler or "Latent",
        "Hires checkpoint": None if second.model == first.model else second.model,
        "Hires sampler": None if sampler == own[0] else sampler,
        "Hires schedule type": None if schedule == own[1] else schedule,
        "Hires prompt": None if prompt == first.prompt else prompt,
        "Hires negative prompt": None if negative == first.negative_prompt else negative,
        "Hires CFG Scale": None if fields.hr_cfg is None else f"{fields.hr_cfg:g}",
    }


def _order(sampler: str | None) -> int:
    """Returns how often a step of a sampler evaluates the network."""
    return scheduler_from_name(sampler).order if sampler else 1


def _sampler(fields: TextToImage, first: Generation, entry: ModelEntry) -> tuple[str | None, float]:
    """Returns the second pass's sampler and its eta."""
    if fields.hr_sampler_name is None and fields.hr_scheduler is None:
        same = first.model == entry.name
        return (first.sampler, first.eta) if same else with_noise(fields, entry.sampler)
    own = fields.sampler_name or fields.sampler_index or to_webui(first.sampler or "")[0]
    name = fields.hr_sampler_name or own
    sampler = from_webui(name, fields.hr_scheduler or fields.scheduler, entry)
    return with_noise(fields, own_sampler(sampler, entry))
