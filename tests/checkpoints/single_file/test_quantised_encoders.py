"""Quantised text encoders, whole models and folders have the numbers that they stand for."""

import json
import shutil

import diffusers
import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.quantised import encoded, marking, save_gguf
from support.tiny import randomize
from support.tiny_transformers import (
    FLUX,
    FLUX_T5,
    Z_IMAGE_LANGUAGE,
    krea2_transformer,
    qwen_image_transformer,
    z_image_transformer,
)

import diffusax
from diffusax.checkpoints.converting import pack_single_file, unpack_single_file
from diffusax.checkpoints.single_file import Reading, kind_of_file, read_contents
from diffusax.checkpoints.tree import params_to_tensors
from diffusax.serving.catalogue.folders import find_files

WEIGHTS = "diffusion_pytorch_model.safetensors"


def same(params, expected):
    """Asserts that parameters are these numbers, bit for bit."""
    ours = params_to_tensors(params)
    assert ours.keys() <= expected.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, expected[name].float(), err_msg=name)


def t5():
    config = transformers.T5Config(**{**FLUX_T5, "d_model": 64, "d_kv": 32, "d_ff": 128})
    return randomize(transformers.T5EncoderModel(config), 4).requires_grad_(False)


def qwen3():
    widths = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    config = transformers.Qwen3Config(**{**Z_IMAGE_LANGUAGE, **widths})
    return randomize(transformers.Qwen3Model(config), 2).requires_grad_(False)


