"""Turns A1111's calls into `Generation`s, and refuses what its server has and this one lacks."""

import dataclasses
import re
import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

from PIL import Image, ImageFilter, ImageOps

from diffusax.images.conversion import resize
from diffusax.images.masks import mask_of
from diffusax.infotext import samplers
from diffusax.serving.catalogue.entries import ModelEntry
from diffusax.serving.catalogue.styles import Style, with_styles
from diffusax.serving.requests.errors import NotFound, Refused
from diffusax.serving.requests.generation import SEEDS, Generation, check_seed
from diffusax.serving.web.a1111.fields import ImageToImage, Shared, TextToImage
from diffusax.serving.web.a1111.scripts import fit, read_controls, script_warnings
from diffusax.serving.web.a1111.state import Options
from diffusax.serving.web.bodies import as_rgb, image_from_base64
from diffusax.serving.web.security import WebSettings, check_most
from diffusax.text.extra_networks import read_tags

AnyCall = TypeVar("AnyCall", bound=Shared)
_COMMENTS = re.compile(r"(?:(?:^|\n)#[^\n]*|#[^\n]*)(?:\n|$)")
"""Comments in prompts (stable-diffusion-webui, modules/processing_scripts/comments.py)."""
_RESIZE_MODES = ("default", "crop", "fill", "default")
"""How each of A1111's resize modes fits an image: just resize, crop, fill; and just resize for
the last, which resizes latents there."""
_FILLS = {2: "noise", 3: "nothing"}
"""What latents begin with under the mask, by A1111's `inpainting_fill`."""
_XL = "Stable Diffusion XL"
"""The family whose models have aligned steps of their own."""
_BLURS = ((256, 1), (64, 1), (16, 2), (4, 4), (2, 2))
"""The radii in pixels whose blurs are laid over each other, and how often each is."""


def text_to_image(
    fields: TextToImage, options: Options, entry: ModelEntry, settings: WebSettings
) -> list[Generation]:
    """Returns what a call without images asks for, one `Generation` for each iteration."""
    shared = _shared(fields, options, entry)
    width, height = size_of(fields, entry)
    controls = fit(read_controls(fields.alwayson_scripts, settings), width, height)
    return _iterations(Generation(**shared, width=width, height=height, controls=controls), fields)


def image_to_image(
    fields: ImageToImage, options: Options, entry: ModelEntry, settings: WebSettings
) -> list[Generation]:
    """Returns what a call with images asks for, one `Generation` for each image and iteration."""
    if not fields.init_images:
        raise Refused("init_images must hold an image", param="init_images")
    check_most("init_images", len(fields.init_images), settings.most_images, "images")
    most_pixels = settings.most_pixels
    images = [
        image_from_base64(value, f"init_images[{i}]", most_pixels)
        for i, value in enumerate(fields.init_images)
    ]
    mask = None
    if fields.mask is not None:
        given = image_from_base64(fields.mask, "mask", most_pixels)
        mask = mask_of(given)
        mask = ImageOps.invert(mask) if fields.inpainting_mask_invert else mask
    shared = _shared(fields, options, entry)
    edits = entry.kind == "edit"
    if edits:
        shared["image_guidance_scale"] = fields.image_cfg_scale
    else:
        shared["strength"] = fields.denoising_strength
        shared["strength_rule"] = "exact" if options.fixes_steps else "webui"
    found: list[Generation] = []
    for i, image in enumerate(images):
        own = _images(fields, image, mask, entry)
        generation = _after(Generation(**shared, **own), i * fields.batch_size * fields.n_iter)
        controls = read_controls(fields.alwayson_scripts, settings, image)
        size = size_of(fields, entry)
        found += _iterations(dataclasses.replace(generation, controls=fit(controls, *size)), fields)
    return found


