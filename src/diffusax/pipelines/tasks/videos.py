"""Videos from images and from videos, as Wan generates them (Team Wan 2025).

Upstream: pipelines/wan/pipeline_wan_i2v.py and pipeline_wan_video2video.py.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from diffusax.images.conversion import to_pixels
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.plan.plan import Inpainting, PreparedRun
from diffusax.pipelines.run import programs
from diffusax.pipelines.run.images import check_latents, encode_pixels
from diffusax.pipelines.tasks.setup import Setup, image_size, require_channels, set_up
from diffusax.pipelines.tasks.tasks import (
    check_count,
    noised,
    prepare_run,
    pure_noise,
    read_pixels,
    required,
)


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


def video_to_video(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that starts from videos, noised to the level that the strength gives.

    Raises:
        ValueError: a video is missing, cannot be read, or has a number of frames that cannot be.
    """
    require_channels(c, c.latents.channels, "video to video")
    size, videos = image_size(c, call), _as_videos(required(call, "video"))
    options: dict[str, Any] = {"factor": c.latents.multiple, "latent_channels": c.latents.channels}
    frames = [to_pixels(video, *size, **options) for video in videos]
    counts = {len(own) for own in frames}
    if len(counts) > 1:
        raise ValueError(f"video must be of one number of frames (got {sorted(counts)})")
    setup = set_up(c, dataclasses.replace(call, num_frames=counts.pop()), size, from_image=True)
    if call.latents is not None:
        x: Any = check_latents(c.latents, call.latents, setup.images, *setup.shape[:-1])
        return prepare_run(setup, x)
    pixels = np.stack(frames)
    check_count(pixels, setup.images, "video")
    x = _encode(c, pixels, setup.images)
    return prepare_run(setup, noised(setup.schedule, x, setup.noise.draw("start", setup.shape)))


def _as_videos(given: Any) -> list[Any]:
    """Returns the frames of each video: of one, of a list of some, or of an array of them."""
    shape = tuple(getattr(given, "shape", ()))
    several = len(shape) == 5 or (
        isinstance(given, list | tuple)
        and bool(given)
        and (isinstance(given[0], list | tuple) or len(getattr(given[0], "shape", ())) == 4)
    )
    return list(given) if several else [given]


def _encode(c: Components, videos: np.ndarray, b: int) -> Any:
    """Encodes videos b f H W 3 to normalised latents, repeated to b."""
    options: dict[str, Any] = {"upcast": c.latents.upcast, "normalize": c.latents.normalize}
    return programs.tile(encode_pixels(c, videos, None, **options), b)
