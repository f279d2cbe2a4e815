"""`diffusax convert`, and what PyTorch diffusers makes of the result."""

import diffusers
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.single_files import hollow, model_shapes

import diffusax
from diffusax.cli import main

KINDS = {
    "sd": diffusers.StableDiffusionInstructPix2PixPipeline,
    "xl": diffusers.StableDiffusionXLInstructPix2PixPipeline,
}


def predictions(reference, wide, family):
    """Of the four-channel UNet, and of the eight-channel one with a random picture besides."""
    generator = torch.Generator().manual_seed(0)
    sample, image = (torch.randn((2, 4, 16, 16), generator=generator) for _ in range(2))
    width = reference.unet.config.cross_attention_dim
    context = torch.randn((2, 77, width), generator=generator)
    added = None
    if family == "xl":
        time_ids = torch.tensor([[64, 64, 0, 0, 64, 64]] * 2)
        added = {"text_embeds": torch.randn((2, 16), generator=generator), "time_ids": time_ids}
    with torch.no_grad():
        for unet, x in ((reference.unet, sample), (wide.unet, torch.cat([sample, image], 1))):
            yield unet(x, torch.tensor([3, 700]), context, added_cond_kwargs=added).sample


@pytest.mark.parametrize("family", KINDS)
def test_a_converted_checkpoint_opens_in_diffusers_and_predicts_what_it_did(
    tiny_checkpoints, tmp_path, capsys, family
):
    folder, reference = tiny_checkpoints.pipeline(family)
    main(["convert", "instruct-pix2pix", str(folder), str(tmp_path / "wide")])
    assert f"wrote {tmp_path / 'wide'}" in capsys.readouterr().out
    wide = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "wide", safety_checker=None)
    assert type(wide) is KINDS[family]
    assert wide.unet.config.in_channels == wide.unet.conv_in.in_channels == 8
    assert wide.config.get("force_zeros_for_empty_prompt") == reference.config.get(
        "force_zeros_for_empty_prompt"
    )
    before, after = predictions(reference, wide, family)
    assert before.std() > 0.03
    np.testing.assert_allclose(after, before, atol=1e-5)
    for name, tensor in reference.text_encoder.state_dict().items():
        assert torch.equal(wide.text_encoder.state_dict()[name], tensor)
    again = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "wide")
    assert type(again).__name__ == KINDS[family].__name__


def test_mistakes_are_one_line(tiny_checkpoints, tmp_path, capsys):
    folder, _ = tiny_checkpoints.pipeline("sd")
    inpainting, _ = tiny_checkpoints.pipeline("sd-inpaint")
    cases = (
        ((folder, folder), "OUT must be another folder than IN"),
        (
            (inpainting, tmp_path / "out"),
            "4 or 8 input channels; that of the pipeline has 9",
        ),
        (("/nowhere", tmp_path / "out"), "/nowhere is no folder here"),
    )
    for args, message in cases:
        with pytest.raises(SystemExit) as stop:
            main(["convert", "instruct-pix2pix", *map(str, args)])
        shown = capsys.readouterr().err
        assert stop.value.code == 2
        assert message in shown
        assert shown.count("\n") == 1


def test_a_single_file_and_back_on_the_command_line(tiny_checkpoints, tmp_path, capsys):
    folder, _ = tiny_checkpoints.pipeline("sd")
    file, again = tmp_path / "model.safetensors", tmp_path / "again"
    main(["convert", str(folder), str(file)])
    main(["convert", str(file), str(again), "--model-config", str(folder)])
    assert f"wrote {file}\nwrote {again}\n" in capsys.readouterr().out
    for name in ("unet", "vae", "text_encoder"):
        (ours,) = (again / name).glob("*.safetensors")
        theirs, found = load_file(folder / name / ours.name), load_file(ours)
        same = {key.removeprefix("text_model."): x for key, x in found.items()}
        assert len(same) == len(theirs)
        for key, x in theirs.items():
            assert np.array_equal(same[key.removeprefix("text_model.")], x)
    cases = (
        ((file, tmp_path / "out"), "pass config= with a folder or Hub repository"),
        ((tmp_path / "x.safetensors", again), "there is no file"),
        ((tmp_path / "nothing", file), "nothing is no folder here"),
    )
    for args, message in cases:
        with pytest.raises(SystemExit) as stop:
            main(["convert", *map(str, args)])
        shown = capsys.readouterr().err
        assert stop.value.code == 2
        assert message in shown
        assert shown.count("\n") == 1


def test_options_of_single_files_are_refused_for_folders(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path), str(tmp_path / "x.safetensors"), "--use-ema"])
    assert "--use-ema is for a single file as IN" in capsys.readouterr().err


def test_commands_take_a_single_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(["convert", "emoji", "emoji.safetensors"])
    # The package has no config of so small a model, and the error says so in one line.
    with pytest.raises(SystemExit):
        main(["generate", "a cat", "--model", "emoji.safetensors"])
    shown = capsys.readouterr().err
    assert "emoji.safetensors: the unet attends to texts of width" in shown
    shapes = model_shapes("sd1")
    hollow(tmp_path / "full.safetensors", shapes)
    main(["info", "full.safetensors"])
    shown = capsys.readouterr().out
    assert "StableDiffusionPipeline in full.safetensors" in shown
    assert "859.5 M parameters" in shown
    assert "samplers: " in shown
