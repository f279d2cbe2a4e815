"""Tasks: what a call asks for becomes a plan. They know families only through `Components`."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from diffusax.images.masks import apply_overlay, get_crop_region, to_mask
from diffusax.images.pictures import nearest, to_pixels
from diffusax.models.embeddings import guidance_scale_embedding
from diffusax.models.freeu import freeu_rows
from diffusax.pipelines import guidance, programs
from diffusax.pipelines.arguments import Call, read_numbers
from diffusax.pipelines.components import Components
from diffusax.pipelines.denoisers import Conditions
from diffusax.pipelines.programs import Kept, Knobs, Known, Plan
from diffusax.pipelines.prompts import embed_prompts
from diffusax.pipelines.schedules import make_schedule
from diffusax.pipelines.sizes import (
    are_latents,
    count_images,
    image_size,
    latent_shape,
    pixel_size,
    require_channels,
)
from diffusax.runtime.noise import Noise, TorchNoise, noise_source
from diffusax.samplers import Schedule

_NOT_SAMPLED = ("AutoencoderTiny",)
"""Autoencoders that give latents, and no distribution of them."""
_embed_scale = jax.jit(guidance_scale_embedding, static_argnums=1)

Images = list[Any]


@dataclasses.dataclass
class Job:
    """A plan with what the host needs to run it."""

    plan: Plan
    schedule: Schedule
    noise: Noise
    weights: tuple[float, ...]
    """Of guidance, one fewer than branches."""
    finish: Callable[[Images], Images] | None = None
    """What becomes of the pictures, where the call asks for more than to decode them."""
    scale: float | None = None
    """Of guidance, where a callback has set another one than the call's."""
    normalized: bool = True
    """Whether latents_mean and latents_std count in decoding, where the family knows them."""
    kept: Kept | None = None
    """What the decoder is shown beside the latents, if it takes anything."""


Task = Callable[[Components, Call], Job]


def text_to_image(c: Components, call: Call) -> Job:
    """Prompts to pictures."""
    b, height, width = count_images(call), *image_size(c, call)
    shape = latent_shape(c, height, width)
    require_channels(c, shape[-1], "text to image")
    noise = noise_source(call.noise, call.seed, b)
    schedule = make_schedule(c, call)
    x = _pure_noise(call, noise, schedule, b, shape)
    return make_job(c, call, schedule, noise, x, size=(height, width))


def image_to_image(c: Components, call: Call) -> Job:
    """Pictures drawn over, from a noise level that the strength says (Meng et al. 2022)."""
    return _draw_over(c, call, make_schedule(c, call, from_image=True))


def consistency_image_to_image(c: Components, call: Call) -> Job:
    """As `image_to_image` for consistency models: all steps are taken, below the strength."""
    return _draw_over(c, call, make_schedule(c, call, strength=call.strength))


def _draw_over(c: Components, call: Call, schedule: Schedule) -> Job:
    b = count_images(call)
    noise = noise_source(call.noise, call.seed, b)
    pixels = _pixels(c, call, call.height, call.width)
    size = pixel_size(c, pixels)
    shape = latent_shape(c, *size)
    require_channels(c, shape[-1], "image to image")
    if call.latents is not None:
        x = check_latents(call.latents, b, *shape)
    else:
        x = encode(c, noise, pixels, b, normalize=c.family.normalizes_latents, per_seed=True)
        if call.denoising_start is None:
            x = _noised(schedule, x, noise.draw("start", shape))
    return make_job(c, call, schedule, noise, x, size=size)


