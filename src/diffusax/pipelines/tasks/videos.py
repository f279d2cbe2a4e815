"""Videos from images and from videos, as Wan generates them (Team Wan 2025).

Upstream: pipelines/wan/pipeline_wan_i2v.py, pipeline_wan_video2video.py and pipeline_wan_vace.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.images.conversion import to_pixels
from diffusax.images.masks import bilinear
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.families.wan import known_frames
from diffusax.pipelines.plan.arguments import Call, as_list, match_length
from diffusax.pipelines.plan.plan import Inpainting, PreparedRun
from diffusax.pipelines.run import programs
from diffusax.pipelines.run.images import check_latents, encode_pixels
from diffusax.pipelines.tasks.setup import (
    Setup,
    check_frames,
    image_size,
    require_channels,
    set_up,
)
from diffusax.pipelines.tasks.tasks import (
    as_pixels,
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
        last = as_pixels(c, call.last_image, *setup.size)
        frames[:, -1], given[-1] = last, 1
    mask = np.broadcast_to(known_frames(given, step)[:, None, None], (*setup.shape[:-1], step))
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
    return _with_input(run, "first_frame", latents[:, None])


def _with_input(run: PreparedRun, name: str, value: Any) -> PreparedRun:
    """Returns a run whose network has a further input, b 1 ..., see `Conditions.added`."""
    conditions = run.plan.conditions
    added = {**(conditions.added or {}), name: value}
    plan = run.plan._replace(conditions=conditions._replace(added=added))
    return dataclasses.replace(run, plan=plan)


def control_video(c: Components, call: Call) -> PreparedRun:
    """Prepares a run of a network that is shown a video, what is to change of it, and images.

    The latents of the images stand before those of the video, and are not decoded (Jiang et al.
    2025, VACE, section 3.2).

    Raises:
        ValueError: the network is no such, an image cannot be read, or there are not as many frames
            or scales as there must be.
    """
    layers = getattr(c.denoiser.network.config, "vace_layers", None)
    if layers is None:
        raise ValueError("a WanVACEPipeline needs a WanVACETransformer3DModel as its transformer")
    size = image_size(c, call)
    pixels, mask = _shown_video(c, call, size)
    images = _references(c, call, size)
    frames = len(pixels) + len(images) * c.latents.frames
    setup = set_up(c, dataclasses.replace(call, num_frames=frames), size)
    own = _encode_control(c, pixels, mask, images)
    channels = jnp.broadcast_to(own, (setup.images, 1, *own.shape))
    run = prepare_run(setup, pure_noise(setup), channels=channels)
    scales = match_length(
        "conditioning_scale", as_list(call.conditioning_scale), len(layers), "layers"
    )
    rows = np.broadcast_to(np.asarray(scales, np.float32), (setup.images, 1, len(layers)))
    decoding = dataclasses.replace(run.decoding, skip=len(images))
    return dataclasses.replace(_with_input(run, "control_scale", rows), decoding=decoding)


def _shown_video(c: Components, call: Call, size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the video that is shown, f H W 3 in [-1, 1], and what of it is to change, in [0, 1].

    Without a video it is grey, and all is to change.
    """
    if call.video is None:
        if call.mask is not None:
            raise ValueError("mask must be with a video, of which it says what is to change")
        check_frames(c, call)
        shape = call.num_frames or 1, *size
        return np.zeros((*shape, 3), np.float32), np.ones((*shape, 1), np.float32)
    videos = _as_videos(call.video)
    if len(videos) > 1:
        raise ValueError(f"video must be one, which all prompts share (got {len(videos)})")
    pixels = as_pixels(c, videos[0], *size)
    if "num_frames" in call.named and call.num_frames != len(pixels):
        raise ValueError(
            f"num_frames must be that of video, {len(pixels)} (got {call.num_frames}); leave it out"
        )
    check_frames(c, dataclasses.replace(call, num_frames=len(pixels)))
    if call.mask is None:
        return pixels, np.ones((*pixels.shape[:3], 1), np.float32)
    mask = (as_pixels(c, call.mask, *size) + 1) / 2
    if len(mask) != len(pixels):
        raise ValueError(f"mask must have the {len(pixels)} frames of video (got {len(mask)})")
    return pixels, mask


def _references(c: Components, call: Call, size: tuple[int, int]) -> list[np.ndarray]:
    """Returns the images to look at, H W 3 each, fitted into a frame on white."""
    given = [] if call.reference_images is None else as_list(call.reference_images)
    if len(given) == 1 and isinstance(given[0], list | tuple):
        given = list(given[0])
    own = [to_pixels(image, factor=c.latents.factor)[0] for image in given]
    return [_fitted(image, size) for image in own]


def _fitted(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns an image h w 3 as large as a frame of this size holds it, on white."""
    scale = min(whole / own for whole, own in zip(size, image.shape))
    height, width = (max(int(own * scale), 1) for own in image.shape[:2])
    frame = np.ones((*size, 3), np.float32)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    frame[top : top + height, left : left + width] = bilinear(image[None], height, width)[0]
    return frame


def _encode_control(
    c: Components, pixels: np.ndarray, mask: np.ndarray, images: list[np.ndarray]
) -> jax.Array:
    """Returns what a network of VACE is shown, f h w c; arguments as `control_video` makes them."""
    changes = np.where(mask > 0.5, np.float32(1), np.float32(0))
    kept, new = (_encode(c, (pixels * part)[None], 1)[0] for part in (1 - changes, changes))
    frames, step = len(kept), c.latents.factor
    # The nearest frame to the middle of each frame of latents; torch computes in float32 as well.
    ratio = np.float32(len(mask)) / np.float32(frames)
    nearest = np.floor((np.arange(frames, dtype=np.float32) + np.float32(0.5)) * ratio)
    chosen = mask[np.minimum(nearest.astype(int), len(mask) - 1), :, :, 0]
    cut = chosen.reshape(frames, chosen.shape[1] // step, step, chosen.shape[2] // step, step)
    places = cut.transpose(0, 1, 3, 2, 4).reshape(*kept.shape[:-1], step * step)
    control = jnp.concatenate([kept, new, places.astype(np.float32)], axis=-1)
    for image in images:
        latents = _encode(c, image[None, None], 1)[0]
        unseen = jnp.zeros((*latents.shape[:-1], control.shape[-1] - latents.shape[-1]))
        control = jnp.concatenate([jnp.concatenate([latents, unseen], axis=-1), control])
    return control


def video_to_video(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that starts from videos, noised to the level that the strength gives.

    Raises:
        ValueError: a video is missing, cannot be read, or has a number of frames that cannot be.
    """
    require_channels(c, c.latents.channels, "video to video")
    size, videos = image_size(c, call), _as_videos(required(call, "video"))
    frames = [as_pixels(c, video, *size) for video in videos]
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
