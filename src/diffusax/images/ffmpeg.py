"""Reads and writes the frames of videos with ffmpeg, one after the other.

imageio-ffmpeg has the program. Its own functions run Python between fork and exec, which may
deadlock beside JAX's threads.
"""

import contextlib
import re
import subprocess
import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from PIL import Image, ImageOps

from diffusax.boundary.messages import require_extra

_DURATION = re.compile(r"Duration: (\d+):(\d\d):(\d\d(?:\.\d+)?)")
_RATE = re.compile(r"Stream #.*Video:.*?([\d.]+) fps")
_COMMENT = re.compile(r"^comment=((?:\\.|[^\\\n])*)$", re.DOTALL | re.MULTILINE)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_FAILED = "cannot read the video {!r}: {}"
_BOUNDS = (
    *("-protocol_whitelist", "file"),
    # No lists that name other files or addresses.
    *("-format_whitelist", "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg"),
    *("-max_pixels", str(2**26)),
)
"""What ffmpeg may open, and take a file for, and the most pixels of a frame."""
_SECONDS = 120.0
"""The longest that looking into a file may take."""


class VideoHeader(NamedTuple):
    """What a video says of itself."""

    height: int
    """Of its frames in pixels, when they are upright."""
    width: int
    fps: float
    """0 where it does not say so."""
    frames: int
    """Its length times its frames per second, from which the number of frames may differ a bit; 0
    where it does not say them."""


def read_header(path: Path) -> VideoHeader:
    """Reads the header of a video, and its first frame for its size when it is upright.

    Raises:
        ValueError: it cannot be read; names it.
        ImportError: imageio-ffmpeg is not installed.
    """
    command = _command(path, ("-frames:v", "1"), log="info")
    done = _done(command)
    text = done.stderr.decode(errors="replace")
    size = re.match(rb"P6\n(\d+) (\d+)\n255\n", done.stdout)
    if size is None:
        lines = [line for line in text.splitlines() if line.strip()] or ["it has no frames"]
        raise ValueError(_FAILED.format(str(path), lines[-1].strip()))
    length, rate = _DURATION.search(text), _RATE.search(text)
    seconds = 0.0
    if length is not None:
        hours, minutes, rest = map(float, length.groups())
        seconds = 3600 * hours + 60 * minutes + rest
    fps = 0.0 if rate is None else float(rate[1])
    width, height = map(int, size.groups())
    return VideoHeader(height, width, fps, round(seconds * fps))


@contextlib.contextmanager
def opened_frames(
    path: Path,
    start: float = 0.0,
    *,
    most: int | None = None,
    area: int | None = None,
    seconds: float | None = None,
) -> Generator[Iterator[Image.Image]]:
    """Opens the frames of a video from a time in seconds, RGB and upright.

    They end early where a file is broken. Nothing more is read behind the context.

    Args:
        path: the file.
        start: when the first one is shown.
        most: the most frames.
        area: frames of more pixels become smaller.
        seconds: the longest that reading may take, after which they end.

    Raises:
        ImportError: imageio-ffmpeg is not installed.
    """
    # Before the input it is exact, and nothing before it is kept.
    seek = ("-ss", f"{start:.6f}") if start > 0 else ()
    more = [] if most is None else ["-frames:v", str(most)]
    if area is not None:
        shrink = f"min(1\\,sqrt({area}/(iw*ih)))"
        sides = (f"max(2\\,trunc({side}*{shrink}/2)*2)" for side in ("iw", "ih"))
        more += ["-vf", "scale=w={}:h={}".format(*sides)]
    with subprocess.Popen(
        _command(path, more, before=seek),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Ctrl-C is for the program that reads.
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        timer = None if seconds is None else threading.Timer(seconds, process.kill)
        if timer is not None:
            timer.start()
        try:
            yield _frames(process.stdout)
        finally:
            process.kill()
            if timer is not None:
                timer.cancel()


def write_frames(
    path: Path,
    frames: Sequence[Image.Image],
    fps: float,
    *,
    comment: str = "",
    coding: Sequence[str] = ("-crf", "18"),
) -> None:
    """Writes a video, H.264 in an .mp4 file, with an even number of rows and columns.

    Args:
        path: the file.
        frames: of one size.
        fps: the frames per second.
        comment: a text for the file to hold.
        coding: ffmpeg's arguments that say how good the video is.

    Raises:
        ValueError: ffmpeg cannot write it; says why.
        ImportError: imageio-ffmpeg is not installed.
    """
    width, height = (side + side % 2 for side in frames[0].size)
    even = [ImageOps.pad(frame, (width, height), color="white") for frame in frames]
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}"]
    coded = ["-c:v", "libx264", "-pix_fmt", "yuv420p", *coding]
    # Players take colours without a name for different ones.
    coded += ["-vf", "scale=out_color_matrix=bt709", "-colorspace", "bt709"]
    coded += ["-color_primaries", "bt709", "-color_trc", "bt709"]
    # The index stands first, so that browsers begin before all of the file has come.
    coded += ["-movflags", "+faststart", "-y"]
    own = ["-metadata", f"comment={comment}"] if comment else []
    data = b"".join(frame.convert("RGB").tobytes() for frame in even)
    command = [*_program("error"), *given, "-i", "-", *coded, *own, f"file:{path}"]
    done = subprocess.run(command, input=data, capture_output=True, start_new_session=True)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or ["ffmpeg fails"]
        raise ValueError(f"cannot write the video {str(path)!r}: {reason[-1]}")


def read_comment(path: Path) -> str:
    """Returns the comment that a video holds, or "".

    Raises:
        ValueError: it takes too long.
        ImportError: imageio-ffmpeg is not installed.
    """
    given = ["-nostdin", *_BOUNDS, "-i", f"file:{path}"]
    done = _done([*_program("error"), *given, "-f", "ffmetadata", "-"])
    comment = _COMMENT.search(done.stdout.decode(errors="replace"))
    return _ESCAPED.sub(r"\1", comment[1]) if comment else ""


def _done(command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
    """Runs a command that reads; raises ValueError where it takes too long."""
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
    try:
        return subprocess.run(command, capture_output=True, timeout=_SECONDS, **options)
    except subprocess.TimeoutExpired:
        raise ValueError(f"reading the video took more than {_SECONDS:g} seconds") from None


def _program(log: str) -> list[str]:
    program = require_extra("imageio_ffmpeg", "video").get_ffmpeg_exe()
    return [program, "-hide_banner", "-loglevel", log, "-nostats"]


def _command(
    path: Path, more: Sequence[str] = (), *, before: Sequence[str] = (), log: str = "error"
) -> list[str]:
    start = [*_program(log), "-nostdin", *_BOUNDS, *before]
    # A name with a colon would be a protocol. Each frame of PPM says its own size.
    given = ["-i", f"file:{path}", "-map", "0:v:0", *more]
    return [*start, *given, "-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24", "-"]


def _frames(stream: IO[bytes]) -> Iterator[Image.Image]:
    while stream.readline() == b"P6\n":
        width, height = map(int, stream.readline().split())
        stream.readline()
        data = stream.read(3 * width * height)
        if len(data) < 3 * width * height:
            return
        yield Image.frombytes("RGB", (width, height), data)
