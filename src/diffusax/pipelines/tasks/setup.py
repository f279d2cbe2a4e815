"""The setup of a run: the facts that follow from a call and the components alone."""

import dataclasses
from typing import Any

import jax
import numpy as np

from diffusax.pipelines.components.adapters import CallAdapters, call_adapters
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.tasks.prompts import count_prompts
from diffusax.runtime.devices.memory import host_memory
from diffusax.runtime.random.noise import Noise, VariedNoise, noise_source
from diffusax.runtime.switches import is_traced
from diffusax.samplers import Schedule
from diffusax.samplers.runs import compute_schedule


@dataclasses.dataclass(frozen=True)
class Setup:
    """What follows from a call and the components alone; a task computes it once, first of all."""

    c: Components
    call: Call
    prompts: int
    """The number of prompts."""
    images: int
    """The number of images to generate, b."""
    size: tuple[int, int]
    """The height and width of the images in pixels."""
    shape: tuple[int, ...]
    """h w c of their latents, of videos f h w c."""
    schedule: Schedule
    """The rows of the sampler to run."""
    noise: Noise
    """The source of random numbers."""
    adapters: CallAdapters | None = None
    """The adapters beside the parameters; None without any."""


def set_up(
    c: Components,
    call: Call,
    size: tuple[int, int],
    *,
    from_image: bool = False,
    strength: float = 1.0,
) -> Setup:
    """Returns the setup of a call's run; nothing runs yet.

    Args:
        c: the components.
        call: the call.
        size: height and width of the images in pixels.
        from_image: see `make_schedule`.
        strength: see `make_schedule`.

    Raises:
        ValueError: there is no prompt, the images exceed the memory, no rows are left, the sampler
            is for other networks, or seeds or adapters are not as many as images or prompts.
    """
    prompts = count_prompts(call)
    images = prompts * (call.num_images_per_prompt or 1)
    check_frames(c, call)
    check_memory(c, images, *size, frames=call.num_frames)
    return Setup(
        c,
        call,
        prompts=prompts,
        images=images,
        size=size,
        shape=c.latents.shape(*size, call.num_frames),
        schedule=make_schedule(c, call, size, from_image=from_image, strength=strength),
        noise=_noise(call, images),
        adapters=None if call.adapters is None else call_adapters(c, call, prompts),
    )


def _noise(call: Call, images: int) -> Noise:
    """Returns the source of random numbers for the images of a call."""
    own = noise_source(call.noise, call.seed, images, call.generators, call.keys)
    if call.turned_noise is None:
        return own
    seed, strength = call.turned_noise
    other = noise_source(call.noise, seed, images)
    assert not isinstance(own, VariedNoise)
    assert not isinstance(other, VariedNoise)
    return VariedNoise(own, other, strength)


def count_images(call: Call) -> int:
    """Returns the number of images that the call generates."""
    return count_prompts(call) * (call.num_images_per_prompt or 1)


