"""The files of a run's clips: MP4, animated WebP or GIF, or NumPy's arrays."""

import io
import itertools
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from PIL import Image

from diffusax.boundary.messages import require_extra
from diffusax.images import clips

ClipFormat = Literal["mp4", "webp", "gif", "npz"]
USUAL_FPS = 16.0
"""The frames per second of Wan 2.1's videos."""


def check_writes(kind: ClipFormat) -> None:
    """Raises ImportError where files of a format need a package that is not installed."""
    if kind == "mp4":
        require_extra("imageio_ffmpeg", "video")


def encode_clip(frames: np.ndarray, fps: float, text: str, kind: ClipFormat) -> bytes:
    """Returns the bytes of a clip's file.

    Args:
        frames: f h w 3, uint8.
        fps: the frames per second.
        text: the settings of the clip, for the file.
        kind: the format. "npz" has the arrays `frames`, as they are, `fps` and `parameters`, the
            text.
    """
    return _ENCODERS[kind](frames, fps, text)


def _by_clips(media_type: str) -> Callable[[np.ndarray, float, str], bytes]:
    def encode(frames: np.ndarray, fps: float, text: str) -> bytes:
        images = list(map(Image.fromarray, frames))
        return clips.encode_video(images, fps, text, media_type=media_type).data

    return encode


def _gif(frames: np.ndarray, fps: float, text: str) -> bytes:
    buffer, (first, *rest) = io.BytesIO(), map(Image.fromarray, frames)
    options: dict[str, Any] = {"save_all": True, "append_images": rest, "loop": 0}
    # GIF counts hundredths of a second, and is to be as long as the video.
    ends = [10 * round(100 * i / fps) for i in range(len(frames) + 1)]
    options["duration"] = [end - begin for begin, end in itertools.pairwise(ends)]
    first.save(buffer, "GIF", comment=text.encode(), optimize=False, **options)
    return buffer.getvalue()


def _npz(frames: np.ndarray, fps: float, text: str) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, frames=frames, fps=np.float64(fps), parameters=np.array(text))
    return buffer.getvalue()


_ENCODERS: dict[str, Callable[[np.ndarray, float, str], bytes]] = {
    "mp4": _by_clips(clips.MP4),
    "webp": _by_clips(clips.WEBP),
    "gif": _gif,
    "npz": _npz,
}
