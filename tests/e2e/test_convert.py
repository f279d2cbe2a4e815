"""`diffusax convert`, and what PyTorch diffusers makes of the result."""

import diffusers
import numpy as np
import pytest
import torch

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
