"""Reads videos as images: GIF and WebP by Pillow, others by ffmpeg."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageSequence

from diffusax.images.ffmpeg import opened_frames, read_header

_BY_PILLOW = (".gif", ".webp", ".png")
Frames = list[Image.Image]


def load_video(
    video: str | Path,
    convert_method: Callable[[Frames], Frames] | None = None,
    return_fps: bool = False,
) -> Any:
    """Reads a video, and returns its frames as PIL images.

    Args:
        video: the path of a file; addresses are not read.
        convert_method: a function of the frames, whose result is returned instead; by default they
            become RGB.
        return_fps: whether to return the frames per second, too, 0 where the file does not say.

    Raises:
        ValueError: there is no such file, or it is no video.
        ImportError: the extra `video`, imageio-ffmpeg, is not installed, for files that are no
            animated images.
    """
    path = Path(video)
    if not path.is_file():
        raise ValueError(f"there is no file {video}")
    frames, fps = _by_pillow(path) if path.suffix.lower() in _BY_PILLOW else _by_ffmpeg(path)
    given = [frame.convert("RGB") for frame in frames]
    found = given if convert_method is None else convert_method(frames)
    return (found, fps) if return_fps else found


def _by_pillow(path: Path) -> tuple[Frames, float]:
    with Image.open(path) as image:
        frames = [frame.copy() for frame in ImageSequence.Iterator(image)]
        duration = image.info.get("duration", 0)
    return frames, 1000 / duration if duration else 0.0


def _by_ffmpeg(path: Path) -> tuple[Frames, float]:
    fps = read_header(path).fps
    with opened_frames(path) as frames:
        return list(frames), fps
