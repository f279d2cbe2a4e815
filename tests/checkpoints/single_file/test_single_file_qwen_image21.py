"""Single files of Qwen-Image 2.1's autoencoder, as ComfyUI has them: in Wan 2.2's layout."""

import diffusers
import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from support.single_files import hollow, prefixed, wan22_name
from support.tiny_transformers import qwen_image21_autoencoder

import diffusax
from diffusax.checkpoints.converting import pack_single_file
from diffusax.checkpoints.networks import network_of, read_network
from diffusax.checkpoints.single_file import Reading, named_entries, opened_view, part_of
from diffusax.checkpoints.tree import params_to_tensors, torch_shapes


def test_the_config_of_the_real_autoencoder_is_in_the_package(tmp_path):
    network = network_of("AutoencoderKLQwenImage21", {}, source="a test")
    shapes = torch_shapes(network.shapes)
    path = hollow(
        tmp_path / "real.safetensors", {wan22_name(k): shape for k, shape in shapes.items()}
    )
    with opened_view(path, Reading(), "vae") as folder:
        found, part = read_network(folder), part_of(folder)
        assert found == network
        entries = named_entries(part, found)
    assert {k: e.shape for k, e in entries.items()} == shapes


def test_one_with_other_latents_is_a_sentence(tmp_path):
    qwen_image21_autoencoder(z_dim=6).save_pretrained(tmp_path / "folder")
    pack_single_file(tmp_path / "folder", tmp_path / "vae.safetensors")
    with pytest.raises(ValueError, match="is like Qwen-Image's and Wan's, but has other latents"):
        diffusax.AutoencoderKLQwenImage21.from_single_file(tmp_path / "vae.safetensors")


@pytest.mark.parametrize("layout", ["wan", "wan of frames", "diffusers"])
def test_an_autoencoder(tmp_path, layout):
    """Kernels over one frame may have an axis for it."""
    config = diffusers.AutoencoderKLQwenImage21().config
    kept = ("z_dim", "dim_mult", "temperal_downsample", "latents_mean", "latents_std")
    network = qwen_image21_autoencoder(
        scale_factor_spatial=16, **{name: config[name] for name in kept}
    )
    network.save_pretrained(tmp_path / "folder")
    expected = network.state_dict()
    stored = (
        dict(expected) if layout == "diffusers" else {wan22_name(k): x for k, x in expected.items()}
    )
    if layout == "wan of frames":
        stored = {
            k: x[:, :, None] if x.ndim == 4 and k.endswith("weight") else x
            for k, x in stored.items()
        }
    path = tmp_path / "vae.safetensors"
    save_file(prefixed("", stored), path)
    ours = diffusax.AutoencoderKLQwenImage21.from_single_file(path)
    assert (
        ours.config == diffusax.AutoencoderKLQwenImage21.from_pretrained(tmp_path / "folder").config
    )
    for key, array in params_to_tensors(ours.params).items():
        np.testing.assert_array_equal(array, expected[key])
    if layout == "wan":
        pack_single_file(tmp_path / "folder", tmp_path / "packed.safetensors")
        assert load_file(tmp_path / "packed.safetensors").keys() == stored.keys()
