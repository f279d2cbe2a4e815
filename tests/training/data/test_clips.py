"""Clips: their frames at a rate, the part that is taken, numbers of frames, and what is refused."""

import dataclasses
import json
import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image
from support.data_sets import png, write_parquet

from diffusax.images.ffmpeg import write_frames
from diffusax.training import CaptionedDataConfig, VideoDataConfig
from diffusax.training.data.batches import Batches
from diffusax.training.data.buckets import FRAMES, SIZE, buckets_of
from diffusax.training.data.clips import ClipFacts, chosen_frames, clip_facts, read_clip
from diffusax.training.data.opening import open_clips, open_data
from diffusax.training.data.options import Extraction

STEP = 10
"""How much brighter each frame is than the one before."""
SUFFIXES = ("mp4", "mov", "mkv", "webm", "gif", "webp")


def frames(count, size=(32, 24)):
    return [Image.new("RGB", size, (STEP * i,) * 3) for i in range(count)]


def write(file, count, fps, size=(32, 24)):
    """Writes a clip whose frames say their number."""
    shown = frames(count, size)
    if file.suffix in (".gif", ".webp"):
        options = {"lossless": True} if file.suffix == ".webp" else {}
        duration = round(1000 / fps)
        shown[0].save(file, save_all=True, append_images=shown[1:], duration=duration, **options)
    elif file.suffix == ".mp4":
        write_frames(file, shown, fps)
    else:
        write_frames(file.with_suffix(".mp4"), shown, fps)
        run_ffmpeg(file.with_suffix(".mp4"), file, *(["-c", "copy"] * (file.suffix != ".webm")))
        file.with_suffix(".mp4").unlink()
    return file


def run_ffmpeg(given, file, *options):
    program = imageio_ffmpeg.get_ffmpeg_exe()
    command = [program, "-y", "-loglevel", "error", "-i", given, *options, file]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def numbers(images):
    """The numbers of frames, which their brightness says."""
    return [round(float(np.asarray(image).mean()) / STEP) for image in images]


def read(file, count, fps, extraction: Extraction = "head", seed=0, **options):
    rng = np.random.default_rng(seed)
    cell = {"path": str(file), "bytes": None}
    return numbers(read_clip(cell, count, rng, fps=fps, extraction=extraction, **options))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_frames_are_those_shown_at_the_rate(tmp_path, suffix):
    file = write(tmp_path / f"clip.{suffix}", 20, 25)
    facts = clip_facts({"path": str(file)})
    assert (facts.height, facts.width, facts.frames) == (24, 32, 20)
    np.testing.assert_allclose(facts.seconds, 0.8, atol=0.01)
    # Of 25 frames a second each second one and a half are left out at 10.
    assert read(file, 8, 10) == [0, 2, 5, 7, 10, 12, 15, 17]
    assert read(file, 20, 0) == list(range(20))
    # Rates that are nearly the file's own take its frames as they are.
    assert read(file, 20, 24) == list(range(20))
    assert read(file, 9, 50) == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    late = read(file, 4, 25, "random", seed=1)
    assert late == list(range(late[0], late[0] + 4))
    assert late[0] > 0


def test_a_gif_has_times_of_its_own(tmp_path):
    shown, file = frames(3), tmp_path / "clip.gif"
    shown[0].save(file, save_all=True, append_images=shown[1:], duration=[100, 300, 100])
    assert read(file, 5, 10) == [0, 1, 1, 1, 2]


def test_clips_in_bytes_and_images_are_read(tmp_path):
    file = write(tmp_path / "clip.mp4", 6, 10)
    rng = np.random.default_rng(0)
    found = read_clip(file.read_bytes(), 6, rng, fps=0, extraction="head")
    assert numbers(found) == list(range(6))
    image = png(Image.new("RGB", (8, 6), (STEP * 7,) * 3))
    assert numbers(read_clip(image, 1, rng, fps=16, extraction="whole")) == [7]
    assert clip_facts(image) == ClipFacts(6, 8, 1, 0.0)


