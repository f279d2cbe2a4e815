"""LoRAs on the command line: tags in prompts, and conversion between formats."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.lora_files import write_kohya, write_peft

import diffusax
from diffusax.cli import main

TEXT = (".q_proj", ".k_proj", ".v_proj", ".out_proj")
ENDS = {"unet": (".to_q", ".conv1"), "text_encoder": TEXT}


@pytest.fixture(scope="module")
def made(tiny_checkpoints, tmp_path_factory):
    """A checkpoint, and a folder with two LoRAs for it."""
    folder, pipe = tiny_checkpoints.pipeline("sd", "a")
    loras = tmp_path_factory.mktemp("loras")
    networks = {name: getattr(pipe, name) for name in ENDS}
    (loras / "more").mkdir()
    write_kohya(loras / "more" / "face [1].safetensors", networks, ENDS)
    write_peft(loras / "style.safetensors", networks, ENDS)
    return folder, loras


def test_prompts_name_loras(made, tmp_path, capsys):
    folder, loras = made
    # As A1111 writes a LoRA into prompts: by the name in its header.
    other = loras / "more" / "other.safetensors"
    save_file(load_file(loras / "more/face [1].safetensors"), other, {"ss_output_name": "visage"})
    command = ["generate", "a cat <lora:style:0.8> in a hat<lyco:visage:0.3:0.6>", "--seed", "3"]
    command += ["--steps", "2", "--model", str(folder), "--output", str(tmp_path / "x.png")]
    main([*command, "--lora-dir", str(loras)])
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
    for name, file in (("style", "style"), ("face", "more/face [1]")):
        pipe.load_lora_weights(loras / f"{file}.safetensors", adapter_name=name)
    weights = {"style": 0.8, "face": {"unet": 0.6, "text_encoder": 0.3}}
    call = {"num_inference_steps": 2, "seed": 3}
    expected = pipe("a cat in a hat", **call, adapters=weights).images[0]
    image = Image.open(tmp_path / "x.png")
    np.testing.assert_array_equal(np.asarray(image), np.asarray(expected))
    assert "<lora:style:0.8>" in image.text["parameters"]
    capsys.readouterr()
    for given, message in (
        ([], "the prompt names the LoRA 'style'; --lora-dir says where it is"),
        (
            ["--lora-dir", str(tmp_path)],
            "has no file style.safetensors or with this name in the header",
        ),
    ):
        with pytest.raises(SystemExit):
            main([*command, *given])
        assert message in capsys.readouterr().err


def test_there_and_back_between_formats(made, tmp_path):
    folder, loras = made
    for name, first, second in (
        ("more/face [1]", "diffusers", "kohya"),
        ("style", "kohya", "diffusers"),
    ):
        source = loras / f"{name}.safetensors"
        files = [source, tmp_path / "one.safetensors", tmp_path / "two.safetensors"]
        for kind, a, b in zip((first, second), files, files[1:]):
            main(["convert", "lora", str(a), str(b), "--to", kind, "--model", str(folder)])
        before, after = load_file(source), load_file(files[2])
        same = {key.replace("text_model.", "") for key in before}
        # A LoRA of SD 1 has one text encoder, which other scripts call the first of two.
        after = {key.replace("lora_te1_", "lora_te_"): x for key, x in after.items()}
        after = {key.replace("text_model.", ""): x for key, x in after.items()}
        before = {key.replace("text_model.", ""): x for key, x in before.items()}
        assert same == set(after)
        assert all(torch.equal(before[key], after[key]) for key in before)
        pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
        for i, file in enumerate(files[:2]):
            pipe.load_lora_weights(file, adapter_name=str(i))
        one, two = (pipe.adapters[str(i)].components for i in range(2))
        for component in one:
            for path, (down, up) in one[component].items():
                np.testing.assert_allclose(up, two[component][path][1], rtol=1e-6)
                np.testing.assert_array_equal(down, two[component][path][0])
    with safe_open(tmp_path / "two.safetensors", "np") as file:
        options = json.loads(file.metadata()["lora_adapter_metadata"])
    assert options["unet.r"] in (4, 6)
    assert options["unet.rank_pattern"]


def test_what_cannot_be_converted(made, tmp_path, capsys):
    whole = {"lora_unet_conv_in.diff": torch.ones((32, 4, 3, 3))}
    save_file(whole, tmp_path / "full.safetensors")
    given = ["--model", str(made[0])]
    for out, to, message in (
        ("x.safetensors", "diffusers", "diffusers' format has no diff (unet's conv_in); write"),
        ("x.bin", "kohya", "OUT must be a .safetensors file"),
    ):
        with pytest.raises(SystemExit):
            main(
                ["convert", "lora", str(tmp_path / "full.safetensors"), str(tmp_path / out)]
                + ["--to", to, *given]
            )
        assert message in capsys.readouterr().err
