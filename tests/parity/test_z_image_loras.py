"""LoRA files for Z-Image in the formats that are shipped, against diffusers with the same files."""

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.effort import few
from support.lora_files import kohya, layers_of, pair
from support.tiny_transformers import Z_IMAGE_SIZE, z_image_pipeline

import diffusax

RANK = 4
ENDS = ("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0")
MORE = (*ENDS, "feed_forward.w1", "feed_forward.w2", "adaLN_modulation.0", "cap_embedder.1")
CALL = {"num_inference_steps": 2, "guidance_scale": 0.0, "output_type": "np", **Z_IMAGE_SIZE}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("z-image")
    theirs = z_image_pipeline(folder)
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    return theirs, ours


def products(network, ends=MORE):
    """A and B of each layer in PyTorch's layout."""
    generator = torch.Generator().manual_seed(5)
    return {n: pair(w, RANK, generator) for n, w in layers_of(network, *ends).items()}


def peft(layers):
    """diffusers' format."""
    return {
        f"transformer.{name}.lora_{part}.weight": x
        for name, own in layers.items()
        for part, x in zip("AB", own)
    }


def ai_toolkit(layers):
    """ComfyUI's prefix before diffusers' names, with alphas."""
    found = {}
    for name, (down, up) in layers.items():
        key = f"diffusion_model.{name}"
        found |= {f"{key}.lora_A.weight": down, f"{key}.lora_B.weight": up}
        found[f"{key}.alpha"] = torch.tensor(3.0)
    return found


def fused(layers):
    """q, k and v of attention with one A, as layers of the original code have it."""
    found = dict(layers)
    for name, (down, _) in layers.items():
        if name.endswith("to_q"):
            block = name.removesuffix("to_q")
            for end in ("to_k", "to_v"):
                found[block + end] = down, layers[block + end][1]
    return found


def original(layers):
    """The names of the original code: qkv in one, out, q_norm and so on."""
    found = {}
    for name, (down, up) in fused(layers).items():
        block, _, end = name.rpartition("attention.")
        if end == "to_q":
            ups = [up, *(layers[f"{block}attention.{n}"][1] for n in ("to_k", "to_v"))]
            found[f"{block}attention.qkv"] = down, torch.cat(ups)
        elif end == "to_out.0":
            found[f"{block}attention.out"] = down, up
        elif end not in ("to_k", "to_v"):
            name = name.replace("all_x_embedder.2-1", "x_embedder")
            found[name.replace("all_final_layer.2-1", "final_layer")] = down, up
    return found


def contiguous(tensors):
    return {key: x.clone().contiguous() for key, x in tensors.items()}


FORMATS = {
    "diffusers": (MORE, peft, peft),
    "ai-toolkit": (MORE, ai_toolkit, ai_toolkit),
    "kohya": (MORE, kohya, kohya),
    # diffusers does not read the original names of Linear layers other than attention's.
    "kohya-original": (ENDS, lambda own: kohya(original(own)), lambda own: kohya(fused(own))),
    "comfyui": (("",), lambda own: ai_toolkit(original(own)), lambda own: ai_toolkit(fused(own))),
}


def draw(pipe, **call):
    seed = {"generator": torch.Generator().manual_seed(3)}
    return pipe(**{"prompt": "a red apple", **CALL, **seed, **call}).images


@pytest.mark.parametrize("name", few(FORMATS, "comfyui"))
def test_every_format_is_drawn_as_by_diffusers(both, tmp_path, name):
    theirs, ours = both
    ends, write, reference = FORMATS[name]
    layers = products(theirs.transformer, ends)
    save_file(contiguous(write(layers)), tmp_path / "given.safetensors")
    save_file(contiguous(reference(layers)), tmp_path / "reference.safetensors")
    plain = draw(ours, adapters={})
    ours.load_lora_weights(tmp_path / "given.safetensors", adapter_name=name)
    theirs.load_lora_weights(tmp_path, weight_name="reference.safetensors", adapter_name=name)
    try:
        expected = draw(theirs)
        assert np.abs(draw(ours) - expected).max() < 1e-4
        assert np.abs(plain - expected).max() > 0.005
    finally:
        theirs.unload_lora_weights()
        ours.unload_lora_weights()


@pytest.mark.slow
def test_each_image_has_adapters_and_weights_of_its_own(both, tmp_path):
    theirs, ours = both
    for name, ends in (("one", ENDS), ("two", MORE)):
        layers = products(theirs.transformer, ends)
        save_file(contiguous(ai_toolkit(layers)), tmp_path / f"{name}.safetensors")
        ours.load_lora_weights(tmp_path / f"{name}.safetensors", adapter_name=name)
    rows = [{"one": 0.7}, {"two": -0.4, "one": 0.2}]
    call = {"seed": [1, 2], "generator": None}
    images = draw(ours, prompt=["a red apple", "two dogs"], adapters=rows, **call)
    for image, prompt, row, seed in zip(images, ("a red apple", "two dogs"), rows, (1, 2)):
        alone = draw(ours, prompt=prompt, adapters=row, seed=seed, generator=None)[0]
        np.testing.assert_allclose(image, alone, atol=1e-5)
    ours.unload_lora_weights()


def test_layers_of_a_transformer_are_written_for_diffusers(both, tmp_path):
    theirs, ours = both
    layers = {
        name: (down.numpy().T, up.numpy().T)
        for name, (down, up) in products(theirs.transformer, ENDS).items()
    }
    ours.save_lora_weights(tmp_path, transformer_lora_layers=layers)
    found = diffusers.ZImagePipeline.lora_state_dict(tmp_path)
    expected = peft(products(theirs.transformer, ENDS))
    assert set(found) == set(expected)
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key])


def test_a_fused_layer_of_another_shape_fits_nothing(both, tmp_path):
    key = "diffusion_model.layers.0.attention.qkv"
    tensors = {f"{key}.lora_A.weight": torch.ones(2, 48), f"{key}.lora_B.weight": torch.ones(96, 2)}
    save_file(tensors, tmp_path / "wrong.safetensors")
    with pytest.raises(ValueError, match=r"the key '.*qkv\.lora_B\.weight' fits no layer of"):
        both[1].load_lora_weights(tmp_path / "wrong.safetensors")
