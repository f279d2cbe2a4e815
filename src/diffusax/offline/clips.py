"""The files of a run's clips: MP4, animated WebP or GIF, or NumPy's arrays."""

import io
from typing import Literal

import numpy as np
from PIL import Image

from diffusax.boundary.messages import require_extra
from diffusax.images import clips

ClipFormat = Literal["mp4", "webp", "gif", "npz"]
_TYPES = {suffix.removeprefix("."): kind for kind, suffix in clips.SUFFIXES.items()}


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
    if kind == "npz":
        buffer = io.BytesIO()
        np.savez_compressed(buffer, frames=frames, fps=np.float64(fps), parameters=np.array(text))
        return buffer.getvalue()
    images = list(map(Image.fromarray, frames))
    return clips.encode_video(images, fps, text, media_type=_TYPES[kind]).data
