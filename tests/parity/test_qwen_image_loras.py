"""LoRA files for Qwen-Image and 2.1 in the formats that are shipped, against diffusers."""

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.effort import few
from support.lora_files import kohya, layers_of, pair
from support.tiny_transformers import KREA2_SIZE as SIZE
from support.tiny_transformers import qwen_image21_pipeline, qwen_image_pipeline

import diffusax

RANK = 4
CALL = {"num_inference_steps": 2, "output_type": "np"}
KINDS = {
    "qwen-image": (qwen_image_pipeline, SIZE),
    "qwen-image21": (qwen_image21_pipeline, {"height": 64, "width": 96}),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    made = {}

    def of(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            theirs = KINDS[kind][0](folder)
            ours = diffusax.DiffusionPipeline.from_pretrained(folder)
            ours.set_progress_bar_config(disable=True)
            made[kind] = theirs, ours, KINDS[kind][1]
        return made[kind]

    return of


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


FORMATS = {
    "diffusers": peft,
    "comfyui": lambda layers: peft(layers, "diffusion_model."),
    "ai-toolkit": lambda layers: peft(layers, "diffusion_model.", ".default"),
    "kohya": lambda layers: kohya(layers, RANK),
    "lightning": lambda layers: kohya(layers, RANK, "", "."),
}


def fused(layers):
    """ComfyUI's files of 2.1, where gate and projection are one layer; both have one A."""
    given, split = dict(layers), dict(layers)
    for name in [name for name in layers if name.endswith("img_mlp.gate_layer")]:
        other = name.replace("gate_layer", "proj")
        (down, up), (_, other_up) = given.pop(name), given.pop(other)
        given[name.replace("gate_layer", "gate_up")] = down, torch.cat([up, other_up])
        split[other] = down, other_up
    return peft(given, "diffusion_model."), peft(split)


def draw(pipe, **call):
    seed = {"generator": torch.Generator().manual_seed(3)}
    return pipe(**{"prompt": "a red apple", **CALL, **seed, **call}).images


@pytest.mark.parametrize(
    ("kind", "name"),
    few(
        [*((k, n) for k in KINDS for n in FORMATS), ("qwen-image21", "gate_up")],
        ("qwen-image", "comfyui"),
        ("qwen-image21", "kohya"),
        ("qwen-image21", "gate_up"),
    ),
)
def test_every_format_is_drawn_as_by_diffusers(both, tmp_path, kind, name):
    theirs, ours, size = both(kind)
    layers = products(theirs.transformer)
    given, known = (FORMATS[name](layers),) * 2 if name in FORMATS else fused(layers)
    if (kind, name) == ("qwen-image21", "kohya"):
        # diffusers knows kohya's names of the first Qwen-Image alone.
        known = peft(layers)
    for file, tensors in (("given", given), ("known", known)):
        whole = {key: x.clone().contiguous() for key, x in tensors.items()}
        save_file(whole, tmp_path / f"{file}.safetensors")
    plain = draw(ours, adapters={}, **size)
    ours.load_lora_weights(tmp_path / "given.safetensors", adapter_name=name)
    theirs.load_lora_weights(tmp_path, weight_name="known.safetensors", adapter_name=name)
    try:
        assert theirs.get_list_adapters() == {"transformer": [name]}
        expected = draw(theirs, **size)
        assert np.abs(draw(ours, **size) - expected).max() < 1e-4
        assert np.abs(plain - expected).max() > 0.01
    finally:
        theirs.unload_lora_weights()
        ours.unload_lora_weights()


def test_layers_of_a_transformer_are_written_for_diffusers(both, tmp_path):
    theirs, ours, _ = both("qwen-image")
    wanted = {n: own for n, own in products(theirs.transformer).items() if ".attn." in n}
    layers = {name: (down.numpy().T, up.numpy().T) for name, (down, up) in wanted.items()}
    ours.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    found = diffusers.QwenImagePipeline.lora_state_dict(tmp_path)
    expected = peft(wanted)
    assert set(found) == set(expected)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key])
