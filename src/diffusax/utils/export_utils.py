"""Writes images as animations: GIF by Pillow, video by ffmpeg."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffusax.images.ffmpeg import write_frames


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
    """Writes images as a video, H.264 by ffmpeg, and returns its path.

    Args:
        video_frames: PIL images, or arrays h w 3 in [0, 1].
        output_video_path: the file; by default one in the system's folder for temporary files.
        fps: the images per second.
        quality: from 0 to 10, as imageio counts it; without effect where bitrate is given.
        bitrate: the bits per second.
        macro_block_size: a number that divides width and height, to which images are enlarged; None
            for 2, which H.264 needs.

    Raises:
        ValueError: there are no images, or ffmpeg cannot write the file.
        ImportError: the extra `video`, imageio-ffmpeg, is not installed.
    """
    if not len(video_frames):
        raise ValueError("video_frames must be at least one image (got none)")
    path = _path(output_video_path, ".mp4")
    frames = [_image(frame) for frame in video_frames]
    block = macro_block_size or 2
    width, height = (-(-side // block) * block for side in frames[0].size)
    if (width, height) != frames[0].size:
        frames = [frame.resize((width, height), Image.Resampling.BICUBIC) for frame in frames]
    coding: tuple[str, ...] = () if bitrate is None else ("-b:v", str(bitrate))
    if bitrate is None and quality is not None:
        # H.264's constant rate factor, from 0 for no loss to 51.
        coding = ("-crf", str(int((1 - quality / 10) * 51)))
    write_frames(Path(path), frames, fps, coding=coding)
    return path


def _image(frame: Any) -> Image.Image:
    if isinstance(frame, Image.Image):
        return frame
    pixels = np.asarray(frame)
    return Image.fromarray(pixels if pixels.dtype == np.uint8 else (pixels * 255).astype(np.uint8))


def _path(given: str | Path | None, suffix: str) -> str:
    if given is not None:
        return str(given)
    with tempfile.NamedTemporaryFile(suffix=suffix, delete=False) as file:
        return file.name