def _shared(fields: Shared, options: Options, entry: ModelEntry) -> dict[str, Any]:
    """Returns the fields that both calls have."""
    check_present(fields, *size_of(fields, entry))
    check_seed(fields.seed)
    if fields.subseed_strength:
        check_seed(fields.subseed, "subseed")
    sampler = sampler_of(fields, entry)
    sampler, eta = with_noise(fields, sampler)
    return {
        "prompt": read_prompt(fields, fields.prompt),
        "negative_prompt": _without_comments(fields.negative_prompt),
        "model": entry.name,
        "seed": _seed(fields.seed),
        "variation_seed": _seed(fields.subseed) if fields.subseed_strength else None,
        "variation_strength": fields.subseed_strength,
        "num_inference_steps": fields.steps,
        "guidance_scale": fields.cfg_scale,
        "sampler": sampler,
        "eta": eta,
        "clip_skip": options.clip_skip,
    }


def _seed(given: int) -> int:
    return secrets.randbits(32) if given == -1 else given % SEEDS


def sampler_of(fields: Shared, entry: ModelEntry) -> str:
    """Returns the name of a call's sampler; see `own_sampler` for networks of flow matching."""
    name = fields.sampler_name or fields.sampler_index
    if name is None:
        return entry.sampler
    return own_sampler(from_webui(name, fields.scheduler, entry), entry)


def own_sampler(sampler: str, entry: ModelEntry) -> str:
    """Returns a sampler that suits a model's networks, in the place of one for others.

    Clients send the name of a sampler with every call, and call those of flow matching by the names
    that samplers had before.
    """
    plain = samplers.split(sampler)[0]
    if plain in entry.samplers or plain not in samplers.NAMES:
        return sampler
    flow = f"flow_{plain}"
    return flow if flow in entry.samplers else entry.sampler


def call_warnings(
    fields: Shared, entry: ModelEntry, styles: Mapping[str, Style]
) -> tuple[str, ...]:
    """Returns a sentence for each thing that a call asks for and that is read over."""
    found = script_warnings(fields.alwayson_scripts)
    name = fields.sampler_name or fields.sampler_index
    if name is not None:
        asked, sampler = from_webui(name, fields.scheduler, entry), sampler_of(fields, entry)
        if sampler not in (asked, f"flow_{asked}"):
            found.append(
                f"sampler_name is read over for {entry.name!r}, which is generated with {sampler} "
                f"(got {name})"
            )
    if fields.restore_faces:
        found.append("restore_faces is read over, as there are no restorers of faces")
    unknown = [style for style in style_names(fields) if style not in styles]
    found += [f"styles names {style[:60]!r}, which is not in styles.csv" for style in unknown]
    return tuple(found)


def style_names(fields: Shared) -> list[str]:
    """Returns the names of a call's styles.

    Raises:
        Refused: they are no texts.
    """
    given = fields.styles if isinstance(fields.styles, list) else [fields.styles]
    names = [style for style in given if style not in _NO_STYLES]
    if not all(isinstance(name, str) for name in names):
        raise Refused(f"styles must be a list of names (got {str(names)[:60]})", param="styles")
    return names


def with_own_styles(fields: AnyCall, styles: Mapping[str, Style]) -> AnyCall:
    """Returns a call with the words of its styles in all of its prompts."""
    chosen = [styles[name] for name in style_names(fields) if name in styles]
    prompt, negative = with_styles(fields.prompt, fields.negative_prompt, chosen)
    changed = {"prompt": prompt, "negative_prompt": negative}
    if isinstance(fields, TextToImage):
        # What is left out is the first pass's prompt, which has the words already.
        given = {name: getattr(fields, name) for name in ("hr_prompt", "hr_negative_prompt")}
        second = dict(
            zip(given, with_styles(given["hr_prompt"], given["hr_negative_prompt"], chosen))
        )
        changed |= {name: second[name] for name, text in given.items() if text}
    return dataclasses.replace(fields, **changed)  # type: ignore[arg-type]


def read_prompt(fields: Shared, prompt: str) -> str:
    """Returns a prompt without comments, and without LoRAs where a call wants none.

    Raises:
        Refused: a tag of a LoRA cannot be read.
    """
    prompt = _without_comments(prompt)
    if not fields.disable_extra_networks:
        return prompt
    try:
        return read_tags(prompt)[0]
    except ValueError as error:
        raise Refused(str(error), param="prompt") from None


def _without_comments(text: str) -> str:
    return _COMMENTS.sub("\n", text).strip() if "#" in text else text


