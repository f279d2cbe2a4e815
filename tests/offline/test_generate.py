"""Runs over many prompts in this process: what they write, what they refuse."""

import io
import json
import logging
import os
import threading

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from support.offline_runs import errors, files, pictures, pixels, run, settings, shards

import diffusax
from diffusax import offline
from diffusax.batch import programs as batch
from diffusax.batch.run import Lanes
from diffusax.offline.requests import Requests, line_seed
from diffusax.offline.seating import seat_requests
from diffusax.samplers import X, scheduler_from_function

ROWS = [
    {"prompt": "a cat"},
    {"prompt": "a dog", "sampler": "heun", "steps": 3, "seed": 5, "guidance": 3.0},
    {"prompt": "a fox", "sampler": "euler_a", "num_inference_steps": 4, "guidance_scale": 1.5},
    {"prompt": "an owl", "negative_prompt": "blue", "seed": 7, "id": "owl_1"},
    {"prompt": "a bee", "guidance": 1.0, "height": 32, "width": 40},
    {"prompt": "an ant", "id": 12},
    {"prompt": "", "sampler": "dpm++2m_karras"},
]


@pytest.fixture(scope="module")
def pipe(tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline("sd", "a")
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def whole(pipe, tmp_path_factory):
    """ROWS in one run."""
    out = tmp_path_factory.mktemp("whole")
    assert run(pipe, ROWS, out) == offline.Summary(drawn=7, errors=0, finished=True)
    return out


@pytest.mark.slow
def test_each_line_is_the_picture_that_the_pipeline_draws(pipe, whole):
    found = {info["line"]: (info, pixels(data)) for info, data in pictures(whole)}
    assert sorted(found) == list(range(1, 8))
    assert len({info["seed"] for info, _ in found.values()}) == 7
    own = pipe.scheduler
    for number, row in enumerate(ROWS, 1):
        info, picture = found[number]
        if "sampler" in row:
            pipe.scheduler = diffusax.samplers.scheduler_from_name(row["sampler"], own)
        expected = pipe(
            row["prompt"],
            negative_prompt=row.get("negative_prompt"),
            height=row.get("height"),
            width=row.get("width"),
            num_inference_steps=row.get("steps", row.get("num_inference_steps", 2)),
            guidance_scale=row.get("guidance", row.get("guidance_scale", 7.5)),
            seed=row.get("seed", line_seed(0, number)),
        ).images[0]
        pipe.scheduler = own
        # Programs of another batch size round otherwise, which may turn a half.
        assert np.abs(picture.astype(int) - np.asarray(expected).astype(int)).max() <= 1
        assert picture.std() > 1
        assert info["seed"] == row.get("seed", line_seed(0, number))
    assert [found[n][0]["key"] for n in (1, 4, 6)] == ["000000001", "owl_1", "12"]


def test_other_samplers_steps_and_guidance_compile_nothing(pipe, whole, tmp_path):
    before = batch.advance_batch.compiled_shapes
    rows = [
        {"prompt": "x", "sampler": "unipc", "steps": 3, "guidance": 4.0},
        {"prompt": "y", "sampler": "lms", "steps": 5, "guidance": 9.0, "negative_prompt": "z"},
    ]
    run(pipe, rows, tmp_path / "two")
    run(pipe, rows[:1], tmp_path / "one")
    assert batch.advance_batch.compiled_shapes == before
    name = "000000/000000001.png"
    assert files(tmp_path / "one")[name] == files(tmp_path / "two")[name]
    # Batches of two, the last of which is filled up.
    run(pipe, [*rows, "z"], tmp_path / "three", batch_size=2)
    assert batch.advance_batch.compiled_shapes == before + 1


def test_seats_follow_from_the_lines_and_long_runs_begin_first(pipe):
    requests = Requests(pipe, settings(sampler="euler"))
    rows = [{"prompt": "a", "steps": steps, "guidance": 2.0} for steps in (2, 9, 3, 9, 2)]
    rows += [{"prompt": "a", "steps": 4, "guidance": 1.0}] * 2
    found = [requests.of_row(row, n)[0] for n, row in enumerate(rows, 1)]
    pieces = seat_requests(found, 3, lambda: Lanes(4, 2))
    images = [image for piece in pieces for image in piece]
    assert [len(piece) for piece in pieces] == [3, 3, 1]
    by_line = {image.request.info["line"]: image for image in images}
    assert sorted(by_line) == list(range(1, 8))
    # The two of nine steps first, then the two without guidance in one lane each.
    begun = sorted(by_line, key=lambda line: by_line[line].turn)
    assert begun[:4] == [2, 4, 6, 7]
    assert [len(by_line[line].seat.lanes) for line in begun[:4]] == [2, 2, 1, 1]
    again = seat_requests(found, 3, lambda: Lanes(4, 2))
    assert [[i.seat for i in piece] for piece in again] == [[i.seat for i in p] for p in pieces]


def test_the_batch_stays_full_over_many_lines(pipe):
    r = np.random.default_rng(0)
    rows = [
        {"prompt": "a", "steps": int(r.integers(4, 51)), "guidance": float(r.choice([1.0, 3.0]))}
        for _ in range(100)
    ]
    requests = Requests(pipe, settings(sampler="euler"))
    images = [requests.of_row(row, n)[0] for n, row in enumerate(rows, 1)]
    pieces = seat_requests(images, 8, lambda: Lanes(16, 2))
    free_from = np.zeros(16, int)
    seated = sorted((image for piece in pieces for image in piece), key=lambda image: image.turn)
    for image in seated:
        lanes = list(image.seat.lanes)
        free_from[lanes] = free_from[lanes].max() + image.request.image.rows
    work = sum(i.request.image.rows * len(i.seat.lanes) for i in seated)
    assert work / (16 * free_from.max()) > 0.95


def test_a_picture_does_not_depend_on_the_lines_around_it(pipe, tmp_path):
    rows = [{**row, "seed": number, "id": number} for number, row in enumerate(ROWS)]
    orders = {}
    for name, order in (("there", rows), ("back", rows[::-1])):
        run(pipe, order, tmp_path / name, images_per_shard=10)
        orders[name] = {info["key"]: data for info, data in pictures(tmp_path / name)}
    assert orders["there"] == orders["back"]
    assert len(set(orders["there"].values())) == len(rows)


def test_the_shards_of_several_processes_are_those_of_one(pipe, whole, tmp_path):
    first = run(pipe, ROWS, tmp_path, shard=(0, 2))
    assert not first.finished
    assert [shard.name for shard in shards(tmp_path)] == ["000000"]
    second = run(pipe, ROWS, tmp_path, shard=(1, 2))
    assert second.finished
    assert first.drawn + second.drawn == 7
    assert files(tmp_path) == files(whole)


def test_jax_processes_divide_the_shards(pipe, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert run(pipe, ROWS, tmp_path).drawn == 3
    assert [shard.name for shard in shards(tmp_path)] == ["000001"]


def test_formats_hold_the_same_pictures(pipe, whole, tmp_path):
    expected = sorted((info["key"], info, data) for info, data in pictures(whole))
    for name, suffix in (("webdataset", ".tar"), ("parquet", ".parquet")):
        run(pipe, ROWS, tmp_path / name, format=name)
        assert [shard.name for shard in shards(tmp_path / name)] == [
            f"000000{suffix}",
            f"000001{suffix}",
        ]
        found = sorted((info["key"], info, data) for info, data in pictures(tmp_path / name))
        assert found == expected


def test_png_files_say_how_they_were_drawn(pipe, whole, tmp_path):
    out = tmp_path / "out"
    source = {"model": "some/model"}
    offline.generate(pipe, ROWS[3:4], out, settings(clip_skip=1), source=source, progress=False)
    (info, data), *_ = pictures(out)
    assert Image.open(io.BytesIO(data)).text["parameters"].splitlines() == [
        "an owl",
        "Negative prompt: blue",
        "Steps: 2, Sampler: PLMS, Schedule type: Automatic, CFG scale: 7.5, Seed: 7, Size: 64x64, "
        "Model: model, Clip skip: 2, Prompt weighting: False, Long prompt: False, RNG: jax, "
        f"Version: diffusax {diffusax.__version__}",
    ]
    assert info["sampler"] == "PNDMScheduler"


def test_several_pictures_of_a_line_are_those_of_its_seed(pipe, tmp_path):
    run(pipe, [{"prompt": "a cat", "seed": 3}], tmp_path, num_images=2)
    found = {info["key"]: pixels(data) for info, data in pictures(tmp_path)}
    assert sorted(found) == ["000000001-0", "000000001-1"]
    expected = pipe("a cat", num_images_per_prompt=2, num_inference_steps=2, seed=3).images
    for number, image in enumerate(expected):
        drawn = found[f"000000001-{number}"].astype(int)
        assert np.abs(drawn - np.asarray(image).astype(int)).max() <= 1
    assert np.abs(found["000000001-0"].astype(int) - found["000000001-1"]).max() > 10


@pytest.mark.slow
def test_sdxl_and_lcm_lines_keep_their_guidance(tiny_checkpoints, tmp_path):
    rows = [{"prompt": "a", "guidance": 3.0, "seed": 1}, {"prompt": "b", "guidance": 6, "seed": 2}]
    rows.append({"prompt": "c", "negative_prompt": "d", "seed": 3})
    for kind in ("xl", "lcm"):
        folder, _ = tiny_checkpoints.pipeline(kind)
        pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        rows = rows if kind == "xl" else rows[:2]
        run(pipe, rows, tmp_path / kind)
        found = {info["line"]: pixels(data).astype(int) for info, data in pictures(tmp_path / kind)}
        for number, row in enumerate(rows, 1):
            more = {k: row[k] for k in ("negative_prompt",) if k in row}
            scale = {"guidance_scale": row["guidance"]} if "guidance" in row else {}
            image = pipe(
                row["prompt"], num_inference_steps=2, seed=row["seed"], **more, **scale
            ).images[0]
            assert np.abs(found[number] - np.asarray(image).astype(int)).max() <= 1


def test_long_prompts_leave_short_ones_as_they_are(pipe, tmp_path):
    long = " ".join(["cat"] * 100)
    rows = [{"prompt": "a cat", "seed": 1}, {"prompt": long, "seed": 1}]
    run(pipe, rows, tmp_path / "two", long_prompt=True)
    run(pipe, rows[:1], tmp_path / "one", long_prompt=True)
    two, one = (
        {info["line"]: data for info, data in pictures(tmp_path / name)} for name in ("two", "one")
    )
    assert two[1] == one[1]
    assert two[2] != two[1]


BAD = [
    ('{"prompt": "a cat"', "it is not valid JSON"),
    ('["a cat"]', "it must be a JSON object (got list)"),
    ('{"prompt": "a cat", "prompt": "a dog"}', "'prompt' stands there twice"),
    ('{"promt": "a cat"}', "prompt must be a text (got nothing)"),
    ('{"prompt": 3}', "prompt must be a text (got 3)"),
    ('{"prompt": "a", "seed": -1}', "seed must be an integer from 0"),
    ('{"prompt": "a", "seed": [1]}', "seed must be an integer from 0"),
    ('{"prompt": "a", "height": 33}', "height must be divisible by"),
    ('{"prompt": "a", "sampler": "best"}', "unknown sampler 'best'"),
    ('{"prompt": "a", "steps": 0}', "num_inference_steps must be at least 1"),
    ('{"prompt": "a", "steps": 5000}', "at most num_train_timesteps"),
    ('{"prompt": "a", "steps": 5, "num_inference_steps": 5}', "another name of num_inf"),
    ('{"prompt": "a", "guidance": "high"}', "guidance_scale must be a number"),
    ('{"prompt": "a", "id": "../a"}', "id must be a number or 1 to 100 letters"),
    ('{"prompt": "a", "id": "first"}', "the id 'first' is that of a line before"),
    ('{"prompt": "\\ud800"}', ""),
]


def test_bad_lines_are_reported_and_skipped(pipe, tmp_path, caplog):
    file = tmp_path / "prompts.jsonl"
    good = ['{"prompt": "a cat", "id": "first"}', "", '{"prompt": "a dog", "colour": "red"}']
    lines = [good[0], *(line for line, _ in BAD), *good[1:]]
    file.write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    with caplog.at_level(logging.WARNING, "diffusax"):
        done = run(pipe, str(file), tmp_path / "out", images_per_shard=100)
    found = errors(tmp_path / "out")
    assert done == offline.Summary(drawn=2, errors=len(found), finished=True)
    assert [error["line"] for error in found] == [*range(2, len(BAD) + 2), len(lines) + 1]
    for error, (_, message) in zip(found, BAD):
        assert message in error["error"]
        assert error["file"] == str(file)
        assert f"{file} line {error['line']} is left out: " in caplog.text
    assert "not UTF-8" in found[-1]["error"]
    assert [info["line"] for info, _ in pictures(tmp_path / "out")] == [1, len(lines)]
    assert caplog.text.count("the column 'colour' is not read") == 1


def test_pictures_that_are_not_finite_are_reported(pipe, tmp_path):
    def overflow(steps):
        return [steps.row(i, 1e30 * X) for i in range(len(steps))]

    own = diffusax.StableDiffusionPipeline.from_pipe(pipe)
    own.scheduler = scheduler_from_function(overflow, like=pipe.scheduler)
    rows = [
        {"prompt": "a cat", "sampler": "euler"},
        "a dog",
        {"prompt": "a fox", "sampler": "ddim"},
    ]
    done = run(own, rows, tmp_path)
    (error,) = errors(tmp_path)
    assert (done.drawn, done.errors) == (2, 1)
    assert "is not finite in float32" in error["error"]
    assert error["line"] == 2
    assert sorted(info["line"] for info, _ in pictures(tmp_path)) == [1, 3]


def test_text_and_parquet_files_are_read_as_lists_are(pipe, tmp_path):
    rows = [{"prompt": f"number {n}", "seed": n, "steps": 1} for n in range(9)]
    run(pipe, rows, tmp_path / "list")
    table = pyarrow.Table.from_pylist([{**row, "other": 1.5} for row in rows])
    # Pandas writes whole numbers as floats where some are missing.
    table = table.set_column(1, "seed", table["seed"].cast(pyarrow.float64()))
    pyarrow.parquet.write_table(table, tmp_path / "prompts.parquet", row_group_size=2)
    for index in range(3):
        run(pipe, tmp_path / "prompts.parquet", tmp_path / "parquet", shard=(index, 3))
    assert files(tmp_path / "parquet") == files(tmp_path / "list")

    text = "\ufeffnumber 0\r\nnumber 1\n\n  number 3"
    (tmp_path / "prompts.txt").write_bytes(text.encode())
    run(pipe, tmp_path / "prompts.txt", tmp_path / "text")
    run(pipe, ["number 0", "number 1", {"prompt": None}, "number 3"], tmp_path / "texts")
    assert files(tmp_path / "text") == files(tmp_path / "texts")
    assert [info["prompt"] for info, _ in pictures(tmp_path / "text")] == [
        "number 0",
        "number 1",
        "number 3",
    ]


def test_a_line_without_end_is_not_read_into_memory(pipe, tmp_path):
    file = tmp_path / "prompts.txt"
    with file.open("wb") as opened:
        opened.write(b"a cat\n")
        for _ in range(5):
            opened.write(b"x" * 2**20)
        opened.write(b"\na dog\n")
    run(pipe, file, tmp_path / "out")
    assert [info["prompt"] for info, _ in pictures(tmp_path / "out")] == ["a cat", "a dog"]
    assert [(e["line"], e["error"]) for e in errors(tmp_path / "out")] == [
        (2, "it is longer than 1048576 bytes")
    ]


def test_shards_without_pictures_are_finished_too(pipe, tmp_path):
    for name in ("images", "webdataset", "parquet"):
        out = tmp_path / name
        assert run(pipe, [3] * 5, out, format=name).errors == 5
        assert len(shards(out)) == 2
        assert pictures(out) == []


def test_a_run_that_is_finished_draws_nothing(pipe, whole):
    noted = json.loads((whole / "manifest.json").read_text())
    assert (noted["pipeline"], noted["lines of prompts"]) == ("StableDiffusionPipeline", 7)
    before = files(whole)
    assert run(pipe, ROWS, whole) == offline.Summary(drawn=0, errors=0, finished=True)
    assert files(whole) == before


@pytest.mark.parametrize(
    ("given", "rows", "message"),
    [
        ({"steps": 3}, ROWS, "steps was 2, now 3"),
        ({"seed": 1}, ROWS, "seed was 0, now 1"),
        ({"format": "parquet"}, ROWS, "format was images, now parquet"),
        ({"negative_prompt": "x"}, ROWS, "negative_prompt was not given, now x"),
        ({}, ROWS[1:], "lines of prompts was 7, now 6"),
        ({}, [*ROWS[:-1], "a"], "sha256 of prompts was "),
    ],
)
def test_other_options_or_prompts_are_refused(pipe, whole, given, rows, message):
    before = files(whole)
    with pytest.raises(ValueError, match="give the same as then to go on with it") as raised:
        run(pipe, rows, whole, **given)
    assert message in str(raised.value)
    assert files(whole) == before


def test_another_pipeline_is_refused(pipe, whole):
    other = diffusax.StableDiffusionPipeline(**pipe.components)
    other.scheduler = diffusax.samplers.scheduler_from_name("heun", pipe.scheduler)
    with pytest.raises(ValueError, match="scheduler was "):
        run(other, ROWS, whole)


@pytest.mark.parametrize(
    ("prompts", "given", "message"),
    [
        ("no.txt", {}, "no.txt is missing"),
        ("prompts.json", {}, "must be a .txt, .jsonl, .csv, .parquet file"),
        ("comma.csv", {}, "comma.csv line 3 has 3 values, and the header has 2 (prompt, seed)"),
        ("texts.csv", {}, "has no column prompt; it has text"),
        ("bad.parquet", {}, "is not a whole Parquet file"),
        ("texts.parquet", {}, "has no column prompt; it has text"),
        (["a"], {"height": 33}, "height must be divisible"),
        (["a"], {"sampler": "best"}, "unknown sampler"),
        (["a"], {"num_images": 5}, "images_per_shard=4 must be at least num_images=5"),
        (["a"], {"batch_size": 0}, "batch_size must be a whole number"),
        (["a"], {"shard": (2, 2)}, "shard must be i/n"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_drawn(pipe, tmp_path, prompts, given, message):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and so on")
    table = pyarrow.Table.from_pylist([{"text": "a"}])
    pyarrow.parquet.write_table(table, tmp_path / "texts.parquet")
    (tmp_path / "comma.csv").write_text('prompt,seed\n"a, b",1\n1girl, solo,2\n')
    (tmp_path / "texts.csv").write_text("text\na\n")
    prompts = tmp_path / prompts if isinstance(prompts, str) else prompts
    shard = given.pop("shard", None)
    with pytest.raises(ValueError) as raised:
        run(pipe, prompts, tmp_path / "out", shard=shard, **given)
    assert message in str(raised.value)
    assert not shards(tmp_path / "out")


def test_pipelines_that_need_a_picture_are_refused(pipe, tmp_path):
    other = diffusax.StableDiffusionImg2ImgPipeline.from_pipe(pipe)
    with pytest.raises(ValueError, match="StableDiffusionImg2ImgPipeline does not"):
        run(other, ROWS, tmp_path)


@pytest.mark.parametrize("name", ["images", "webdataset", "parquet"])
def test_a_full_disk_ends_the_run_and_another_one_goes_on(pipe, tmp_path, monkeypatch, name):
    sync, written, room = os.fsync, [], 1_000

    def limited(file):
        sync(file)
        written.append(file)
        if len(written) > room:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", limited)
        run(pipe, ROWS, tmp_path / "whole", format=name)
        room = len(written) * 2 // 3
        written.clear()
        with pytest.raises(OSError, match="No space left"):
            run(pipe, ROWS, tmp_path / "out", format=name)
    assert run(pipe, ROWS, tmp_path / "out", format=name).drawn < 7
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_the_next_batch_is_drawn_while_the_files_of_one_are_made(pipe, tmp_path, monkeypatch):
    decode, encode = offline.stages.decode, offline.stages.ShardGenerator._encode
    second, drawn = threading.Event(), []

    def drawing(*args, **options):
        drawn.append(args)
        if len(drawn) == 6:
            second.set()
        return decode(*args, **options)

    def encoding(self, request, picture):
        assert second.wait(20)
        return encode(self, request, picture)

    monkeypatch.setattr(offline.stages, "decode", drawing)
    monkeypatch.setattr(offline.stages.ShardGenerator, "_encode", encoding)
    assert run(pipe, ["a cat"] * 6, tmp_path, images_per_shard=6).drawn == 6
    assert len(drawn) == 6


def test_without_looking_ahead_the_files_are_the_same(pipe, whole, tmp_path):
    offline.generate(pipe, ROWS, tmp_path, settings(), progress=False, lookahead=0)
    assert files(tmp_path) == files(whole)
