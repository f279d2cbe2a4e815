"""LoRA files for Krea 2 in the formats that are shipped, against diffusers with the same files."""

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.effort import few
from support.lora_files import kohya, layers_of, pair
from support.tiny_transformers import KREA2_SIZE, krea2_pipeline

import diffusax

RANK = 4
NAMES = {
    "to_q": "wq",
    "to_k": "wk",
    "to_v": "wv",
    "to_out.0": "wo",
    "to_gate": "gate",
}
OTHERS = {
    "img_in": "first",
    "final_layer.linear": "last.linear",
    "time_embed.linear_1": "tmlp.0",
    "time_embed.linear_2": "tmlp.2",
    "time_mod_proj": "tproj.1",
    "txt_in.linear_1": "txtmlp.1",
    "txt_in.linear_2": "txtmlp.3",
    "text_fusion.projector": "txtfusion.projector",
}
CALL = {"num_inference_steps": 2, "guidance_scale": 2.0, "output_type": "np", **KREA2_SIZE}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("krea2")
    theirs = krea2_pipeline(folder)
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    return theirs, ours


def products(network):
    """A and B of each layer in PyTorch's layout."""
    generator = torch.Generator().manual_seed(5)
    return {name: pair(w, RANK, generator) for name, w in layers_of(network).items()}


def peft(layers, prefix="transformer."):
    return {
        f"{prefix}{name}.lora_{part}.weight": x
        for name, own in layers.items()
        for part, x in zip("AB", own)
    }


def original_name(name):
    """The name of a layer in Krea's code."""
    if name in OTHERS:
        return OTHERS[name]
    name = name.replace("text_fusion.", "txtfusion.").replace("transformer_blocks.", "blocks.")
    block, _, end = name.partition(".attn.")
    return f"{block}.attn.{NAMES[end]}" if end else name.replace(".ff.", ".mlp.")


def original(layers):
    return {original_name(name): own for name, own in layers.items()}


FORMATS = {
    "diffusers": peft,
    "comfyui": lambda layers: peft(original(layers), "diffusion_model."),
    "ai-toolkit": lambda layers: peft(original(layers), "base_model.model."),
    "kohya": lambda layers: kohya(original(layers), RANK),
}


def draw(pipe, **call):
    seed = {"generator": torch.Generator().manual_seed(3)}
    return pipe(**{"prompt": "a red apple", **CALL, **seed, **call}).images


@pytest.mark.parametrize("name", few(FORMATS, "comfyui"))
def test_every_format_is_drawn_as_by_diffusers(both, tmp_path, name):
    theirs, ours = both
    layers = products(theirs.transformer)
    given = {key: x.clone().contiguous() for key, x in FORMATS[name](layers).items()}
    save_file(given, tmp_path / "given.safetensors")
    # diffusers does not read kohya's names.
    read = peft(layers) if name == "kohya" else given
    save_file(read, tmp_path / "read.safetensors")
    plain = draw(ours, adapters={})
    ours.load_lora_weights(tmp_path / "given.safetensors", adapter_name=name)
    theirs.load_lora_weights(tmp_path, weight_name="read.safetensors", adapter_name=name)
    try:
        expected = draw(theirs)
        assert np.abs(draw(ours) - expected).max() < 1e-4
        assert np.abs(plain - expected).max() > 0.01
    finally:
        theirs.unload_lora_weights()
        ours.unload_lora_weights()


def test_layers_of_a_transformer_are_written_for_diffusers(both, tmp_path):
    theirs, ours = both
    layers = {
        name: (down.numpy().T, up.numpy().T)
        for name, (down, up) in products(theirs.transformer).items()
        if ".attn." in name
    }
    ours.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    found = diffusers.Krea2Pipeline.lora_state_dict(tmp_path)
    wanted = {n: own for n, own in products(theirs.transformer).items() if ".attn." in n}
    expected = peft(wanted)
    assert set(found) == set(expected)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key])
