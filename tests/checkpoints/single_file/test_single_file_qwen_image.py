"""Single files of Qwen-Image's transformer, as ComfyUI has them."""

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.single_files import hollow
from support.tiny_transformers import qwen_image_transformer

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

FLAG = "__index_timestep_zero__"
NAME = "QwenImageTransformer2DModel"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder, and the transformer of PyTorch in it."""
    folder, network = tmp_path_factory.mktemp("qwen-image"), qwen_image_transformer()
    network.save_pretrained(folder / "transformer")
    return folder, network


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model.", ""])
def test_a_transformer_alone_is_read_as_diffusers_does(made, tmp_path, prefix):
    folder, network = made
    path, tensors = tmp_path / "alone.safetensors", network.state_dict()
    stored = {prefix + key: tensor.clone() for key, tensor in tensors.items()}
    # Edit 2511 has a tensor without numbers.
    save_file({**stored, prefix + FLAG: torch.zeros(0)}, path)
    config = folder / "transformer"
    ours = params_to_tensors(
        diffusax.QwenImageTransformer2DModel.from_single_file(path, config=config).params
    )
    assert ours.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(ours[key], tensor)
    if not prefix:
        save_file(stored, path)
        theirs = diffusers.QwenImageTransformer2DModel.from_single_file(
            path, config=str(folder), subfolder="transformer", local_files_only=True
        )
        for key, tensor in theirs.state_dict().items():
            torch.testing.assert_close(tensor, tensors[key], rtol=0, atol=0)


@pytest.mark.parametrize("still", [False, True])
def test_written_with_a_flag_for_images_at_time_zero(tmp_path, still):
    network = qwen_image_transformer(zero_cond_t=still)
    network.save_pretrained(tmp_path / "folder")
    pack_single_file(tmp_path / "folder", tmp_path / "packed.safetensors")
    found = load_file(tmp_path / "packed.safetensors")
    assert (FLAG in found) == still
    found.pop(FLAG, None)
    expected = network.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("still", [False, True])
def test_the_config_of_the_real_network_is_in_the_package(tmp_path, still):
    network = network_of(NAME, {"zero_cond_t": still}, source="a test")
    shapes = torch_shapes(network.shapes)
    path = hollow(tmp_path / "hollow.safetensors", {**shapes, FLAG: (0,)} if still else shapes)
    component = next(iter(read_contents(path).parts))
    with opened_view(path, Reading(), component) as folder:
        found, part = read_network(folder), part_of(folder)
        assert found == network
        entries = named_entries(part, found)
    assert {key: entry.shape for key, entry in entries.items()} == shapes
