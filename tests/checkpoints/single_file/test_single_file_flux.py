"""Single files of FLUX and Qwen-Image 2.1: diffusers reads ours, and we read them back."""

import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from diffusers.loaders import single_file_model
from diffusers.loaders import single_file_utils as upstream
from safetensors.torch import load_file, save_file
from support.effort import few
from support.single_files import hollow
from support.tiny_flux3 import flux3_pipeline
from support.tiny_transformers import (
    flux_pipeline,
    flux_transformer,
    klein_pipeline,
    qwen_image21_pipeline,
    z_image_pipeline,
)
from support.upstream_widths import for_tiny

import diffusax
from diffusax.checkpoints.converting import pack_single_file, unpack_single_file
from diffusax.checkpoints.networks import network_of, read_network
from diffusax.checkpoints.original.transformers import ORIGINALS, transformer_names
from diffusax.checkpoints.single_file import (
    Reading,
    kind_of_file,
    named_entries,
    opened_view,
    part_of,
    read_contents,
)
from diffusax.checkpoints.tree import fitted, params_to_tensors, torch_shapes

PIPELINES = {
    "flux": flux_pipeline,
    "klein": klein_pipeline,
    "klein-3": flux3_pipeline,
    "qwen-image21": qwen_image21_pipeline,
    "z-image": z_image_pipeline,
}
TRANSFORMERS = {
    "flux": "FluxTransformer2DModel",
    "klein": "Flux2Transformer2DModel",
    "klein-3": "Flux3Transformer2DModel",
    "qwen-image21": "QwenImage21Transformer2DModel",
    "z-image": "ZImageTransformer2DModel",
}
KINDS = ("flux", "klein")
# Configs of the Hub's repositories where they are not the defaults.
REAL = {
    "dev": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    "schnell": ("FluxTransformer2DModel", {}),
    "Fill": (
        "FluxTransformer2DModel",
        {"guidance_embeds": True, "in_channels": 384, "out_channels": 64},
    ),
    "klein-4B": (
        "Flux2Transformer2DModel",
        {
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
            "guidance_embeds": False,
        },
    ),
    "qwen-image21": ("QwenImage21Transformer2DModel", {}),
}


