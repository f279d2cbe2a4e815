"""T2I-Adapter (Mou et al. 2023) as a change to the plan of text to image."""

import dataclasses
import math
from typing import Any

import numpy as np

from diffusax.images.pictures import to_control
from diffusax.models.network import Network
from diffusax.pipelines.arguments import Call, as_list, match_length
from diffusax.pipelines.components import Components
from diffusax.pipelines.control import repeat_for_prompts
from diffusax.pipelines.plan import PreparedRun
from diffusax.pipelines.sizes import count_images
from diffusax.pipelines.tasks import text_to_image


def adapter_text_to_image(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that generates images from prompts, steered by the adapters' images.

    Raises:
        ValueError: the images are missing, not as many as the adapters, or do not fit the prompts.
    """
    adapters = [c.networks[name] for name in c.of_role("t2i_adapter")]
    pictures = _pictures(c, call, adapters)
    height, width = pictures[0].shape[1:3]
    # SDXL's family has other sizes for a run that starts from an image; this one does not.
    call = dataclasses.replace(call, image=None, height=height, width=width)
    run = text_to_image(c, call)
    b, per_prompt = count_images(call), call.num_images_per_prompt or 1
    hints = tuple(repeat_for_prompts(own, b, per_prompt) for own in pictures)
    inputs = run.plan.step_inputs._replace(control=_scales(call, run, len(adapters)))
    conditions = run.plan.conditions._replace(control=hints)
    return dataclasses.replace(
        run,
        plan=run.plan._replace(conditions=conditions, step_inputs=inputs),
        # pipeline_stable_diffusion_xl_adapter.py of diffusers applies only the scaling_factor.
        decoding=c.decoding(normalize=False),
    )


def _pictures(c: Components, call: Call, adapters: list[Network]) -> list[np.ndarray]:
    """Returns the images of each adapter, n H W c in [0, 1], all of one size."""
    if call.image is None:
        raise ValueError("image must be given, the picture that the T2I-Adapter reads")
    given = as_list(call.image) if len(adapters) > 1 else [call.image]
    if len(given) != len(adapters):
        raise ValueError(
            f"image must be a list with one entry for each of {len(adapters)} T2I-Adapters "
            f"(got {_counted(call.image)})"
        )
    factor = math.lcm(c.latents.factor, adapters[0].config.downscale_factor)
    _check_size(call, factor)
    height, width, pictures = call.height, call.width, []
    for own, adapter in zip(given, adapters):
        channels = adapter.config.in_channels
        pixels = to_control(own, height, width, factor=factor, channels=channels)
        height, width = pixels.shape[1:3]
        pictures.append(pixels)
    return pictures


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
