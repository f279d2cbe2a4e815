"""Tasks, which turn the arguments of a call into a plan.

They use the families of checkpoints only through `Components`.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from diffusax.images.conversion import to_pixels
from diffusax.models.adapters.freeu import freeu_rows
from diffusax.models.hooks import HookFunctions
from diffusax.models.network import hooks_for
from diffusax.pipelines.components.adapters import CallAdapters
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan import guidance
from diffusax.pipelines.plan.arguments import Call, as_list
from diffusax.pipelines.plan.plan import (
    Conditions,
    Inpainting,
    Later,
    Plan,
    PreparedRun,
    StepInputs,
)
from diffusax.pipelines.run import autoencoding, programs
from diffusax.pipelines.run.images import check_latents, encode_pixels
from diffusax.pipelines.tasks.composed_prompts import (
    Composition,
    compose,
    embed_composition,
    later_conditions,
    with_equal_sizes,
)
from diffusax.pipelines.tasks.image_prompts import image_prompts
from diffusax.pipelines.tasks.prompts import embed_prompts, prompt_for_each_image
from diffusax.pipelines.tasks.references import sized_by_first, with_references
from diffusax.pipelines.tasks.setup import (
    Setup,
    are_latents,
    image_size,
    make_schedule,
    pixel_size,
    require_channels,
    set_up,
)
from diffusax.runtime.random.noise import Noise, TorchNoise, noise_source
from diffusax.samplers import Schedule

_NOT_SAMPLED = ("AutoencoderTiny",)
"""The autoencoders that encode to latents directly, instead of to a distribution of them."""

Task = Callable[[Components, Call], PreparedRun]


def text_to_image(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that generates images from prompts, and from images to look at, if any."""
    require_channels(c, c.latents.channels, "text to image")
    setup = set_up(c, call, image_size(c, call))
    run = prepare_run(setup, pure_noise(setup))
    if call.image is not None:
        run = with_references(c, call, run)
    return run


def edit(c: Components, call: Call) -> PreparedRun:
    """Prepares a run of `text_to_image` in the size of the first image to look at, if any.

    Raises:
        ValueError: an image cannot be read.
    """
    return text_to_image(c, sized_by_first(c, call))