def test_images_are_upright_and_pages_no_frames(tmp_path):
    image, exif = Image.new("RGB", (8, 6)), Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert clip_facts({"path": str(tmp_path / "turned.jpg")}) == ClipFacts(8, 6, 1, 0.0)
    image.save(tmp_path / "pages.tif", save_all=True, append_images=[image] * 4)
    assert clip_facts({"path": str(tmp_path / "pages.tif")}).frames == 1


def test_videos_are_upright(tmp_path):
    given, file = write(tmp_path / "clip.mp4", 4, 10), tmp_path / "turned.mp4"
    program = imageio_ffmpeg.get_ffmpeg_exe()
    turn = [program, "-loglevel", "error", "-display_rotation", "90", "-i", given]
    subprocess.run([*turn, "-c", "copy", file], check=True)
    facts = clip_facts({"path": str(file)})
    assert (facts.height, facts.width) == (32, 24)
    rng = np.random.default_rng(0)
    (frame,) = read_clip({"path": str(file)}, 1, rng, fps=0, extraction="head")
    assert frame.size == (24, 32)


def test_the_part_that_is_taken():
    def chosen(extraction, samples=2, seed=0):
        rng = np.random.default_rng(seed)
        return chosen_frames(21, 5, extraction, samples, rng).tolist()

    assert chosen("head") == [0, 1, 2, 3, 4]
    assert chosen("whole") == [0, 5, 10, 15, 20]
    starts = {chosen("uniform", 3, seed)[0] for seed in range(40)}
    assert starts == {0, 8, 16}
    starts = [chosen("random", seed=seed)[0] for seed in range(400)]
    assert set(starts) == set(range(17))
    assert chosen("random", seed=7) == chosen("random", seed=7)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: file.write_bytes(b"no video"), "cannot read the video '.*broken.mp4'"),
        (lambda file: write(file, 4, 16), "the clip has 4 frames at 16 frames a second, and 5 are"),
    ],
)
def test_broken_and_short_clips_are_errors(tmp_path, make, message):
    make(tmp_path / "broken.mp4")
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "broken.mp4", 5, 16)


def test_a_video_that_ends_early_is_an_error_and_a_missing_frame_is_not(tmp_path):
    file = write(tmp_path / "whole.mkv", 60, 20)
    data = file.read_bytes()
    (tmp_path / "cut.mkv").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"cannot read the video '.*cut.mkv': it ends before"):
        read(tmp_path / "cut.mkv", 60, 0)
    # The sound goes on for two frames.
    sound = ["-f", "lavfi", "-i", "anullsrc", "-t", "0.6", "-c:v", "copy", "-c:a", "aac"]
    run_ffmpeg(write(tmp_path / "mute.mp4", 10, 20), tmp_path / "loud.mp4", *sound)
    facts = clip_facts({"path": str(tmp_path / "loud.mp4")})
    assert facts.frames == 12
    assert read(tmp_path / "loud.mp4", 12, 0) == [*range(10), 9, 9]


@pytest.fixture
def folder(tmp_path):
    """Clips of several lengths and shapes and an image, with captions beside them."""
    found = tmp_path / "clips"
    found.mkdir()
    write(found / "long.mp4", 22, 10, (32, 24))
    write(found / "short.gif", 6, 10, (24, 32))
    Image.new("RGB", (40, 30)).save(found / "still.png")
    for name in ("long", "short", "still"):
        (found / f"{name}.txt").write_text(f"a {name} one")
    return found


def opened(folder, step=4, fps=10.0, **options):
    config = VideoDataConfig(str(folder), **options)
    given = {"side": 16, "factor": 8, "step": step, "fps": fps}
    return open_clips(config, ("image", "text"), **given)


