"""Images that a denoiser looks at while it generates others."""

import dataclasses

from diffusax.images.references import as_images, reference_image
from diffusax.pipelines import programs
from diffusax.pipelines.arguments import Call
from diffusax.pipelines.components import Components
from diffusax.pipelines.plan import PreparedRun


def with_references(c: Components, call: Call, run: PreparedRun) -> PreparedRun:
    """Returns a run whose denoiser looks at the call's images, in a family that has such images.

    Raises:
        ValueError: an image cannot be read, is too small or too narrow.
    """
    if call.image is None or not c.family.looks_at_images:
        return run
    pixels = (reference_image(image, c.latents.factor) for image in as_images(call.image))
    vae, params = c.autoencoder, c.autoencoder_params
    options = {"upcast": c.latents.upcast, "normalize": c.latents.normalize}
    maps = [programs.encode_image(vae, params, one, None, **options) for one in pixels]
    conditions = run.plan.conditions
    count = len(conditions.context)
    added = {"references": tuple(programs.tile(x, count)[:, None] for x in maps)}
    conditions = conditions._replace(added={**(conditions.added or {}), **added})
    return dataclasses.replace(run, plan=run.plan._replace(conditions=conditions))
