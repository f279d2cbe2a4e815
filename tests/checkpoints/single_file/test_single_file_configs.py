"""What single files say: names and shapes are upstream's, configs those in the package."""

import json
import math

import diffusers
import numpy as np
import pytest
import torch
from diffusers.loaders import single_file_utils as upstream
from support.clip_vocabulary import write_clip_vocabulary
from support.effort import few
from support.single_files import hollow, model_shapes

from diffusax.checkpoints import read_model_index
from diffusax.checkpoints.networks import network_of, read_network, stored_tensors
from diffusax.checkpoints.original.unet import controlnet_names, unet_names
from diffusax.checkpoints.single_file import Reading, configs, opened_view, part_of, read_contents
from diffusax.checkpoints.single_file.original_config import prediction_of
from diffusax.checkpoints.tree import fitted, torch_shapes
from diffusax.text import clip_vocabulary
from diffusax.text.tokenizer import CLIPTokenizer

FAMILIES = ("sd1", "sd2", "sdxl", "refiner")
CLASSES = {
    ("sd1", 4): "StableDiffusionPipeline",
    ("sd1", 8): "StableDiffusionInstructPix2PixPipeline",
    ("sd1", 9): "StableDiffusionInpaintPipeline",
    ("sd2", 9): "StableDiffusionInpaintPipeline",
    ("sdxl", 4): "StableDiffusionXLPipeline",
    ("sdxl", 8): "StableDiffusionXLInstructPix2PixPipeline",
    ("sdxl", 9): "StableDiffusionXLInpaintPipeline",
    ("refiner", 4): "StableDiffusionXLImg2ImgPipeline",
}


def passed_through(config, prefix, names, convert):
    """What diffusers' converter makes of a file whose tensors are the names that we give them."""
    network = network_of(config["_class_name"], config, source="a test")
    modules = {ours: theirs for theirs, ours in names(network.config).items()}
    file = {}
    for name in torch_shapes(network.shapes):
        module, _, leaf = name.rpartition(".")
        file[f"{prefix}{modules[module]}.{leaf}"] = name
    return network, convert(file, config=config)


@pytest.mark.parametrize("family", few(FAMILIES, "sd1"))
def test_names_and_shapes_of_unets_are_diffusers(family):
    config = configs.UNETS[family]
    network, converted = passed_through(
        config, "model.diffusion_model.", unet_names, upstream.convert_ldm_unet_checkpoint
    )
    assert converted == {name: name for name in torch_shapes(network.shapes)}
    with torch.device("meta"):
        reference = diffusers.UNet2DConditionModel.from_config(config)
    shapes = {name: tuple(x.shape) for name, x in reference.state_dict().items()}
    assert torch_shapes(network.shapes) == shapes


def test_names_of_controlnets_are_diffusers():
    config = configs.controlnet_like(configs.UNETS["sd1"])
    network, converted = passed_through(
        config, "control_model.", controlnet_names, upstream.convert_controlnet_checkpoint
    )
    assert converted == {name: name for name in torch_shapes(network.shapes)}


def test_levels_of_several_depths_are_counted_through():
    config = network_of(
        "UNet2DConditionModel",
        {
            "block_out_channels": [8, 8, 8],
            "layers_per_block": [1, 2, 3],
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
            "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "attention_head_dim": 2,
            "norm_num_groups": 4,
        },
        source="a test",
    ).config
    names = unet_names(config)
    assert names["input_blocks.2.0.op"] == "down_blocks.0.downsamplers.0.conv"
    assert names["input_blocks.4.1.proj_in"] == "down_blocks.1.attentions.1.proj_in"
    assert names["input_blocks.8.0.in_layers.2"] == "down_blocks.2.resnets.2.conv1"
    assert names["output_blocks.3.1.conv"] == "up_blocks.0.upsamplers.0.conv"
    assert names["output_blocks.6.2.conv"] == "up_blocks.1.upsamplers.0.conv"
    assert names["output_blocks.8.0.skip_connection"] == "up_blocks.2.resnets.1.conv_shortcut"


