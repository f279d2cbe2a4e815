"""Reads and writes the frames of videos with ffmpeg, one after the other.

imageio-ffmpeg has the program. Its own functions run Python between fork and exec, which may
deadlock beside JAX's threads.
"""

import contextlib
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from diffusax.boundary.messages import require_extra

_DURATION = re.compile(r"Duration: (\d+):(\d\d):(\d\d(?:\.\d+)?)")
_RATE = re.compile(r"Stream #.*Video:.*?([\d.]+) fps")
_FAILED = "cannot read the video {!r}: {}"


class VideoHeader(NamedTuple):
    """What a video says of itself."""

    height: int
    width: int
    fps: float
    frames: int
    """Its length times its frames per second, from which the number of frames may differ a bit."""


def read_header(path: Path) -> VideoHeader:
    """Reads the header of a video, and its first frame for its size when it is upright.

    Raises:
        ValueError: it cannot be read, or says no length or rate; names it.
        ImportError: imageio-ffmpeg is not installed.
    """
    command = _command(path, ("-frames:v", "1"), log="info")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
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
    frames = round(seconds * fps)
    if not frames:
        raise ValueError(_FAILED.format(str(path), "it says no length, or no frames per second"))
    width, height = map(int, size.groups())
    return VideoHeader(height, width, fps, frames)


@contextlib.contextmanager
def opened_frames(path: Path, start: float = 0.0) -> Iterator[Iterator[np.ndarray]]:
    """Opens the frames of a video from a time in seconds, H W 3 uint8 each, upright.

    They end early where a file is broken. Nothing more is read behind the context.

    Raises:
        ImportError: imageio-ffmpeg is not installed.
    """
    # Before the input it is exact, and nothing before it is kept.
    seek = ("-ss", f"{start:.6f}") if start > 0 else ()
    with subprocess.Popen(
        _command(path, before=seek),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Ctrl-C is for the program that reads.
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield _frames(process.stdout)
        finally:
            process.kill()


def write_frames(path: Path, frames: Sequence[Image.Image], fps: float) -> None:
    """Writes a video, H.264 in an .mp4 file, with an even number of rows and columns.

    Raises:
        ValueError: ffmpeg cannot write it; says why.
        ImportError: imageio-ffmpeg is not installed.
    """
    width, height = (side + side % 2 for side in frames[0].size)
    even = [ImageOps.pad(frame, (width, height), color="white") for frame in frames]
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", f"{fps:g}"]
    coded = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", "18", "-y", f"file:{path}"]
    data = b"".join(frame.convert("RGB").tobytes() for frame in even)
    command = [*_program("error"), *given, "-i", "-", *coded]
    done = subprocess.run(command, input=data, capture_output=True, start_new_session=True)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().splitlines() or ["ffmpeg fails"]
        raise ValueError(f"cannot write the video {str(path)!r}: {reason[-1]}")


def _program(log: str) -> list[str]:
    program = require_extra("imageio_ffmpeg", "video").get_ffmpeg_exe()
    return [program, "-hide_banner", "-loglevel", log, "-nostats"]


def _command(
    path: Path, more: Sequence[str] = (), *, before: Sequence[str] = (), log: str = "error"
) -> list[str]:
    start = [*_program(log), "-nostdin", *before]
    # A name with a colon would be a protocol. Each frame of PPM says its own size.
    given = ["-i", f"file:{path}", "-map", "0:v:0", *more]
    return [*start, *given, "-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24", "-"]


def _frames(stream: IO[bytes]) -> Iterator[np.ndarray]:
    while stream.readline() == b"P6\n":
        width, height = map(int, stream.readline().split())
        stream.readline()
        data = stream.read(3 * width * height)
        if len(data) < 3 * width * height:
            return
        yield np.frombuffer(data, np.uint8).reshape(height, width, 3)
