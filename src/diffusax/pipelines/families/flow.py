"""What families of flow matching share: the noise levels that they ask samplers for, and texts."""

from typing import Any

import numpy as np

from diffusax.samplers.noise_levels import dynamic_mu


def schedule_options(
    components: Any, call: Any, size: tuple[int, int], *, even: bool = True
) -> dict[str, Any]:
    """Returns evenly spaced sigmas from 1 to 1/steps, and mu where the shift depends on the size.

    Upstream: pipeline_flux.py, and pipeline_z_image.py, get_default_z_image_sigmas.

    Args:
        components: the components.
        call: the call.
        size: height and width in pixels.
        even: False leaves the sigmas to the scheduler.

    Raises:
        ValueError: the scheduler cannot shift as the checkpoint's own does.
    """
    scheduler, options = components.scheduler, dict[str, Any]()
    if shifts_by_size(scheduler):
        rows, columns, _ = components.latents.shape(*size)
        options["mu"] = dynamic_mu(scheduler.config, (rows // 2) * (columns // 2))
    steps = call.num_inference_steps
    takes = even and "sigmas" in scheduler.custom
    if takes and call.sigmas is None and call.timesteps is None and steps:
        sigmas = np.linspace(1.0, 1 / steps, steps, dtype=np.float32)
        options |= {"steps": None, "sigmas": tuple(map(float, sigmas))}
    return options


def shifts_by_size(scheduler: Any) -> bool:
    """Returns whether a scheduler asks for a mu, by which it shifts the noise levels of an image.

    Raises:
        ValueError: its config says so, but it has no such option.
    """
    shifts = bool(scheduler.config.get("use_dynamic_shifting"))
    if shifts and not hasattr(scheduler, "use_dynamic_shifting"):
        raise ValueError(
            f"{scheduler.class_name} cannot shift noise levels by the size of an image, which the "
            "config that it was made from asks for (use_dynamic_shifting=True); use "
            f"FlowMatchEulerDiscreteScheduler, or make one of a fixed shift: "
            f"{scheduler.class_name}(shift=3.0)"
        )
    return shifts


def longest_text(components: Any, call: Any) -> int:
    """Returns the length that all of a call's texts are filled up to."""
    return int(call.max_sequence_length)
