"""Reads clips: the frames of videos and of animated images at a rate, or those of a part.

Animated images are read by Pillow, videos by ffmpeg (imageio-ffmpeg). A clip's frames are those
that are shown at the times 0, 1 / rate, 2 / rate and so on, whatever the file's own rate.
"""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffusax.images.ffmpeg import opened_frames, read_header
from diffusax.images.reading import load_image, upright_size
from diffusax.training.data.examples import image_file
from diffusax.training.data.image_files import VIDEO_SUFFIXES, suffix_of
from diffusax.training.data.options import Extraction

_ALIKE = 0.05
"""Rates that differ by less than this share are one: those of GIFs are made of hundredths of a
second, and films of 24 frames a second may have 23.976 or 25."""
_ANIMATED = ("GIF", "WEBP", "PNG", "AVIF")
"""The formats whose several images are frames; those of a TIFF are pages."""
_USUAL = 100
"""The milliseconds for which browsers show a frame that does not say how long."""
_HELD = 3
"""The frames that may be missing at the end of a video, whose sound may be longer."""


@dataclasses.dataclass(frozen=True)
class ClipFacts:
    """What the header of a clip's file says."""

    height: int
    width: int
    frames: int
    """1 for an image."""
    seconds: float
    """0 for an image."""

    def available(self, fps: float) -> int:
        """Returns the number of frames at a rate, of which 0 means the file's own."""
        if self._own(fps):
            return self.frames
        return max(int(self.seconds * fps + 1e-3), 1)

    def places(self, fps: float, wanted: np.ndarray) -> np.ndarray:
        """Returns the times in seconds at which the frames of a rate with these numbers are shown,
        n; of a file's own rate in the middle of each frame's time.
        """
        if self._own(fps):
            return (wanted + 0.5) * self.seconds / self.frames
        return wanted / fps + 1e-6

    def _own(self, fps: float) -> bool:
        """Returns whether each frame of the file is taken."""
        if fps == 0 or self.frames == 1 or not self.seconds:
            return True
        return abs(self.frames / self.seconds / fps - 1) < _ALIKE


def clip_facts(cell: Any) -> ClipFacts:
    """Reads the header of the clip, or image, in a cell: a file's bytes, or {bytes, path}.

    Raises:
        ValueError: the cell holds none that can be read.
    """
    with _clip(image_file(cell)) as clip:
        return clip.facts


def read_clip(
    cell: Any,
    count: int,
    rng: np.random.Generator,
    *,
    fps: float,
    extraction: Extraction,
    samples: int = 1,
) -> list[Image.Image]:
    """Reads frames of the clip, or image, in a cell; RGB, on white.

    Args:
        cell: a file's bytes, or {bytes, path}.
        count: the number of frames.
        rng: draws the part.
        fps: the frames per second, 0 for those of the file.
        extraction: which part is taken: its head, any, or one of a few; or frames of the whole.
        samples: the parts that "uniform" draws from.

    Raises:
        ValueError: the cell holds no clip that can be read, or it has fewer frames at the rate.
    """
    with _clip(image_file(cell)) as clip:
        available = clip.facts.available(fps)
        if available < count:
            rate = f" at {fps:g} frames a second" if fps else ""
            raise ValueError(
                f"the clip has {available} frames{rate}, and {count} are needed; name a smaller "
                "number of frames in data.num_frames, too"
            )
        wanted = chosen_frames(available, count, extraction, samples, rng)
        return clip.read(clip.facts.places(fps, wanted))


def chosen_frames(
    available: int, count: int, extraction: Extraction, samples: int, rng: np.random.Generator
) -> np.ndarray:
    """Returns the numbers of the frames that are taken of a clip, n; see `read_clip`."""
    spare = available - count
    if extraction == "whole":
        return np.linspace(0, available - 1, count).round().astype(int)
    start = 0
    if extraction == "random":
        start = int(rng.integers(spare + 1))
    elif extraction == "uniform":
        start = round(spare * int(rng.integers(samples)) / max(samples - 1, 1))
    return start + np.arange(count)


class _Image:
    """An image, which is one frame."""

    def __init__(self, file: Path | Image.Image):
        self.file = file
        size = file.size[::-1] if isinstance(file, Image.Image) else upright_size(file)
        self.facts = ClipFacts(*size, 1, 0.0)

    def read(self, times: np.ndarray) -> list[Image.Image]:
        return [load_image(self.file) for _ in times]


class _Animation:
    """An animated image, whose frames are each shown for a time of their own."""

    def __init__(self, image: Image.Image):
        self.image, durations = image, []
        count: int = image.n_frames  # type: ignore[attr-defined]
        for i in range(count):
            image.seek(i)
            # WebP says how long a frame is shown once it is decoded.
            image.load()
            durations.append(image.info.get("duration") or _USUAL)
        self.ends = np.cumsum(durations) / 1000
        self.facts = ClipFacts(image.height, image.width, count, float(self.ends[-1]))

    def read(self, times: np.ndarray) -> list[Image.Image]:
        numbers = np.searchsorted(self.ends, times, side="right")
        frames = []
        for number in np.minimum(numbers, self.facts.frames - 1):
            self.image.seek(int(number))
            frames.append(load_image(self.image.copy()))
        return frames


class _Video:
    """A file that ffmpeg reads."""

    def __init__(self, path: Path):
        self.path, header = path, read_header(path)
        if not header.frames:
            raise ValueError(
                f"cannot read the video {str(path)!r}: it says no length, or no frames per second"
            )
        self.fps, seconds = header.fps, header.frames / header.fps
        self.facts = ClipFacts(header.height, header.width, header.frames, seconds)

    def read(self, times: np.ndarray) -> list[Image.Image]:
        numbers = (times * self.fps).astype(int).tolist()
        first, last, wanted = numbers[0], numbers[-1], set(numbers)
        found: dict[int, Image.Image] = {}
        # Half a frame before, so that rounding leaves none out.
        with opened_frames(self.path, (first - 0.5) / self.fps) as frames:
            for number, frame in enumerate(frames, first):
                if number in wanted:
                    found[number] = frame
                if number >= last:
                    break
        newest = max(found, default=first - 1)
        if not found or min(wanted - found.keys(), default=last) < last + 1 - _HELD:
            raise ValueError(
                f"cannot read the video {str(self.path)!r}: it ends before frame {newest + 1} of "
                f"{self.facts.frames}"
            )
        return [found.get(number, found[newest]) for number in numbers]


_Clip = _Image | _Animation | _Video


@contextlib.contextmanager
def _clip(file: bytes | Path | Image.Image) -> Iterator[_Clip]:
    """Opens a clip."""
    if isinstance(file, Image.Image):
        yield _Image(file)
        return
    if isinstance(file, bytes):
        with tempfile.NamedTemporaryFile() as copy:
            copy.write(file)
            copy.flush()
            with _opened(Path(copy.name)) as clip:
                yield clip
        return
    with _opened(file) as clip:
        yield clip


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_Clip]:
    if not path.is_file():
        raise ValueError(f"there is no file {str(path)!r}")
    try:
        image = None if suffix_of(path.name) in VIDEO_SUFFIXES else Image.open(path)
    except Image.UnidentifiedImageError:
        # A column of bytes does not say which file it was.
        image = None
    if image is None:
        yield _Video(path)
        return
    with image:
        animated = getattr(image, "n_frames", 1) > 1 and image.format in _ANIMATED
        yield _Animation(image) if animated else _Image(path)
