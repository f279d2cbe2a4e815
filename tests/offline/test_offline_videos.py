"""Runs over many prompts with a model of videos."""

import io
import json
import tarfile

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image
from support.offline_runs import errors, files, run, shards
from support.tiny_transformers import wan_pipeline, wan_transformer

import diffusax
from diffusax import offline
from diffusax.cli import main
from diffusax.images import clips
from diffusax.offline.requests import line_seed

SIZE = {"height": 16, "width": 32, "frames": 5, "guidance": 2.0}
ROWS = [
    {"prompt": "a cat"},
    {"prompt": "a dog", "frames": 3, "fps": 8, "seed": 5, "id": "dog", "steps": 3},
    {"prompt": "a fox", "num_frames": 4},
    {"prompt": "an owl", "guidance_scale": 1.0, "guidance_scale_2": 3.0},
    {"prompt": "a bee", "fps": 0},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of two transformers, so that guidance has two scales."""
    path = tmp_path_factory.mktemp("wan")
    wan_pipeline(path, transformer_2=wan_transformer(7), boundary_ratio=0.9)
    return path


@pytest.fixture(scope="module")
def pipe(folder):
    pipe = diffusax.WanPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def whole(pipe, tmp_path_factory):
    """ROWS in one run, as arrays."""
    out = tmp_path_factory.mktemp("whole")
    done = run(pipe, ROWS, out, clip_format="npz", **SIZE)
    assert done == offline.Summary(drawn=3, errors=2, finished=True)
    return out


def test_each_line_is_the_video_that_the_pipeline_draws(pipe, whole):
    (shard, _) = shards(whole)
    rows = [json.loads(line) for line in (shard / "metadata.jsonl").read_text().splitlines()]
    assert [row["file_name"] for row in rows] == ["000000001.npz", "dog.npz", "000000004.npz"]
    assert [(row["num_frames"], row["fps"]) for row in rows] == [(5, 16), (3, 8), (5, 16)]
    for row, given in zip(rows, (ROWS[0], ROWS[1], ROWS[3])):
        found = np.load(shard / row["file_name"])
        call = {"height": 16, "width": 32, "num_frames": row["num_frames"]}
        call |= {"guidance_scale_2": row["guidance_scale_2"], "output_type": "np"}
        call |= {name: row[name] for name in ("num_inference_steps", "guidance_scale", "seed")}
        assert row["seed"] == given.get("seed", line_seed(0, row["line"]))
        expected = pipe(row["prompt"], **call).frames[0]
        assert found["frames"].dtype == np.uint8
        assert np.abs(found["frames"] / 255 - expected).max() < 1.6 / 255
        assert found["frames"].std() > 1
        assert row["prompt"] in str(found["parameters"])
        assert float(found["fps"]) == row["fps"]
    reasons = {error["line"]: error["error"] for error in errors(whole)}
    assert "num_frames must be one more than a multiple of 2" in reasons[3]
    assert "fps must be a number up to 240" in reasons[5]


def test_a_run_goes_on_and_its_parts_are_those_of_one_run(pipe, whole, tmp_path):
    for part in ((0, 2), (1, 2)):
        done = run(pipe, ROWS, tmp_path, shard=part, clip_format="npz", **SIZE)
    assert done.finished
    assert files(tmp_path) == files(whole)
    assert run(pipe, ROWS, tmp_path, clip_format="npz", **SIZE).drawn == 0
    with pytest.raises(ValueError, match="clip_format was npz, now gif"):
        run(pipe, ROWS, tmp_path, clip_format="gif", **SIZE)


@pytest.mark.parametrize("kind", ["mp4", "webp", "gif"])
@pytest.mark.parametrize("form", ["webdataset", "parquet"])
def test_files_and_formats(pipe, tmp_path, kind, form):
    if kind == "mp4":
        pytest.importorskip("imageio_ffmpeg")
    run(pipe, ROWS[:1], tmp_path, format=form, clip_format=kind, fps=10, **SIZE)
    (shard,) = shards(tmp_path)
    if form == "parquet":
        (row,) = pyarrow.parquet.read_table(shard).to_pylist()
        name, data = row["video"]["path"], row["video"]["bytes"]
        assert (row["num_frames"], row["fps"]) == (5, 10)
    else:
        with tarfile.open(shard) as file:
            name, _ = file.getnames()
            data = file.extractfile(name).read()
    assert name == f"000000001.{kind}"
    if kind == "mp4":
        with clips.opened(data, 99, 10**6) as reader:
            size, fps, found = reader.size, reader.fps(), list(reader.frames)
        assert (size, fps, len(found)) == ((32, 16), 10, 5)
        assert "a cat" in clips.text_of(data)
    else:
        clip = Image.open(io.BytesIO(data))
        assert (clip.size, clip.n_frames) == ((32, 16), 5)
        clip.load()
        assert clip.info["duration"] == 100


def test_from_the_command_line(folder, tmp_path, capsys):
    (tmp_path / "prompts.csv").write_text("prompt,frames,fps\na cat,3,12\na dog,,\n")
    given = ["--prompts", str(tmp_path / "prompts.csv"), "--out", str(tmp_path / "out")]
    size = ["--height", "16", "--width", "32", "--steps", "2", "--frames", "5"]
    more = ["--model", str(folder), "--clip-format", "gif", "--step-cache", "first-block=0.1"]
    main(["generate", *given, *size, *more])
    assert "(2 drawn)" in capsys.readouterr().out
    found = sorted((tmp_path / "out" / "000000").glob("*.gif"))
    assert [Image.open(path).n_frames for path in found] == [3, 5]


def test_videos_settings_are_for_videos(tiny_checkpoints, tmp_path):
    images = diffusax.DiffusionPipeline.from_pretrained(tiny_checkpoints.pipeline("sd", "a")[0])
    for name, value in (("frames", 5), ("fps", 8), ("clip_format", "gif")):
        with pytest.raises(ValueError, match=f"{name} is for models that generate videos"):
            run(images, ["a cat"], tmp_path, **{name: value})