def image_to_image(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that starts from given images, noised to the level that the strength gives.

    Source: Meng et al. 2022, SDEdit.
    """
    return _start_from_images(c, call, from_image=True)


def consistency_image_to_image(c: Components, call: Call) -> PreparedRun:
    """Prepares an image-to-image run of a consistency model.

    All steps are made, at noise levels below the one that the strength gives.
    """
    return _start_from_images(c, call, strength=call.strength)


def _start_from_images(c: Components, call: Call, **rows: Any) -> PreparedRun:
    """Prepares a run that starts from images. rows: options of `make_schedule`."""
    require_channels(c, c.latents.channels, "image to image")
    call = prompt_for_each_image(call)
    call = c.family.resize(c, call, image_size)
    pixels = read_pixels(c, call, call.height, call.width)
    setup = set_up(c, call, pixel_size(c, pixels), **rows)
    if call.latents is not None:
        x = check_latents(c.latents, call.latents, setup.images, *setup.shape[:2])
    else:
        options = {"normalize": c.latents.normalize, "per_seed": True}
        x = encode(c, setup.noise, pixels, setup.images, **options)
        if call.denoising_start is None:
            x = noised(setup.schedule, x, setup.noise.draw("start", setup.shape))
    return prepare_run(setup, x)


def instruct(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that edits images as the prompt says (Brooks et al. 2023, InstructPix2Pix)."""
    require_channels(c, 2 * c.latents.channels, "InstructPix2Pix")
    call = prompt_for_each_image(call)
    call = c.family.edits.resize(c, call, image_size)
    pixels = read_pixels(c, call, call.height, call.width)
    setup = set_up(c, call, pixel_size(c, pixels))
    is_edit = c.options.get("is_cosxl_edit", False)
    image = encode(c, None, pixels, setup.images, scale=is_edit)
    x = pure_noise(setup)

    weights: tuple[float, ...] = ()
    scale = _scale(call)
    if scale > 1 and call.image_guidance_scale >= 1:
        weights = guidance.instruct(scale, call.image_guidance_scale)
    order = (0, 0, None) if weights else (0,)
    (channels,) = programs.stack_branches(((image,),), order=order, repeats=1)
    return prepare_run(setup, x, channels=channels, weights=weights)


def prepare_run(
    setup: Setup,
    latents: Any,
    *,
    channels: Any = None,
    inpainting: Inpainting | None = None,
    weights: tuple[float, ...] | None = None,
) -> PreparedRun:
    """Completes a run: encodes the prompts, and computes the inputs of each step.

    Args:
        setup: the facts of the run.
        latents: the latents at the start of the run, b h w c.
        channels: see `Conditions`.
        inpainting: see `Plan`.
        weights: the weights of guidance; by default those of classifier-free guidance, where the
            call asks for it.
    """
    c, call, schedule = setup.c, setup.call, setup.schedule
    composition = compose(c, call, len(schedule)) if call.prompt_weighting else None
    joined = None if composition is None or composition.is_plain else composition
    if joined is not None:
        _check_joined(call, weights)
        weights = joined.guidance(max(_scale(call), 1.0))
    elif weights is None:
        weights = c.family.guidance.weights(c, call)
    conditions, later = _conditions(setup, composition, 1 + len(weights))
    table = programs.device_table(schedule)
    plan = Plan(
        latents,
        conditions._replace(channels=channels),
        table,
        _step_inputs(setup, weights, len(table.timestep)),
        setup.noise.keys,
        inpainting,
        None if call.guide is None else _rule(c, call, weights),
        c.step_cache,
        hooks=_hooks(c, call),
    )
    return PreparedRun(
        plan,
        schedule,
        setup.noise,
        weights,
        c.decoding,
        loras={} if setup.adapters is None else setup.adapters.loras,
        ip_adapters=c.ip_adapters.placed(c).layers if conditions.images else (),
        later=later,
        reweigh=None if joined is None else joined.guidance,
    )


def _conditions(
    setup: Setup, composition: Composition | None, branches: int
) -> tuple[Conditions, tuple[Later, ...]]:
    """Encodes the prompts and image prompts to the conditions of a run, and those of later rows.

    composition: the prompts, where they are in A1111's syntax. branches: those of guidance.
    """
    c, call = setup.c, setup.call
    scales = np.full(setup.images, _scale(call), np.float32)
    if composition is None:
        own: Any = {"branches": branches, "adapters": setup.adapters}
        prompts = [embed_prompts(c, call, setup.prompts, **own)]
    else:
        prompts = embed_composition(setup, composition, branches)
    # One entry, unless the prompt changes from step to step: the others then begin at later rows.
    found = [c.family.conditions(c, call, prompt, setup.size, scales) for prompt in prompts]
    if composition is not None and not composition.is_plain:
        found = [with_equal_sizes(conditions, branches - 1) for conditions in found]
    first = found[0]
    has_images = call.ip_adapter_image is not None or call.ip_adapter_image_embeds is not None
    if has_images or call.ip_adapter_masks is not None:
        first = first._replace(images=image_prompts(setup, branches))
    return first, () if composition is None else later_conditions(composition, found)


def _step_inputs(setup: Setup, weights: tuple[float, ...], padded: int) -> StepInputs:
    """Returns the inputs of each row. weights: those of guidance. padded: the table's rows."""
    c, call, adapters = setup.c, setup.call, setup.adapters
    rescale = call.cfg_normalization or call.guidance_rescale
    times = setup.schedule.timesteps
    return StepInputs(
        c.family.guidance.by_row(c, call, weights, times, padded),
        np.full(padded, rescale, np.float32),
        freeu=None if c.freeu is None else freeu_rows(c.freeu, padded),
        adapters=None if adapters is None else _adapter_rows(adapters, call, padded),
        target=c.denoiser.targets(times, padded),
    )


def _scale(call: Call) -> float:
    return 1.0 if call.guidance_scale is None else call.guidance_scale


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
    """Returns the rule of guidance that a call brings, see `guidance.as_rule`.

    weights: those of guidance.

    Raises:
        ValueError: it is no rule, there are no branches to guide, or cfg_normalization belongs to
            another rule.
    """
    c.family.guidance.check_rule(c, weights)
    if call.cfg_normalization:
        raise ValueError("only one of guide and cfg_normalization can be given")
    return guidance.as_rule(call.guide)


def _hooks(c: Components, call: Call) -> HookFunctions | None:
    """Returns the hooks of a call, see `models.hooks.as_hooks`.

    Raises:
        ValueError: they cannot be, or not with the network or its cache of steps.
    """
    hooks = hooks_for(c.denoiser.network, call.hooks)
    if hooks is not None and c.step_cache is not None:
        raise ValueError("hooks need all layers of each step; call disable_cache first")
    return hooks


def _adapter_rows(adapters: CallAdapters, call: Call, padded: int) -> np.ndarray:
    """Returns the weights of adapters in each row, padded a, and image, padded b a.

    Images share them where the call's argument has one dictionary, whatever its weights are, so
    that other weights compile nothing.
    """
    if len(call.adapter_rows or as_list(call.adapters)) == 1:
        return np.tile(adapters.weights[0], (padded, 1))
    images = np.repeat(adapters.weights, call.num_images_per_prompt or 1, axis=0)
    return np.tile(images, (padded, 1, 1))


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
    """Encodes images to latents and repeats them to b, b h w z.

    Latents that are given in their place are only normalised, where the autoencoder has statistics,
    and repeated.

    noise: the source of the noise that samples the autoencoder's distribution; None takes its mode.
    purpose: the name of that noise. per_seed: whether, with a seed for each image, fewer images
    than b may be repeated before they are sampled.
    """
    check_count(pixels, b, "image")
    channels = c.latents.channels
    if are_latents(pixels):
        return programs.tile(
            autoencoding.normalized(c.autoencoder, c.autoencoder_params, pixels), b
        )
    eps = None
    if noise is not None and c.autoencoder.class_name not in _NOT_SAMPLED:
        many = per_seed and isinstance(noise, TorchNoise) and len(noise.generators) > 1
        height, width = (n // c.latents.factor for n in pixels.shape[1:3])
        draw = functools.partial(noise.draw, purpose, (height, width, channels))
        eps = c.family.encoding(draw, len(pixels), b if many else len(pixels))
    options = {"upcast": c.latents.upcast, "scale": scale, "normalize": normalize}
    return programs.tile(encode_pixels(c, pixels, eps, **options), b)


def pure_noise(setup: Setup) -> Any:
    """Returns the latents at the start of a run from pure noise, given or drawn, b ... c."""
    given = setup.call.latents
    if given is None:
        x = setup.noise.draw("start", setup.shape)
    else:
        x = check_latents(setup.c.latents, given, setup.images, *setup.shape[:-1])
    return programs.initial_latents(x, np.float32(setup.schedule.init_noise_sigma), None, None)


def noised(schedule: Schedule, clean: Any, noise: Any) -> Any:
    """Returns the latents at the start of a run that begins with noised latents of an image."""
    signal, level = schedule.levels[0].astype(np.float32)
    return programs.initial_latents(noise, level, clean, signal)


def read_pixels(
    c: Components, call: Call, height: int | None, width: int | None, **crop: Any
) -> Any:
    """Returns the call's images, or latents in their place, see `to_pixels`."""
    return as_pixels(c, required(call, "image"), height, width, **crop)


def as_pixels(
    c: Components, images: Any, height: int | None, width: int | None, **crop: Any
) -> Any:
    """Returns images of any kind, or latents in their place, see `to_pixels`."""
    channels = c.latents.channels
    options: dict[str, Any] = {"factor": c.latents.multiple, "latent_channels": channels, **crop}
    return to_pixels(images, height, width, **options)


def required(call: Call, name: str) -> Any:
    """Returns an argument of the call, which must not be None."""
    value = getattr(call, name)
    if value is None:
        raise ValueError(f"{name} must be given")
    return value


def check_count(images: Any, b: int, name: str) -> None:
    """Raises ValueError unless images can be repeated to b of them."""
    if len(images) > b or b % len(images):
        n = len(images)
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
    images = call.batch_size
    noise = noise_source(call.noise, call.seed, images, call.generators, call.keys)
    start = noise.draw("start", c.latents.shape(*size))
    x = programs.initial_latents(start, np.float32(schedule.init_noise_sigma), None, None)
    table = programs.device_table(schedule)
    padded = len(table.timestep)
    inputs = StepInputs(np.zeros((padded, 0), np.float32), np.zeros(padded, np.float32))
    plan = Plan(x, Conditions(None), table, inputs, noise.keys, hooks=_hooks(c, call))
    return PreparedRun(plan, schedule, noise, (), c.decoding)