def inpaint(c: Components, call: Call) -> Job:
    """Pictures drawn anew where the mask is white.

    A UNet with as many channels as the latents keeps the rest by putting it back after each row;
    one with more is given the mask and the masked picture beside the latents.
    """
    b, height, width = count_images(call), *image_size(c, call)
    noise = noise_source(call.noise, call.seed, b)
    # diffusers puts the picture back without noise after the last row, also where denoising_end or
    # the sampler leaves some (pipeline_stable_diffusion_xl_inpaint.py, the denoising loop).
    schedule = make_schedule(c, call, from_image=True).ending_clean
    crop = crop_options(call, height, width)
    pixels = _pixels(c, call, height, width, **crop)
    mask = to_mask(_required(call, "mask_image"), height, width, factor=c.factor, **crop)
    shape = latent_shape(c, height, width)
    own_channels = c.unet_config.in_channels == shape[-1]
    if not own_channels:
        require_channels(c, 2 * shape[-1] + 1, "inpainting")

    start = None if call.latents is None else check_latents(call.latents, b, *shape)
    whole = call.strength == 1 and call.denoising_start is None
    clean = None
    if own_channels or (start is None and not whole):
        clean = encode(c, noise, pixels, b)
    eps = noise.draw("start", shape) if start is None else start
    if call.denoising_start is not None:
        x = clean
    elif whole or start is not None:
        x = programs.begin(eps, np.float32(schedule.init_noise_sigma), None, None)
    else:
        x = _noised(schedule, clean, eps)

    _check_count(mask, b, "mask_image")
    small = np.tile(nearest(mask, *shape[:2]), (b // len(mask), 1, 1, 1))
    own: dict[str, Any] = {"size": (height, width)}
    if own_channels:
        own["known"] = Known(small, clean, eps)
        encodes = call.masked_image_latents is None and not are_latents(pixels)
        if encodes and isinstance(noise, TorchNoise):
            # diffusers encodes the masked picture in any case, which takes its numbers.
            noise.draw("masked", shape, max(len(pixels), len(mask)))
    else:
        masked = _masked_latents(c, call, noise, pixels, mask, b)
        own["channels"] = programs.join_channels(small, masked)
    job = make_job(c, call, schedule, noise, x, **own)
    job.kept = _kept(c, call, pixels, mask, b)
    if call.padding_mask_crop is not None:
        coords = crop["crops_coords"]
        job.finish = lambda images: [
            apply_overlay(call.mask_image, call.image, drawn, coords) for drawn in images
        ]
    return job


def instruct(c: Components, call: Call) -> Job:
    """Pictures edited as the prompt says (Brooks et al. 2023, InstructPix2Pix)."""
    b = count_images(call)
    noise = noise_source(call.noise, call.seed, b)
    schedule = make_schedule(c, call)
    resized = image_size(c, call) if c.family.resizes_edits else (None, None)
    pixels = _pixels(c, call, *resized)
    size = pixel_size(c, pixels)
    shape = latent_shape(c, *size)
    require_channels(c, 2 * shape[-1], "InstructPix2Pix")
    image = encode(c, None, pixels, b, scale=c.options.get("is_cosxl_edit", False))
    x = _pure_noise(call, noise, schedule, b, shape)

    weights: tuple[float, ...] = ()
    scale = 1.0 if call.guidance_scale is None else call.guidance_scale
    if scale > 1 and call.image_guidance_scale >= 1:
        weights = guidance.instruct(scale, call.image_guidance_scale)
    order = (0, 0, None) if weights else (0,)
    (channels,) = programs.arrange(((image,),), order=order, repeats=1)
    return make_job(c, call, schedule, noise, x, size=size, channels=channels, weights=weights)


def make_job(
    c: Components,
    call: Call,
    schedule: Schedule,
    noise: Noise,
    latents: Any,
    *,
    size: tuple[int, int],
    channels: Any = None,
    known: Known | None = None,
    weights: tuple[float, ...] | None = None,
) -> Job:
    """The last part of every task: prompts to conditions, scales to knobs.

    size: height and width in pixels. weights: of guidance; by default classifier-free guidance's,
    where the call asks for it and the UNet was not distilled from it.
    """
    scale = 1.0 if call.guidance_scale is None else call.guidance_scale
    distilled = getattr(c.unet_config, "time_cond_proj_dim", None)
    if weights is None:
        weights = guidance.classifier_free(scale) if scale > 1 and distilled is None else ()
    context, *pooled = embed_prompts(c, call, branches=1 + len(weights))
    added = c.family.added(c, call, *pooled, *size) if c.family.added else None
    if distilled is not None:
        embedded = _embed_scale(np.full(context.shape[0], scale - 1, np.float32), distilled)
        added = {**(added or {}), "timestep_cond": embedded[:, None]}
    table = programs.device_table(schedule)
    height, n = len(table.timestep), len(schedule)
    interval = call.guidance_start, call.guidance_end
    knobs = Knobs(
        guidance.per_row(weights, n, height, interval),
        np.full(height, call.guidance_rescale, np.float32),
        freeu=freeu_rows(c.freeu, height),
    )
    conditions = Conditions(context, channels, added)
    plan = Plan(latents, conditions, table, knobs, noise.keys, known)
    return Job(plan, schedule, noise, weights)


def encode(
    c: Components,
    noise: Noise | None,
    pixels: np.ndarray,
    b: int,
    *,
    scale: bool = True,
    normalize: bool = False,
    purpose: Any = "image",
    per_seed: bool = False,
) -> Any:
    """Pictures as latents of b images, b h w z; latents in their place stay as they are.

    noise: what to sample the autoencoder's distribution with; None takes its mode. per_seed: with
    a seed for each image, whether fewer pictures are repeated before they are sampled.
    """
    _check_count(pixels, b, "image")
    channels = c.vae_config.latent_channels
    if are_latents(pixels):
        return programs.tile(pixels, b)
    eps = None
    if noise is not None and c.networks["vae"].class_name not in _NOT_SAMPLED:
        many = per_seed and isinstance(noise, TorchNoise) and len(noise.generators) > 1
        height, width = (n // c.factor for n in pixels.shape[1:3])
        eps = noise.draw(purpose, (height, width, channels), b if many else len(pixels))
    options = {"upcast": c.upcasts, "scale": scale, "normalize": normalize}
    vae, params = c.networks["vae"], c.params["vae"]
    return programs.tile(programs.encode_image(vae, params, pixels, eps, **options), b)


def _masked_latents(
    c: Components, call: Call, noise: Noise, pixels: np.ndarray, mask: np.ndarray, b: int
) -> Any:
    """The picture without what is masked, as latents."""
    if call.masked_image_latents is not None:
        given, name = call.masked_image_latents, "masked_image_latents"
        shape = len(given) if hasattr(given, "shape") else b, *latent_shape(c, *mask.shape[1:3])
        given = check_latents(given, *shape, name=name)
        _check_count(given, b, name)
        return programs.tile(given, b)
    if are_latents(pixels):
        raise ValueError(
            "masked_image_latents must be given where image is latents and the UNet takes the "
            "masked picture"
        )
    return encode(c, noise, pixels * (mask < 0.5), b, purpose="masked")


def _kept(c: Components, call: Call, pixels: np.ndarray, mask: np.ndarray, b: int) -> Kept | None:
    """What an AsymmetricAutoencoderKL is shown when it decodes; others see latents alone."""
    shown = c.family.shows_kept and call.output_type != "latent"
    if not shown or c.networks["vae"].class_name != "AsymmetricAutoencoderKL":
        return None
    if are_latents(pixels):
        raise ValueError(
            "image must be a picture, not latents, where vae is an AsymmetricAutoencoderKL, whose "
            "decoder looks at it"
        )
    return Kept(*(np.tile(x, (b // len(x), 1, 1, 1)) for x in (pixels, mask)))


def crop_options(call: Call, height: int, width: int) -> dict[str, Any]:
    """How pictures and masks are resized: whole, or the part around what is masked."""
    if call.padding_mask_crop is None:
        return {"resize_mode": "default", "crops_coords": None}
    for name in ("image", "mask_image"):
        if not hasattr(getattr(call, name), "convert"):
            raise ValueError(f"{name} must be a PIL image where padding_mask_crop is given")
    if call.output_type != "pil":
        raise ValueError(
            f"output_type must be 'pil' where padding_mask_crop is given (got {call.output_type!r})"
        )
    coords = get_crop_region(call.mask_image, width, height, pad=call.padding_mask_crop)
    return {"resize_mode": "fill", "crops_coords": coords}


def _pure_noise(
    call: Call, noise: Noise, schedule: Schedule, b: int, shape: tuple[int, int, int]
) -> Any:
    """What a whole run starts from: the call's latents or drawn ones, b h w c."""
    given = call.latents
    x = noise.draw("start", shape) if given is None else check_latents(given, b, *shape)
    return programs.begin(x, np.float32(schedule.init_noise_sigma), None, None)


def _noised(schedule: Schedule, clean: Any, noise: Any) -> Any:
    """What a run that starts from a picture's latents starts from."""
    signal, level = schedule.levels[0].astype(np.float32)
    return programs.begin(noise, level, clean, signal)


def check_latents(
    latents: Any, b: int, h: int, w: int, c: int, *, name: str = "latents"
) -> np.ndarray:
    """Latents b c h w as float32, b h w c.

    Raises:
        ValueError: they have another shape, or are not numbers.
    """
    shape = (b, c, h, w)
    if tuple(getattr(latents, "shape", ())) != shape:
        raise ValueError(
            f"{name} must have shape (images, channels, height, width) = {shape} for this call "
            f"(got {getattr(latents, 'shape', type(latents).__name__)})"
        )
    return read_numbers(name, latents).transpose(0, 2, 3, 1)


def _pixels(c: Components, call: Call, height: int | None, width: int | None, **crop: Any) -> Any:
    """The call's pictures, or latents in their place, see `to_pixels`."""
    channels = c.vae_config.latent_channels
    options: dict[str, Any] = {"factor": c.factor, "latent_channels": channels, **crop}
    return to_pixels(_required(call, "image"), height, width, **options)


def _required(call: Call, name: str) -> Any:
    value = getattr(call, name)
    if value is None:
        raise ValueError(f"{name} must be given")
    return value


def _check_count(pictures: Any, b: int, name: str) -> None:
    if len(pictures) > b or b % len(pictures):
        raise ValueError(f"{name} has {len(pictures)} pictures for {b} images to draw; give one")