REAL |= {
    name: ("Flux3Transformer2DModel", {"flow_map": flow_map})
    for name, flow_map in (("klein-3-base", False), ("klein-3", True))
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that gives the folder and PyTorch's pipeline of a family, made once."""
    found = {}

    def make(kind):
        if kind not in found:
            folder = tmp_path_factory.mktemp(kind)
            found[kind] = folder, PIPELINES[kind](folder)
        return found[kind]

    return make


@pytest.fixture
def tiny_width(monkeypatch):
    """Has diffusers read FLUX.1's transformers of the tiny width."""
    convert = for_tiny(upstream.convert_flux_transformer_checkpoint_to_diffusers)
    entry = single_file_model.SINGLE_FILE_LOADABLE_CLASSES["FluxTransformer2DModel"]
    monkeypatch.setitem(entry, "checkpoint_mapping_fn", convert)


def same(params, tensors):
    """Asserts that parameters are PyTorch's, bit for bit."""
    ours = params_to_tensors(params)
    expected = {k: x for k, x in tensors.items() if not k.endswith("num_batches_tracked")}
    assert ours.keys() == expected.keys()
    for key, tensor in expected.items():
        np.testing.assert_array_equal(ours[key], tensor)


def prefixed(path, prefix):
    """The same file with a prefix before all names."""
    save_file({prefix + key: x for key, x in load_file(path).items()}, path)
    return path


@pytest.mark.parametrize("kind", [*KINDS, "klein-3", "qwen-image21"])
@pytest.mark.parametrize("prefix", few(["model.diffusion_model.", "diffusion_model.", ""], ""))
def test_diffusers_and_we_read_a_transformer_in_the_original_layout(
    made, tmp_path, tiny_width, kind, prefix
):
    folder, pipe = made(kind)
    path = tmp_path / "alone.safetensors"
    pack_single_file(folder / "transformer", path)
    part = read_contents(prefixed(path, prefix)).parts["transformer"]
    assert (part.class_name, part.layout) == (TRANSFORMERS[kind], "original")
    expected = pipe.transformer.state_dict()
    ours = getattr(diffusax, TRANSFORMERS[kind]).from_single_file(path, config=folder)
    same(ours.params, expected)
    if not prefix or (kind, prefix) == ("flux", "model.diffusion_model."):
        theirs = getattr(diffusers, TRANSFORMERS[kind]).from_single_file(
            path, config=str(folder), subfolder="transformer", local_files_only=True
        )
        assert theirs.state_dict().keys() == expected.keys()
        for key, tensor in theirs.state_dict().items():
            torch.testing.assert_close(tensor, expected[key], rtol=0, atol=0)


def test_a_transformer_in_diffusers_layout_and_one_without_guidance(made, tmp_path):
    folder, pipe = made("flux")
    path = tmp_path / "alone.safetensors"
    save_file(pipe.transformer.state_dict(), path)
    same(
        diffusax.FluxTransformer2DModel.from_single_file(path, config=folder).params,
        pipe.transformer.state_dict(),
    )
    schnell = flux_transformer(5, guidance_embeds=False)
    schnell.save_pretrained(tmp_path / "schnell")
    pack_single_file(tmp_path / "schnell", path)
    found = diffusax.FluxTransformer2DModel.from_single_file(path, config=tmp_path / "schnell")
    same(found.params, schnell.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_an_autoencoder_alone_is_read_as_diffusers_does(made, tmp_path, kind):
    folder, pipe = made(kind)
    path = tmp_path / "ae.safetensors"
    pack_single_file(folder / "vae", path)
    name = type(pipe.vae).__name__
    found = getattr(diffusax, name).from_single_file(path, config=folder)
    same(found.params, pipe.vae.state_dict())
    if kind == "flux":
        theirs = diffusers.AutoencoderKL.from_single_file(
            path, config=str(folder), subfolder="vae", local_files_only=True
        )
        for key, tensor in theirs.state_dict().items():
            torch.testing.assert_close(tensor, pipe.vae.state_dict()[key], rtol=0, atol=0)
    stored = load_file(path)
    statistics = {k: stored.pop(k) for k in list(stored) if k.startswith("bn.")}
    assert len(statistics) == (2 if kind == "klein" else 0)
    assert ("encoder.quant_conv.weight" in stored) == (kind == "klein")
    # diffusers' converter knows these two under their names in Stable Diffusion's code.
    moved = {
        k.replace("encoder.q", "q").replace("decoder.post", "post"): x for k, x in stored.items()
    }
    config = {**pipe.vae.config, "down_block_types": ("",) * 2, "up_block_types": ("",) * 2}
    converted = upstream.convert_ldm_vae_checkpoint(moved, config)
    for key, tensor in pipe.vae.state_dict().items():
        if not key.startswith("bn."):
            torch.testing.assert_close(converted[key], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("kind", few([*KINDS, "z-image"], "flux"))
def test_a_whole_model_goes_there_and_back(made, tmp_path, kind):
    folder, pipe = made(kind)
    path = tmp_path / "whole.safetensors"
    pack_single_file(folder, path)
    assert kind_of_file(path) == "model"
    whole = diffusax.DiffusionPipeline.from_single_file(path, config=folder)
    assert type(whole).__name__ == type(pipe).__name__
    for name, params in whole.params.items():
        expected = diffusax.AutoModel.from_pretrained(folder, subfolder=name).params
        same(params, params_to_tensors(expected))
    unpack_single_file(path, tmp_path / "folder", Reading(config=folder))
    pack_single_file(tmp_path / "folder", tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()
    if kind == "flux":
        names = load_file(path)
        for start in ("clip_l.transformer.text_model.", "t5xxl.transformer.encoder.block.0."):
            assert any(name.startswith(f"text_encoders.{start}") for name in names)
        with pytest.raises(ValueError, match=r"such as 'black-forest-labs/FLUX\.1-dev', of which"):
            diffusax.DiffusionPipeline.from_single_file(path)


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        ("flux", ("vae", "text_encoder", "text_encoder_2"), "a second text encoder .*_encoder_2=$"),
        ("klein-3", ("vae", "text_encoder"), "a text encoder .*; give text_encoder=$"),
        ("qwen-image21", ("vae", "text_encoder"), "a text encoder .*; give text_encoder=$"),
    ],
)
def test_what_a_transformers_file_lacks_is_given(made, tmp_path, kind, names, message):
    folder, pipe = made(kind)
    path = tmp_path / "alone.safetensors"
    pack_single_file(folder / "transformer", path)
    whole = diffusax.DiffusionPipeline.from_pretrained(folder)
    parts = {name: getattr(whole, name) for name in names}
    found = type(whole).from_single_file(path, config=folder, **parts)
    assert getattr(found, names[-1]).params is parts[names[-1]].params
    assert found.parts.networks == whole.parts.networks
    same(found.transformer.params, pipe.transformer.state_dict())
    del parts[names[-1]]
    with pytest.raises(ValueError, match=f"does not hold {message}"):
        type(whole).from_single_file(path, config=folder, **parts)


@pytest.mark.parametrize(
    ("kind", "component", "name", "prefix"),
    [
        ("flux", "text_encoder", "CLIPTextModel", "text_model."),
        ("flux", "text_encoder_2", "T5EncoderModel", ""),
        ("klein", "text_encoder", "Qwen3Model", ""),
        ("qwen-image21", "text_encoder", "Qwen3VLModel", ""),
    ],
)
def test_a_text_encoder_alone(made, tmp_path, kind, component, name, prefix):
    folder, pipe = made(kind)
    path = tmp_path / "text.safetensors"
    tensors = getattr(pipe, component).state_dict()
    # As ComfyUI has CLIP, and without the names that share memory with others.
    tensors = {f"{prefix}{k.removeprefix(prefix)}": x.clone() for k, x in tensors.items()}
    tensors.pop("encoder.embed_tokens.weight", None)
    tensors = as_in_comfyui(tensors) if kind == "qwen-image21" else tensors
    save_file(tensors, path)
    assert kind_of_file(path) == "other"
    found = getattr(diffusax, name).from_single_file(path, config=folder)
    expected = diffusax.AutoModel.from_pretrained(folder, subfolder=component)
    same(found.params, params_to_tensors(expected.params))
    message = "holds a text encoder of no known model; pass config="
    with pytest.raises(ValueError, match=message):
        getattr(diffusax, name).from_single_file(path)


@pytest.mark.parametrize("name", ["T5EncoderModel", "Qwen3ForCausalLM"])
def test_configs_of_real_text_encoders(tmp_path, name):
    if name == "T5EncoderModel":
        config = transformers.T5Config(
            d_model=4096, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu"
        )
    else:
        config = transformers.Qwen3Config(
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            num_key_value_heads=8,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=True,
        )
    with torch.device("meta"):
        network = getattr(transformers, name)(config)
    # The head is the table of embeddings, and files have it once.
    tensors = {k: x for k, x in network.state_dict().items() if k != "lm_head.weight"}
    shapes = {key: tuple(x.shape) for key, x in tensors.items()}
    path = hollow(tmp_path / "real.safetensors", shapes)
    component = "text_encoder_2" if name == "T5EncoderModel" else "text_encoder"
    with opened_view(path, Reading(), component) as folder:
        found = read_network(folder)
        named = named_entries(part_of(folder), found)
        tensors = fitted(found.module_class, found.shapes, [named], where="a test")
    data = {**config.to_dict(), "architectures": [name]}
    assert found == network_of(name, data, source="a test")
    assert tensors.keys() == torch_shapes(found.shapes).keys()


def as_in_comfyui(tensors):
    """Tensors of Qwen3-VL, whose language model is named as if it were by itself."""
    names = {key: key.replace("model.language_model.", "model.") for key in tensors}
    return {n.replace("model.visual.", "visual."): tensors[k] for k, n in names.items()}


QWEN3_VL_TEXT = {
    **{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
    **{"head_dim": 128, "vocab_size": 151936},
    **{"max_position_embeddings": 262144, "rope_theta": 5e6},
}
QWEN3_VL = {
    "4B": (
        {**QWEN3_VL_TEXT, "hidden_size": 2560, "intermediate_size": 9728},
        {
            **{"depth": 24, "hidden_size": 1024, "intermediate_size": 4096},
            **{"out_hidden_size": 2560, "deepstack_visual_indexes": [5, 11, 17]},
        },
    ),
    "8B": (
        {**QWEN3_VL_TEXT, "hidden_size": 4096, "intermediate_size": 12288},
        {"out_hidden_size": 4096},
    ),
}


@pytest.mark.parametrize("size", QWEN3_VL)
@pytest.mark.parametrize("layout", ["ComfyUI", "transformers"])
def test_the_configs_of_real_language_models_that_see(tmp_path, size, layout):
    text, vision = QWEN3_VL[size]
    data = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {**text, "tie_word_embeddings": layout != "transformers"},
        "vision_config": vision,
        "tie_word_embeddings": layout != "transformers",
    }
    name = "Qwen3VLForConditionalGeneration"
    network = network_of(name, data, source="a test")
    shapes = torch_shapes(network.shapes)
    stored = shapes if layout == "transformers" else as_in_comfyui(shapes)
    path = hollow(tmp_path / "real.safetensors", stored)
    with opened_view(path, Reading(), "text_encoder") as folder:
        found = read_network(folder)
        assert found == network
        assert named_entries(part_of(folder), found).keys() == shapes.keys()


def scaled(tensors, ends):
    """Weights of two axes in eight bits, each with a scale beside it, as ComfyUI has them."""
    found, expected = {}, {}
    for key, tensor in tensors.items():
        if tensor.ndim != 2 or not key.endswith(".weight"):
            found[key] = expected[key] = tensor
            continue
        scale = tensor.abs().max() / 448
        eight = (tensor / scale).to(torch.float8_e4m3fn)
        module = key.removesuffix(".weight")
        found |= {key: eight, f"{module}.{ends[0]}": scale, f"{module}.{ends[1]}": scale * 2}
        expected[key] = eight.float() * scale
    return {**found, "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, expected


@pytest.mark.parametrize(
    ("kind", "ends"),
    few(
        [
            ("flux", ("scale_weight", "scale_input")),
            ("klein", ("weight_scale", "input_scale")),
            ("z-image", ("scale_weight", "scale_input")),
        ],
        ("flux", ("scale_weight", "scale_input")),
        ("z-image", ("scale_weight", "scale_input")),
    ),
)
def test_eight_bits_with_scales(made, tmp_path, kind, ends):
    folder, _ = made(kind)
    path, plain = tmp_path / "scaled.safetensors", tmp_path / "plain.safetensors"
    pack_single_file(folder / "transformer", plain)
    stored, expected = scaled(load_file(plain), ends)
    save_file(stored, path)
    save_file(expected, plain)
    load = getattr(diffusax, TRANSFORMERS[kind]).from_single_file
    prefixed(path, "model.diffusion_model.")
    found = load(path, config=folder, dtype="bfloat16").params
    reference = load(plain, config=folder, dtype="bfloat16").params
    for ours, theirs in zip(
        params_to_tensors(found).values(), params_to_tensors(reference).values(), strict=True
    ):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match="in which networks do not compute; give a dtype"):
        load(path, config=folder, dtype="auto")
    with pytest.raises(ValueError, match="with a scale, which cannot be copied as it is"):
        unpack_single_file(path, tmp_path / "out", Reading(config=folder / "transformer"))
    assert not (tmp_path / "out").exists()


def test_scales_of_blocks_are_a_sentence(made, tmp_path):
    folder, _ = made("flux")
    path = tmp_path / "blocks.safetensors"
    pack_single_file(folder / "transformer", path)
    stored, _ = scaled(load_file(path), ("weight_scale", "input_scale"))
    stored["img_in.weight_scale"] = torch.ones(24, 4)
    save_file(stored, path)
    with pytest.raises(ValueError, match=r"img_in\.weight is .* with scales of shape \(24, 4\)"):
        read_contents(path)


@pytest.mark.parametrize("name", REAL)
def test_configs_and_names_of_real_transformers(tmp_path, name):
    class_name, config = REAL[name]
    network = network_of(class_name, config, source="a test")
    shapes, file = torch_shapes(network.shapes), {}
    for theirs, (paths, _) in transformer_names(network).items():
        for leaf in ("weight", "bias"):
            if parts := [shapes[key] for path in paths if (key := f"{path}.{leaf}") in shapes]:
                end = "scale" if theirs.endswith(ORIGINALS[class_name].scales) else leaf
                file[f"{theirs}.{end}"] = (sum(p[0] for p in parts), *parts[0][1:])
    path = hollow(tmp_path / "real.safetensors", file)
    with opened_view(path, Reading(), "transformer") as folder:
        found, part = read_network(folder), part_of(folder)
        assert found == network
        entries = named_entries(part, found)
    assert {key: entry.shape for key, entry in entries.items()} == shapes
    convert = single_file_model.SINGLE_FILE_LOADABLE_CLASSES[class_name]["checkpoint_mapping_fn"]
    converted = convert({key: torch.empty(shape, device="meta") for key, shape in file.items()})
    assert {key: tuple(x.shape) for key, x in converted.items()} == shapes


def test_a_file_of_one_network_is_no_pipeline(made, tmp_path):
    folder, _ = made("flux")
    pack_single_file(folder / "vae", tmp_path / "ae.safetensors")
    with pytest.raises(ValueError, match=r"^ae\.safetensors holds one network and no model_index"):
        diffusax.DiffusionPipeline.from_pretrained(tmp_path / "ae.safetensors")


@pytest.mark.parametrize("widths", [None, [96, 192, 384, 384]])
def test_the_config_of_the_real_autoencoder(tmp_path, widths):
    name = "AutoencoderKLFlux2"
    network = network_of(name, {"decoder_block_out_channels": widths}, source="a test")
    (tmp_path / "vae").mkdir()
    hollow(tmp_path / "vae" / "diffusion_pytorch_model.safetensors", torch_shapes(network.shapes))
    path = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    with opened_view(path, Reading(), "vae") as folder:
        assert read_network(folder) == network


def test_others_with_such_blocks_are_named(tmp_path):
    path = tmp_path / "chroma.safetensors"
    names = ("img_in.weight", "double_blocks.0.img_attn.qkv.weight", "final_layer.linear.weight")
    save_file({name: torch.ones(4, 4) for name in names}, path)
    with pytest.raises(ValueError, match="holds another model of the Flux family, such as Chroma"):
        read_contents(path)
    key = "double_blocks.0.processor.qkv_lora1.down.weight"
    save_file({key: torch.ones(4, 4)}, path)
    assert kind_of_file(path) == "lora"
