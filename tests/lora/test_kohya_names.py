"""The names of SDXL's layers in kohya's files, which are those of the original code."""

import types

import diffusers
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from diffusax.checkpoints.networks import network_of
from diffusax.lora import find_layers, read_lora, write_lora
from diffusax.lora.keys import split_key
from diffusax.models.adapters.low_rank import kernel_shapes

ATTENTION = "transformer_blocks.0.attn1.to_q"
# As sd-scripts' networks/lora.py and library/sdxl_original_unet.py have them.
NAMES = {
    f"down_blocks.1.attentions.0.{ATTENTION}": "input_blocks_4_1_transformer_blocks_0_attn1_to_q",
    f"down_blocks.2.attentions.1.{ATTENTION}": "input_blocks_8_1_transformer_blocks_0_attn1_to_q",
    f"mid_block.attentions.0.{ATTENTION}": "middle_block_1_transformer_blocks_0_attn1_to_q",
    f"up_blocks.0.attentions.2.{ATTENTION}": "output_blocks_2_1_transformer_blocks_0_attn1_to_q",
    f"up_blocks.1.attentions.0.{ATTENTION}": "output_blocks_3_1_transformer_blocks_0_attn1_to_q",
    "down_blocks.1.attentions.1.proj_in": "input_blocks_5_1_proj_in",
    "down_blocks.0.resnets.1.conv1": "input_blocks_2_0_in_layers_2",
    "down_blocks.0.downsamplers.0.conv": "input_blocks_3_0_op",
    "mid_block.resnets.1.time_emb_proj": "middle_block_2_emb_layers_1",
    "up_blocks.0.upsamplers.0.conv": "output_blocks_2_2_conv",
    "up_blocks.2.resnets.2.conv_shortcut": "output_blocks_8_0_skip_connection",
    "conv_in": "input_blocks_0_0",
    "time_embedding.linear_1": "time_embed_0",
    "conv_out": "out_2",
}


SDXL = {
    "block_out_channels": (8, 16, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 2,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 64,
}


def write(tmp_path, config):
    """A file of kohya's with an adapter in each layer of a UNet, and the layers."""
    network = network_of("UNet2DConditionModel", config, source="here")
    rng = np.random.default_rng(0)
    layers = {}
    for path, shape in kernel_shapes(network).items():
        ones = (1,) * (len(shape) - 2)
        down = rng.standard_normal((2, shape[-2], *shape[:-2]), np.float32)
        up = rng.standard_normal((shape[-1], 2, *ones), np.float32)
        layers["unet", path] = {"down": down, "up": up, "alpha": np.float32(3)}
    file = tmp_path / "kohya.safetensors"
    write_lora(file, layers, "kohya", encoders=2, unet=network.config)
    return file, network, layers


def test_they_are_those_of_sd_scripts_and_are_read_back(tmp_path):
    file, network, layers = write(tmp_path, SDXL)
    written = load_file(file)
    for path, name in NAMES.items():
        np.testing.assert_array_equal(
            written[f"lora_unet_{name}.lora_down.weight"], layers["unet", path]["down"]
        )
    assert not any("attentions" in key or "resnets" in key for key in written)
    with safe_open(file, "np") as opened:
        assert opened.metadata()["ss_base_model_version"] == "sdxl_base_v1-0"
    again = find_layers(read_lora(str(file)), {"unet": network})
    assert again.keys() == layers.keys()
    for key, parts in layers.items():
        for part, x in parts.items():
            np.testing.assert_array_equal(again[key][part], x)


def test_diffusers_reads_them(tmp_path):
    file, _, layers = write(tmp_path, SDXL)
    unet = types.SimpleNamespace(layers_per_block=2)
    found, _ = diffusers.StableDiffusionXLPipeline.lora_state_dict(file, unet_config=unet)
    by_part = {split_key(key): x for key, x in found.items()}
    assert by_part.keys() == {(f"unet.{path}", k) for _, path in layers for k in ("down", "up")}
    for (layer, part), x in by_part.items():
        np.testing.assert_array_equal(x, layers["unet", layer.removeprefix("unet.")][part])


@pytest.mark.parametrize(
    "changes", [{"layers_per_block": (1, 2, 2)}, {"addition_embed_type": None}]
)
def test_other_unets_have_the_names_of_diffusers(tmp_path, changes):
    file, _, _ = write(tmp_path, {**SDXL, **changes})
    assert "lora_unet_mid_block_resnets_0_conv1.lora_up.weight" in load_file(file)
