"""`diffusax train` and `cache-latents`, from the command line to a folder that PyTorch opens."""

import json
import subprocess
import sys

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import diffusax
from diffusax.cli import main

pytestmark = pytest.mark.slow


def diffusax_command(*args: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "diffusax", *map(str, args)], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory, checkpoint, pictures):
    """A cache, and a run of four steps on it with validation."""
    folder = tmp_path_factory.mktemp("command")
    size = ("--data.resolution", 32, "--data.center-crop")
    done = diffusax_command(
        "cache-latents",
        "--model",
        checkpoint,
        "--data.path",
        pictures,
        "--output",
        folder / "c",
        *size,
    )
    assert done.returncode == 0, done.stderr
    assert "wrote 30 rows" in done.stdout
    (folder / "a.yaml").write_text(
        "steps: 9\noptimizer:\n  learning_rate: 1e-3\nema: {rule: power}\n"
        "validation: {prompts: [a dog]}\n"
    )
    args = ["train", "text-to-image", "--config", folder / "a.yaml", "--set", "steps=4"]
    args += ["--model", checkpoint, "--data.path", folder / "c", "--output", folder / "out"]
    args += ["--batch-size", 4, "--validation.every", 2, "--validation.steps", 2, "--log-every", 2]
    done = diffusax_command(*args)
    assert done.returncode == 0, done.stderr
    assert f"{folder / 'out'} holds the result of step 4" in done.stdout
    (folder / "said").write_text(done.stderr)
    return folder / "out", args


def test_pytorch_diffusers_opens_both_results(run, checkpoint):
    output, _ = run
    before = diffusers.StableDiffusionPipeline.from_pretrained(checkpoint, safety_checker=None)
    kernels = [before.unet.conv_in.weight]
    for name in ("model", "model_ema"):
        pipe = diffusers.StableDiffusionPipeline.from_pretrained(output / name, safety_checker=None)
        pipe.set_progress_bar_config(disable=True)
        kernels.append(pipe.unet.conv_in.weight)
        latents = torch.randn((1, 4, 16, 16), generator=torch.Generator().manual_seed(0))
        options = {"num_inference_steps": 3, "output_type": "np"}
        theirs = pipe("a dog", latents=latents, **options).images
        ours = diffusax.DiffusionPipeline.from_pretrained(output / name)
        ours = ours("a dog", latents=latents.numpy(), **options).images
        np.testing.assert_allclose(ours, theirs, atol=1e-3)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(kernels[i], kernels[j])


def test_logs_in_every_form(run):
    output, _ = run
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert {"loss", "grad_norm", "images_per_s", "tflops", "lr", "skipped"} <= set(lines[0])
    events = EventAccumulator(str(output / "logs"))
    events.Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx([x["loss"] for x in lines])
    assert [e.step for e in events.Images("validation")] == [2, 4]
    sheet = Image.open(output / "validation" / "validation-0000004.png")
    assert sheet.width == 64
    pixels = np.asarray(sheet)
    # Beneath the picture stands its prompt.
    assert (pixels[64:] < 128).any()
    assert (pixels[64:] == 255).any()


def test_a_run_says_everything_once(run):
    output, _ = run
    said = (output.parent / "said").read_text()
    assert said.count("batch_size=4: 1 processes") == 1
    assert "compiling" in said


def test_the_resolved_options_stand_beside_the_result(run):
    output, _ = run
    options = yaml.safe_load((output / "config.yaml").read_text())
    assert (options["optimizer"]["learning_rate"], options["steps"], options["batch_size"]) == (
        1e-3,
        4,
        4,
    )
    assert not {"config", "set"} & set(options)
    card = (output / "model_ema" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["pipeline_tag"] == "text-to-image"
    assert "for\n4 steps of 4 examples" in text
    assert "averaged (power)" in text
    assert "averaged" not in (output / "model" / "README.md").read_text().split("```yaml")[0]


def test_another_average_is_made_after_the_run(run, capsys):
    output, _ = run
    main(["ema", str(output), "--length", "0.05"])
    assert f"wrote {output / 'model_ema_0.05'}" in capsys.readouterr().out
    kernels = [
        diffusers.StableDiffusionPipeline.from_pretrained(output / name, safety_checker=None)
        .unet.conv_in.weight.detach()
        .numpy()
        for name in ("model_ema", "model_ema_0.05")
    ]
    np.testing.assert_allclose(*kernels, rtol=1e-5, atol=1e-7)
    for args, message in {
        ("--length", 0.05, "--start", 0.5): "--start cannot be given with --kind power",
        ("--kind", "late"): "--start must be given with --kind late",
        ("--kind", "late", "--start", 3, "--step", 2): "step=2 has no stored averages",
    }.items():
        with pytest.raises(SystemExit):
            main(["ema", str(output), *map(str, args)])
        assert message in capsys.readouterr().err


def test_a_finished_run_has_nothing_left_to_do(run):
    output, args = run

    def contents():
        return {file: file.read_bytes() for file in output.rglob("*") if file.is_file()}

    before = contents()
    done = diffusax_command(*args, "--steps", 2, "--batch-size", 8)
    assert done.returncode == 0, done.stderr
    assert f"diffusax: the run in {output} is finished at step 4, and stays as it is" in done.stderr
    assert f"{output} holds the result of step 4" in done.stdout
    assert contents() == before


def test_mistakes_are_one_line(checkpoint, pictures, tmp_path, capsys):
    cases = {
        ("train", "text-to-image", "--model", checkpoint): "--data.path must be given",
        ("train", "text-to-image", "--set", "steps=0"): "steps must be a whole number from 1",
        (
            *("train", "text-to-image", "--model", checkpoint, "--data.path", pictures),
            *("--data.caption-column", "caption", "--output", tmp_path / "out"),
        ): "has no column 'caption'; it has image, text",
    }
    for args, message in cases.items():
        with pytest.raises(SystemExit) as stop:
            main([str(arg) for arg in args])
        shown = capsys.readouterr().err
        assert stop.value.code == 2
        assert message in shown
        assert shown.count("\n") == 1
