"""Tasks of FLUX.1 with images as inputs of their own: Fill, Kontext and ControlNets."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusax.boundary.tensors import as_numpy, is_tensor
from diffusax.images.masks import to_mask
from diffusax.images.references import KONTEXT_SIZES
from diffusax.models.network import Network
from diffusax.models.transformers.flux import PATCH
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.families.flux import control_conditions
from diffusax.pipelines.plan.arguments import Call, as_list, match_length
from diffusax.pipelines.plan.plan import PreparedRun
from diffusax.pipelines.run import programs
from diffusax.pipelines.run.images import check_latents
from diffusax.pipelines.tasks.references import looking_at
from diffusax.pipelines.tasks.setup import are_latents, image_size, require_channels, set_up
from diffusax.pipelines.tasks.steering import control_weights, repeat_for_prompts
from diffusax.pipelines.tasks.tasks import (
    as_pixels,
    encode,
    noised,
    prepare_run,
    pure_noise,
    read_pixels,
    required,
)

_NETS = "ControlNets"


def fill(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that generates the white part of a mask, which the network sees.

    Its input is latents, those of the image without that part, and the mask, of which the pixels of
    a latent are channels (pipeline_flux_fill.py, prepare_mask_latents).
    """
    factor = c.latents.factor
    require_channels(c, 2 * c.latents.channels + factor**2, "filling")
    if call.masked_image_latents is not None:
        raise ValueError(
            "masked_image_latents must be None: give image and mask_image, which are encoded"
        )
    height, width = image_size(c, call)
    setup = set_up(c, call, (height, width), from_image=True)
    b, shape, noise = setup.images, setup.shape, setup.noise
    pixels = read_pixels(c, call, height, width)
    mask = to_mask(required(call, "mask_image"), height, width, factor=c.latents.multiple)
    if are_latents(pixels):
        raise ValueError("image must be pixels, not latents, as its white part is left out")
    if call.latents is None:
        clean = encode(c, noise, pixels, b)
        x = noised(setup.schedule, clean, noise.draw("start", shape))
    else:
        x = check_latents(c.latents, call.latents, b, *shape[:2])
    masked = encode(c, noise, pixels * (1 - mask), b, purpose="masked")
    cut = mask.reshape(len(mask), shape[0], factor, shape[1], factor)
    folded = cut.transpose(0, 1, 3, 2, 4).reshape(len(mask), *shape[:2], factor**2)
    folded = np.tile(folded, (b // len(mask), 1, 1, 1))
    channels = programs.join_channels(masked, folded)
    return prepare_run(setup, x, channels=channels)


def kontext(c: Components, call: Call) -> PreparedRun:
    """Prepares a run whose network looks at the tokens of an image, if one is given.

    Height and width give the shape of the result, and max_area its pixels. Source: Labs et al.
    2025, FLUX.1 Kontext.
    """
    require_channels(c, c.latents.channels, "Kontext")
    call = _with_area(c, call)
    setup = set_up(c, call, image_size(c, call))
    references = []
    if call.image is not None:
        references = [encode(c, None, _reference(c, call), setup.images)]
    return looking_at(prepare_run(setup, pure_noise(setup)), references)


def control(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that ControlNets steer, which read latents of their images, or pixels.

    One that knows several kinds of images sees as many as there are entries in control_mode.
    """
    require_channels(c, c.latents.channels, "text to image")
    nets, hints = _net_of_each_image(c, call), []
    images = _images(call, len(nets))
    call = _with_size_of_tensors(call, images)
    height, width = image_size(c, call)
    setup = set_up(c, call, (height, width))
    b = setup.images
    for i, given in enumerate(images):
        if _is_raw(given):
            pixels = as_numpy(given).astype(np.float32).transpose(0, 2, 3, 1)
        else:
            pixels = as_pixels(c, given, height, width)
        pixels = repeat_for_prompts(pixels, b, call.num_images_per_prompt or 1)
        if nets[i].config.conditioning_embedding_channels is None:
            pixels = encode(c, setup.noise, pixels[:, 0], b, purpose="control")[:, None]
        hints.append(pixels)
    run = prepare_run(setup, pure_noise(setup))
    plan = run.plan
    conditions = control_conditions(plan.conditions, tuple(hints), _modes(nets, call))
    inputs = plan.step_inputs._replace(control=control_weights(nets, call, run))
    plan = plan._replace(conditions=conditions, step_inputs=inputs)
    return dataclasses.replace(run, plan=plan)


def _net_of_each_image(c: Components, call: Call) -> tuple[Network, ...]:
    """Returns the ControlNet that sees each image: the only one where control_mode has several."""
    nets: tuple[Network, ...] = c.denoiser.controlnets
    return nets * len(as_list(call.control_mode)) if len(nets) == 1 else nets


def _images(call: Call, count: int) -> list[Any]:
    """Returns the images for the ControlNets."""
    given = required(call, "control_image")
    return [given] if count == 1 else match_length("control_image", as_list(given), count, _NETS)


def _is_raw(image: Any) -> bool:
    """Returns whether an image is a batch that is taken as it is, without scaling its pixels.

    Upstream: prepare_image of pipeline_flux_controlnet.py, which prepares all but tensors.
    """
    return is_tensor(image) and image.ndim == 4 and image.shape[1] == 3


def _with_size_of_tensors(call: Call, images: Sequence[Any]) -> Call:
    """Returns the call with the height and width of the last image that is taken as it is."""
    sizes = [tuple(image.shape[2:]) for image in images if _is_raw(image)]
    return dataclasses.replace(call, height=sizes[-1][0], width=sizes[-1][1]) if sizes else call


def _modes(nets: Sequence[Network], call: Call) -> list[int]:
    """Returns the kind of each image. nets: the ControlNets that see them.

    Raises:
        ValueError: one is missing or unknown.
    """
    modes = match_length("control_mode", as_list(call.control_mode), len(nets), _NETS)
    for mode, net in zip(modes, nets):
        kinds = net.config.num_mode
        if kinds is not None and (mode is None or mode >= kinds):
            raise ValueError(
                f"control_mode must be from 0 to {kinds - 1} for this ControlNet (got {mode})"
            )
    return [mode or 0 for mode in modes]


def _with_area(c: Components, call: Call) -> Call:
    """Returns the call with height and width of max_area pixels, in the shape of the call's own."""
    height, width = call.height or c.default_size[0], call.width or c.default_size[1]
    sides = {"height": height / width, "width": width / height}
    multiple = c.latents.multiple
    found: dict[str, Any] = {
        name: round((call.max_area * ratio) ** 0.5) // multiple * multiple
        for name, ratio in sides.items()
    }
    return dataclasses.replace(call, **found)


def _reference(c: Components, call: Call) -> np.ndarray:
    """Returns the image to look at, in its own size or the most alike of those of the training.

    Raises:
        ValueError: latents in its place are no patches.
    """
    pixels = np.asarray(read_pixels(c, call, None, None))
    rows, columns = pixels.shape[1:3]
    if are_latents(pixels) and (rows % PATCH or columns % PATCH):
        raise ValueError(
            f"image must be latents of an even height and width (got {rows}x{columns})"
        )
    if are_latents(pixels) or not call.auto_resize:
        return pixels
    height, width = pixels.shape[1:3]
    ratio, multiple = width / height, c.latents.multiple
    best = min(KONTEXT_SIZES, key=lambda size: (abs(ratio - size[1] / size[0]), size[1]))
    return np.asarray(read_pixels(c, call, *(side // multiple * multiple for side in best)))