def test_a_folder_has_clips_and_images_in_buckets_of_their_frames(folder, caplog):
    with caplog.at_level("INFO"):
        source = opened(folder, num_frames=(9, 1, 5), bucket_step=8)
    rows = [source[i] for i in range(len(source))]
    assert [row["text"] for row in rows] == ["a long one", "a short one", "a still one"]
    assert [row[FRAMES] for row in rows] == [9, 5, 1]
    assert {row[SIZE] for row in rows} == {(16, 16)}
    assert "sizes 24x32 to 40x30; frames 6 to 22; frames a second 10; 1 images" in caplog.text
    assert "images by size: 16x16x1 1, 16x16x5 1, 16x16x9 1" in caplog.text
    again = opened(folder, num_frames=(9, 1, 5), bucket_step=8)
    np.testing.assert_array_equal(buckets_of(again).of_row, buckets_of(source).of_row)


def test_metadata_names_clips(tmp_path):
    write(tmp_path / "a.mp4", 5, 10)
    write(tmp_path / "b.webm", 5, 10)
    lines = [{"file_name": "b.webm", "text": "second"}, {"file_name": "a.mp4", "text": "first"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = opened(tmp_path, num_frames=(5,))
    assert [source[i]["text"] for i in range(2)] == ["second", "first"]
    assert source[0]["image"]["path"].endswith("b.webm")


def test_clips_in_parquet_are_read(tmp_path):
    cell = {"bytes": write(tmp_path / "a.mp4", 5, 10).read_bytes(), "path": "a.mp4"}
    data = write_parquet(tmp_path / "data", [{"image": cell, "text": "one"}] * 3)
    source = opened(data, num_frames=(5, 1))
    assert buckets_of(source).frames == (1, 5)
    assert source[1][FRAMES] == 5


def test_sizes_may_stand_in_columns(tmp_path):
    write(tmp_path / "a.mp4", 5, 10, (32, 16))
    line = {"file_name": "a.mp4", "text": "one", "width": 16, "height": 32}
    (tmp_path / "metadata.jsonl").write_text(json.dumps(line))
    columns = {"width_column": "width", "height_column": "height"}
    source = opened(tmp_path, num_frames=(5,), buckets=("32x16", "16x32"), **columns)
    assert source[0][SIZE] == (32, 16)


def test_clips_that_are_too_short_end_the_run(folder):
    message = "2 of 3 clips have fewer than 9 frames, such as .*short.gif; name a smaller number"
    with pytest.raises(ValueError, match=message):
        opened(folder, num_frames=(9,), bucket_step=8)
    source = opened(folder, num_frames=(9,))
    config = VideoDataConfig(str(folder), num_frames=(9,))

    def prepare(row, rng):
        count = row.get(FRAMES, config.num_frames[0])
        found = read_clip(row["image"], count, rng, fps=10, extraction="head")
        return {"pixel_values": np.stack([np.asarray(frame) for frame in found])}

    batches = Batches(source, prepare, batch_size=3, seed=0)
    with pytest.raises(ValueError, match=r"of \d rows are broken.*frames at 10 frames a second"):
        next(batches)
    batches.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_frames": (81, 8)}, "data.num_frames must be one more than a multiple of 4 .*5 or 9"),
        ({"mask": "alpha"}, "data.mask is of images, and cannot be with clips"),
        ({"mask_column": "mask"}, "data.mask_column is of images"),
        (
            {"num_frames": (1, 5), "own_part": True},
            "data.num_frames must be one number with data.o",
        ),
        ({"frame_samples": 3}, "data.frame_samples=3 does nothing without data.frame_extraction"),
        ({"num_frames": ()}, "data.num_frames must be at least one number"),
        ({"num_frames": (0,)}, "data.num_frames must be"),
    ],
)
def test_options_that_cannot_be(folder, options, message):
    with pytest.raises(ValueError, match=message):
        opened(folder, **options)


def test_images_of_other_recipes_are_no_videos(folder):
    source = open_data(CaptionedDataConfig(str(folder)), ("image", "text"))
    assert sorted(source[i]["text"] for i in range(len(source))) == ["a short one", "a still one"]


def test_facts_say_how_many_frames_there_are():
    facts = ClipFacts(8, 8, 17, 17 / 16)
    assert [facts.available(fps) for fps in (0, 8, 16, 16.5, 32)] == [17, 8, 17, 17, 34]
    assert dataclasses.replace(facts, frames=1, seconds=0.0).available(16) == 1
