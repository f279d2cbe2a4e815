"""ControlNet (Zhang et al. 2023) as a change to the plan of any task."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusax.images.conversion import target_size, to_control
from diffusax.images.reading import load_image
from diffusax.models.network import Network
from diffusax.models.unet.controlnet import guess_scales
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call, as_list, match_length
from diffusax.pipelines.plan.plan import Decoding, PreparedRun
from diffusax.pipelines.tasks.inpainting import crop_options, inpaint
from diffusax.pipelines.tasks.prompts import prompt_for_each_image
from diffusax.pipelines.tasks.setup import count_images
from diffusax.pipelines.tasks.tasks import Task, image_to_image, text_to_image


def controlled(task: Task) -> Task:
    """Returns the task with the images in `control_image` added to its plan."""

    def with_control(c: Components, call: Call) -> PreparedRun:
        if task is text_to_image:
            # diffusers calls the ControlNet's image `image` where there is no other.
            call = dataclasses.replace(call, control_image=call.image, image=None)
        call = prompt_for_each_image(call)
        call = _with_size(task, c, call)
        images = control_images(c, call, cropped=task is inpaint)
        if task is text_to_image:
            height, width = images[0].shape[2:4]
            call = dataclasses.replace(call, height=height, width=width)
        run = task(c, call)
        plan = run.plan
        weights = control_weights(c.denoiser.controlnets, call, run)
        inputs = plan.step_inputs._replace(control=weights)
        conditions = plan.conditions._replace(control=images)
        return dataclasses.replace(
            run,
            plan=plan._replace(conditions=conditions, step_inputs=inputs),
            # pipeline_controlnet_inpaint_sd_xl.py of diffusers applies only the scaling_factor.
            decoding=_only_scaled(run) if task is inpaint else run.decoding,
            # Its pipelines with a ControlNet do not pass the image to the decoder either.
            decoder_condition=None,
        )

    with_control.__name__ = f"control_{task.__name__}"
    return with_control


control_text_to_image = controlled(text_to_image)
control_image_to_image = controlled(image_to_image)
control_inpaint = controlled(inpaint)


def control_images(c: Components, call: Call, *, cropped: bool) -> tuple[Any, ...]:
    """Returns the images of each ControlNet, one for each image of the call, b 1 H W 3 in [0, 1].

    Raises:
        ValueError: there are not as many as ControlNets, or as images.
    """
    nets = len(c.denoiser.controlnets)
    given = call.control_image
    if given is None:
        raise ValueError("an image for the ControlNet must be given")
    per_net = [given] if nets == 1 else as_list(given)
    if nets > 1 and per_net and all(isinstance(p, list) and len(p) == nets for p in per_net):
        per_net = [list(images) for images in zip(*per_net)]
    if len(per_net) != nets:
        raise ValueError(
            f"the control images must be a list with one entry for each of {nets} ControlNets "
            f"(got {len(per_net)})"
        )
    options: dict[str, Any] = {"factor": c.latents.factor}
    if cropped and call.padding_mask_crop is not None:
        options |= crop_options(call, call.height or 0, call.width or 0)
    b = count_images(call)
    arrays = [to_control(p, call.height, call.width, **options) for p in per_net]
    return tuple(repeat_for_prompts(array, b, call.num_images_per_prompt or 1) for array in arrays)


def control_weights(nets: Sequence[Network], call: Call, run: PreparedRun) -> np.ndarray:
    """Returns the scale of each residual, n m k r: see `StepInputs.control`.

    nets: the ControlNet of each image.

    Raises:
        ValueError: the scales or fractions are not as many as the ControlNets, or the start of an
            interval is not below its end.
    """
    k, n = len(run.weights) + 1, len(run.schedule)
    height = len(run.plan.step_inputs.rescale)
    # The residuals of a transformer's ControlNet all have one scale.
    residuals = len(nets[0].shapes.get("controlnet_down_blocks", ())) + 1
    pools = [getattr(net.config, "global_pool_conditions", False) for net in nets]
    weights = np.zeros((height, len(nets), k, residuals), np.float32)
    names = ("controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end")
    columns = [
        match_length(name, as_list(getattr(call, name)), len(nets), "ControlNets") for name in names
    ]
    rows = np.arange(n)
    for m, (scale, start, end) in enumerate(zip(*columns)):
        if start >= end:
            raise ValueError(
                f"control_guidance_start must be below control_guidance_end (got {start} and {end})"
            )
        active = (rows / n >= start) & ((rows + 1) / n <= end)
        weights[:n, m] = scale * active[:, None, None]
        if call.guess_mode and not pools[m]:
            weights[:, m] *= guess_scales(residuals)
        if call.guess_mode or pools[0]:
            # All prompts that AND joins see the image.
            weights[:, m, 1 if run.reweigh is None else k - 1 :] = 0
    return weights


def repeat_for_prompts(images: np.ndarray, b: int, per_prompt: int) -> np.ndarray:
    """Repeats one image for all, or one for each prompt for its images: n H W c -> b 1 H W c.

    Raises:
        ValueError: there are neither one nor as many as prompts.
    """
    copies = b if len(images) == 1 else per_prompt
    if len(images) * copies != b:
        raise ValueError(
            f"the control image has {len(images)} entries for {b // per_prompt} prompts; "
            "give one for all or one for each"
        )
    return np.repeat(images, copies, axis=0)[:, None]


def _with_size(task: Task, c: Components, call: Call) -> Call:
    """Returns the call with the size of the image to start from as the default, as in diffusers."""
    if task is text_to_image or call.image is None or (call.height and call.width):
        return call
    first = as_list(call.image)[0]
    if hasattr(first, "shape"):
        return call
    image = load_image(first)
    own = image.height, image.width
    height, width = target_size(own, call.height, call.width, c.latents.factor)
    return dataclasses.replace(call, height=height, width=width)


def adapter_text_to_image(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that generates images from prompts, steered by the adapters' images.

    Raises:
        ValueError: the images are missing, not as many as the adapters, or do not fit the prompts.
    """
    adapters = [c.networks[name] for name in c.of_role("t2i_adapter")]
    images = _adapter_images(c, call, adapters)
    height, width = images[0].shape[1:3]
    # SDXL's family has other sizes for a run that starts from an image; this one does not.
    call = dataclasses.replace(call, image=None, height=height, width=width)
    run = text_to_image(c, call)
    b, per_prompt = len(run.plan.latents), call.num_images_per_prompt or 1
    hints = tuple(repeat_for_prompts(own, b, per_prompt) for own in images)
    inputs = run.plan.step_inputs._replace(control=_scales(call, run, len(adapters)))
    conditions = run.plan.conditions._replace(control=hints)
    return dataclasses.replace(
        run,
        plan=run.plan._replace(conditions=conditions, step_inputs=inputs),
        # pipeline_stable_diffusion_xl_adapter.py of diffusers applies only the scaling_factor.
        decoding=_only_scaled(run),
    )