@pytest.mark.parametrize(("family", "channels"), few(CLASSES, ("sd1", 4), ("sdxl", 8)))
def test_a_full_size_file_fits_the_configs_in_the_package(tmp_path, family, channels):
    path = hollow(tmp_path / "model.safetensors", model_shapes(family, channels))
    with opened_view(path, Reading()) as folder:
        class_name, listed, _ = read_model_index(folder)
        assert class_name == CLASSES[family, channels]
        networks = [name for name in listed if (folder / name / "config.json").is_file()]
        assert len(networks) == 2 + len(configs.TEXT_ENCODERS[family])
        for name in networks:
            network = read_network(folder / name)
            stored = stored_tensors(folder / name)
            fitted(network.module_class, network.shapes, stored, where=name)
        assert (folder / "vae" / "config.json").is_file()
        scale = json.loads((folder / "vae" / "config.json").read_text())["scaling_factor"]
        assert scale == (0.13025 if family in ("sdxl", "refiner") else 0.18215)
    assert not folder.exists()
    assert all(part_of(folder / name) is None for name in networks)


# In millions. With the autoencoder they make the sizes of the files that Stability AI published.
MILLIONS = {
    "sd1": (859.5, 123.1),
    "sd2": (865.9, 340.4),
    "sdxl": (2567.5, 123.1, 694.7),
    "refiner": (2259.5, 694.7),
}


