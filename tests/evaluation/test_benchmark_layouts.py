"""The folders of benchmarks' judges, read here as the judges' own scripts read them."""

import json
import os
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.data_sets import picture, png

import diffusax
from diffusax.cli import main

STEPS = 2


def evaluate(*args):
    main(list(map(str, ["evaluate", *args, "--steps", STEPS, "--batch-size", 2])))


def failure(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(list(map(str, ["evaluate", *args])))
    assert stop.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def changed(file):
    return file.stat().st_mtime_ns


def test_gedit_has_what_its_judge_reads(tiny_checkpoints, tmp_path):
    model, _ = tiny_checkpoints.pipeline("sd-instruct")
    rows = [
        {
            "task_type": task,
            "key": f"k{i}",
            "instruction": f"add {i} pears",
            "instruction_language": language,
            "input_image": {"bytes": png(picture(i, (48, 32))), "path": None},
            "input_image_raw": {"bytes": png(picture(i, (60, 40))), "path": None},
            "Intersection_exist": True,
        }
        for i, (task, language) in enumerate(
            [("subject-add", "en"), ("subject-add", "cn"), ("ps_human", "en")]
        )
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "gedit.parquet")
    output = tmp_path / "results" / "mine"
    args = ["edits", model, "--layout", "gedit", "--data", tmp_path / "gedit.parquet"]
    args += ["--output", output, "--resolution", 64]
    evaluate(*args)
    # GEdit-Bench/test_gedit_score.py, process_single_item.
    save_path = os.path.join(tmp_path, "results", "mine")
    for i, row in enumerate(rows):
        group_name, language, key = row["task_type"], row["instruction_language"], row["key"]
        source = f"{save_path}/fullset/{group_name}/{language}/{key}_SRCIMG.png"
        edited = f"{save_path}/fullset/{group_name}/{language}/{key}.png"
        np.testing.assert_array_equal(Image.open(source), picture(i, (48, 32)))
        with Image.open(edited) as image:
            assert image.width / image.height == pytest.approx(1.5, abs=0.3)
    assert sorted(os.listdir(tmp_path / "results")) == ["mine", "mine.json"]
    assert os.listdir(output) == ["fullset"]
    # The one that is missing is made again, and is the same image.
    first, other = (
        output / "fullset" / "subject-add" / n / f"k{i}.png" for i, n in enumerate(("en", "cn"))
    )
    before, when = np.asarray(Image.open(first)), changed(other)
    first.unlink()
    evaluate(*args)
    assert np.abs(before.astype(int) - np.asarray(Image.open(first))).max() <= 1
    assert changed(other) == when


def test_imgedit_has_what_its_judge_reads(tiny_checkpoints, tmp_path):
    model, _ = tiny_checkpoints.pipeline("sd-instruct")
    data = tmp_path / "singleturn"
    (data / "animal").mkdir(parents=True)
    picture(0, (64, 64)).save(data / "animal" / "a.png")
    items = {
        "1082": {"id": "animal/a.png", "prompt": "make it smooth", "edit_type": "adjust"},
        "673": {"id": "animal/a.png", "prompt": "make it ukiyo-e", "edit_type": "style"},
    }
    (data / "singleturn.json").write_text(json.dumps(items))
    output = tmp_path / "edited"
    args = ["edits", model, "--layout", "imgedit", "--output", output, "--resolution", 64]
    evaluate(*args, "--data", data, "--seed", 3)
    # Benchmark/singleturn_bench.py, process_single_item.
    assert {f"{key}.png" for key in items} == {*os.listdir(output)}
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    expected = pipe(
        ["make it smooth", "make it ukiyo-e"],
        image=[picture(0, (64, 64))] * 2,
        seed=[3, 4],
        num_inference_steps=STEPS,
    ).images
    for key, image in zip(items, expected, strict=True):
        np.testing.assert_array_equal(Image.open(output / f"{key}.png"), image)


@pytest.fixture(scope="module")
def geneval(tmp_path_factory):
    file = tmp_path_factory.mktemp("geneval") / "evaluation_metadata.jsonl"
    lines = [
        {"tag": "counting", "include": [{"class": "cat", "count": n}], "prompt": f"{n} cats"}
        for n in range(2)
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return file, lines


def test_geneval_has_what_its_judge_reads(tiny_checkpoints, geneval, tmp_path):
    model, _ = tiny_checkpoints.pipeline("sd")
    file, items = geneval
    imagedir = tmp_path / "images"
    args = ["text-to-image", "--layout", "geneval", "--model", model, "--prompts", file]
    args += ["--output", imagedir, "--images-per-prompt", 3, "--seed", 7]
    evaluate(*args)
    # evaluation/evaluate_images.py, main.
    found = {}
    for subfolder in os.listdir(imagedir):
        folderpath = os.path.join(imagedir, subfolder)
        assert os.path.isdir(folderpath)
        assert subfolder.isdigit()
        with open(os.path.join(folderpath, "metadata.jsonl")) as fp:
            metadata = json.load(fp)
        names = sorted(os.listdir(os.path.join(folderpath, "samples")))
        assert all(re.match(r"\d+\.png", name) for name in names)
        found[subfolder] = metadata, names
    samples = ["0000.png", "0001.png", "0002.png"]
    assert found == {f"{i:05}": (item, samples) for i, item in enumerate(items)}
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    options = {"num_inference_steps": STEPS, "seed": [7 + 3 + 1, 0]}
    expected = pipe(["1 cats", "x"], **options).images[0]
    actual = Image.open(imagedir / "00001" / "samples" / "0001.png")
    assert np.abs(np.asarray(actual, int) - np.asarray(expected, int)).max() <= 1
    with Image.open(imagedir / "00001" / "grid.png") as grid:
        assert grid.size == (2 * actual.width, 2 * actual.height)
    when = changed(imagedir / "00000" / "samples" / "0000.png")
    shutil.rmtree(imagedir / "00001")
    evaluate(*args)
    assert changed(imagedir / "00000" / "samples" / "0000.png") == when
    assert (imagedir / "00001" / "samples" / "0002.png").is_file()


def test_dpg_has_what_its_judge_reads(tiny_checkpoints, tmp_path):
    model, _ = tiny_checkpoints.pipeline("sd")
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for name, prompt in (("12", "a cat\n"), ("partiprompts3", "two dogs")):
        (prompts / f"{name}.txt").write_text(prompt)
    root = tmp_path / "mine"
    args = ["text-to-image", "--layout", "dpg", "--model", model, "--prompts", prompts]
    evaluate(*args, "--output", root)
    # dpg_bench/compute_dpg_bench.py: all files of the folder are images named by prompts.
    assert {name.split(".")[0] for name in os.listdir(root)} == {"12", "partiprompts3"}
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    images = pipe(["two dogs"] * 2, num_inference_steps=STEPS, seed=[4, 7]).images
    resolution = images[0].width
    with Image.open(root / "partiprompts3.png") as grid:
        assert grid.size == (2 * resolution, 2 * resolution)
        corners = (0, 0), (resolution, resolution)
        for image, (left, top) in zip(images, corners, strict=True):
            part = grid.crop((left, top, left + resolution, top + resolution))
            assert np.abs(np.asarray(part, int) - np.asarray(image, int)).max() <= 1


def test_mistakes_are_one_sentence(tiny_checkpoints, geneval, tmp_path, capsys):
    model, _ = tiny_checkpoints.pipeline("sd-instruct")
    out = ["--output", tmp_path / "o"]
    said = failure(capsys, "edits", model, "--layout", "geneval")
    assert "use diffusax evaluate text-to-image --layout geneval" in said
    said = failure(capsys, "text-to-image", "--layout=gedit")
    assert "use diffusax evaluate edits --layout gedit" in said
    given = ["text-to-image", "--model", "emoji", *out]
    for args, message in (
        (["--layout", "geneval", "--prompts", tmp_path], "give that file"),
        (["--layout", "dpg", "--prompts", tmp_path], "must be DPG-Bench's folder of prompts"),
        (["--layout", "dpg", "--prompts", tmp_path, "--images-per-prompt", 3], "must be 4 or 1"),
        (["--layout", "geneval", "--prompts", geneval[0], "--clip", "c"], "measures nothing"),
    ):
        assert message in failure(capsys, *given, *args)
    (tmp_path / "x.json").write_text(json.dumps({"../a": {"id": "b.png", "prompt": "c"}}))
    picture(0).save(tmp_path / "b.png")
    given = ["edits", model, "--layout", "imgedit", *out]
    said = failure(capsys, *given, "--data", tmp_path / "x.json")
    assert "must be the name of a file (got '../a')" in said
    (tmp_path / "x.json").write_text(json.dumps({"a": {"id": "../b.png", "prompt": "c"}}))
    assert "is not beside the file" in failure(capsys, *given, "--data", tmp_path / "x.json")
