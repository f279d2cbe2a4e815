"""Tasks: what a call asks for becomes a plan. They know families only through `Components`."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from diffusax.masks import apply_overlay, get_crop_region, to_mask
from diffusax.models.embeddings import guidance_scale_embedding
from diffusax.pictures import nearest, to_pixels
from diffusax.pipelines import guidance, programs
from diffusax.pipelines.arguments import Call
from diffusax.pipelines.components import Components
from diffusax.pipelines.denoisers import Conditions
from diffusax.pipelines.noise import Noise, TorchNoise, noise_source
from diffusax.pipelines.programs import Knobs, Known, Plan
from diffusax.pipelines.prompts import count_prompts, embed_prompts
from diffusax.samplers import Schedule

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


Task = Callable[[Components, Call], Job]


def text_to_image(c: Components, call: Call) -> Job:
    """Prompts to pictures."""
    b, height, width = count_images(call), *image_size(c, call)
    shape = latent_shape(c, height, width)
    require_channels(c, shape[-1], "text to image")
    noise = noise_source(call.noise, call.seed, b)
    schedule = make_schedule(c, call)
    x = _given_latents(call, b, shape)
    x = noise.draw("start", shape) if x is None else x
    x = programs.begin(x, np.float32(schedule.init_noise_sigma), None, None)
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
    pixels = to_pixels(_required(call, "image"), call.height, call.width, factor=c.factor)
    size = pixel_size(c, pixels)
    shape = latent_shape(c, *size)
    require_channels(c, shape[-1], "image to image")
    x = _given_latents(call, b, shape)
    if x is None:
        clean = encode(c, noise, pixels, b, normalize=c.family.normalizes_latents, per_seed=True)
        if call.denoising_start is not None:
            x = clean
        else:
            signal, level = schedule.levels[0].astype(np.float32)
            x = programs.begin(noise.draw("start", shape), level, clean, signal)
    return make_job(c, call, schedule, noise, x, size=size)


def inpaint(c: Components, call: Call) -> Job:
    """Pictures drawn anew where the mask is white.

    A UNet with as many channels as the latents keeps the rest by putting it back after each row;
    one with more is given the mask and the masked picture beside the latents.
    """
    b, height, width = count_images(call), *image_size(c, call)
    noise = noise_source(call.noise, call.seed, b)
    # diffusers puts the picture back without noise after the last row, also where denoising_end
    # leaves some to another model (pipeline_stable_diffusion_xl_inpaint.py, the denoising loop).
    schedule = make_schedule(c, call, from_image=True)
    if call.denoising_end is not None:
        schedule = dataclasses.replace(schedule, last_level=(1.0, 0.0))
    crop = crop_options(call, height, width)
    image = _required(call, "image")
    pixels = to_pixels(image, height, width, factor=c.factor, **crop)
    mask = to_mask(_required(call, "mask_image"), height, width, factor=c.factor, **crop)
    shape = latent_shape(c, height, width)
    own_channels = c.unet_config.in_channels == shape[-1]
    if not own_channels:
        require_channels(c, 2 * shape[-1] + 1, "inpainting")

    start = _given_latents(call, b, shape)
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
        signal, level = schedule.levels[0].astype(np.float32)
        x = programs.begin(eps, level, clean, signal)

    small = _per_image(nearest(mask, shape[0], shape[1]), b, "mask_image")
    masked = _masked_latents(c, call, noise, pixels, mask, b, shape, needed=not own_channels)
    channels = known = None
    if own_channels:
        known = Known(small, clean, eps)
    else:
        channels = programs.join_channels(small, masked)
    job = make_job(
        c, call, schedule, noise, x, size=(height, width), channels=channels, known=known
    )
    if call.padding_mask_crop is not None:
        _check_overlay(call)
        coords = crop["crops_coords"]
        job.finish = lambda images: [
            apply_overlay(call.mask_image, image, drawn, coords) for drawn in images
        ]
    return job


def instruct(c: Components, call: Call) -> Job:
    """Pictures edited as the prompt says (Brooks et al. 2023, InstructPix2Pix)."""
    b = count_images(call)
    noise = noise_source(call.noise, call.seed, b)
    schedule = make_schedule(c, call)
    height, width = call.height, call.width
    if c.family.normalizes_latents:
        height, width = image_size(c, call)
    pixels = to_pixels(_required(call, "image"), height, width, factor=c.factor)
    size = pixel_size(c, pixels)
    shape = latent_shape(c, *size)
    require_channels(c, 2 * shape[-1], "InstructPix2Pix")
    scaled = c.options.get("is_cosxl_edit", False)
    image = encode(c, None, pixels, b, scale=scaled)
    x = _given_latents(call, b, shape)
    x = noise.draw("start", shape) if x is None else x
    x = programs.begin(x, np.float32(schedule.init_noise_sigma), None, None)

    weights: tuple[float, ...] = ()
    scale = _guidance_scale(call)
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
    scale = _guidance_scale(call)
    distilled = getattr(c.unet_config, "time_cond_proj_dim", None)
    if weights is None:
        weights = guidance.classifier_free(scale) if scale > 1 and distilled is None else ()
    positive, negative = embed_prompts(c, call, guided=bool(weights))
    other = None if negative is None else 1
    context, *pooled = programs.arrange(
        (positive,) if negative is None else (positive, negative),
        order=(0, *[other] * len(weights)),
        repeats=call.num_images_per_prompt or 1,
    )
    added = c.family.added(c, call, pooled[0] if pooled else None, *size)
    if distilled is not None:
        embedded = _embed_scale(np.full(context.shape[0], scale - 1, np.float32), distilled)
        added = {**(added or {}), "timestep_cond": embedded[:, None]}
    table = programs.device_table(schedule)
    height, n = len(table.timestep), len(schedule)
    interval = call.guidance_start, call.guidance_end
    knobs = Knobs(
        guidance.per_row(weights, n, height, interval),
        np.full(height, call.guidance_rescale, np.float32),
    )
    conditions = Conditions(context, channels, added)
    source = noise.row(latents.shape[1:], draws=False)
    return Job(Plan(latents, conditions, table, knobs, source, known), schedule, noise, weights)


def make_schedule(
    c: Components, call: Call, *, from_image: bool = False, strength: float | None = None
) -> Schedule:
    """The rows of the run, cut at what strength, denoising_start and denoising_end say.

    from_image: whether the run starts from a picture, and so where the strength says. strength: the
    sampler's own, as consistency models have it.

    Raises:
        ValueError: nothing is left of the run.
    """
    custom = call.timesteps is not None or call.sigmas is not None
    options: dict[str, Any] = {
        "timesteps": None if call.timesteps is None else tuple(call.timesteps),
        "sigmas": None if call.sigmas is None else tuple(call.sigmas),
        "eta": call.eta or 0.0,
    }
    if strength is not None:
        options["strength"] = strength
    if call.original_inference_steps is not None:
        options["original_inference_steps"] = call.original_inference_steps
    steps = None if custom else call.num_inference_steps
    whole = c.scheduler.schedule(steps, **options)
    begin, end = 0, len(whole)
    if from_image:
        begin = begin_row(c, call, whole)
    if call.denoising_end is not None and 0 < call.denoising_end < 1:
        cutoff = _cutoff(c, call.denoising_end)
        end = begin + int((whole.timesteps[begin:] >= cutoff).sum())
    if begin >= end:
        raise ValueError(
            f"nothing is left of num_inference_steps={call.num_inference_steps} with "
            f"strength={call.strength}, denoising_start={call.denoising_start} and "
            f"denoising_end={call.denoising_end}; take more steps or a larger part of them"
        )
    if (begin, end) == (0, len(whole)):
        return whole
    return c.scheduler.schedule(steps, begin=begin, end=end, **options)


def begin_row(c: Components, call: Call, whole: Schedule) -> int:
    """The row at which a run that starts from a picture begins.

    Upstream: get_timesteps of diffusers' image-to-image pipelines.
    """
    start = call.denoising_start
    if start is not None and 0 < start < 1:
        left = int((whole.timesteps < _cutoff(c, start)).sum())
        # A step of two rows is not cut in the middle.
        left += whole.order == 2 and left % 2 == 0
        return len(whole) - left
    given = call.timesteps or call.sigmas
    steps = call.num_inference_steps if given is None else len(given)
    kept = min(int((steps or 0) * call.strength), steps or 0)
    return ((steps or 0) - kept) * whole.order


def _cutoff(c: Components, fraction: float) -> int:
    total = c.scheduler.num_train_timesteps
    return round(total - fraction * total)


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
    channels = c.vae_config.latent_channels
    if pixels.shape[-1] == channels:
        return programs.tile(_checked_count(pixels, b, "image"), b)
    _checked_count(pixels, b, "image")
    eps = None
    if noise is not None and c.networks["vae"].class_name == "AutoencoderKL":
        many = per_seed and isinstance(noise, TorchNoise) and len(noise.generators) > 1
        height, width = (n // c.factor for n in pixels.shape[1:3])
        eps = noise.draw(purpose, (height, width, channels), b if many else len(pixels))
    upcast = c.upcasts
    latents = programs.encode_image(
        c.networks["vae"],
        c.params["vae"],
        pixels,
        eps,
        upcast=upcast,
        scale=scale,
        normalize=normalize,
    )
    return programs.tile(latents, b)


def _masked_latents(
    c: Components,
    call: Call,
    noise: Noise,
    pixels: np.ndarray,
    mask: np.ndarray,
    b: int,
    shape: tuple[int, int, int],
    *,
    needed: bool,
) -> Any:
    """The picture without what is masked, as latents; where they are not needed, only drawn for."""
    if call.masked_image_latents is not None:
        given = np.asarray(call.masked_image_latents, np.float32).transpose(0, 2, 3, 1)
        return encode(c, None, given, b)
    if pixels.shape[-1] == shape[-1]:
        if needed:
            raise ValueError(
                "masked_image_latents must be given where image is latents and the UNet takes the "
                "masked picture"
            )
        return None
    if not needed:
        # diffusers encodes the masked picture in any case, which takes its numbers.
        if isinstance(noise, TorchNoise):
            noise.draw("masked", shape, max(len(pixels), len(mask)))
        return None
    return encode(c, noise, pixels * (mask < 0.5), b, purpose="masked")


def crop_options(call: Call, height: int, width: int) -> dict[str, Any]:
    """How pictures and masks are resized: whole, or the part around what is masked."""
    if call.padding_mask_crop is None:
        return {"resize_mode": "default", "crops_coords": None}
    _check_overlay(call)
    coords = get_crop_region(call.mask_image, width, height, pad=call.padding_mask_crop)
    return {"resize_mode": "fill", "crops_coords": coords}


def _check_overlay(call: Call) -> None:
    for name in ("image", "mask_image"):
        if not hasattr(getattr(call, name), "convert"):
            raise ValueError(f"{name} must be a PIL image where padding_mask_crop is given")
    if call.output_type != "pil":
        raise ValueError(
            f"output_type must be 'pil' where padding_mask_crop is given (got {call.output_type!r})"
        )


def count_images(call: Call) -> int:
    """How many pictures the call draws."""
    return count_prompts(call) * (call.num_images_per_prompt or 1)


def image_size(c: Components, call: Call) -> tuple[int, int]:
    """Height and width in pixels, by default those that the UNet was trained at.

    Raises:
        ValueError: one is not a multiple of the autoencoder's factor.
    """
    default = c.default_size
    size = call.height or default[0], call.width or default[1]
    for name, value in zip(("height", "width"), size):
        if value < c.factor or value % c.factor:
            low = max(value // c.factor, 1) * c.factor
            raise ValueError(
                f"{name} must be divisible by {c.factor} (got {value}); use {low} or "
                f"{low + c.factor}"
            )
    _check_memory(c, count_images(call), *size)
    return size


def _check_memory(c: Components, b: int, height: int, width: int) -> None:
    """Refuses what no machine of this kind could hold, before it is killed for it."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return
    # The decoder's last level, its input and output in float32: a lower bound.
    channels = getattr(c.vae_config, "block_out_channels", (64,))[0]
    needed = b * height * width * channels * 8
    if jax.default_backend() == "cpu" and needed > total:
        raise ValueError(
            f"{b} pictures of {height}x{width} need more than {needed / 1e9:.0f} GB of memory at "
            f"once, and this machine has {total / 1e9:.0f} GB; draw fewer or smaller ones at a time"
        )


