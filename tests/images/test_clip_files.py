"""Videos as the bytes of files: written, read within bounds, and the text inside."""

import io

import numpy as np
import pytest
from PIL import Image

from diffusax.images import clips

TEXT = 'a "b"; #c = \\ d\nNegative prompt: é漢\nSteps: 3, Seed: 1'
FRAMES = [Image.new("RGB", (32, 16), (20 * i, 100, 50)) for i in range(9)]


def animated():
    buffer = io.BytesIO()
    FRAMES[0].save(buffer, "WEBP", save_all=True, append_images=FRAMES[1:])
    return buffer.getvalue()


def read(data, most=99, area=10**6):
    with clips.opened(data, most, area) as reader:
        return reader.size, reader.fps(), list(reader.frames)


@pytest.fixture(params=[clips.MP4, clips.WEBP])
def file(request, monkeypatch):
    if request.param == clips.MP4:
        pytest.importorskip("imageio_ffmpeg")
    else:
        # As where the extra is not installed.
        monkeypatch.setattr(clips.importlib.util, "find_spec", lambda name: None)
    made = clips.encode_video(FRAMES, 16, TEXT)
    assert made.media_type == request.param
    return made


def test_what_is_written_is_read_again(file):
    size, fps, frames = read(file.data)
    assert (size, len(frames)) == ((32, 16), 9)
    # WebP has whole milliseconds.
    assert fps == pytest.approx(16, abs=0.3)
    for one, other in zip(frames, FRAMES, strict=True):
        assert np.abs(np.asarray(one, int) - np.asarray(other, int)).mean() < 4
    if file.media_type == clips.MP4:
        assert clips.text_of(file.data) == TEXT
        # Browsers begin before they have all of it.
        assert file.data.index(b"moov") < file.data.index(b"mdat")
    else:
        comment = Image.open(io.BytesIO(file.data)).getexif().get_ifd(0x8769)[0x9286]
        assert comment.removeprefix(b"UNICODE\0").decode("utf-16-be") == TEXT


def test_only_so_many_frames_and_pixels_are_read(file):
    size, _, frames = read(file.data, 4, 200)
    assert (size, len(frames), frames[0].size) == ((32, 16), 4, (20, 10))


def test_sides_become_even_and_long_texts_are_left_out():
    pytest.importorskip("imageio_ffmpeg")
    odd = [frame.resize((31, 15)) for frame in FRAMES]
    file = clips.encode_video(odd, 24, "x" * 70_000)
    assert read(file.data)[:2] == ((32, 16), 24)
    assert clips.text_of(file.data) == ""
    assert clips.text_of(b"no video") == ""
    assert "\0" not in clips.text_of(clips.encode_video(odd, 24, "a\0b").data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"text" * 100,
        b"GIF89a" + bytes(50),
        # Lists that name other files, which ffmpeg would open.
        b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:10.0,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
    ],
)
def test_what_is_no_video_is_refused(data):
    pytest.importorskip("imageio_ffmpeg")
    with pytest.raises(ValueError, match=r"no video in it|image|cannot"):
        read(data)


def test_half_a_video_is_refused_or_gives_what_it_has():
    pytest.importorskip("imageio_ffmpeg")
    data = clips.encode_video(FRAMES, 16).data
    with pytest.raises(ValueError, match="ffmpeg"):
        read(data[:300])
    with pytest.raises(ValueError):
        read(animated()[:-20])


def test_stills_are_told_from_animations():
    buffer = io.BytesIO()
    FRAMES[0].save(buffer, "PNG")
    assert clips.is_still(buffer.getvalue())
    assert not clips.is_still(animated())
    assert not clips.is_still(clips.encode_video(FRAMES, 16).data)
