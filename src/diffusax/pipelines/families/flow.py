"""What families of flow matching share: the noise levels that they ask samplers for, and texts."""

from typing import Any

import numpy as np


def schedule_options(components: Any, call: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Returns evenly spaced sigmas from 1 to 1/steps, and mu where the shift depends on the size.

    Upstream: pipeline_flux.py, and pipeline_z_image.py, get_default_z_image_sigmas.
    """
    scheduler, options = components.scheduler, dict[str, Any]()
    if getattr(scheduler, "use_dynamic_shifting", False) and scheduler.needs_mu:
        rows, columns, _ = components.latents.shape(*size)
        options["mu"] = scheduler.dynamic_mu((rows // 2) * (columns // 2))
    steps = call.num_inference_steps
    if "sigmas" in scheduler.custom and call.sigmas is None and call.timesteps is None and steps:
        sigmas = np.linspace(1.0, 1 / steps, steps, dtype=np.float32)
        options |= {"steps": None, "sigmas": tuple(map(float, sigmas))}
    return options


def longest_text(components: Any, call: Any) -> int:
    """Returns the length that all of a call's texts are filled up to."""
    return int(call.max_sequence_length)
