"""Tasks, which turn the arguments of a call into a plan.

They use the families of checkpoints only through `Components`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from diffusax.images.pictures import to_pixels
from diffusax.models.adapters.freeu import freeu_rows
from diffusax.pipelines.components.adapters import CallAdapters, call_adapters
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan import guidance
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.plan.plan import Conditions, Inpainting, Plan, PreparedRun, StepInputs
from diffusax.pipelines.run import programs
from diffusax.pipelines.run.images import check_latents, encode_pixels
from diffusax.pipelines.tasks.composed_prompts import (
    compose,
    embed_composition,
    later_conditions,
    with_equal_sizes,
)
from diffusax.pipelines.tasks.image_prompts import image_prompts
from diffusax.pipelines.tasks.prompts import (
    count_prompts,
    embed_prompts,
    prompt_for_each_image,
)
from diffusax.pipelines.tasks.references import with_references
from diffusax.pipelines.tasks.schedules import make_schedule
from diffusax.pipelines.tasks.start import (
    are_latents,
    count_images,
    image_size,
    pixel_size,
    require_channels,
)
from diffusax.runtime.random.noise import Noise, TorchNoise, noise_source
from diffusax.samplers import Schedule

_NOT_SAMPLED = ("AutoencoderTiny",)
"""The autoencoders that encode to latents directly, instead of to a distribution of them."""

Task = Callable[[Components, Call], PreparedRun]


def text_to_image(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that generates images from prompts, and from images to look at, if any."""
    b, height, width = count_images(call), *image_size(c, call)
    shape = c.latents.shape(height, width)
    require_channels(c, shape[-1], "text to image")
    schedule = make_schedule(c, call, (height, width))
    noise = noise_source(call.noise, call.seed, b, call.generators)
    x = pure_noise(c, call, noise, schedule, b, shape)
    run = prepare_run(c, call, schedule, noise, x, size=(height, width))
    return with_references(c, call, run)


