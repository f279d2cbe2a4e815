"""Videos from images, as Wan generates them (Team Wan 2025).

Upstream: pipelines/wan/pipeline_wan_i2v.py.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.plan.plan import Inpainting, PreparedRun
from diffusax.pipelines.run import programs
from diffusax.pipelines.run.images import encode_pixels
from diffusax.pipelines.tasks.setup import Setup, image_size, set_up
from diffusax.pipelines.tasks.tasks import check_count, prepare_run, pure_noise, read_pixels


def image_to_video(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that generates a video which begins with an image, and may end with another.

    Networks have the latents of a video of these frames, grey between them, and a mask beside the
    noise; or, where each token has a time of its own (expand_timesteps), the first frame's latents
    in the noise's place.

    Raises:
        ValueError: the network is for videos from texts, or an image is missing or cannot be read.
    """
    expands = bool(c.options.get("expand_timesteps"))
    latent, own = c.latents.channels, c.denoiser.in_channels
    expected = latent if expands else 2 * latent + c.latents.frames
    if own != expected:
        raise ValueError(
            f"a video from an image needs a transformer with {expected} input channels (got {own})"
        )
    if expands and call.last_image is not None:
        raise ValueError("last_image cannot be with expand_timesteps; leave it out")
    size = image_size(c, call)
    first = np.asarray(read_pixels(c, call, *size))
    setup = set_up(c, call, size)
    check_count(first, setup.images, "image")
    return _from_first_frame(setup, first) if expands else _from_channels(setup, first)


def _from_channels(setup: Setup, first: np.ndarray) -> PreparedRun:
    """Returns the run of a network that has given frames and a mask as further input channels."""
    c, call = setup.c, setup.call
    count, step = call.num_frames or 1, c.latents.frames
    frames = np.zeros((len(first), count, *first.shape[1:]), np.float32)
    frames[:, 0] = first
    given = np.zeros(count, np.float32)
    given[0] = 1
    if call.last_image is not None:
        last = read_pixels(c, dataclasses.replace(call, image=call.last_image), *setup.size)
        frames[:, -1], given[-1] = last, 1
    known = np.concatenate([np.repeat(given[:1], step), given[1:]]).reshape(-1, step)
    mask = np.broadcast_to(known[:, None, None], (*setup.shape[:-1], step))
    latents = _encode(c, frames, setup.images)
    every = jnp.broadcast_to(jnp.asarray(mask), (setup.images, *mask.shape))
    channels = jnp.concatenate([every, latents], axis=-1)[:, None]
    return prepare_run(setup, pure_noise(setup), channels=channels)


def _from_first_frame(setup: Setup, first: np.ndarray) -> PreparedRun:
    """Returns the run of a network whose first frame is known, and has the time zero."""
    latents = _encode(setup.c, first[:, None], setup.images)
    mask = np.ones((setup.images, *setup.shape[:-1], 1), np.float32)
    mask[:, 0] = 0
    known = jnp.zeros((setup.images, *setup.shape), jnp.float32).at[:, :1].set(latents)
    # The frame is put back where the run ends; before that the network is shown it in its place.
    inpainting = Inpainting(mask, known, jnp.zeros_like(known))
    run = prepare_run(setup, pure_noise(setup), inpainting=inpainting)
    conditions = run.plan.conditions
    added = {**(conditions.added or {}), "first_frame": latents[:, None]}
    plan = run.plan._replace(conditions=conditions._replace(added=added))
    return dataclasses.replace(run, plan=plan)


def _encode(c: Components, videos: np.ndarray, b: int) -> Any:
    """Encodes videos b f H W 3 to normalised latents, repeated to b."""
    options: dict[str, Any] = {"upcast": c.latents.upcast, "normalize": c.latents.normalize}
    return programs.tile(encode_pixels(c, videos, None, **options), b)
