"""What becomes of a video's frames: a file, which is written once, and a few small pictures."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import numpy as np
from PIL import Image

from diffusax.images.clips import VideoFile, encode_video

_STILLS = 16
"""The most frames of a spritesheet."""
_SIDE = 256
"""The most pixels of a still's sides."""
_COLUMNS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Video:
    """A video that is done."""

    file: VideoFile
    num_frames: int
    fps: float
    poster: Image.Image
    """The frame in the middle."""
    stills: tuple[Image.Image, ...]
    """Some frames from the first to the last, small."""

    @classmethod
    def of(cls, frames: Sequence[Image.Image], fps: float, text: str) -> Self:
        """Writes the file of frames, RGB of one size; text: what it tells of itself."""
        stills = tuple(shrunk(frames[i]) for i in spread(len(frames), _STILLS))
        poster = frames[len(frames) // 2]
        return cls(encode_video(frames, fps, text), len(frames), fps, poster, stills)

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.num_frames / self.fps

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return len(self.file.data) + sum(map(image_bytes, (self.poster, *self.stills)))

    def spritesheet(self) -> Image.Image:
        """Returns the stills in rows, from left to right and from top to bottom."""
        width, height = self.stills[0].size
        columns = min(len(self.stills), _COLUMNS)
        rows = -(-len(self.stills) // columns)
        sheet = Image.new("RGB", (columns * width, rows * height))
        for i, still in enumerate(self.stills):
            sheet.paste(still, (i % columns * width, i // columns * height))
        return sheet


@dataclasses.dataclass(frozen=True, eq=False)
class MovingPreview:
    """What a video under way will become."""

    middle: Image.Image
    """The frame in the middle, small."""
    frames: tuple[Image.Image, ...]
    """Some frames from the first to the last."""

    @property
    def nbytes(self) -> int:
        """The bytes that it takes."""
        return sum(map(image_bytes, (self.middle, *self.frames)))


def image_bytes(image: Image.Image) -> int:
    """Returns the bytes of an image's pixels."""
    return image.width * image.height * len(image.getbands())


def spread(count: int, most: int) -> list[int]:
    """Returns indices from 0 to count - 1, evenly spaced, at most so many."""
    return [round(i) for i in np.linspace(0, count - 1, min(count, most))]


def shrunk(image: Image.Image, side: int = _SIDE) -> Image.Image:
    """Returns a copy of an image whose sides have at most so many pixels."""
    small = image.copy()
    small.thumbnail((side, side))
    return small