def pixel_size(c: Components, pixels: np.ndarray) -> tuple[int, int]:
    """Height and width in pixels of pictures, or of the pictures that latents stand for."""
    _, height, width, channels = pixels.shape
    factor = c.factor if channels == c.vae_config.latent_channels else 1
    return height * factor, width * factor


def latent_shape(c: Components, height: int, width: int) -> tuple[int, int, int]:
    """h w c of one picture's latents."""
    return height // c.factor, width // c.factor, c.vae_config.latent_channels


def require_channels(c: Components, expected: int, task: str) -> None:
    """Raises ValueError unless the UNet has the input channels that the task feeds."""
    actual = c.unet_config.in_channels
    if actual == expected:
        return
    latent = c.vae_config.latent_channels
    made_for = {
        latent: "text to image",
        2 * latent + 1: "inpainting",
        2 * latent: "InstructPix2Pix",
    }
    hint = f"; it is made for {made_for[actual]}" if actual in made_for else ""
    raise ValueError(f"{task} needs a UNet with {expected} input channels (got {actual}){hint}")


def _given_latents(call: Call, b: int, shape: tuple[int, int, int]) -> np.ndarray | None:
    """The call's latents, b h w c."""
    if call.latents is None:
        return None
    h, w, c = shape
    return check_latents(call.latents, (b, c, h, w)).transpose(0, 2, 3, 1)


def check_latents(latents: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Latents in float32, b c h w.

    Raises:
        ValueError: they have another shape, or are not numbers.
    """
    if tuple(getattr(latents, "shape", ())) != shape:
        raise ValueError(
            f"latents must have shape (images, channels, height, width) = {shape} for this call "
            f"(got {getattr(latents, 'shape', type(latents).__name__)})"
        )
    return np.asarray(latents, np.float32)


def _guidance_scale(call: Call) -> float:
    return 1.0 if call.guidance_scale is None else call.guidance_scale


def _required(call: Call, name: str) -> Any:
    value = getattr(call, name)
    if value is None:
        raise ValueError(f"{name} must be given")
    return value


def _checked_count(pictures: Any, b: int, name: str) -> Any:
    if len(pictures) > b or b % len(pictures):
        raise ValueError(f"{name} has {len(pictures)} pictures for {b} images to draw; give one")
    return pictures


def _per_image(pictures: np.ndarray, b: int, name: str) -> np.ndarray:
    return np.tile(_checked_count(pictures, b, name), (b // len(pictures), 1, 1, 1))