def _only_scaled(run: PreparedRun) -> Decoding:
    """Returns the options of the decoder without the statistics of the autoencoder's latents."""
    return dataclasses.replace(run.decoding, normalize=False)


def _adapter_images(c: Components, call: Call, adapters: list[Network]) -> list[np.ndarray]:
    """Returns the images of each adapter, n H W c in [0, 1], all of one size."""
    if call.image is None:
        raise ValueError("image must be given for the T2I-Adapter to read")
    given = as_list(call.image) if len(adapters) > 1 else [call.image]
    if len(given) != len(adapters):
        raise ValueError(
            f"image must be a list with one entry for each of {len(adapters)} T2I-Adapters "
            f"(got {_counted(call.image)})"
        )
    factor = math.lcm(c.latents.factor, adapters[0].config.downscale_factor)
    _check_size(call, factor)
    height, width, images = call.height, call.width, []
    for own, adapter in zip(given, adapters):
        channels = adapter.config.in_channels
        pixels = to_control(own, height, width, factor=factor, channels=channels)
        height, width = pixels.shape[1:3]
        images.append(pixels)
    return images


def _check_size(call: Call, factor: int) -> None:
    for name in ("height", "width"):
        value = getattr(call, name)
        if value is not None and value % factor:
            low = max(value // factor, 1) * factor
            raise ValueError(
                f"{name} must be divisible by {factor} for this T2I-Adapter (got {value}); use "
                f"{low} or {low + factor}"
            )


def _scales(call: Call, run: PreparedRun, adapters: int) -> np.ndarray:
    """Returns the scale of each adapter's maps in each row and branch, n m k 1."""
    scale = call.adapter_conditioning_scale
    # Upstream's MultiAdapter takes None for equal shares of one.
    scales = [1 / adapters] if scale is None else as_list(scale)
    scales = match_length("adapter_conditioning_scale", scales, adapters, "T2I-Adapters")
    height, k = len(run.plan.step_inputs.rescale), len(run.weights) + 1
    active = np.arange(height) < _steered_rows(call, run)
    table = active[:, None, None, None] * np.array(scales, np.float32)[:, None, None]
    return np.broadcast_to(table, (height, adapters, k, 1)).astype(np.float32)


def _steered_rows(call: Call, run: PreparedRun) -> int:
    """Returns the number of rows, from the first, in which the adapters steer.

    Upstream compares the row with a fraction of num_inference_steps, though some samplers have more
    rows than steps; custom timesteps, and denoising_end, set that to the number of rows
    (pipeline_stable_diffusion_xl_adapter.py, the denoising loop).
    """
    rows, factor = len(run.schedule), call.adapter_conditioning_factor
    if factor is None:
        return rows
    custom = call.timesteps is not None or call.sigmas is not None
    if custom or 0 < (call.denoising_end or 0) < 1 or call.num_inference_steps is None:
        return int(rows * factor)
    return int(call.num_inference_steps * factor)


def _counted(value: Any) -> str:
    return f"{len(value)} entries" if isinstance(value, list | tuple) else type(value).__name__
