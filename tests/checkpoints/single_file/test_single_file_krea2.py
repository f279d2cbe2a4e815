"""Single files of Krea 2's transformer and of Qwen-Image's autoencoder, as ComfyUI has them."""

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.single_files import hollow, prefixed
from support.tiny_transformers import (
    KREA2_SIZE,
    krea2_pipeline,
    krea2_transformer,
    qwen_image_autoencoder,
)

import diffusax
from diffusax.checkpoints.converting import pack_single_file
from diffusax.checkpoints.networks import network_of, read_network
from diffusax.checkpoints.single_file import (
    Reading,
    named_entries,
    opened_view,
    part_of,
    read_contents,
)
from diffusax.checkpoints.tree import params_to_tensors, torch_shapes

NORMS = {
    "norm_q": "qknorm.qnorm",
    "norm_k": "qknorm.knorm",
    "norm1": "prenorm",
    "norm2": "postnorm",
}
LAYERS = {"to_q": "wq", "to_k": "wk", "to_v": "wv", "to_out.0": "wo", "to_gate": "gate"}
WHOLE = {
    "img_in.": "first.",
    "time_embed.linear_1.": "tmlp.0.",
    "time_embed.linear_2.": "tmlp.2.",
    "time_mod_proj.": "tproj.1.",
    "txt_in.norm.weight": "txtmlp.0.scale",
    "txt_in.linear_1.": "txtmlp.1.",
    "txt_in.linear_2.": "txtmlp.3.",
    "final_layer.linear.": "last.linear.",
    "final_layer.norm.weight": "last.norm.scale",
    "final_layer.scale_shift_table": "last.modulation.lin",
}


def original_name(name):
    """The name of a tensor of the transformer in Krea's code."""
    for ours, theirs in WHOLE.items():
        name = name.replace(ours, theirs)
    for ours, theirs in NORMS.items():
        name = name.replace(f".{ours}.weight", f".{theirs}.scale")
    for ours, theirs in LAYERS.items():
        name = name.replace(f".attn.{ours}.", f".attn.{theirs}.")
    name = name.replace("text_fusion.", "txtfusion.").replace("transformer_blocks.", "blocks.")
    return name.replace(".scale_shift_table", ".mod.lin").replace(".ff.", ".mlp.")


def original(tensors, flatten=torch.Tensor.flatten):
    """A transformer's tensors in Krea's code, which has the tables of blocks in one row."""
    found = {original_name(name): tensor for name, tensor in tensors.items()}
    return {k: flatten(x) if k.endswith(".mod.lin") else x for k, x in found.items()}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pipeline's folder, and the pipeline of PyTorch."""
    folder = tmp_path_factory.mktemp("krea2")
    return folder, krea2_pipeline(folder)


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model.", ""])
@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_a_transformer_alone_is_read_as_diffusers_does(made, tmp_path, prefix, layout):
    folder, pipe = made
    tensors = pipe.transformer.state_dict()
    path = tmp_path / "alone.safetensors"
    save_file(prefixed(prefix, original(tensors) if layout == "original" else tensors), path)
    found = diffusax.Krea2Transformer2DModel.from_single_file(path, config=folder).params
    ours = params_to_tensors(found)
    assert ours.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(ours[key], tensor)
    if prefix.startswith("model.") and layout == "original":
        theirs = diffusers.Krea2Transformer2DModel.from_single_file(
            path, config=str(folder), subfolder="transformer", local_files_only=True
        )
        for key, tensor in theirs.state_dict().items():
            torch.testing.assert_close(tensor, tensors[key], rtol=0, atol=0)


def test_a_table_of_another_size_is_an_error(made, tmp_path):
    folder, pipe = made
    tensors = original(pipe.transformer.state_dict())
    tensors["blocks.1.mod.lin"] = torch.ones(7)
    save_file(prefixed("", tensors), tmp_path / "wrong.safetensors")
    with pytest.raises(ValueError, match=r"transformer_blocks\.1\.scale_shift_table \(has \(7,\)"):
        diffusax.Krea2Transformer2DModel.from_single_file(
            tmp_path / "wrong.safetensors", config=folder
        )