ENCODERS = {
    "T5EncoderModel": (t5, gguf.MODEL_ARCH.T5ENCODER, ""),
    "Qwen3Model": (qwen3, gguf.MODEL_ARCH.QWEN3, "model."),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_text_encoders_with_the_names_of_llama_cpp(tmp_path, name):
    build, number, prefix = ENCODERS[name]
    module = build()
    module.save_pretrained(tmp_path / "folder")
    names = gguf.get_tensor_name_map(number, 3)
    tensors = {
        names.get_name(prefix + key, (".weight",)): x
        for key, x in module.state_dict().items()
        if key != "encoder.embed_tokens.weight"
    }
    assert None not in tensors
    path = tmp_path / "encoder.gguf"
    expected = save_gguf(path, tensors, "Q8_0", architecture=gguf.MODEL_ARCH_NAMES[number])
    model = getattr(diffusax, name).from_single_file(path, config=tmp_path / "folder")
    back = {names.get_name(prefix + key, (".weight",)): key for key in module.state_dict()}
    same(model.params, {back[key]: x for key, x in expected.items()})
    found = params_to_tensors(model.params)
    assert sum(not np.array_equal(found[k], module.state_dict()[k]) for k in found) > 10


def test_text_encoders_of_comfyui(tmp_path):
    module = t5()
    module.save_pretrained(tmp_path / "folder")
    tensors = {k: x for k, x in module.state_dict().items() if k != "encoder.embed_tokens.weight"}
    stored, expected = encoded(tensors, "ConvRot")
    save_file(stored, tmp_path / "t5.safetensors")
    model = diffusax.T5EncoderModel.from_single_file(
        tmp_path / "t5.safetensors", config=tmp_path / "folder"
    )
    for name, array in params_to_tensors(model.params).items():
        np.testing.assert_allclose(array, expected[name], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_folders_that_transformers_has_quantised(tmp_path, bits):
    t5().save_pretrained(tmp_path / "folder")
    options = {
        4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        8: {"load_in_8bit": True},
    }
    theirs = transformers.T5EncoderModel.from_pretrained(
        tmp_path / "folder", quantization_config=transformers.BitsAndBytesConfig(**options[bits])
    )
    theirs.save_pretrained(tmp_path / "small")
    assert "quantization_config" in (tmp_path / "small" / "config.json").read_text()
    # In eight bits, 1/127 is in the scales, and the last bit of a number may be another.
    ours = diffusax.T5EncoderModel.from_pretrained(
        tmp_path / "small", dtype="float32", weights=None
    )
    same(ours.params, theirs.dequantize(torch.float32).state_dict())
    with pytest.raises(ValueError, match="in which networks do not compute; give a dtype"):
        diffusax.T5EncoderModel.from_pretrained(tmp_path / "small", dtype="auto")
    ours.save_pretrained(tmp_path / "again")
    assert "quantization_config" not in (tmp_path / "again" / "config.json").read_text()


@pytest.fixture
def folder(tmp_path):
    """A transformer of FLUX.1, as diffusers saves it."""
    wide = {"attention_head_dim": 32, "axes_dims_rope": (8, 12, 12), "joint_attention_dim": 64}
    network = diffusers.FluxTransformer2DModel(**{**FLUX, **wide})
    randomize(network, 3).save_pretrained(tmp_path / "transformer")
    return tmp_path / "transformer"


def quantised_by(folder, method):
    data = json.loads((folder / "config.json").read_text())
    data["quantization_config"] = {"quant_method": method, "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(data))


def test_folders_of_diffusers_in_several_files(folder):
    stored, expected = encoded(load_file(folder / WEIGHTS), "nf4, nested")
    (folder / WEIGHTS).unlink()
    # A weight and what belongs to it may be in two files.
    files = {name: f"{'ab'['absmax' in name]}.safetensors" for name in stored}
    for file in set(files.values()):
        save_file({k: stored[k] for k, own in files.items() if own == file}, folder / file)
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": files}))
    quantised_by(folder, "bitsandbytes")
    same(diffusax.FluxTransformer2DModel.from_pretrained(folder).params, expected)


def test_what_is_not_read_is_one_sentence(folder):
    stored = load_file(folder / WEIGHTS)
    load = diffusax.FluxTransformer2DModel.from_pretrained
    name = "transformer_blocks.0.attn.to_q"
    changes = {
        rf"{name}\.weight is in the format 'convrot_w4a4', which is not read; take the file": {
            f"{name}.comfy_quant": marking(format="convrot_w4a4")
        },
        r"to_q\.qweight is of weights of four bits by SVDQuant, AWQ or GPTQ, which": {
            f"{name}.qweight": torch.zeros(4, 4, dtype=torch.int32)
        },
        r"to_q\.weight is int8_tensorwise, but its weight_scale is missing": {
            f"{name}.comfy_quant": marking(format="int8_tensorwise")
        },
        r"and groups of 48 for ConvRot; download it again, or take": {
            f"{name}.weight": stored[f"{name}.weight"].to(torch.int8),
            f"{name}.weight_scale": torch.ones(()),
            f"{name}.comfy_quant": marking(
                format="int8_tensorwise", convrot=True, convrot_groupsize=48
            ),
        },
    }
    for message, tensors in changes.items():
        save_file({**stored, **tensors}, folder / WEIGHTS)
        with pytest.raises(ValueError, match=message):
            load(folder)
    save_file(stored, folder / WEIGHTS)
    quantised_by(folder, "torchao")
    with pytest.raises(ValueError, match=r"config\.json: the weights are quantised by 'torchao'"):
        load(folder)


def by_stable_diffusion_cpp(name):
    """The name of a tensor of SDXL in the files that stable-diffusion.cpp writes."""
    name = name.replace("conditioner.embedders.0.", "cond_stage_model.")
    name = name.replace("conditioner.embedders.1.model.", "cond_stage_model.1.transformer.")
    if not name.startswith("cond_stage_model.1."):
        return name
    text = "transformer.text_model."
    pairs = {
        "transformer.transformer.resblocks.": f"{text}encoder.layers.",
        "attn.in_proj_": "self_attn.in_proj.",
        "attn.out_proj": "self_attn.out_proj",
        ".ln_1.": ".layer_norm1.",
        ".ln_2.": ".layer_norm2.",
        "c_fc": "fc1",
        "c_proj": "fc2",
        "transformer.ln_final": f"{text}final_layer_norm",
        "transformer.positional_embedding": f"{text}embeddings.position_embedding.weight",
        "transformer.token_embedding": f"{text}embeddings.token_embedding",
        "transformer.text_projection": f"{text}text_projection",
    }
    for old, new in pairs.items():
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("kind", ["sd", "xl"])
def test_whole_models_of_stable_diffusion_cpp(tmp_path, tiny_checkpoints, kind):
    folder, _ = tiny_checkpoints.pipeline(kind, "a")
    pack_single_file(folder, tmp_path / "packed.safetensors")
    tensors = load_file(tmp_path / "packed.safetensors")
    path, plain = tmp_path / "models" / "model.gguf", tmp_path / "plain.safetensors"
    path.parent.mkdir()
    stored = {by_stable_diffusion_cpp(name): tensor for name, tensor in tensors.items()}
    assert len(stored) == len(tensors)
    numbers = save_gguf(path, stored, "Q8_0", architecture=None)
    expected = {name: numbers[by_stable_diffusion_cpp(name)] for name in tensors}
    save_file(expected, plain)
    ours, theirs = (
        diffusax.DiffusionPipeline.from_single_file(file, config=folder) for file in (path, plain)
    )
    assert ours.params.keys() == theirs.params.keys() >= {"unet", "vae", "text_encoder"}
    for name, params in theirs.params.items():
        own = {key: torch.tensor(x) for key, x in params_to_tensors(params).items()}
        same(ours.params[name], own)
    assert kind_of_file(path) == "model"
    (found,), unreadable = find_files(path.parent)
    assert (found.kind, found.name, found.title, unreadable) == ("model", "model", "model.gguf", {})
    with pytest.raises(ValueError, match="is Q8_0, which cannot be copied as it is; give a dtype"):
        unpack_single_file(path, tmp_path / "out", Reading(config=folder))
    unpack_single_file(path, tmp_path / "out", Reading(config=folder), dtype=np.float32)
    back = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "out")
    for name, params in theirs.params.items():
        own = {key: torch.tensor(x) for key, x in params_to_tensors(params).items()}
        same(back.params[name], own)


NETWORKS = {
    "lumina2": (z_image_transformer, "ZImageTransformer2DModel"),
    "krea2": (krea2_transformer, "Krea2Transformer2DModel"),
    "qwen_image": (qwen_image_transformer, "QwenImageTransformer2DModel"),
}


@pytest.mark.parametrize("architecture", NETWORKS)
def test_other_architectures(tmp_path, architecture):
    build, name = NETWORKS[architecture]
    build().save_pretrained(tmp_path / "folder")
    pack_single_file(tmp_path / "folder", tmp_path / "packed.safetensors")
    path = tmp_path / "packed.gguf"
    tensors = load_file(tmp_path / "packed.safetensors")
    # Last axes of one, which are the first here, are not in all files.
    flat = {k: x[0] if x.ndim == 2 and len(x) == 1 else x for k, x in tensors.items()}
    expected = save_gguf(path, flat, "Q4_0", architecture=architecture, wide=True)
    expected = {k: x.reshape(tensors[k].shape) for k, x in expected.items()}
    save_file(expected, tmp_path / "plain.safetensors")
    assert [*read_contents(path).parts] == ["transformer"]
    load = getattr(diffusax, name).from_single_file
    ours, theirs = (
        params_to_tensors(load(file, config=tmp_path / "folder").params)
        for file in (path, tmp_path / "plain.safetensors")
    )
    for key, array in theirs.items():
        np.testing.assert_array_equal(ours[key], array)


def test_a_language_model_that_is_not_there_is_named(tmp_path):
    tensors = {"token_embd.weight": torch.ones(4, 32), "blk.0.attn_q.weight": torch.ones(32, 32)}
    save_gguf(tmp_path / "llama.gguf", tensors, "Q8_0", architecture="llama")
    with pytest.raises(ValueError, match="holds a language model that diffusax lacks"):
        read_contents(tmp_path / "llama.gguf")
    shutil.copy(tmp_path / "llama.gguf", tmp_path / "short.gguf")
    with (tmp_path / "short.gguf").open("r+b") as file:
        file.truncate(200)
    with pytest.raises(ValueError, match=r"short\.gguf is not a whole GGUF file .*; download it"):
        kind_of_file(tmp_path / "short.gguf")
