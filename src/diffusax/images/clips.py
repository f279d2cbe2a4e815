"""Videos as the bytes of files: MP4 by ffmpeg, or animated WebP by Pillow, with a text inside.

`videos` reads files of a user's own; what is here bounds what it reads, and never trusts it.
"""

import contextlib
import dataclasses
import importlib.util
import io
import itertools
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from PIL import Image, ImageSequence

from diffusax.boundary.messages import require_extra

MP4, WEBP = "video/mp4", "image/webp"
SUFFIXES = {MP4: ".mp4", WEBP: ".webp"}
"""The endings of files by their media types."""
_RATE_FACTOR = "16"
"""H.264's constant rate factor: 0 loses nothing, 18 hardly anything that is seen."""
_SECONDS = 120.0
"""The longest that ffmpeg may take for a file."""
_STREAM = re.compile(r"Stream #\d.*?Video:.*?\b(\d{1,5})x(\d{1,5})\b(?:.*?([\d.]+) fps)?")
_LONGEST_TEXT = 65_000
"""The most bytes of a text, which is an argument of ffmpeg."""
_EXIF_IFD, _USER_COMMENT = 0x8769, 0x9286
_ANIMATIONS = ("GIF", "WEBP", "PNG")
_DEMUXERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg"
"""What ffmpeg may take a file for: no lists that name other files or addresses."""
_BOUNDS = ["-protocol_whitelist", "file", "-format_whitelist", _DEMUXERS]
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_COMMENT = re.compile(r"^comment=((?:\\.|[^\\\n])*)$", re.DOTALL | re.MULTILINE)


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
        text: what the file tells of the video, in MP4's comment or EXIF's UserComment; a very long
            one is left out.
        media_type: `MP4` or `WEBP`; by default `video_type`.
    """
    text = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if len(text.encode("utf-16-be")) > _LONGEST_TEXT:
        text = ""
    made = media_type or video_type()
    return VideoFile((_mp4 if made == MP4 else _webp)(frames, fps, text), made)


def _mp4(frames: Sequence[Image.Image], fps: float, text: str) -> bytes:
    width, height = frames[0].size
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}"]
    # The index stands first, so that playing begins before all of the file has come.
    made = [
        "-c:v",
        "libx264",
        "-crf",
        _RATE_FACTOR,
        "-pix_fmt",
        "yuv420p",
        "-movflags",
        "+faststart",
    ]
    # Without a name for its colours, each player takes them for others.
    for name in ("colorspace", "color_primaries", "color_trc"):
        made += [f"-{name}", "bt709"]
    filters = "scale=out_color_matrix=bt709,pad=ceil(iw/2)*2:ceil(ih/2)*2"
    comment = ["-metadata", f"comment={text}"] if text else []
    with tempfile.TemporaryDirectory(prefix="diffusax-") as folder:
        path = Path(folder) / "clip.mp4"
        call = [*given, "-i", "pipe:0", "-vf", filters, *made, *comment, str(path)]
        with _ffmpeg(call, Path(folder), stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                for frame in frames:
                    process.stdin.write(frame.convert("RGB").tobytes())
        return path.read_bytes()


@contextlib.contextmanager
def _ffmpeg(call: Sequence[str], folder: Path, **pipes: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs ffmpeg inside the context, at whose end it must have ended well.

    imageio_ffmpeg itself forks the process, which JAX's threads do not survive.

    Raises:
        ValueError: it does not do what it is asked for; says why.
    """
    program = require_extra("imageio_ffmpeg", "video").get_ffmpeg_exe()
    with open(folder / "log", "w+b") as log:
        process = subprocess.Popen([program, "-v", "error", *call], stderr=log, **pipes)
        # No file may keep it busy for ever.
        timer = threading.Timer(_SECONDS, process.kill)
        timer.start()
        try:
            yield process
            if process.stdin is not None:
                process.stdin.close()
            process.wait()
        finally:
            timer.cancel()
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        if process.returncode:
            log.seek(0)
            said = log.read().decode("utf-8", "replace").strip().splitlines()[-1:]
            raise ValueError(f"ffmpeg failed ({said[0][:120] if said else 'it says nothing'})")


