"""`diffusax generate --backend torch` against diffusers."""

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support.torch_families import REGISTRY

from diffusax.cli import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A pipeline that diffusax has no networks for."""
    folder = tmp_path_factory.mktemp("torch") / "sd3"
    REGISTRY["StableDiffusion3Pipeline"]()[0].save_pretrained(folder)
    return folder


def test_draws_what_diffusers_draws(checkpoint, tmp_path, capsys):
    output = tmp_path / "a.png"
    size = ["--height", "32", "--width", "32", "--steps", "3", "--guidance", "4"]
    command = ["generate", "a red apple", "--model", str(checkpoint), "--backend", "torch"]
    main([*command, *size, "--seed", "5", "--output", str(output)])
    assert str(output) in capsys.readouterr().out
    pipe = diffusers.DiffusionPipeline.from_pretrained(checkpoint)
    expected = pipe(
        "a red apple",
        height=32,
        width=32,
        num_inference_steps=3,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(5),
        output_type="np",
    ).images[0]
    found = Image.open(output)
    np.testing.assert_allclose(np.asarray(found) / 255, expected, atol=1 / 255)
    assert "Steps: 3, Sampler: Flow Euler, " in found.info["parameters"]
    assert "Seed: 5" in found.info["parameters"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sampler", "euler"], "--sampler is nothing that --backend torch knows"),
        (["--step-cache", "deep=3"], "--step-cache is nothing that --backend torch knows"),
        (["--model", "absent"], "absent cannot be loaded by diffusers"),
    ],
)
def test_errors_are_one_sentence(checkpoint, options, message, capsys):
    command = ["generate", "an apple", "--backend", "torch"]
    if "--model" not in options:
        options = [*options, "--model", str(checkpoint)]
    with pytest.raises(SystemExit):
        main([*command, *options])
    error = capsys.readouterr().err
    assert message in " ".join(error.split())
    assert "Traceback" not in error
