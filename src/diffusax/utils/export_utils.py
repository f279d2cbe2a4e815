"""Writes images as animations: GIF by Pillow, video by imageio."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffusax.boundary.messages import require_extra


def export_to_gif(
    image: Sequence[Image.Image], output_gif_path: str | Path | None = None, fps: int = 10
) -> str:
    """Writes images as an animated GIF that repeats for ever, and returns its path.

    Args:
        image: the images, in order.
        output_gif_path: the file; by default one in the system's folder for temporary files.
        fps: the images per second.

    Raises:
        ValueError: there are no images.
    """
    if not image:
        raise ValueError("image must be a list of at least one image (got none)")
    path = _path(output_gif_path, ".gif")
    image[0].save(
        path, save_all=True, append_images=image[1:], optimize=False, duration=1000 // fps, loop=0
    )
    return path


def export_to_video(
    video_frames: Sequence[Any],
    output_video_path: str | Path | None = None,
    fps: int = 10,
    quality: float | None = 5.0,
    bitrate: int | None = None,
    macro_block_size: int | None = 16,
) -> str:
    """Writes images as a video by imageio and ffmpeg, and returns its path.

    Args:
        video_frames: PIL images, or arrays h w 3 in [0, 1].
        output_video_path: the file; by default one in the system's folder for temporary files.
        fps: the images per second.
        quality: from 0 to 10; None where bitrate is given.
        bitrate: the bits per second.
        macro_block_size: a number that divides width and height, to which imageio enlarges images.

    Raises:
        ImportError: the extra `video`, imageio and its ffmpeg, is not installed.
    """
    require_extra("imageio_ffmpeg", "video")
    imageio = require_extra("imageio", "video")
    path = _path(output_video_path, ".mp4")
    options: Any = {"fps": fps, "quality": quality, "bitrate": bitrate}
    opened: Any = imageio.get_writer(path, macro_block_size=macro_block_size, **options)
    with opened as writer:
        for frame in video_frames:
            pixels = np.asarray(frame)
            writer.append_data(
                (pixels * 255).astype(np.uint8) if pixels.dtype != np.uint8 else pixels
            )
    return path


def _path(given: str | Path | None, suffix: str) -> str:
    if given is not None:
        return str(given)
    with tempfile.NamedTemporaryFile(suffix=suffix, delete=False) as file:
        return file.name
