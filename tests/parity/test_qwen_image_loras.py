"""LoRA files for Qwen-Image in the formats that are shipped, against diffusers with the same."""

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.effort import few
from support.lora_files import layers_of, pair
from support.tiny_transformers import KREA2_SIZE as SIZE
from support.tiny_transformers import qwen_image_pipeline

import diffusax

RANK = 4
CALL = {"num_inference_steps": 2, "output_type": "np", **SIZE}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen-image")
    theirs = qwen_image_pipeline(folder)
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    return theirs, ours


def products(network):
    """A and B of each layer in PyTorch's layout."""
    generator = torch.Generator().manual_seed(5)
    return {name: pair(w, RANK, generator) for name, w in layers_of(network).items()}


def peft(layers, prefix="transformer.", adapter=""):
    return {
        f"{prefix}{name}.lora_{part}{adapter}.weight": x
        for name, own in layers.items()
        for part, x in zip("AB", own)
    }


def kohya(layers, prefix="lora_unet_", dot="_"):
    """Names with down, up and alpha, whose dots are underscores in kohya's files."""
    found = {}
    for name, (down, up) in layers.items():
        key = f"{prefix}{name.replace('.', dot)}"
        found |= {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}
        found[f"{key}.alpha"] = torch.tensor(float(RANK))
    return found


FORMATS = {
    "diffusers": peft,
    "comfyui": lambda layers: peft(layers, "diffusion_model."),
    "ai-toolkit": lambda layers: peft(layers, "diffusion_model.", ".default"),
    "kohya": kohya,
    "lightning": lambda layers: kohya(layers, "", "."),
}


def draw(pipe, **call):
    seed = {"generator": torch.Generator().manual_seed(3)}
    return pipe(**{"prompt": "a red apple", **CALL, **seed, **call}).images


@pytest.mark.parametrize("name", few(FORMATS, "comfyui", "kohya"))
def test_every_format_is_drawn_as_by_diffusers(both, tmp_path, name):
    theirs, ours = both
    layers = products(theirs.transformer)
    given = {key: x.clone().contiguous() for key, x in FORMATS[name](layers).items()}
    save_file(given, tmp_path / "given.safetensors")
    plain = draw(ours, adapters={})
    ours.load_lora_weights(tmp_path / "given.safetensors", adapter_name=name)
    theirs.load_lora_weights(tmp_path, weight_name="given.safetensors", adapter_name=name)
    try:
        assert theirs.get_list_adapters() == {"transformer": [name]}
        expected = draw(theirs)
        assert np.abs(draw(ours) - expected).max() < 1e-4
        assert np.abs(plain - expected).max() > 0.01
    finally:
        theirs.unload_lora_weights()
        ours.unload_lora_weights()


def test_layers_of_a_transformer_are_written_for_diffusers(both, tmp_path):
    theirs, ours = both
    wanted = {n: own for n, own in products(theirs.transformer).items() if ".attn." in n}
    layers = {name: (down.numpy().T, up.numpy().T) for name, (down, up) in wanted.items()}
    ours.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    found = diffusers.QwenImagePipeline.lora_state_dict(tmp_path)
    expected = peft(wanted)
    assert set(found) == set(expected)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key])