def size_of(fields: Shared, entry: ModelEntry) -> tuple[int, int]:
    """Returns width and height, rounded down to a size for the model, as A1111 does."""

    def rounded(value: int) -> int:
        return max(value // entry.multiple * entry.multiple, entry.multiple)

    width, height = fields.width or entry.width, fields.height or entry.height
    first = getattr(fields, "firstphase_width", 0), getattr(fields, "firstphase_height", 0)
    if any(first):
        width, height = (own or side for own, side in zip(first, (width, height)))
    return rounded(width), rounded(height)


def _iterations(generation: Generation, fields: Shared) -> list[Generation]:
    """Returns one `Generation` for each iteration; the seeds go on from one to the next."""
    count = fields.batch_size
    generation = dataclasses.replace(generation, num_images=count)
    return [_after(generation, i * count) for i in range(fields.n_iter)]


def _after(generation: Generation, count: int) -> Generation:
    """Returns what generates the images after the first `count` ones of a request."""
    later = generation.single(count)
    return dataclasses.replace(generation, seed=later.seed, variation_seed=later.variation_seed)


def _images(
    fields: ImageToImage, image: Image.Image, mask: Image.Image | None, entry: ModelEntry
) -> dict[str, Any]:
    """Returns the fields that come from an image and a mask."""
    width, height = size_of(fields, entry)
    found: dict[str, Any] = {"width": width, "height": height}
    if mask is None:
        return {**found, "image": _fit_image(image, width, height, fields.resize_mode)}
    mask = mask if mask.size == image.size else mask.resize(image.size)
    if fields.inpaint_full_res:
        # The part around the mask is generated in full size, and the image keeps its own.
        image = _fit_image(image, image.width, image.height, 0)
        found["padding_mask_crop"] = fields.inpaint_full_res_padding
    else:
        # A mask is fitted like its image, so that it stays where it was.
        mask = _fit_image(mask, width, height, fields.resize_mode).convert("L")
        image = _fit_image(image, width, height, fields.resize_mode)
    blur = max(fields.mask_blur_x, fields.mask_blur_y)
    found["mask_blur"] = blur if fields.mask_blur is None else fields.mask_blur
    found["image"] = _fill_masked(image, mask) if fields.inpainting_fill == 0 else image
    found["masked_fill"] = _FILLS.get(fields.inpainting_fill, "image")
    return {**found, "mask_image": mask}


def _fit_image(image: Image.Image, width: int, height: int, mode: int) -> Image.Image:
    """Returns an image as RGB in the size to generate."""
    return resize(as_rgb(image, "init_images"), height, width, _RESIZE_MODES[mode])


def _fill_masked(image: Image.Image, mask: Image.Image) -> Image.Image:
    """Fills the masked part of an image with the colours around, A1111's `inpainting_fill` 0.

    Arguments:
        image: the image, RGB.
        mask: white where the image is generated anew; of the image's size.
    """
    kept = image.convert("RGBA")
    kept.putalpha(ImageOps.invert(mask))
    filled = Image.new("RGBA", image.size)
    for radius, times in _BLURS:
        # Premultiplied, so that the colours under the mask do not bleed into the blur.
        blurred = kept.convert("RGBa").filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(times):
            filled.alpha_composite(blurred)
    filled.alpha_composite(kept)
    result = image.copy()
    result.paste(filled.convert("RGB"), mask=filled.getchannel("A"))
    return result


_NO_STYLES: tuple[Any, ...] = (None, [], "", "None", "none")
_ETA = {"euler_a": 1.0, "kdpm2_a": 1.0, "dpm++_sde": 1.0, "dpm++2m_sde": 1.0, "dpm++3m_sde": 1.0}
_ETA |= {"ddim": 0.0}
"""The samplers that read eta, with its default."""
_WITHOUT_ETA = {"euler_a": "euler", "kdpm2_a": "kdpm2", "dpm++2m_sde": "dpm++2m"}
"""What samplers are with an eta of 0."""
_CHURN = ("euler", "heun", "kdpm2")
_NOISE = ("kdpm2_a", "dpm++_sde", "dpm++2m_sde", "dpm++3m_sde")
"""The samplers that read s_churn, and those that read s_noise without it: sampler_extra_params of
A1111's sd_samplers_kdiffusion.py."""


def check_present(fields: Shared, width: int, height: int) -> None:
    """Raises Refused where a call asks for what is not here. width, height: of its images."""
    resized = (fields.seed_resize_from_w, fields.seed_resize_from_h)
    resizes = min(resized) > 0 and resized != (width, height)
    refiner = fields.refiner_checkpoint not in (None, "None", "none")
    last = fields.refiner_switch_at
    script = fields.script_name if fields.script_name not in ("None", "none") else None
    asked: dict[str, tuple[Any, Any, str]] = {
        "tiling": (fields.tiling, False, "images that tile"),
        "seed_resize_from_w": (resized[0] if resizes else -1, -1, "resizing of seeds"),
        "script_name": (script or "", "", "scripts"),
        "refiner_checkpoint": (
            fields.refiner_checkpoint if refiner and (last is None or last < 1) else "",
            "",
            "refiners within a run",
        ),
        "s_min_uncond": (fields.s_min_uncond, 0, "steps without a negative prompt"),
        "infotext": (fields.infotext or "", "", "calls from texts; send their fields"),
        "firstpass_image": (getattr(fields, "firstpass_image", None), None, "given first passes"),
        "latent_mask": (getattr(fields, "latent_mask", None), None, "masks of latents"),
        "mask_round": (getattr(fields, "mask_round", True), True, "soft masks"),
        "initial_noise_multiplier": (
            1.0 if (m := getattr(fields, "initial_noise_multiplier", None)) is None else m,
            1.0,
            "multiples of the first noise",
        ),
    }
    for name, (value, off, what) in asked.items():
        if value != off:
            text = f"{name} must be {off!r} here (got {str(value)[:60]!r}), as there are no {what}"
            raise Refused(text, param=name, code="not_supported")


def from_webui(sampler: str, schedule: str | None = None, entry: ModelEntry | None = None) -> str:
    """Returns the name of a sampler here, see `diffusax.infotext.samplers.from_webui`.

    entry: the model that it is for, which may have a list of noise levels of its own.

    Raises:
        NotFound: there is no such sampler.
        Refused: it has no such schedule type.
    """
    try:
        xl = entry is not None and entry.family == _XL
        return samplers.from_webui(sampler, schedule, xl=xl)
    except samplers.UnknownSampler as error:
        raise NotFound(str(error), param="sampler") from None
    except samplers.UnknownSchedule as error:
        raise Refused(str(error), param="scheduler") from None


def with_noise(fields: Shared, sampler: str) -> tuple[str, float]:
    """Returns the sampler and DDIM's eta for what a call says of the noise in its steps.

    Source: stable-diffusion-webui, modules/sd_samplers_common.py, Sampler.initialize.

    Args:
        fields: the call.
        sampler: the name of its sampler.

    Raises:
        Refused: the sampler would read a value, and cannot do so here.
    """
    plain, _ = samplers.split(sampler)
    if plain in _CHURN and fields.s_churn:
        raise _fixed("s_churn", 0, fields.s_churn, sampler)
    if plain in _NOISE and fields.s_noise != 1:
        raise _fixed("s_noise", 1, fields.s_noise, sampler)
    usual = _ETA.get(plain)
    eta = usual if fields.eta is None else fields.eta
    if plain == "ddim" and eta is not None:
        if eta > 1:
            raise Refused(f"eta must be from 0 to 1 for DDIM (got {eta:g})", param="eta")
        return sampler, eta
    if eta == usual or usual is None:
        return sampler, 0.0
    if eta == 0 and plain in _WITHOUT_ETA:
        return _WITHOUT_ETA[plain] + sampler.removeprefix(plain), 0.0
    raise _fixed("eta", 1, eta, sampler)


def _fixed(name: str, value: float, got: Any, sampler: str) -> Refused:
    text = f"{name} must be {value} for the sampler {sampler!r} here (got {got:g})"
    return Refused(text, param=name, code="not_supported")