def image_to_image(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that starts from given images, noised to the level that the strength gives.

    Source: Meng et al. 2022, SDEdit.
    """
    return _draw_over(c, call, from_image=True)


def consistency_image_to_image(c: Components, call: Call) -> PreparedRun:
    """Prepares an image-to-image run of a consistency model.

    All steps are made, at noise levels below the one that the strength gives.
    """
    return _draw_over(c, call, strength=call.strength)


def _draw_over(c: Components, call: Call, **start: Any) -> PreparedRun:
    """Prepares a run that starts from images. start: options of `make_schedule`."""
    call = prompt_for_each_image(call)
    b = count_images(call)
    call = c.family.resize(c, call, image_size)
    pixels = read_pixels(c, call, call.height, call.width)
    size = pixel_size(c, pixels)
    schedule = make_schedule(c, call, size, **start)
    noise = noise_source(call.noise, call.seed, b, call.generators)
    shape = c.latents.shape(*size)
    require_channels(c, shape[-1], "image to image")
    if call.latents is not None:
        x = check_latents(c.latents, call.latents, b, *shape[:2])
    else:
        x = encode(c, noise, pixels, b, normalize=c.latents.normalize, per_seed=True)
        if call.denoising_start is None:
            x = noised(schedule, x, noise.draw("start", shape))
    return prepare_run(c, call, schedule, noise, x, size=size)


def instruct(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that edits images as the prompt says (Brooks et al. 2023, InstructPix2Pix)."""
    call = prompt_for_each_image(call)
    b = count_images(call)
    call = c.family.edits.resize(c, call, image_size)
    pixels = read_pixels(c, call, call.height, call.width)
    size = pixel_size(c, pixels)
    schedule = make_schedule(c, call, size)
    noise = noise_source(call.noise, call.seed, b, call.generators)
    shape = c.latents.shape(*size)
    require_channels(c, 2 * shape[-1], "InstructPix2Pix")
    image = encode(c, None, pixels, b, scale=c.options.get("is_cosxl_edit", False))
    x = pure_noise(c, call, noise, schedule, b, shape)

    weights: tuple[float, ...] = ()
    scale = 1.0 if call.guidance_scale is None else call.guidance_scale
    if scale > 1 and call.image_guidance_scale >= 1:
        weights = guidance.instruct(scale, call.image_guidance_scale)
    order = (0, 0, None) if weights else (0,)
    (channels,) = programs.stack_branches(((image,),), order=order, repeats=1)
    return prepare_run(c, call, schedule, noise, x, size=size, channels=channels, weights=weights)


def prepare_run(
    c: Components,
    call: Call,
    schedule: Schedule,
    noise: Noise,
    latents: Any,
    *,
    size: tuple[int, int],
    channels: Any = None,
    inpainting: Inpainting | None = None,
    weights: tuple[float, ...] | None = None,
    scales: np.ndarray | None = None,
) -> PreparedRun:
    """Completes a run: encodes the prompts, and computes the inputs of each step.

    Args:
        c: the components.
        call: the call.
        schedule: the rows of the run.
        noise: the source of random numbers.
        latents: the latents at the start of the run, b h w c.
        size: height and width in pixels.
        channels: see `Conditions`.
        inpainting: see `Plan`.
        weights: the weights of guidance; by default those of classifier-free guidance, where the
            call asks for it.
        scales: b, the guidance scale of each image; by default the call's.
    """
    scale = 1.0 if call.guidance_scale is None else call.guidance_scale
    texts, reweigh = compose(c, call, schedule), None
    if texts is not None and not texts.is_plain:
        _check_joined(call, weights)
        weights, reweigh = texts.guidance(max(scale, 1.0)), texts.guidance
    if weights is None:
        weights = c.family.guidance.weights(c, call)
    if texts is None:
        prompts = [embed_prompts(c, call, branches=1 + len(weights))]
    else:
        prompts = embed_composition(c, call, texts, branches=1 + len(weights))
    prompt = prompts[0]
    adapters = call_adapters(c, call, count_prompts(call))
    if scales is None:
        scales = np.full(prompt.context.shape[0], scale, np.float32)
    every = [c.family.conditions(c, call, one, size, scales) for one in prompts]
    if reweigh is not None:
        every = [with_equal_sizes(one, len(weights)) for one in every]
    conditions = every[0]
    images = image_prompts(c, call, branches=1 + len(weights), size=size)
    conditions = conditions._replace(channels=channels, images=images)
    table = programs.device_table(schedule)
    height = len(table.timestep)
    corrected = call.cfg_normalization or call.guidance_rescale
    inputs = StepInputs(
        guidance.call_rows(call, weights, schedule.timesteps, height),
        np.full(height, corrected, np.float32),
        freeu=None if c.freeu is None else freeu_rows(c.freeu, height),
        adapters=None if adapters is None else _adapter_rows(adapters, call, height),
    )
    plan = Plan(latents, conditions, table, inputs, noise.keys, inpainting, _rule(c, call, weights))
    layers = c.ip_adapters.placed(c).layers if images else ()
    run = PreparedRun(plan, schedule, noise, weights, c.decoding(), ip_adapters=layers)
    if texts is not None:
        later = later_conditions(texts, every)
        run = dataclasses.replace(run, later=later, reweigh=reweigh)
    if adapters is None:
        return run
    return dataclasses.replace(run, loras=adapters.loras)


def _check_joined(call: Call, weights: tuple[float, ...] | None) -> None:
    """Raises ValueError for a call whose guidance has no branches for prompts that AND joins."""
    for name, given in (
        ("guide", call.guide is not None),
        ("image_guidance_scale", weights is not None),
        ("ip_adapter_image", call.ip_adapter_image is not None),
        ("ip_adapter_image_embeds", call.ip_adapter_image_embeds is not None),
    ):
        if given:
            raise ValueError(
                f"prompt has AND or a weight of its own, which cannot be together with {name}; "
                "leave one of them out"
            )


def _rule(c: Components, call: Call, weights: tuple[float, ...]) -> Any:
    """Returns the call's rule of guidance, see `guidance.as_rule`. weights: those of guidance.

    Raises:
        ValueError: it is no rule, there are no branches to guide, or cfg_normalization belongs to
            another rule.
    """
    if call.guide is not None:
        c.family.guidance.check_rule(c, weights)
    if call.guide is not None and call.cfg_normalization:
        raise ValueError("only one of guide and cfg_normalization can be given")
    return guidance.as_rule(call.guide)


def _adapter_rows(adapters: CallAdapters, call: Call, height: int) -> np.ndarray:
    """Returns the weights of adapters in each row and image, height b a."""
    images = np.repeat(adapters.weights, call.num_images_per_prompt or 1, axis=0)
    return np.tile(images, (height, 1, 1))


def most_branches(c: Components, task: Task) -> int:
    """Returns the most branches of guidance that an image of a task may have."""
    return 3 if task is instruct else c.family.guidance.branches(c)


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
    """Encodes images to latents of b images, b h w z; latents in their place are only repeated, and
    normalised by the statistics of an autoencoder that has some.

    noise: the source of the noise that samples the autoencoder's distribution; None takes its mode.
    purpose: the name of that noise. per_seed: whether, with a seed for each image, fewer images
    than b may be repeated before they are sampled.
    """
    check_count(pixels, b, "image")
    channels = c.latents.channels
    if are_latents(pixels):
        return programs.tile(programs.normalized(c.autoencoder, c.autoencoder_params, pixels), b)
    eps = None
    if noise is not None and c.autoencoder.class_name not in _NOT_SAMPLED:
        many = per_seed and isinstance(noise, TorchNoise) and len(noise.generators) > 1
        height, width = (n // c.latents.factor for n in pixels.shape[1:3])
        draw = functools.partial(noise.draw, purpose, (height, width, channels))
        eps = c.family.encoding(draw, len(pixels), b if many else len(pixels))
    options = {"upcast": c.latents.upcast, "scale": scale, "normalize": normalize}
    return programs.tile(encode_pixels(c, pixels, eps, **options), b)


def pure_noise(
    c: Components,
    call: Call,
    noise: Noise,
    schedule: Schedule,
    b: int,
    shape: tuple[int, int, int],
) -> Any:
    """Returns the latents at the start of a run from pure noise, given or drawn, b h w c."""
    given = call.latents
    x = (
        noise.draw("start", shape)
        if given is None
        else check_latents(c.latents, given, b, *shape[:2])
    )
    return programs.begin(x, np.float32(schedule.init_noise_sigma), None, None)


def noised(schedule: Schedule, clean: Any, noise: Any) -> Any:
    """Returns the latents at the start of a run that begins with noised latents of an image."""
    signal, level = schedule.levels[0].astype(np.float32)
    return programs.begin(noise, level, clean, signal)


def read_pixels(
    c: Components, call: Call, height: int | None, width: int | None, **crop: Any
) -> Any:
    """Returns the call's images, or latents in their place, see `to_pixels`."""
    channels = c.latents.channels
    options: dict[str, Any] = {"factor": c.latents.multiple, "latent_channels": channels, **crop}
    return to_pixels(required(call, "image"), height, width, **options)


def required(call: Call, name: str) -> Any:
    """Returns an argument of the call, which must not be None."""
    value = getattr(call, name)
    if value is None:
        raise ValueError(f"{name} must be given")
    return value


def check_count(pictures: Any, b: int, name: str) -> None:
    """Raises ValueError unless images can be repeated to b of them."""
    if len(pictures) > b or b % len(pictures):
        n = len(pictures)
        raise ValueError(
            f"{name} has {n} images for {b} to generate; give one image, or a prompt for each: "
            f"prompt=[prompt] * {n}"
        )


def unconditional(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that generates images from noise alone (Ho et al. 2020, algorithm 2).

    Raises:
        ValueError: the call has adapters, or its steps or seeds cannot be.
    """
    if call.adapters is not None:
        raise ValueError(
            f"adapters must be left out with {c.family.name}, whose calls take none; call "
            "fuse_lora, which merges them into the parameters, or disable_lora"
        )
    size = c.default_size
    schedule = make_schedule(c, call, size)
    noise = noise_source(call.noise, call.seed, call.batch_size, call.generators)
    start = noise.draw("start", c.latents.shape(*size))
    x = programs.begin(start, np.float32(schedule.init_noise_sigma), None, None)
    table = programs.device_table(schedule)
    height = len(table.timestep)
    inputs = StepInputs(guidance.per_row((), len(schedule), height), np.zeros(height, np.float32))
    plan = Plan(x, Conditions(None), table, inputs, noise.keys)
    return PreparedRun(plan, schedule, noise, (), c.decoding())
