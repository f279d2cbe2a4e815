import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from tiny import build_stable_diffusion

import diffusax
from diffusax.cli import main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    build_stable_diffusion(folder, unet={"sample_size": 8})
    return folder


def test_generate_writes_the_picture_that_python_draws_and_its_settings(model, tmp_path, capsys):
    output = tmp_path / "new" / "cat.png"
    main(
        ["generate", "a cat", "--model", str(model), "--steps", "2", "--guidance", "5"]
        + ["--seed", "3", "--sampler", "euler_a", "--negative-prompt", "dog"]
        + ["--output", str(output)]
    )
    image = Image.open(output)
    assert image.text["parameters"].splitlines() == [
        "a cat",
        "Negative prompt: dog",
        "Steps: 2, Sampler: euler_a, CFG scale: 5.0, Seed: 3, Size: 32x32, Model: tiny, RNG: jax, "
        f"Version: diffusax {diffusax.__version__}",
    ]
    assert str(output) in capsys.readouterr().out
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    pipe.scheduler = diffusax.EulerAncestralDiscreteScheduler.from_config(pipe.scheduler)
    expected = pipe(
        "a cat", negative_prompt="dog", num_inference_steps=2, guidance_scale=5, seed=3
    ).images[0]
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))


def test_several_pictures_make_a_contact_sheet(model, tmp_path):
    output = tmp_path / "sheet.png"
    main(
        ["generate", "a", "--model", str(model), "--steps", "1", "--num-images", "3"]
        + ["--height", "32", "--width", "40", "--output", str(output)]
    )
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["sheet-0.png", "sheet-1.png", "sheet-2.png", "sheet.png"]
    assert Image.open(output).size == (2 * 40 + 4, 2 * 32 + 4)
    assert Image.open(tmp_path / "sheet-2.png").size == (40, 32)


def test_info_lists_components_and_samplers(model, capsys):
    main(["info", str(model)])
    out = capsys.readouterr().out
    for part in ("UNet2DConditionModel", "M parameters", "float32", "PNDMScheduler", "dpm++2m"):
        assert part in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "a", "--model", "/nowhere"], "there is no folder /nowhere"),
        (["generate", "a", "--model", "{model}", "--height", "33"], "height must be divisible"),
        (["generate", "a", "--model", "{model}", "--sampler", "eulr"], "unknown sampler 'eulr'"),
        (["generate", "a", "--model", "{model}", "--steps", "0"], "at least 1"),
        (["generate", "a", "--model", "{model}", "--dtype", "int3"], "dtype must be"),
        (["generate", "a", "--model", "{model}", "--output", "x.jpg"], "must be a .png"),
        (["generate"], "Missing from diffusax generate"),
        (["generate", "a", "--model", "{model}", "--steps", "many"], "--steps"),
        (["draw", "a"], "draw"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(model, capsys, args, message):
    with pytest.raises(SystemExit) as stop:
        main([a.format(model=model) for a in args])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_python_dash_m(model):
    done = subprocess.run(
        [sys.executable, "-m", "diffusax", "info", str(model)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "StableDiffusionPipeline" in done.stdout
