"""`diffusax generate --prompts` in this process."""

import io
import json
import sys

import numpy as np
import pytest
from PIL import Image
from support.offline_runs import errors, files, pictures, shards
from support.tiny import build_stable_diffusion

import diffusax
from diffusax import offline
from diffusax.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    build_stable_diffusion(folder, unet={"sample_size": 8})
    return folder


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a cat"}, {"prompt": "a dog", "sampler": "heun"}, {"promt": "a fox"}]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def failure(capsys, *args):
    with pytest.raises(SystemExit) as stop:
        main(["generate", *map(str, args)])
    shown = capsys.readouterr()
    assert (stop.value.code, shown.out) == (2, "")
    return " ".join(shown.err.split())


def test_the_command_writes_what_python_writes(model, prompts, tmp_path, capsys):
    out = tmp_path / "command"
    args = ["--model", model, "--out", out, "--steps", 2, "--guidance", 5, "--sampler", "euler_a"]
    args += ["--height", 32, "--width", 40, "--seed", 4, "--num-images", 2, "--batch-size", 3]
    args += ["--negative-prompt", "dog", "--dtype", "bfloat16", "--format", "webdataset"]
    args += ["--weights", "fp8", "--step-cache", "deep=3"]
    with pytest.raises(SystemExit) as stop:
        main(["generate", "--prompts", str(prompts), *map(str, args)])
    assert stop.value.code == 3
    said = f"{out} (4 drawn, 1 line left out: see errors.jsonl)\n"
    assert capsys.readouterr().out == said
    pipe = diffusax.DiffusionPipeline.from_pretrained(model, dtype="bfloat16", weights="fp8")
    pipe.unet.enable_cache(diffusax.DeepCacheConfig(3))
    settings = offline.Settings(
        steps=2,
        guidance=5,
        sampler="euler_a",
        height=32,
        width=40,
        seed=4,
        num_images=2,
        batch_size=3,
        negative_prompt="dog",
        format="webdataset",
    )
    source = {"model": str(model)}
    offline.generate(pipe, prompts, tmp_path / "python", settings, source=source, progress=False)
    assert files(out) == files(tmp_path / "python")
    found = {info["key"]: (info, data) for info, data in pictures(out)}
    assert {info["sampler"] for info, _ in found.values()} == {"euler_a", "heun"}
    image = Image.open(io.BytesIO(found["000000001-1"][1]))
    assert np.asarray(image).shape == (32, 40, 3)
    assert "Sampler: Euler a, Schedule type: Automatic, CFG scale: 5, " in image.text["parameters"]
    assert [error["line"] for error in errors(out)] == [3]


def test_a_part_of_standard_input_says_that_others_are_not_finished(
    model, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a cat\n\na dog\na fox\n")))
    args = ["--prompts", "-", "--out", out, "--model", model, "--steps", 1]
    args += ["--images-per-shard", 1, "--batch-size", 1, "--shard", "1/2"]
    main(["generate", *map(str, args)])
    assert capsys.readouterr().out == f"{out} (1 drawn; other shards are not finished)\n"
    assert [shard.name for shard in shards(out)] == ["000001"]
    assert [info["prompt"] for info, _ in pictures(out)] == ["a dog"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompts", "a.txt"], "Required options were not provided: --out"),
        (["a cat", "--prompts", "a.txt", "--out", "b"], "unrecognized arguments: a cat"),
        (["--prompts", "a.txt", "--out", "b", "--image", "c.png"], "Unrecognized options: --image"),
        (["--prompts", "a.txt", "--out", "b", "--shard", "2/2"], "shard must be i/n"),
        (["--prompts", "a.txt", "--out", "b", "--shard", "half"], "shard must be i/n"),
        (["--prompts", "a.txt", "--out", "b", "--format", "zip"], "invalid choice: 'zip'"),
        (["--prompts", "a.txt", "--out", "b", "--batch-size", "0"], "batch_size must be a whole"),
        (
            ["--prompts", "a.txt", "--out", "b", "--engine", "ray", "--shard", "0/2"],
            "leave --shard out",
        ),
        (
            ["--prompts", "a.txt", "--out", "b", "--ray-resources", "GPU=1"],
            "--ray-resources needs --engine ray",
        ),
        (
            ["--prompts", "a.txt", "--out", "b", "--engine", "ray", "--ray-resources", "GPU"],
            "ray_resources must be NAME=AMOUNT",
        ),
        (["--prompts", "/nowhere/a.txt", "--out", "{out}"], "/nowhere/a.txt is missing"),
    ],
)
def test_mistakes_are_said_plainly(model, tmp_path, capsys, args, message):
    args = [arg.format(out=tmp_path / "out") for arg in args]
    assert message in failure(capsys, *args, "--model", model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "word"),
    [(["--help"], "--prompts FILE --out FOLDER"), (["--prompts", "--help"], "--engine")],
)
def test_help_of_generate_names_the_other_way(capsys, args, word):
    with pytest.raises(SystemExit) as stop:
        main(["generate", *args])
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    assert word in shown
    assert shown.isascii()
    assert "(default: None)" not in shown