@pytest.mark.parametrize("family", few(FAMILIES, "sd2"))
def test_full_size_models_have_as_many_parameters_and_heads_as_published(family):
    unet = configs.UNETS[family]
    counts = []
    for config in (unet, *configs.TEXT_ENCODERS[family].values()):
        class_name = config.get("_class_name") or config["architectures"][0]
        shapes = torch_shapes(network_of(class_name, config, source="a test").shapes)
        counts.append(round(sum(map(math.prod, shapes.values())) / 1e6, 1))
    assert tuple(counts) == MILLIONS[family]
    heads = unet["attention_head_dim"]
    widths = unet["block_out_channels"]
    if family == "sd1":
        assert heads == 8
    else:
        assert [width // 64 for width in widths] == heads
    for config in configs.TEXT_ENCODERS[family].values():
        assert config["hidden_size"] // config["num_attention_heads"] == 64
        assert config["intermediate_size"] == 4 * config["hidden_size"]


def test_controlnets_of_sdxl_are_known_in_their_sizes(tmp_path):
    shapes = {"controlnet_cond_embedding.conv_in.weight": (16, 3, 3, 3)}
    shapes["add_embedding.linear_1.weight"] = (1280, 2816)
    for level, depth in ((1, 2), (2, 10)):
        for block in range(depth):
            name = f"down_blocks.{level}.attentions.0.transformer_blocks.{block}.norm1.bias"
            shapes[name] = (320 * 2**level,)
        shapes[f"down_blocks.{level}.attentions.0.norm.weight"] = (320 * 2**level,)
    shapes["mid_block.attentions.0.norm.weight"] = (1280,)
    path = hollow(tmp_path / "control.safetensors", shapes)
    found = configs.controlnet_config(read_contents(path).parts["controlnet"])
    assert found["transformer_layers_per_block"] == [0, 2, 10]
    assert found["down_block_types"] == ["DownBlock2D", *("CrossAttnDownBlock2D",) * 2]
    config = network_of("ControlNetModel", found, source="a test").config
    assert config.projection_class_embeddings_input_dim == 2816


def test_the_vocabulary_is_clips(tmp_path):
    for pad in ("<|endoftext|>", "!"):
        clip_vocabulary.write_clip_vocabulary(tmp_path / "ours", pad)
        write_clip_vocabulary(tmp_path / "theirs", pad=pad)
        for name in ("vocab.json", "merges.txt"):
            ours, theirs = (tmp_path / side / name for side in ("ours", "theirs"))
            assert ours.read_bytes() == theirs.read_bytes()
        ours, theirs = (CLIPTokenizer.from_folder(tmp_path / s) for s in ("ours", "theirs"))
        texts = ["a red apple! <|endoftext|>", "DOGS, naïve café 🐕", ""]
        assert np.array_equal(ours.windows(texts), theirs.windows(texts))


# What a file says of itself.


def described(tmp_path, family, channels=4, markers=(), **metadata):
    """The scheduler's and the UNet's config of a full-size file, and the pipeline's options."""
    shapes = {
        "model.diffusion_model.input_blocks.0.0.weight": (320, channels, 3, 3),
        "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": (
            320,
            {"sd1": 768, "sd2": 1024, "sdxl": 2048}[family],
        ),
        **dict.fromkeys(markers, (0,)),
    }
    path = hollow(tmp_path / f"{family}.safetensors", shapes, **metadata)
    given = frozenset(("vae", "text_encoder", "text_encoder_2"))
    with opened_view(path, Reading(given=given)) as folder:
        scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
        return scheduler, read_network(folder / "unet").config, read_model_index(folder)


def test_sd2_asks_for_its_prediction_type_unless_the_file_says_it(tmp_path):
    with pytest.raises(ValueError, match="pass prediction_type='v_prediction' for a model of 768"):
        described(tmp_path, "sd2")
    for said in (
        {"modelspec.prediction_type": "v"},
        {"modelspec.predict_key": "v"},
        {"modelspec.architecture": "stable-diffusion-v2-768-v"},
    ):
        scheduler, unet, _ = described(tmp_path, "sd2", **said)
        assert (scheduler["prediction_type"], unet.sample_size) == ("v_prediction", 96)
    scheduler, unet, _ = described(tmp_path, "sd2", **{"modelspec.predict_key": "epsilon"})
    assert (scheduler["prediction_type"], unet.sample_size) == ("epsilon", 64)
    assert described(tmp_path, "sd2", 9)[0]["prediction_type"] == "epsilon"


def test_markers_of_v_prediction_are_understood(tmp_path):
    for family, name in (("sd1", "DDIMScheduler"), ("sdxl", "EulerDiscreteScheduler")):
        scheduler, _, _ = described(tmp_path, family, markers=("v_pred", "ztsnr"))
        assert scheduler["_class_name"] == name
        assert scheduler["prediction_type"] == "v_prediction"
        assert scheduler["rescale_betas_zero_snr"] is True
        assert scheduler["timestep_spacing"] == "trailing"
        scheduler, _, _ = described(tmp_path, family, markers=("v_pred",))
        assert "rescale_betas_zero_snr" not in scheduler
        assert described(tmp_path, family)[0]["prediction_type"] == "epsilon"
    assert described(tmp_path, "sd1", 8)[0]["_class_name"] == "EulerAncestralDiscreteScheduler"


def test_the_original_yaml_says_what_a_unet_predicts(tmp_path):
    file = tmp_path / "v2.yaml"
    file.write_text("model:\n  params:\n    parameterization: v\n")
    assert prediction_of(file) == "v_prediction"
    assert prediction_of({"model": {"params": {"timesteps": 1000}}}) == "epsilon"
    scaling = {"scaling_config": {"target": "sgm.modules.diffusionmodules.VScaling"}}
    assert prediction_of({"model": {"params": {"denoiser_config": scaling}}}) == "v_prediction"
    file.write_text("a: [")
    for wrong, message in (
        (file, "is not valid YAML"),
        ("https://example.org/v1.yaml", "must be the path of a YAML file"),
        ({"model": 1}, "must be a config of Stable Diffusion's original code"),
    ):
        with pytest.raises(ValueError, match=message):
            prediction_of(wrong)