def _webp(frames: Sequence[Image.Image], fps: float, text: str) -> bytes:
    buffer, options = io.BytesIO(), dict[str, Any]()
    if text:
        options["exif"] = exif = Image.Exif()
        exif[_EXIF_IFD] = {_USER_COMMENT: b"UNICODE\0" + text.encode("utf-16-be")}
    first, *rest = frames
    # The next frame begins after whole milliseconds, so that the clip is as long as it should be.
    ends = [round(1000 * (i + 1) / fps) for i in range(len(frames))]
    options["duration"] = [end - begin for begin, end in zip([0, *ends], ends)]
    first.save(buffer, "WEBP", save_all=True, append_images=rest, loop=0, quality=85, **options)
    return buffer.getvalue()


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
    ffmpeg.

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
    if image is None:
        with tempfile.TemporaryDirectory(prefix="diffusax-") as folder:
            path = Path(folder) / "clip"
            path.write_bytes(data)
            size, fps = _facts(path)
            with contextlib.closing(_read(path, most, area)) as frames:
                yield Reader(size, lambda: fps, frames)
    else:
        with image:
            yield Reader(image.size, lambda: _fps(image), _animated(image, most, area))


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


def _facts(path: Path) -> tuple[tuple[int, int], float]:
    """Returns the width and height of a video's frames, and the frames per second or 0."""
    program = require_extra("imageio_ffmpeg", "video").get_ffmpeg_exe()
    call = [program, "-hide_banner", "-nostdin", *_BOUNDS, "-i", str(path)]
    done = subprocess.run(call, capture_output=True, check=False, timeout=_SECONDS)
    said = done.stderr.decode("utf-8", "replace")
    found = _STREAM.search(said)
    if found is None:
        reason = said.strip().splitlines()[-1:] or ["it says nothing"]
        raise ValueError(f"ffmpeg finds no video in it ({reason[0][:120]})")
    return (int(found[1]), int(found[2])), float(found[3] or 0)


def _read(path: Path, most: int, area: int) -> Generator[Image.Image]:
    """Yields the first frames of a video."""
    shrink = f"min(1\\,sqrt({area}/(iw*ih)))"
    scale = f"scale=w=max(2\\,trunc(iw*{shrink}/2)*2):h=max(2\\,trunc(ih*{shrink}/2)*2)"
    # Each frame comes with its size: turned videos have another one than their file says.
    made = ["-frames:v", str(most), "-vf", scale, "-an", "-f", "image2pipe", "-c:v", "ppm"]
    call = ["-nostdin", *_BOUNDS, "-i", str(path), *made, "pipe:1"]
    with _ffmpeg(call, path.parent, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while process.stdout.readline() == b"P6\n":
            width, height = map(int, process.stdout.readline().split())
            process.stdout.readline()
            pixels = process.stdout.read(3 * width * height)
            if len(pixels) < 3 * width * height:
                break
            yield Image.frombytes("RGB", (width, height), pixels)


def text_of(data: bytes) -> str:
    """Returns the text in a video's file that `encode_video` wrote there, or ""; of MP4s alone."""
    if not _is_mp4(data) or video_type() != MP4:
        return ""
    ffmpeg = require_extra("imageio_ffmpeg", "video").get_ffmpeg_exe()
    with tempfile.TemporaryDirectory(prefix="diffusax-") as folder:
        path = Path(folder) / "clip"
        path.write_bytes(data)
        call = [ffmpeg, "-v", "quiet", "-nostdin", *_BOUNDS, "-i", str(path)]
        call += ["-f", "ffmetadata", "pipe:1"]
        done = subprocess.run(call, capture_output=True, check=False, timeout=_SECONDS)
    comment = _COMMENT.search(done.stdout.decode("utf-8", "replace"))
    return _ESCAPED.sub(r"\1", comment[1]) if comment else ""