def test_written_in_the_original_layout(tmp_path):
    network = krea2_transformer()
    network.save_pretrained(tmp_path / "folder")
    pack_single_file(tmp_path / "folder", tmp_path / "packed.safetensors")
    found = load_file(tmp_path / "packed.safetensors")
    expected = original(network.state_dict())
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=0)


def test_the_configs_of_the_real_networks_are_in_the_package(tmp_path):
    for name in ("Krea2Transformer2DModel", "AutoencoderKLQwenImage"):
        network = network_of(name, {}, source="a test")
        shapes = torch_shapes(network.shapes)
        if name.startswith("Krea2"):
            shapes = original(shapes, lambda shape: (shape[0] * shape[1],))
        path = hollow(tmp_path / f"{name}.safetensors", shapes)
        component = next(iter(read_contents(path).parts))
        with opened_view(path, Reading(), component) as folder:
            found, part = read_network(folder), part_of(folder)
            assert found == network
            entries = named_entries(part, found)
        assert {k: e.shape for k, e in entries.items()} == torch_shapes(network.shapes)


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    """An autoencoder of the depth of the real one, which diffusers' conversion is written for."""
    folder = tmp_path_factory.mktemp("vae")
    widths = {"z_dim": 16, "num_res_blocks": 2, "dim_mult": [1, 2, 4, 4]}
    config = diffusers.AutoencoderKLQwenImage().config
    statistics = {name: config[name] for name in ("latents_mean", "latents_std")}
    network = qwen_image_autoencoder(**widths, **statistics)
    network.save_pretrained(folder)
    return folder, network


def test_an_autoencoder_in_the_original_layout(vae, tmp_path):
    folder, network = vae
    path = tmp_path / "packed.safetensors"
    pack_single_file(folder, path)
    stored = load_file(path)
    assert "decoder.upsamples.12.residual.2.weight" in stored
    assert "encoder.downsamples.5.time_conv.weight" in stored
    theirs = diffusers.loaders.single_file_utils.convert_wan_vae_to_diffusers(dict(stored))
    expected = network.state_dict()
    assert theirs.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(theirs[key], tensor, rtol=0, atol=0)
    for prefix in ("", "vae."):
        save_file(prefixed(prefix, stored), tmp_path / "prefixed.safetensors")
        ours = diffusax.AutoencoderKLQwenImage.from_single_file(tmp_path / "prefixed.safetensors")
        assert ours.config == diffusax.AutoencoderKLQwenImage.from_pretrained(folder).config
        for key, array in params_to_tensors(ours.params).items():
            frames = expected[key].shape[2] if "time_conv" not in key and array.ndim == 5 else 0
            last = expected[key][:, :, -1] if frames else expected[key]
            np.testing.assert_array_equal(array[:, :, -1] if frames else array, last)


def test_a_pipeline_of_a_single_file_with_components_beside_it(made, tmp_path):
    folder, pipe = made
    path = tmp_path / "alone.safetensors"
    save_file(prefixed("model.diffusion_model.", original(pipe.transformer.state_dict())), path)
    expected = diffusax.DiffusionPipeline.from_pretrained(folder)
    parts = {name: getattr(expected, name) for name in ("vae", "text_encoder", "tokenizer")}
    found = diffusax.Krea2Pipeline.from_single_file(path, config=folder, **parts)
    images = []
    for own in (expected, found):
        own.set_progress_bar_config(disable=True)
        call = {"num_inference_steps": 2, "seed": 0, "output_type": "np", **KREA2_SIZE}
        images.append(own("a red apple", **call).images)
    np.testing.assert_array_equal(*images)
