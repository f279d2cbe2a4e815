"""Single files of transformers, as ComfyUI has them: diffusers reads them, and so do we."""

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.single_files import hollow, prefixed
from support.tiny_transformers import Z_IMAGE_SIZE, z_image_pipeline

import diffusax
from diffusax.checkpoints.networks import network_of, read_network
from diffusax.checkpoints.single_file import (
    Reading,
    kind_of_file,
    named_entries,
    opened_view,
    part_of,
)
from diffusax.checkpoints.tree import params_to_tensors, torch_shapes

REAL = {"axes_lens": [1536, 512, 512]}
"""Z-Image-Turbo's config where it is not the default."""


def original(tensors, join=torch.cat):
    """A transformer's tensors under the names of the original code, with q, k and v in one."""
    found = {}
    for key, tensor in tensors.items():
        block, _, end = key.rpartition(".attention.")
        if end == "to_q.weight":
            parts = [tensors[f"{block}.attention.to_{n}.weight"] for n in "qkv"]
            found[f"{block}.attention.qkv.weight"] = join(parts)
        elif end not in ("to_k.weight", "to_v.weight"):
            key = key.replace(".to_out.0.", ".out.").replace("norm_q.", "q_norm.")
            key = key.replace("norm_k.", "k_norm.").replace("all_x_embedder.2-1", "x_embedder")
            found[key.replace("all_final_layer.2-1", "final_layer")] = tensor
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A pipeline's folder, and the pipeline of PyTorch."""
    folder = tmp_path_factory.mktemp("z-image")
    return folder, z_image_pipeline(folder)


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model.", ""])
@pytest.mark.parametrize("layout", ["original", "diffusers"])
def test_a_transformer_alone_is_read_as_diffusers_does(made, tmp_path, prefix, layout):
    folder, pipe = made
    tensors = pipe.transformer.state_dict()
    stored = original(tensors) if layout == "original" else tensors
    path = tmp_path / "alone.safetensors"
    save_file({**prefixed(prefix, stored), f"{prefix}norm_final.weight": torch.ones(4)}, path)
    kind = diffusax.ZImageTransformer2DModel
    ours = params_to_tensors(kind.from_single_file(path, config=folder).params)
    assert ours.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(ours[key], tensor)
    if prefix.startswith("model.") and layout == "original":
        theirs = diffusers.ZImageTransformer2DModel.from_single_file(
            path, config=str(folder), subfolder="transformer", local_files_only=True
        )
        for key, tensor in theirs.state_dict().items():
            torch.testing.assert_close(tensor, tensors[key], rtol=0, atol=0)


def test_eight_bits_are_cast(made, tmp_path):
    folder, pipe = made
    path = tmp_path / "fp8.safetensors"
    tensors = {k: x.to(torch.float8_e4m3fn) for k, x in pipe.transformer.state_dict().items()}
    # PyTorch cannot join numbers of eight bits, but can join their bytes.
    bits = original({k: x.view(torch.uint8) for k, x in tensors.items()})
    stored = {k: x.view(torch.float8_e4m3fn) for k, x in bits.items()}
    save_file(prefixed("model.diffusion_model.", stored), path)
    kind = diffusax.ZImageTransformer2DModel
    found = kind.from_single_file(path, config=folder, dtype="bfloat16").params
    for key, array in params_to_tensors(found).items():
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array.astype(np.float32), tensors[key].float())


@pytest.mark.slow
def test_a_whole_model_and_one_with_components_beside_it(made, tmp_path):
    folder, pipe = made
    alone = prefixed("model.diffusion_model.", original(pipe.transformer.state_dict()))
    save_file(alone, tmp_path / "alone.safetensors")
    language = prefixed("text_encoders.qwen3_4b.transformer.model.", pipe.text_encoder.state_dict())
    save_file(
        {**alone, **language, **prefixed("vae.", pipe.vae.state_dict())},
        tmp_path / "whole.safetensors",
    )
    assert kind_of_file(tmp_path / "whole.safetensors") == "model"
    expected = diffusax.DiffusionPipeline.from_pretrained(folder)
    whole = diffusax.DiffusionPipeline.from_single_file(
        tmp_path / "whole.safetensors", config=folder
    )
    parts = {name: getattr(expected, name) for name in ("vae", "text_encoder", "tokenizer")}
    beside = diffusax.ZImagePipeline.from_single_file(
        tmp_path / "alone.safetensors", config=folder, **parts
    )
    assert type(whole) is diffusax.ZImagePipeline
    images = []
    for other in (expected, whole, beside):
        other.set_progress_bar_config(disable=True)
        call = {"num_inference_steps": 2, "seed": 0, "output_type": "np", **Z_IMAGE_SIZE}
        images.append(other("a red apple", **call).images)
    np.testing.assert_array_equal(images[1], images[0])
    np.testing.assert_array_equal(images[2], images[0])
    with pytest.raises(ValueError, match=r"has no tokenizer; pass config= with a folder"):
        diffusax.DiffusionPipeline.from_single_file(tmp_path / "whole.safetensors")
    with pytest.raises(ValueError, match=r"does not hold a text encoder .*; give text_encoder="):
        diffusax.DiffusionPipeline.from_single_file(tmp_path / "alone.safetensors", config=folder)


def test_the_config_of_the_real_model_is_in_the_package(tmp_path):
    name = "ZImageTransformer2DModel"
    network = network_of(name, REAL, source="a test")
    shapes = original(
        torch_shapes(network.shapes), lambda parts: (sum(p[0] for p in parts), *parts[0][1:])
    )
    path = hollow(tmp_path / "real.safetensors", shapes)
    with opened_view(path, Reading(), "transformer") as folder:
        found, part = read_network(folder), part_of(folder)
        assert found == network
        entries = named_entries(part, found)
    assert {k: e.shape for k, e in entries.items()} == torch_shapes(network.shapes)


def test_a_fused_layer_of_another_shape_is_one_sentence(made, tmp_path):
    folder, pipe = made
    tensors = original(pipe.transformer.state_dict())
    tensors["layers.1.attention.qkv.weight"] = torch.ones(100, 48)
    save_file(prefixed("", tensors), tmp_path / "wrong.safetensors")
    message = r"layers\.1\.attention\.qkv\.weight holds 3 tensors below each other, but has"
    with pytest.raises(ValueError, match=message):
        diffusax.ZImageTransformer2DModel.from_single_file(
            tmp_path / "wrong.safetensors", config=folder
        )
