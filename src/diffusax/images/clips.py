"""Videos as the bytes of files: MP4 by ffmpeg, or animated WebP or GIF by Pillow, with a text.

`videos` reads files of a user's own; what is here bounds what it reads, and never trusts it.
"""

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from PIL import Image, ImageSequence

from diffusax.images import ffmpeg

MP4, WEBP, GIF = "video/mp4", "image/webp", "image/gif"
SUFFIXES = {MP4: ".mp4", WEBP: ".webp", GIF: ".gif"}
"""The endings of files by their media types."""
_SECONDS = 120.0
"""The longest that reading a video may take."""
_LONGEST_TEXT = 65_000
"""The most bytes of a text, which is an argument of ffmpeg."""
_EXIF_IFD, _USER_COMMENT = 0x8769, 0x9286
_ANIMATIONS = ("GIF", "WEBP", "PNG")


@dataclasses.dataclass(frozen=True)
class VideoFile:
    """The bytes of a video's file."""

    data: bytes
    media_type: str

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Returns the file of bytes that `encode_video` wrote."""
        return cls(data, MP4 if _is_mp4(data) else WEBP)


def _is_mp4(data: bytes) -> bool:
    return data[4:8] == b"ftyp"


@dataclasses.dataclass(frozen=True)
class Clip:
    """The frames of a video, RGB of one size."""

    frames: tuple[Image.Image, ...]
    fps: float
    """The frames per second; 0 where the file does not say."""

    @property
    def size(self) -> tuple[int, int]:
        """The width and height in pixels."""
        return self.frames[0].size

    @property
    def nbytes(self) -> int:
        """The bytes of all frames' pixels."""
        return sum(frame.width * frame.height * len(frame.getbands()) for frame in self.frames)


def video_type() -> str:
    """Returns the media type of what `encode_video` writes: MP4's where ffmpeg is installed."""
    return MP4 if importlib.util.find_spec("imageio_ffmpeg") else WEBP


def encode_video(
    frames: Sequence[Image.Image], fps: float, text: str = "", *, media_type: str | None = None
) -> VideoFile:
    """Writes frames as a video that browsers play: H.264 in MP4, or an animated WebP.

    Args:
        frames: RGB, of one size. H.264's are even: larger by one where a side is odd.
        fps: the frames per second.
        text: what the file tells of the video, in MP4's or GIF's comment or EXIF's UserComment; a
            very long one is left out.
        media_type: `MP4`, `WEBP` or `GIF`; by default `video_type`.
    """
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if len(text.encode("utf-16-be")) > _LONGEST_TEXT:
        text = ""
    made = media_type or video_type()
    return VideoFile(_WRITERS[made](frames, fps, text), made)


def _mp4(frames: Sequence[Image.Image], fps: float, text: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="diffusax-") as folder:
        path = Path(folder) / "clip.mp4"
        ffmpeg.write_frames(path, frames, fps, comment=text)
        return path.read_bytes()


def _webp(frames: Sequence[Image.Image], fps: float, text: str) -> bytes:
    buffer, options = io.BytesIO(), dict[str, Any]()
    if text:
        options["exif"] = exif = Image.Exif()
        exif[_EXIF_IFD] = {_USER_COMMENT: b"UNICODE\0" + text.encode("utf-16-be")}
    _animate(buffer, "WEBP", frames, _durations(len(frames), fps), quality=85, **options)
    return buffer.getvalue()


def _gif(frames: Sequence[Image.Image], fps: float, text: str) -> bytes:
    buffer, lasting = io.BytesIO(), _durations(len(frames), fps, unit=10)
    _animate(buffer, "GIF", frames, lasting, comment=text.encode(), optimize=False)
    return buffer.getvalue()


def _durations(count: int, fps: float, unit: int = 1) -> list[int]:
    """Returns how long frames are shown, in milliseconds that are multiples of a unit.

    They differ, so that a clip is as long as it should be.
    """
    ends = [unit * round(1000 * i / fps / unit) for i in range(count + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _animate(
    buffer: io.BytesIO, kind: str, frames: Sequence[Image.Image], lasting: list[int], **options: Any
) -> None:
    first, *rest = frames
    given: dict[str, Any] = {"save_all": True, "append_images": rest, "loop": 0}
    first.save(buffer, kind, duration=lasting, **given, **options)


_WRITERS: dict[str, Callable[[Sequence[Image.Image], float, str], bytes]] = {
    MP4: _mp4,
    WEBP: _webp,
    GIF: _gif,
}


def is_still(data: bytes) -> bool:
    """Returns whether bytes are an image of one frame that Pillow knows, by their beginning."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:
            return not getattr(image, "is_animated", False)
    except Exception:  # Pillow's readers raise errors of nearly every class.
        return False


@dataclasses.dataclass(frozen=True)
class Reader:
    """A video's file that is open."""

    size: tuple[int, int]
    """The width and height of its frames in pixels, as they are in the file."""
    fps: Callable[[], float]
    """Returns the frames per second; 0 where the file does not say. May decode a frame."""
    frames: Iterator[Image.Image]
    """The first frames, RGB. Raises ValueError where the file is broken."""


@contextlib.contextmanager
def opened(data: bytes, most: int, area: int) -> Iterator[Reader]:
    """Opens a video's file inside the context.

    GIF, animated WebP and PNG are read by Pillow, and MP4, MOV, WebM, Matroska, AVI and MPEG by
    ffmpeg, which may open nothing else.

    Args:
        data: the bytes of the file.
        most: the most frames.
        area: frames of more pixels become smaller.

    Raises:
        ValueError: the bytes are no such file.
        ImportError: ffmpeg is needed, and not installed.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=_ANIMATIONS)
    except Exception:  # Pillow's readers raise errors of nearly every class.
        image = None
    if image is not None:
        with image:
            yield Reader(image.size, lambda: _fps(image), _animated(image, most, area))
        return
    with _as_file(data) as path:
        try:
            header = ffmpeg.read_header(path)
        except ValueError as error:
            # The name of the file is nobody's.
            reason = str(error).rpartition(": ")[2]
            raise ValueError(f"ffmpeg finds no video in it ({reason})") from None
        limits: Any = {"most": most, "area": area, "seconds": _SECONDS}
        with ffmpeg.opened_frames(path, **limits) as frames:
            yield Reader((header.width, header.height), lambda: header.fps, frames)


@contextlib.contextmanager
def _as_file(data: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="diffusax-") as folder:
        path = Path(folder) / "clip"
        path.write_bytes(data)
        yield path


def _fps(image: Image.Image) -> float:
    # A WebP says it once its first frame is decoded.
    image.load()
    duration = image.info.get("duration", 0)
    return 1000 / duration if duration else 0.0


def _animated(image: Image.Image, most: int, area: int) -> Iterator[Image.Image]:
    try:
        for frame in itertools.islice(ImageSequence.Iterator(image), most):
            shrink = min((area / (frame.width * frame.height)) ** 0.5, 1.0)
            size = max(int(frame.width * shrink), 1), max(int(frame.height * shrink), 1)
            whole = frame.convert("RGB")
            yield whole if size == whole.size else whole.resize(size)
    except Exception as error:  # See above.
        raise ValueError(str(error) or type(error).__name__) from None


def text_of(data: bytes) -> str:
    """Returns the text in a video's file that `encode_video` wrote there, or ""; of MP4s alone."""
    if not _is_mp4(data) or video_type() != MP4:
        return ""
    with _as_file(data) as path, contextlib.suppress(ValueError):
        return ffmpeg.read_comment(path)
    return ""