def image_size(c: Components, call: Call) -> tuple[int, int]:
    """Returns height and width in pixels, by default those of the family, see `default_size`.

    Raises:
        ValueError: one is not a multiple of the autoencoder's factor, or of a token's size.
    """
    factor = c.latents.multiple
    size = call.height or 0, call.width or 0
    if not all(size):
        own = c.family.default_size
        height, width = c.default_size if own is None else own(c, call)
        size = call.height or height, call.width or width
    for name, value in zip(("height", "width"), size):
        if value < factor or value % factor:
            low = max(value // factor, 1) * factor
            raise ValueError(
                f"{name} must be divisible by {factor} (got {value}); use {low} or {low + factor}"
            )
    return size


def check_frames(c: Components, call: Call) -> None:
    """Raises ValueError where latents cannot be of the call's number of frames."""
    frames, step = call.num_frames, c.latents.frames
    if frames is not None and step and frames % step != 1 % step:
        low = max((frames - 1) // step, 0) * step + 1
        name = "num_frames" if call.video is None else "the number of frames of video"
        raise ValueError(
            f"{name} must be one more than a multiple of {step} (got {frames}); use {low} or "
            f"{low + step}"
        )


def check_memory(
    c: Components, b: int, height: int, width: int, *, frames: int | None = None
) -> None:
    """Raises ValueError where b images, or videos, exceed the machine's memory; checks CPUs only.

    A call that is only traced may be for another machine, and is not refused.
    """
    if jax.default_backend() != "cpu" or (total := host_memory()) is None or is_traced(c.params):
        return
    # The decoder's last level, its input and output in float32: a lower bound. Videos are decoded
    # in chunks, and then are there whole.
    network = getattr(c.models.get(c.autoencoder_name or ""), "network", None)
    config = getattr(network, "config", None)
    channels = getattr(config, "block_out_channels", (64,))[0]
    decoded = min(frames or 1, c.latents.frames or 1) * channels * 8
    needed = b * height * width * (decoded + (frames or 0) * 12)
    if needed > total:
        what = f"{b} images" if frames is None else f"{b} videos of {frames} frames"
        raise ValueError(
            f"{what} of {height}x{width} need more than {needed / 1e9:.0f} GB of memory at "
            f"once, and this machine has {total / 1e9:.0f} GB; draw fewer or smaller ones at a time"
        )


def make_schedule(
    c: Components,
    call: Call,
    size: tuple[int, int],
    *,
    from_image: bool = False,
    strength: float = 1.0,
) -> Schedule:
    """Returns the rows of a call's run, cut by strength, denoising_start and denoising_end.

    Args:
        c: the components.
        call: the call.
        size: height and width of the image in pixels, on which some families' noise levels depend.
        from_image: whether the run starts from an image, and so at the row that the strength gives.
        strength: the scheduler's own strength, which consistency models use.

    Raises:
        ValueError: no rows are left, or the sampler is for networks of another kind.
    """
    scheduler = c.fitting_scheduler
    custom = call.timesteps is not None or call.sigmas is not None
    options: dict[str, Any] = {
        "steps": None if custom else call.num_inference_steps,
        "timesteps": None if call.timesteps is None else tuple(call.timesteps),
        "sigmas": None if call.sigmas is None else tuple(call.sigmas),
        "eta": call.eta or 0.0,
        "original_inference_steps": call.original_inference_steps,
        "strength": strength,
        "use_clipped_model_output": bool(call.use_clipped_model_output),
    }
    if c.family.schedule_options is not None:
        options |= c.family.schedule_options(c, call, size)
    last = call.denoising_end or 0.0
    if not from_image and not 0 < last < 1:
        return compute_schedule(scheduler, **options)
    whole = compute_schedule(scheduler, uncut=True, **options)
    begin, end = begin_row(c, call, whole) if from_image else 0, len(whole)
    if 0 < last < 1:
        cutoff = _cutoff(c, last)
        end = begin + int((whole.timesteps[begin:] >= cutoff).sum())
    if begin >= end:
        raise ValueError(_nothing_left(call, from_image=from_image))
    if (begin, end) == (0, len(whole)):
        return compute_schedule(scheduler, **options)
    return compute_schedule(scheduler, begin=begin, end=end, **options)


def begin_row(c: Components, call: Call, whole: Schedule) -> int:
    """Returns the row at which a run that starts from an image begins.

    Upstream: get_timesteps of diffusers' image-to-image pipelines.
    """
    start = call.denoising_start
    if start is not None and 0 < start < 1:
        left = int((whole.timesteps < _cutoff(c, start)).sum())
        # A step of two rows is not cut in the middle.
        left += whole.order == 2 and left % 2 == 0
        return len(whole) - left
    given = call.timesteps or call.sigmas
    steps = (call.num_inference_steps if given is None else len(given)) or 0
    return c.family.start.first_step(steps, call.strength) * whole.order


def _nothing_left(call: Call, *, from_image: bool) -> str:
    """Says which of the call's arguments leave no step, naming those that it has."""
    given: dict[str, Any] = {"num_inference_steps": call.num_inference_steps}
    given |= {name: getattr(call, name) for name in ("timesteps", "sigmas")}
    starts = call.denoising_start is not None and 0 < call.denoising_start < 1
    if from_image and not starts:
        given["strength"] = call.strength
    given |= {name: getattr(call, name) for name in ("denoising_start", "denoising_end")}
    if call.timesteps or call.sigmas:
        given.pop("num_inference_steps")
    steps, *parts = (f"{name}={value}" for name, value in given.items() if value is not None)
    return (
        f"nothing is left of {steps} with {' and '.join(parts)}; take more steps or a larger part "
        "of them"
    )


def _cutoff(c: Components, fraction: float) -> int:
    total = c.scheduler.num_train_timesteps
    return round(total - fraction * total)


def pixel_range(c: Components) -> tuple[int, int] | None:
    """Returns the pixels between which a model generates well: a quarter to four times its own.

    None for networks without a size of their own, which were trained at many.
    """
    network = c.models[c.denoiser.components[0]]
    if getattr(network.config, "sample_size", None) is None:
        return None
    height, width = c.default_size
    return height * width // 4 + 1, height * width * 4 - 1


def size_warning(c: Components, height: int | None, width: int | None) -> str | None:
    """Returns a sentence about a size at which the model generates poor images, or None."""
    bounds, own = pixel_range(c), c.default_size
    height, width = height or own[0], width or own[1]
    if bounds is None or bounds[0] <= height * width <= bounds[1]:
        return None
    return (
        f"the model was trained on images of {own[1]}x{own[0]}, and those of {width}x{height} may "
        "be poor; choose a width and a height nearer to its own"
    )


def pixel_size(c: Components, pixels: np.ndarray) -> tuple[int, int]:
    """Returns height and width in pixels of images, or of the images that latents represent."""
    _, height, width, _ = pixels.shape
    factor = c.latents.factor if are_latents(pixels) else 1
    return height * factor, width * factor


def are_latents(pixels: np.ndarray) -> bool:
    """Returns whether the result of `to_pixels` is latents instead of images."""
    return pixels.shape[-1] != 3


def require_channels(c: Components, expected: int, task: str) -> None:
    """Raises ValueError unless the denoiser has the input channels that the task feeds."""
    actual = c.denoiser.in_channels
    if actual == expected:
        return
    latent = c.latents.channels
    made_for = {
        latent: "text to image",
        2 * latent + 1: "inpainting",
        2 * latent: "InstructPix2Pix",
    }
    hint = f"; it is made for {made_for[actual]}" if actual in made_for else ""
    name = c.denoiser.components[0]
    raise ValueError(f"{task} needs a {name} with {expected} input channels (got {actual}){hint}")
